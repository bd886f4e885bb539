"""What kernels are compiled for: the GPUs that a set of cubins runs on, and how its sources are configured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polymoe.kernels.cuda.pipelines import Budget, WeightFormat
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, KernelFamily

_AROUND = ("slots", "permute", "finalize", "quantize", "bits")
_CUBINS = Path(__file__).parent / "cubins"


@dataclass(frozen=True, slots=True)
class Target:
    """A set of cubins.

    Attributes:
        name: name of its folder.
        arch: the architecture that nvcc compiles for, after ``compute_`` and ``sm_``. A family's ("120f") runs on all
            its members.
        capabilities: compute capabilities of the GPUs that the set is for.
        budget: the most shared memory that a CTA uses, and what lies in it.
        families: names of the kernel families that are compiled; none: only the kernels of experts in host memory.
        folder: where the archives of cubins are.
        fp4_cvt: whether instructions convert E2M1 codes and their scales: the kernels then read ``w4a16_fragments_cvt``
            instead of ``w4a16_fragments``.
        chained: whether a launch may start before the one ahead of it has finished.
        mma_sync_rate: rate of ``mma.sync`` over the rate of the device.
    """

    name: str
    arch: str
    capabilities: tuple[tuple[int, int], ...]
    budget: Budget
    families: tuple[str, ...]
    folder: Path
    fp4_cvt: bool = False
    chained: bool = True
    mma_sync_rate: float = 1.0

    def budget_on(self, shared_bytes: int) -> Budget:
        """Return the budget on a GPU where a CTA may have ``shared_bytes`` of shared memory."""
        return replace(self.budget, shared_bytes=min(self.budget.shared_bytes, shared_bytes))

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros that configure the sources."""
        macros = {"POLYMOE_X_IN_STAGES": self.budget.x_in_stages, "POLYMOE_UNCHAINED": not self.chained}
        return tuple(name for name, defined in macros.items() if defined)

    @property
    def options(self) -> tuple[str, ...]:
        """Options of nvcc."""
        code = f"-gencode=arch=compute_{self.arch},code=sm_{self.arch}"
        defines = (f"-D{name}" for name in self.defines)
        return ("-cubin", code, "-O3", "-std=c++17", "-Xptxas=-warn-spills", *defines)

    @property
    def units(self) -> dict[str, str]:
        """Units that are compiled, and the source file of each."""
        families = (KERNEL_FAMILIES[name] for name in self.families)
        gemms = {f.unit(format): f"instantiations/{self.source(f, format)}" for f in families for format in f.formats}
        around = _AROUND if gemms else ("slots",)
        return {**gemms, **{name: f"{name}.cu" for name in around}}

    @property
    def archives(self) -> dict[str, tuple[str, ...]]:
        """Archives of cubins in the folder, and the units in each: those of a family, or all around the GEMMs."""
        gemms = {name: tuple(map(KERNEL_FAMILIES[name].unit, KERNEL_FAMILIES[name].formats)) for name in self.families}
        return {**gemms, "around": tuple(name for name in _AROUND if name in self.units)}

    def source(self, family: KernelFamily, format: str) -> str:
        """Return the name of the file in ``instantiations/`` with a family's kernels for a format."""
        return f"{family.unit(format)}{'_cvt' * self.converts(family.formats[format])}.cu"

    def converts(self, format: WeightFormat) -> bool:
        """Return whether instructions convert the format's codes and scales."""
        return self.fp4_cvt and bool(format.cvt)


def _target(
    name: str, arch: str, sms: tuple[int, ...], shared_kib: int, instructions: tuple[str, ...], **options: Any
) -> Target:
    budget = Budget(shared_kib * 1024, options.pop("x_in_stages", True))
    capabilities = tuple(divmod(sm, 10) for sm in sms)
    families = tuple(f.name for f in KERNEL_FAMILIES.values() if f.instructions in instructions)
    return Target(name, arch, capabilities, budget, families, _CUBINS / name, **options)


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        # One set for all of 8.x, where layers run on Triton.
        _target("sm80", "80", (80, 86, 87, 89), 99, (), chained=False),
        # mma.sync reaches 0.62 of an H200's nominal rate.
        _target("sm90", "90a", (90,), 227, ("mma", "wgmma"), x_in_stages=False, mma_sync_rate=0.78),
        # Assumed are as many operations for each clock of an SM100's SM, and an SM120's full rate.
        _target("sm100", "100f", (100, 103), 227, ("mma", "mma_tiled"), fp4_cvt=True, mma_sync_rate=0.34),
        _target("sm120", "120f", (120, 121), 99, ("mma", "mma_tiled"), fp4_cvt=True),
    )
}
"""The sets that polymoe ships, by name."""

SM90 = TARGETS["sm90"]
"""The set that was measured."""


def target_for(capability: tuple[int, int]) -> Target:
    """Return the set for GPUs of this compute capability.

    Raises:
        LookupError: if there is none.
    """
    for target in TARGETS.values():
        if capability in target.capabilities:
            return target
    raise LookupError(f"no kernels are compiled for compute capability {capability}")
