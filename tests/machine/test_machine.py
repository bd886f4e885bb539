from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polymoe.errors import ArgumentError
from polymoe.machine import DEVICES, Machine, cpus_near, machine
from polymoe.machine.machine import cutlass_cuda


class _Driver:
    """libcuda of a machine with one GPU."""

    def cuDeviceGetPCIBusId(self, name: Any, size: int, device: int) -> int:
        name.value = b"0000:3B:00.0"
        return 0 if device == 0 else 101


def test_cpus_on_the_node_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/bus/pci/devices/0000:3b:00.0/local_cpulist": "0-2,8,10-11\n"}

    def read(path: Path, *_: Any) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: _Driver())
    assert cpus_near(0) == {0, 1, 2, 8, 10, 11}
    assert cpus_near(1) == set()
    for text in ("", "\n", "all"):
        files["/sys/bus/pci/devices/0000:3b:00.0/local_cpulist"] = text
        assert cpus_near(0) == set()
    files.clear()
    assert cpus_near(0) == set()


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_named_devices(name: str) -> None:
    machine = Machine.of(name)
    assert machine.device is DEVICES[name]
    assert (machine.device.kind == "cpu") == (machine.device.capability is None)
    assert machine.packages["torch"].split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("name", "like"), [("sm_90", "h100"), ("sm_120", "rtx5090"), ("sm_80", "a100"), ("SM_121", "gb10")]
)
def test_architectures(name: str, like: str) -> None:
    device = Machine.of(name).device
    assert (device.name, device.capability) == (name.lower(), DEVICES[like].capability)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("RTX-5090", "rtx5090"),
        ("RTX PRO 6000", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_spellings(name: str, device: str) -> None:
    """As people write a GPU's name, and as the driver does."""
    assert Machine.of(name).device is DEVICES[device]


def test_devices_of_torch_have_the_same_names() -> None:
    assert Machine.of(torch.device("cpu")).device is DEVICES["cpu"]


def test_a_number_is_no_device() -> None:
    with pytest.raises(ArgumentError, match="device: expected a GPU that polymoe knows, or cpu, got '0'"):
        Machine.of(0)  # pyright: ignore[reportArgumentType]


def test_a_size_in_the_name() -> None:
    found = Machine.of("NVIDIA A100-SXM4-40GB").device
    assert (found.name, found.memory_bytes) == ("a100", 40 * 2**30)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", "H200 NVX", ""])
def test_another_gpu_with_a_similar_name(name: str) -> None:
    with pytest.raises(ArgumentError, match="device"):
        Machine.of(name)


def test_a_gpu_by_name_has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymoe.machine.machine._version", lambda name: None)
    assert Machine.of("h200").packages == {"triton": "3.6.0"}
    assert Machine.of("cpu").packages == {}
    monkeypatch.setattr("polymoe.machine.machine._version", {"triton": "3.7.1"}.get)
    assert Machine.of("h200").packages == {"triton": "3.7.1"}


def test_unknown_name_suggests() -> None:
    with pytest.raises(ArgumentError, match=r"did you mean 'h200'.*sm_90"):
        Machine.of("h20")


def test_older_than_any_known_architecture() -> None:
    with pytest.raises(ArgumentError, match="sm_70"):
        Machine.of("sm_70")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_no_gpu_here() -> None:
    assert Machine.of().device.name == "cpu"
    with pytest.raises(ArgumentError, match="none in this machine"):
        Machine.of("cuda")


def test_machines_hash_and_compare_by_device() -> None:
    assert Machine.of("h200") == Machine.of("h200")
    assert hash(Machine.of("h200")) == hash(Machine.of("h200"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class CUDA_VERSION:\n    major, minor = 12, 9", (12, 9)),
        ("raise RuntimeError('None of the installed toolkit flavors is compatible with the driver')", None),
        ("", None),
    ],
)
def test_the_compiler_of_the_cute_dsl_is_the_one_that_it_loads(
    source: str, found: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cutlass" / "base_dsl"
    package.mkdir(parents=True)
    (package / "version_info.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        assert cutlass_cuda.__wrapped__() == found
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mi300x", "an NVIDIA GPU"), ("AMD Instinct MI355X", "an NVIDIA GPU"), ("Radeon RX 7900", "an NVIDIA GPU"),
        ("mps", "an NVIDIA GPU"), ("t4", "compute capability 8.0 (SM80) or newer"), ("sm_75", "8.0 (SM80) or newer"),
        ("Tesla V100-SXM2-32GB", "8.0 (SM80) or newer"), ("GeForce RTX 2080 Ti", "8.0 (SM80) or newer"),
    ],
)  # fmt: skip
def test_gpus_that_nothing_here_runs_on(name: str, expected: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Machine.of(name)
    assert expected in str(raised.value)
    assert "did you mean" not in str(raised.value)
    assert "Ampere, Ada, Hopper and Blackwell" in str(raised.value)


@pytest.mark.parametrize("name", [*DEVICES, "NVIDIA A100-SXM4-40GB", "sm_86"])
def test_gpus_that_are_known(name: str) -> None:
    assert Machine.of(name).device.kind in ("cuda", "cpu")
