"""What is asked of the GPU that is there."""

from __future__ import annotations

import torch

from polymoe.machine import Machine


def test_the_gpu_here() -> None:
    machine = Machine.of("cuda:0")
    assert machine.device == Machine.of(machine.device).device
    assert machine.device.capability == torch.cuda.get_device_capability(0)
    assert machine.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert machine.driver is not None
    assert machine.driver >= (11, 0)
