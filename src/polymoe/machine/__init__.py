"""What a GPU is, and what is installed beside it. The only package that probes hardware."""

from __future__ import annotations

from polymoe.machine.machine import DEVICES, Device, Machine, cpus_near, driver_cuda, host_memory, listed_cpus

__all__ = ["DEVICES", "Device", "Machine", "cpus_near", "driver_cuda", "host_memory", "listed_cpus"]
