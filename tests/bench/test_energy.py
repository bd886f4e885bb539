"""The energy meter, against a stand-in for NVML with counters of known steps."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from polymoe.bench.energy import EnergyMeter
from polymoe.errors import ArgumentError


class Nvml:
    """Two GPUs that have used 1.5 J and 2.5 J, and 100 J more at each further reading; a third has no counter."""

    def __init__(self) -> None:
        self.used = {1: 1500, 2: 2500}
        self.readings = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        if index.value > 2:
            return 2
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, out: Any) -> int:
        if handle.value not in self.used:
            return 3
        self.readings += 1
        out._obj.value = self.used[handle.value] + 100_000 * (self.readings > 2)
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, length: Any) -> int:
        text.value = f"GPU {handle.value}".encode()[: length.value]
        return 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())


@pytest.mark.usefixtures("nvml")
def test_adds_up_the_gpus_it_was_given() -> None:
    meter = EnergyMeter.of_indices([0, 1])
    assert meter.joules() == 1.5 + 2.5 + 200.0
    assert meter.names() == ["GPU 1", "GPU 2"]


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(("index", "says"), [(2, "NVML error 3"), (7, "nvmlDeviceGetHandleByIndex_v2: NVML error 2")])
def test_a_gpu_that_is_not_there_or_has_no_counter(index: int, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        EnergyMeter.of_indices([0, index])


def test_without_nvml_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: not found")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(ArgumentError, match="gpu_ids: expected NVML"):
        EnergyMeter.of_indices([0])
    with pytest.raises(ArgumentError, match="energy: expected a GPU, got cpu"):
        EnergyMeter(torch.device("cpu"))
