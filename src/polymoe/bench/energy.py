"""Energy of GPUs, from the counter of the driver (NVML, through nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from polymoe.common.install_command import packages_of
from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    import torch


class EnergyMeter:
    """Reads the energy counters of GPUs: NVML's ``nvmlDeviceGetTotalEnergyConsumption``, in millijoules.

    Raises:
        ArgumentError: without a GPU or NVML, or for a GPU without the counter (before Volta).
        MissingDependency: without nvidia-ml-py (``pynvml``).
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        if device.type != "cuda":
            raise ArgumentError("energy", expected="a GPU", got=str(device), hint="leave it out")
        self._open("energy", "UUID", [f"GPU-{torch.cuda.get_device_properties(device).uuid}"])

    @classmethod
    def of_indices(cls, indices: Sequence[int]) -> EnergyMeter:
        """Return a meter of GPUs by their NVML index, as ``nvidia-smi`` numbers them, whatever runs on them."""
        self = cls.__new__(cls)
        self._open("gpu_ids", "Index", indices)
        return self

    def _open(self, argument: str, by: Literal["UUID", "Index"], keys: Sequence[object]) -> None:
        with packages_of("bench", argument):
            import pynvml
        self._nvml: Any = pynvml
        self._handles: list[Any] = []
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise ArgumentError(argument, expected="NVML, which is part of the driver", got=str(error)) from error
        for key in keys:
            try:
                self._handles.append(getattr(pynvml, f"nvmlDeviceGetHandleBy{by}")(key))
                self.joules()
            except pynvml.NVMLError as error:
                got = f"{key}: {error}"
                raise ArgumentError(argument, expected="a GPU with an energy counter", got=got) from error

    def joules(self) -> float:
        """Total energy of all GPUs so far; only differences are meaningful."""
        return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles) / 1e3

    def names(self) -> list[str]:
        """The names of the GPUs: ``["NVIDIA H200"]``."""
        return [str(self._nvml.nvmlDeviceGetName(handle)) for handle in self._handles]
