"""Energy of a GPU, from the driver's own counter (NVML)."""

from __future__ import annotations

import ctypes

import torch

from polymoe.errors import ArgumentError

__all__ = ["EnergyMeter"]


class EnergyMeter:
    """Reads a GPU's energy counter: NVML's ``nvmlDeviceGetTotalEnergyConsumption``, in millijoules.

    Raises:
        ArgumentError: where there is no GPU, no NVML, or a GPU without the counter (before Volta).
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ArgumentError("--energy", expected="a GPU", got=str(device), hint="leave --energy out")
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise ArgumentError("--energy", expected="NVML, which the driver brings", got=str(error)) from error
        self._handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        self.joules()

    def joules(self) -> float:
        """Energy so far; differences count."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._nvml, name)(*args)
        if code:
            raise ArgumentError("--energy", expected="a GPU with an energy counter", got=f"{name}: NVML error {code}")
