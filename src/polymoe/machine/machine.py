"""Device and Machine: the properties of a GPU, and the software installed beside it. No other module asks for them.

Named devices describe GPUs that are not in this machine: ``polymoe.explain(..., device="rtx5090")`` works on a laptop.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polymoe.common.environment import downloads_allowed
from polymoe.errors import ArgumentError, nearest

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch", "triton", "transformers", "flashinfer-python", "flashinfer-cubin", "nvidia-cutlass-dsl",
    "humming-kernels", "vllm", "sglang",
)  # fmt: skip
"""Distributions that a backend may need. A machine records the version of each that is installed."""
_WITH_CUDA = {"triton": "3.6.0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU model or a CPU, with its size and speed.

    Attributes:
        name: short name, as ``--device`` takes it.
        kind: "cuda" or "cpu".
        capability: compute capability (9, 0) of a GPU.
        sms: streaming multiprocessors.
        memory_bytes: device memory; 0 for a CPU.
        bandwidth: of device memory, bytes/s; where it was measured, of reading alone.
        flops_16bit, flops_fp8: dense tensor-core rates with float32 accumulation, flop/s; ``flops_fp8`` is None for
            GPUs without FP8 tensor cores.
        shared_memory_bytes: largest shared memory of one CTA.
        unified_memory: whether it has no memory of its own, but shares the CPU's.
        rates: source of bandwidth and flop rates: "measured", "datasheet" or "nominal".
    """

    name: str
    kind: Literal["cuda", "cpu"]
    capability: tuple[int, int] | None = None
    sms: int = 1
    memory_bytes: int = 0
    bandwidth: float
    flops_16bit: float
    flops_fp8: float | None = None
    shared_memory_bytes: int = 0
    unified_memory: bool = False
    rates: Literal["measured", "datasheet", "nominal"] = "datasheet"

    @property
    def arch(self) -> str:
        """``"sm_90"`` for a GPU, ``"cpu"`` otherwise."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else "cpu"

    @property
    def sm(self) -> int:
        """Compute capability as one number, 90 for (9, 0); 0 for a CPU."""
        return 10 * self.capability[0] + self.capability[1] if self.capability else 0

    def __str__(self) -> str:
        return self.name if self.name == self.arch else f"{self.name} ({self.arch})"


# Shared memory of one CTA (opt-in maximum): CUDA C++ Programming Guide, table of technical specifications.
_SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


def _gpu(name: str, sm: int, sms: int, mib: int, tb_s: float, bf16: float, fp8: float | None = None) -> Device:
    return Device(
        name=name,
        kind="cuda",
        capability=divmod(sm, 10),
        sms=sms,
        memory_bytes=mib * 2**20,
        bandwidth=tb_s * 1e12,
        flops_16bit=bf16 * 1e12,
        flops_fp8=fp8 * 1e12 if fp8 else None,
        shared_memory_bytes=_SHARED_KIB[sm] * 1024,
    )


# From data sheets: dense rates with float32 accumulation. The h200's bandwidth (of reading alone,
# benchmarks/results/bandwidth-h200.jsonl) and rates were measured.
# Memory is the total that nvidia-smi reports, in MiB; the gb10's is shared with its CPU and is that of the data sheet.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _gpu("a100", 80, 108, 81920, 2.039, 312),
        _gpu("rtx3090", 86, 82, 24576, 0.936, 71),
        _gpu("a10", 86, 72, 23028, 0.600, 125),
        _gpu("l4", 89, 58, 23034, 0.300, 121, 242),
        _gpu("l40s", 89, 142, 46068, 0.864, 362, 733),
        _gpu("rtx4090", 89, 128, 24564, 1.008, 165, 330),
        _gpu("h100", 90, 132, 81559, 3.35, 989, 1979),
        replace(_gpu("h200", 90, 132, 143771, 4.58, 790, 1580), rates="measured"),
        _gpu("b200", 100, 148, 183359, 7.7, 2250, 4500),
        _gpu("b300", 103, 148, 275040, 8.0, 2250, 4500),
        _gpu("rtx5090", 120, 170, 32607, 1.792, 209, 419),
        _gpu("rtxpro6000", 120, 188, 97887, 1.792, 503, 1007),
        replace(_gpu("gb10", 121, 48, 122070, 0.273, 125, 250), unified_memory=True),
        # CPUs differ tenfold in these rates. They do not decide between backends, all of which they slow down alike.
        Device(name="cpu", kind="cpu", bandwidth=40e9, flops_16bit=0.5e12, rates="nominal"),
    )
}
"""Named devices."""

_TYPICAL = {80: "a100", 86: "rtx3090", 89: "rtx4090", 90: "h100", 100: "b200", 103: "b300", 120: "rtx5090", 121: "gb10"}


def _product(name: str) -> str:
    """A GPU's name without maker, product line and punctuation: "NVIDIA GeForce RTX 4090" gives "rtx4090"."""
    return re.sub(r"nvidia|geforce|blackwell|[^a-z0-9]", "", name.lower())


