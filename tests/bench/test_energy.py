"""The energy meter, against a stand-in for the driver behind nvidia-ml-py, with counters of known steps."""

from __future__ import annotations

import sys

import pynvml
import pytest
import torch

from polymoe.bench.energy import EnergyMeter
from polymoe.errors import ArgumentError, MissingDependency


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that have used 1.5 J and 2.5 J, and 100 J more at each further reading; a third has no counter."""
    used, readings = {"GPU 1": 1500, "GPU 2": 2500}, []

    def handle(index: int) -> str:
        if index > 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return f"GPU {index + 1}"

    def energy(handle: str) -> int:
        if handle not in used:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        readings.append(handle)
        return used[handle] + 100_000 * (len(readings) > 3)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", energy)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: handle)


@pytest.mark.usefixtures("nvml")
def test_adds_up_the_gpus_it_was_given() -> None:
    meter = EnergyMeter.of_indices([0, 1])
    assert meter.joules() == 1.5 + 2.5 + 200.0
    assert meter.names() == ["GPU 1", "GPU 2"]


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(("index", "says"), [(2, "2: Not Supported"), (7, "7: Invalid Argument")])
def test_a_gpu_that_is_not_there_or_has_no_counter(index: int, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        EnergyMeter.of_indices([0, index])


def test_without_nvml_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    with pytest.raises(ArgumentError, match="gpu_ids: expected NVML"):
        EnergyMeter.of_indices([0])
    with pytest.raises(ArgumentError, match="energy: expected a GPU, got cpu"):
        EnergyMeter(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingDependency, match="pynvml"):
        EnergyMeter.of_indices([0])
