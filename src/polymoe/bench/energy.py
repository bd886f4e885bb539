"""Energy of GPUs, from the counter of the driver (NVML)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    import torch

__all__ = ["EnergyMeter"]


class EnergyMeter:
    """Reads the energy counters of GPUs: NVML's ``nvmlDeviceGetTotalEnergyConsumption``, in millijoules.

    Raises:
        ArgumentError: without a GPU or NVML, or for a GPU without the counter (before Volta).
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        if device.type != "cuda":
            raise ArgumentError("energy", expected="a GPU", got=str(device), hint="leave it out")
        self._open("energy")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._add("nvmlDeviceGetHandleByUUID", uuid.encode())

    @classmethod
    def of_indices(cls, indices: Sequence[int]) -> EnergyMeter:
        """Return a meter of GPUs by their NVML index, as ``nvidia-smi`` numbers them, whatever runs on them."""
        self = cls.__new__(cls)
        self._open("gpu_ids")
        for index in indices:
            self._add("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
        return self

    def _open(self, option: str) -> None:
        self._option = option
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise ArgumentError(option, expected="NVML, which is part of the driver", got=str(error)) from error
        self._call("nvmlInit_v2")

    def _add(self, by: str, key: object) -> None:
        handle = ctypes.c_void_p()
        self._call(by, key, ctypes.byref(handle))
        self._handles.append(handle)
        self.joules()

    def joules(self) -> float:
        """Total energy of all GPUs so far; only differences are meaningful."""
        total = 0
        for handle in self._handles:
            millijoules = ctypes.c_ulonglong()
            self._call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
            total += millijoules.value
        return total / 1e3

    def names(self) -> list[str]:
        """The names of the GPUs: ``["NVIDIA H200"]``."""
        found = []
        for handle in self._handles:
            text = ctypes.create_string_buffer(96)
            self._call("nvmlDeviceGetName", handle, text, ctypes.c_uint(len(text)))
            found.append(text.value.decode())
        return found

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._nvml, name)(*args)
        if code:
            raise ArgumentError(self._option, expected="a GPU with an energy counter", got=f"{name}: NVML error {code}")