_BOARD = r"(sxm\d?|pcie|nvl|hbm\d?e?|\d+gb|serveredition|workstationedition)*"
"""What the driver adds to a data-center GPU's name: "NVIDIA H100 80GB HBM3". Other additions mean another GPU."""


_NVIDIA_ONLY, _AMPERE = "an NVIDIA GPU", "an NVIDIA GPU of compute capability 8.0 (SM80) or newer"
_UNSUPPORTED = {
    r"(amd|instinct|radeon|ati|intel|arc|gaudi|apple|google|aws).*|mi\d{2,3}\w*|rx\d{4}\w*|gfx\w+": _NVIDIA_ONLY,
    r"(hpu|xpu|mps|npu|tpu|rocm|hip|trainium|inferentia)\w*|m\d(pro|max|ultra)?|ascend\w*": _NVIDIA_ONLY,
    rf"(tesla)?(t4|p4|p40|p100|v100|m40|k80){_BOARD}|gtx\w+|titan\w+|rtx20\d\d\w*|quadro\w+": _AMPERE,
    r"(rtx)?t\d{3,4}|sm([1-6]\d|7\d)[a-z]?": _AMPERE,
}
"""Names of GPUs that nothing here runs on: the nearest supported name would mislead."""


def _named(name: str) -> Device:
    key = _product(name)
    for known, device in DEVICES.items():
        if re.fullmatch(re.escape(known) + _BOARD, key):
            return _with_memory(device, name)
    arch = re.fullmatch(r"sm(\d+)[a-z]?", key)
    if arch and int(arch[1]) in _TYPICAL:
        return replace(DEVICES[_TYPICAL[int(arch[1])]], name=f"sm_{arch[1]}")
    for pattern, expected in _UNSUPPORTED.items():
        if re.fullmatch(pattern, key):
            families = "a100, rtx3090, rtx4090, l40s, h200, b200, rtx5090"
            hint = f"supported are Ampere, Ada, Hopper and Blackwell GPUs, such as {families}; and cpu"
            raise ArgumentError("device", expected=expected, got=repr(name), hint=hint)
    known = nearest(key, [*DEVICES, *(f"sm_{sm}" for sm in _TYPICAL)])
    hint = f"{known}; for another GPU name its architecture, such as sm_89"
    raise ArgumentError("device", expected="a GPU that polymoe knows, or cpu", got=repr(name), hint=hint)


def _with_memory(device: Device, name: str) -> Device:
    """The device with the memory that its name says: there are an A100 40GB and an A100 80GB."""
    size = re.search(r"(\d+) ?gb", name.lower())
    memory_bytes = int(size[1]) * 2**30 if size else device.memory_bytes
    other = abs(memory_bytes - device.memory_bytes) > 0.1 * device.memory_bytes
    return replace(device, memory_bytes=memory_bytes) if other else device


