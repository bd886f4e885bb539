"""CUDA kernels, compiled ahead of time, for 4-bit, MXFP8, FP8 and bfloat16 weights. They need neither a compiler nor
another package.

A call with few tokens has four launches: the permutation, gate and up with the activation, down, and the weighted sum.
With up to 32 expanded rows the GEMMs sort the rows themselves, so there are three launches, except with bfloat16
weights. With many rows per expert, or with E4M3 activations, a fifth launch copies x into permuted tiles or rounds it
to E4M3. If h has one scale per row, a sixth launch rounds h. With bfloat16 weights, gate and up gather rows of x where
they lie, and so they do with 4-bit and MXFP8 weights where they have few rows of weights. Each launch starts before the
previous one ends. ``kernels/cuda/spec.py`` lists the kernels and the numbers of rows for which each is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polymoe.backends.base import BackendBase, Prediction, Runner
from polymoe.backends.config import Config
from polymoe.backends.cost import Cost, cost
from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.families import activations_of, architectures_of, families_for, layout_on, weight_format
from polymoe.backends.cuda.runner import ACTIVATION_ARGS, CudaRunner
from polymoe.backends.features import ANY, SHARDS, Handled
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, Choice, KernelFamily
from polymoe.kernels.cuda.targets import target_for
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import UNQUANTIZED
from polymoe.problem.verdict import Accepted, Reasons, Verdict

_MOST_EXPERTS = 1024
"""Most experts on a rank: the permutation uses one thread for each."""

_MOST_FAST_COLUMNS = 4096
"""Most columns that are added up with fast accumulation: so many were measured, and more lose more."""

_MOST_WAVES = 2
"""Most waves of CTAs of which it is worth filling the last one with smaller tiles."""

_DRIVER = (13, 0)
"""CUDA version of the oldest driver that loads the kernels."""

_MODES = tuple(dict.fromkeys(mode for family in KERNEL_FAMILIES.values() for mode in activations_of(family)))
_FORMATS = tuple(dict.fromkeys(name for family in KERNEL_FAMILIES.values() for name in family.formats))


_HANDLES: Handled = {
    **SHARDS,
    "activation": tuple(ACTIVATION_ARGS),
    "weight_on": ("output", "input"),
    "dtype": ("bf16", "fp16", "fp32"),
    "activations": _MODES,
    "scales": ANY,
    "spec.bias": ANY,
    "batch_invariant": ANY,
}


@dataclass(frozen=True, slots=True)
class Cuda(BackendBase):
    """Grouped GEMMs on tensor cores.

    Supported pairs: 4-bit, MXFP8 or bfloat16 weights with bfloat16 rows; MXFP4 weights with E4M3 rows that have one
    scale for 128 columns or one scale in all; INT4 weights by groups of 128 columns with E4M3 rows that have one scale
    in all; and E4M3 weights with E4M3 rows, scaled by block or by row, which are multiplied in float16 for few rows and
    in E4M3 for many. Calls can be captured in CUDA graphs, and repeated calls are bitwise identical. For
    batch-invariant results, kernels with a fixed order of summation run at every token count; for E4M3 weights these
    multiply in float16.
    """

    name: str = "cuda"
    layouts: tuple[str, ...] = tuple(
        dict.fromkeys(layout for family in KERNEL_FAMILIES.values() for layout in family.layouts)
    )
    handles = _HANDLES
    """:meth:`check` rejects some combinations."""

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Accept the problem, or return every reason against it: GPU, driver, formats, and options without a kernel."""
        device, spec, reasons = machine.device, problem.spec, Reasons()
        families = tuple(KERNEL_FAMILIES.values())
        readers_of_all = [f for f in families_for(problem) if _usable(problem, f)] or families
        built = sorted({arch for family in readers_of_all for arch in architectures_of(family)})
        reasons.need(device.capability in built, "GPU", _listed(built), device.arch)
        driver = machine.driver
        version = ".".join(map(str, driver)) if driver else "none"
        newest = ".".join(map(str, _DRIVER))
        reasons.need(driver is None or driver >= _DRIVER, "driver", f"CUDA {newest} or newer", version)
        formats = {projection: weight_format(encoding) for projection, encoding in spec.encodings.items()}
        readers = {name: [f for f in families if name in f.formats] for name in formats.values() if name}
        modes = [m for m in _MODES if all(any(m in activations_of(f) for f in fs) for fs in readers.values())]
        modes = modes or [UNQUANTIZED]
        reasons.need(problem.activations in modes, "activations", " or ".join(map(str, modes)), problem.activations)
        for projection, encoding in spec.encodings.items():
            expected = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
            got = encoding.name + (f" with scales {encoding.scale_dtype}" if encoding.scale_dtype else "")
            reasons.need(formats[projection] is not None, f"{projection} weights", expected, got)
        if problem.activations.quantized:
            quantized = families_for(problem) or [f for f in families if problem.activations in activations_of(f)]
            gate = spec.gated or not all(f.gated_only for f in quantized)
            reasons.need(gate, "FP8 activations without a gate")
            weight = problem.weight_on == "output" or not all(f.output_weight_only for f in quantized)
            reasons.need(weight, "routing weight on the input with FP8 activations")
        static_input = problem.activations.static and problem.weight_on == "input"
        reasons.need(not static_input, "routing weight on the input", "dynamic scales of activations", "fp8_static")
        if problem.activations.fast_accumulation:
            _need_fast_accumulation(reasons, problem)
        found = families_for(problem)
        if all(formats.values()) and problem.activations in modes:
            got = ", ".join(dict.fromkeys(map(str, formats.values())))
            reasons.need(bool(found), "weights", "formats that one family of kernels reads", got)
        reasons.need(
            spec.local_experts <= _MOST_EXPERTS, "experts on this rank", f"at most {_MOST_EXPERTS}", spec.local_experts
        )
        if not reasons.found and not any(_configs(problem, machine, f) for f in _families(problem, machine)):
            # A device that has less than its compute capability says.
            kib = device.shared_memory_bytes // 1024
            reasons.need(False, f"shared memory of {device.arch}", "enough for a CTA", f"{kib} KiB")
        if reasons.found or device.capability is None:
            return reasons.verdict(Accepted())
        here, target = families_for(problem, device.capability), target_for(device.capability)
        layouts = tuple(dict.fromkeys(layout_on(family, target, spec) for family in here))
        fast, promoted = problem.activations, problem.activations.promoted
        note = f"errors of up to {fast.tolerance:g} where fast accumulation runs, else {promoted.tolerance:g}"
        return Accepted(capturable=True, layouts=layouts, notes=(note,) if fast.fast_accumulation else ())

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> CudaConfig:
        """Return the configuration for the mean number of rows of the experts that have any."""
        c = cost(problem, machine.device, tokens)
        choices = list(_choices(problem, machine))
        usable = {family.name for family, *_ in choices}
        for family, choice, config in choices:
            fill = _fill(problem, machine, family, c.uniform_experts)
            limited = not family.otherwise or family.otherwise in usable
            if limited and not _filled(problem, family, fill):
                continue
            last_rows = choice.last_rows if family is choices[-1][0] else 0
            few = c.mean_rows <= (last_rows or choice.most_rows)
            if few and _holds(problem, c, choice, fill) and _replaces(problem, machine, family, choice, c):
                return _shorter(problem, machine, family, config, c.uniform_experts)
        last = _chosen_families(problem, machine)[-1]
        return max(_configs(problem, machine, last), key=lambda config: config.block_m)

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """Return all configurations that fit in shared memory: :meth:`configure`'s, then those whose tiles are not much
        narrower or wider than the mean number of rows of the experts that have any.

        Families that can be checked only with many tokens are left out for fewer.
        """
        if timed:
            return ()
        rows, found = cost(problem, machine.device, tokens).mean_rows, []
        for family in _families(problem, machine):
            if family.check_tokens > max(tokens, 8):
                continue
            found += _configs(problem, machine, family)
            if family.shorter:
                found.append(CudaConfig(family.name, family.shorter.block_m, 0, family.shorter.instead))
        found.sort(key=lambda c: not min(rows, 100) / 1.5 <= c.block_m <= max(64, 16 * rows))
        return tuple(dict.fromkeys([self.configure(problem, machine, tokens), *found]))

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Return the sum of the times for memory, math and launches, at rates fitted to measurements on one H200.

        Errors were at most 3 % for w4a16_mma, 6 % for w4a16_mma_ordered, 15 % for w4a16_wgmma, 5 % for bf16 and 20 %
        for E4M3 rows. For other GPUs the same rates are assumed, and another rate of mma.sync.
        """
        c, config = cost(problem, machine.device, tokens), self.configure(problem, machine, tokens)
        family, capability = config.kernels.fitted(machine.device.name), machine.device.capability
        assert capability is not None
        target = target_for(capability)
        slower = target.mma_sync_rate if family.rates.mma_sync else 1.0
        return Prediction(family.rates.time_us(c.memory_us, c.compute_us / slower), "cost model")

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return CudaRunner(problem, packed)


def _need_fast_accumulation(reasons: Reasons, problem: Problem) -> None:
    """What kernels with fast accumulation need besides formats."""
    promoted, columns = problem.activations.promoted, max(problem.spec.hidden, problem.spec.intermediate)
    expected = f"{promoted}, with the same sums at every number of tokens"
    reasons.need(not problem.batch_invariant, "activations of batch-invariant results", expected, problem.activations)
    expected = f"at most {_MOST_FAST_COLUMNS} columns, or {promoted}"
    reasons.need(columns <= _MOST_FAST_COLUMNS, "fast accumulation", expected, columns)


def _usable(problem: Problem, family: KernelFamily) -> bool:
    """Return whether the problem may run on the family: batch-invariant results need sums in a fixed order."""
    return family.batch_invariant or not problem.batch_invariant


def _families(problem: Problem, machine: Machine) -> list[KernelFamily]:
    """Return the families that may be used on the machine's GPU, in the order of the table."""
    return [family for family in families_for(problem, machine.device.capability) if _usable(problem, family)]