def _detected(index: int) -> Device:
    import torch

    p: Any = torch.cuda.get_device_properties(index)
    sm = 10 * p.major + p.minor
    key = _product(p.name)
    known = [d for d in DEVICES.values() if d.capability == (p.major, p.minor) and key.startswith(d.name)]
    typical = known[0] if known else DEVICES[_TYPICAL[max((s for s in _TYPICAL if s <= sm), default=80)]]
    clock, bus = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
    return replace(
        typical,
        name=typical.name if known else p.name,
        capability=(p.major, p.minor),
        sms=p.multi_processor_count,
        memory_bytes=p.total_memory,
        # Double data rate: the clock is in kHz, the bus width in bits.
        bandwidth=typical.bandwidth if known or not clock or not bus else 2e3 * clock * bus / 8,
        shared_memory_bytes=getattr(p, "shared_memory_per_block_optin", typical.shared_memory_bytes),
        unified_memory=bool(getattr(p, "is_integrated", typical.unified_memory)),
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and the software beside it: all that a backend's ``check`` may depend on besides the problem.

    Attributes:
        device: what computes.
        packages: versions of the installed distributions among those that a backend may need: ``{"triton": "3.6.0"}``.
        driver: newest CUDA version that the driver runs, (13, 0); None without a driver, or where it is not known.
        cutlass_cuda: CUDA version of the compiler that the CuTe DSL loads, (13, 1); None without one, or where nothing
            needs it: only SM120 and SM121 are asked.
        elsewhere: whether this describes a GPU that is not here, beside which other packages may be installed.
        downloads: whether libraries may download compiled kernels that are not installed.
        layer_bytes: the host's free memory for one layer's experts; None for a GPU, or where it is not known. It
            changes from moment to moment, so it does not tell machines apart.
    """

    device: Device
    packages: Mapping[str, str] = field(default_factory=dict, hash=False)
    driver: tuple[int, int] | None = None
    cutlass_cuda: tuple[int, int] | None = None
    elsewhere: bool = False
    downloads: bool = False
    layer_bytes: int | None = field(default=None, compare=False, repr=False)

    def shared_by(self, layers: int) -> Machine:
        """The same machine, whose memory this many layers share equally."""
        return self if self.layer_bytes is None else replace(self, layer_bytes=self.layer_bytes // max(layers, 1))

    @classmethod
    def of(cls, device: str | torch.device | Device | None = None) -> Machine:
        """The machine for a device name: "cuda", "cuda:1", "cpu", a GPU's name, an architecture ("sm_90"), or None for
        the GPU of this machine, or else its CPU.

        Packages are those installed here. For a GPU by name, which need not be here, Triton is assumed too, because
        every torch with CUDA depends on it.

        Raises:
            ArgumentError: for an unknown name, or "cuda" where there is no GPU.
        """
        packages = {name: version for name in PACKAGES if (version := _version(name))}
        if isinstance(device, Device):
            return cls._of(device, packages)
        if device is not None:
            device = str(device)  # of torch.device, which has the same names
        if device is not None and not device.startswith("cuda"):
            named = _named("cpu" if device == "cpu:0" else device)
            if named.kind == "cuda":
                return cls(named, {**_WITH_CUDA, **packages}, elsewhere=True, downloads=downloads_allowed())
            return cls._of(named, packages)
        import torch

        if not torch.cuda.is_available():
            if device is None:
                return cls._of(DEVICES["cpu"], packages)
            raise ArgumentError(
                "device",
                expected="a CUDA device",
                got="none in this machine",
                hint='use device="cpu", or name a GPU to explain',
            )
        index = torch.device(device or "cuda").index
        device = _detected(torch.cuda.current_device() if index is None else index)
        compiler = cutlass_cuda() if device.sm >= 120 and "nvidia-cutlass-dsl" in packages else None
        return cls(device, packages, driver_cuda(), compiler, downloads=downloads_allowed())

    @classmethod
    def _of(cls, device: Device, packages: Mapping[str, str]) -> Machine:
        memory = host_memory() if device.kind == "cpu" else None
        return cls(device, packages, layer_bytes=memory[0] if memory else None)


def driver_cuda() -> tuple[int, int] | None:
    """Newest CUDA version that the driver runs, (13, 0), or None without a driver.

    It asks the driver's own library, because torch has no public function for it.
    """
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            version = ctypes.c_int()
            if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)) == 0:
                return version.value // 1000, version.value % 1000 // 10  # 13000 is CUDA 13.0
        except OSError:
            continue
    return None


@cache  # importing the compiler takes a second
def cutlass_cuda() -> tuple[int, int] | None:
    """CUDA version of the compiler that the CuTe DSL loads, (13, 1), or None if none can be imported.

    It is asked by importing it: several may be installed, and which is loaded depends on the driver, and in older
    versions on the order in which they were installed.
    """
    try:
        version = import_module("cutlass.base_dsl.version_info").CUDA_VERSION
        return int(version.major), int(version.minor)
    except Exception:  # besides ImportError it raises errors of its own, for a driver that is too old, for example
        return None


def host_memory() -> tuple[int, int] | None:
    """Free and total bytes of the host's memory, or of the container's where that has less; None where Linux does not
    say. What the page cache holds counts as free."""
    try:
        sizes = _numbers("/proc/meminfo")
        free, total = (1024 * sizes[name] for name in ("MemAvailable:", "MemTotal:"))
    except (OSError, KeyError, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")  # version 2, as a container sees its own
        limit = int((group / "memory.max").read_text())
        cached = _numbers(str(group / "memory.stat"))["inactive_file"]
        used = int((group / "memory.current").read_text()) - cached
    except (OSError, KeyError, ValueError):  # no such group, or "max"
        return free, total
    return max(0, min(free, limit - used)), min(total, limit)


def cpus_near(device: int) -> set[int]:
    """The CPUs of the NUMA node to which a GPU, by its number, is attached; none if Linux or the driver do not say."""
    bus = ctypes.create_string_buffer(16)  # 0000:3b:00.0
    try:
        if ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(bus, len(bus), device):
            return set()
        return listed_cpus(Path(f"/sys/bus/pci/devices/{bus.value.decode().lower()}/local_cpulist"))
    except (OSError, ValueError):
        return set()


def listed_cpus(file: Path) -> set[int]:
    """The CPUs in a file in Linux' list format, such as ``0-15,32-47``.

    Raises:
        OSError, ValueError: for a file that cannot be read, and one in another format.
    """
    ranges = [part.split("-") for part in file.read_text().strip().split(",") if part]
    return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}


def _numbers(path: str) -> dict[str, int]:
    """The first two words of each line, a name and a number."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


@cache  # looking one up reads the metadata's file
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