def _chosen_families(problem: Problem, machine: Machine) -> list[KernelFamily]:
    """Return those of the families that are chosen without measurements of the user's own."""
    device = machine.device.name
    return [f.fitted(device) for f in _families(problem, machine) if not f.devices or device in f.devices]


def _listed(capabilities: Sequence[tuple[int, int]]) -> str:
    """Return "SM90, SM100 or SM120"."""
    *others, last = (f"SM{major}{minor}" for major, minor in capabilities)
    return f"{', '.join(others)} or {last}" if others else last


def _fits(problem: Problem, machine: Machine, config: CudaConfig) -> bool:
    """Return whether the pipelines of both GEMMs fit in the GPU's shared memory."""
    spec, device = problem.spec, machine.device
    assert device.capability is not None
    budget = target_for(device.capability).budget_on(device.shared_memory_bytes)
    sides = (("gate_up" if spec.gated else "up", spec.up, spec.hidden), ("down", spec.down, spec.intermediate))
    family = config.kernels
    return all(family.fits(budget, weight_format(e) or "", part, config.block_m, k) for part, e, k in sides)


def _configs(problem: Problem, machine: Machine, family: KernelFamily) -> list[CudaConfig]:
    """Return all of a family's configurations that fit in shared memory, with the same tiles for both GEMMs."""
    configs = [CudaConfig(family.name, m, n) for m in family.tiles for n in family.block_ns or (0,)]
    configs += [CudaConfig(family.name, m, narrow_m=narrow_m) for m, narrow_m in family.narrow]
    return [config for config in configs if _fits(problem, machine, config)]


def _choices(problem: Problem, machine: Machine) -> Iterator[tuple[KernelFamily, Choice, CudaConfig]]:
    """Yield the families that may be used with their choices and configurations, for few rows per expert first."""
    for family in _chosen_families(problem, machine):
        for choice in family.choices:
            config = CudaConfig(family.name, choice.block_m, choice.block_n, narrow_m=choice.narrow_m)
            if _fits(problem, machine, config):
                yield family, choice, config


def _filled(problem: Problem, family: KernelFamily, fill: float) -> bool:
    """Return whether ``fill`` is within the limits in which the family is chosen."""
    short = problem.spec.hidden <= family.few_columns
    return family.fills <= fill and (short or fill <= family.most_fill)


def _holds(problem: Problem, c: Cost, choice: Choice, fill: float) -> bool:
    """Return whether the call is within the limits of a choice other than those of its mean number of rows."""
    skewed = c.skewed_rows > choice.most_skewed_rows and fill >= choice.skewed_fill
    return not skewed and fill <= choice.most_fill and problem.spec.intermediate <= choice.most_columns


def _replaces(problem: Problem, machine: Machine, family: KernelFamily, choice: Choice, c: Cost) -> bool:
    """Return whether gate and up finish sooner with a choice's tiles than with those that it replaces, if any."""
    if not choice.instead_of:
        return True

    def waves(block_m: int) -> int:
        tiles = c.mean_rows / block_m
        # Experts differ in their rows: half a work tile more on average.
        work_tiles = math.ceil(tiles) if problem.spec.local_experts == 1 else max(1.0, tiles + 0.5)
        return math.ceil(_fill(problem, machine, family, c.uniform_experts * work_tiles))

    most = waves(choice.instead_of)
    return most <= _MOST_WAVES and choice.cost * waves(choice.block_m) < most


def _fill(problem: Problem, machine: Machine, family: KernelFamily, work_tiles: float) -> float:
    """Return how many tiles of weights gate and up have for each SM."""
    spec = problem.spec
    rows = (2 if spec.gated else 1) * spec.intermediate
    (tile, *_) = family.tiles.values()
    return work_tiles * math.ceil(rows / tile.block_n) / machine.device.sms


def _shorter(problem: Problem, machine: Machine, family: KernelFamily, config: CudaConfig, tiles: float) -> CudaConfig:
    """Return ``config``, or one with shorter tiles of weights for one or both GEMMs where these finish sooner."""
    spec, shorter = problem.spec, family.shorter
    if shorter is None or (config.narrow_m or config.block_m) != shorter.block_m:
        return config

    def pays(n: int) -> bool:
        """Return whether shorter tiles finish sooner: the last wave of tall tiles may be nearly empty."""
        short, tall = (
            block_n * math.ceil(tiles * math.ceil(n / block_n) / machine.device.sms)
            for block_n in (family.tiles[m].block_n for m in (shorter.instead, shorter.block_m))
        )
        return shorter.cost * short < tall

    if not pays(spec.hidden):
        return config
    if pays((2 if spec.gated else 1) * spec.intermediate):
        return CudaConfig(family.name, shorter.instead)
    return CudaConfig(family.name, shorter.block_m, 0, shorter.instead)
