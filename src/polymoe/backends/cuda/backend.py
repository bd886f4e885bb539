"""Hopper: experts of 4-bit, FP8 or bfloat16 weights on SM90 from the Hopper layouts, by kernels compiled ahead of time.

No compiler, no package. Four launches for few tokens: dispatch, gate and up with the activation, down, combine; a fifth
brings x into tiles where an expert gets many rows, or rounds it to E4M3. Each starts while the one before it ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from polymoe.activation_quantization import FP8_GROUP128, UNQUANTIZED, ActivationQuantization
from polymoe.activations import Activation, GeGLU, SwiGLU
from polymoe.backends.base import BackendBase, Prediction, Runner, RunnerBase
from polymoe.backends.config import Config
from polymoe.cost import cost
from polymoe.errors import PlanError
from polymoe.formats import Encoding, PerGroup
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.verdict import Accepted, Reasons, Verdict

if TYPE_CHECKING:
    from polymoe.kernels.cuda import launch

__all__ = ["Cuda", "CudaConfig"]


@dataclass(frozen=True, slots=True)
class CudaConfig(Config):
    """Which kernels, and the most rows of x that one piece of work holds."""

    kernels: Literal["decode", "prefill", "w4a8", "whole", "fp8", "w8a8"]
    rows: int
    """8, 12 or 16 (decode), 32, 64, 128 or 256 (prefill, and whole: of weights that are not decoded), 16, 32, 64 or 128
    (w4a8: x and h in E4M3), 32, 64 or 96 (fp8: as float16), 160 (w8a8: of E4M3 weights, as they are)."""
    height: int
    """Rows of weights that a block makes at once (decode), or 0."""
    down_rows: int = 0
    """The kernel for the down projection of the same pieces, where it is the one for more rows; or 0."""

    def __post_init__(self) -> None:
        from polymoe.kernels.cuda.launch import DECODE, IN_TILES
        from polymoe.kernels.cuda.launch_fp8 import FP8, W8A8

        sizes = (self.rows, self.height)
        many = {**IN_TILES, "fp8": FP8, "w8a8": W8A8}
        known = DECODE if self.kernels == "decode" else tuple((rows, 0) for rows in many[self.kernels])
        if sizes not in known:  # a table of measured times may be older than the kernels
            expected = f"rows and height of a {self.kernels} kernel: {', '.join(map(str, known))}"
            raise PlanError("CudaConfig", expected=expected, got=str(sizes))
        wider = [rows for rows in IN_TILES.get(self.kernels, ()) if rows > self.rows]
        if self.down_rows and self.down_rows not in wider:
            expected = f"down_rows of a {self.kernels} kernel for more than {self.rows} rows: 0 or {wider}"
            raise PlanError("CudaConfig", expected=expected, got=str(self.down_rows))

    @property
    def kernel_family(self) -> str:
        """By what the kernels compute and with which instruction."""
        return {
            "decode": "w4a16_mma", "prefill": "w4a16_wgmma", "w4a8": "w4a8", "whole": "bf16", "fp8": "w8a8_f16",
            "w8a8": "w8a8",
        }[self.kernels]  # fmt: skip

    @property
    def check_tokens(self) -> int:
        """Of E4M3's own products single tokens are up to 4e-2 off (docs/measured.md), and 512 together never 6e-3."""
        return 512 if self.kernels == "w8a8" else 8

    def __str__(self) -> str:
        down = f", down as for {self.down_rows}" if self.down_rows else ""
        return f"{self.kernels}, {self.rows} rows" + (f", {self.height} high" if self.height else "") + down


# Kernels and rows of an item, by the mean number of rows of an expert that has any: the fastest on one H200 at 1 to 128
# tokens of DeepSeek-V4-Flash (up to 3.2 rows), 256 to 1024 (6 to 24), 2048 (48), 4096 (96), and beyond.
_BY_ROWS: tuple[tuple[float, CudaConfig], ...] = (
    (4.4, CudaConfig("decode", 8, 64)),
    (29.0, CudaConfig("prefill", 32, 0)),
    (62.0, CudaConfig("prefill", 64, 0)),
    (115.0, CudaConfig("prefill", 128, 0)),
    (float("inf"), CudaConfig("prefill", 256, 0)),
)

# The same for weights that the matrix units read as they are, at 1 to 4096 tokens of Qwen3-235B TP4 in bfloat16 (up to
# 256 rows).
_WHOLE_BY_ROWS = tuple(
    (bound, CudaConfig("whole", rows, 0)) for bound, rows in ((20.0, 32), (45.0, 64), (90.0, 128), (float("inf"), 256))
)

# The same for rows in E4M3, at 1 to 256 tokens of DeepSeek-V4-Flash (up to 6 rows), 512 and 1024 (24), 2048 (48), and
# beyond.
_W4A8_BY_ROWS = tuple(
    (bound, CudaConfig("w4a8", rows, 0)) for bound, rows in ((8.0, 16), (29.0, 32), (62.0, 64), (float("inf"), 128))
)

# The same for E4M3 weights with scales for 128 x 128, at 1 to 512 tokens of DeepSeek-V3 TP8 (up to 16 rows), 1024 (32),
# and beyond. The last is for results that must not depend on the batch.
_FP8_BY_ROWS: tuple[tuple[float, CudaConfig], ...] = (
    (20.0, CudaConfig("fp8", 32, 0)),
    (50.0, CudaConfig("fp8", 64, 0)),
    (float("inf"), CudaConfig("w8a8", 160, 0)),
    (float("inf"), CudaConfig("fp8", 96, 0)),
)

# Of those times: the shares of the device's rates at which weights are read and products are made, one after the other,
# and microseconds beside them.
_RATES = {
    "decode": (0.93, 0.45, 10.0), "prefill": (1.02, 0.95, 20.0), "w4a8": (1.02, 0.65, 20.0), "whole": (1.02, 1.0, 12.0),
    "fp8": (0.98, 0.5, 14.0), "w8a8": (1.02, 0.45, 14.0),
}  # fmt: skip

# Lower tiles for the down projection alone.
_LOWER_DOWN = CudaConfig("prefill", 32, 0, 64)

# What the kernel for 64 rows of x takes for few of them, by the one for 32: at most that for DeepSeek-V4-Flash and
# Kimi K2 TP8 at 256 and 512 tokens.
_LOWER = 1.2

# How x and h may be held, where it is not in bfloat16 alone. E4M3 beside 4-bit weights wants a layout of its own.
_MODES: dict[str, tuple[ActivationQuantization, ...]] = {
    "mxfp4": (UNQUANTIZED, FP8_GROUP128), "fp8_block128": (FP8_GROUP128,),
}  # fmt: skip

# Of many rows: the share of the products' rate that the L2 cache can feed, since what is not decoded passes through it
# anew for each piece of work.
_WHOLE_MOST = 0.38


@dataclass(frozen=True, slots=True)
class Cuda(BackendBase):
    """Grouped products of 4-bit or bfloat16 weights and bfloat16 rows, of MXFP4 weights and E4M3 rows, or of E4M3
    weights and rows, as float16 or, where they are many, as they are. Capturable. Repeats are equal to the bit. Where
    results must not depend on the rest of the batch, the kernels for many rows run at every token count, of E4M3 as
    float16.
    """

    name: str = "cuda"
    layouts: tuple[str, ...] = ("w4a16_fragments", "w4a8_fragments", "w8_fragments", "w16_swizzle128")

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Every reason against it: the GPU, the driver, formats and options that its kernels do not cover."""
        device, spec, reasons = machine.device, problem.spec, Reasons()
        reasons.need(device.capability == (9, 0), "GPU", "SM90", device.arch)
        driver = machine.driver
        version = ".".join(map(str, driver)) if driver else "none"
        reasons.need(driver is None or driver >= (13, 0), "driver", "CUDA 13.0 or newer", version)
        known = [_MODES.get(name, (UNQUANTIZED,)) for name in map(_format, spec.encodings.values()) if name]
        modes = [mode for mode in (UNQUANTIZED, FP8_GROUP128) if all(mode in each for each in known)] or [UNQUANTIZED]
        reasons.need(problem.activations in modes, "activations", " or ".join(map(str, modes)), problem.activations)
        for projection, encoding in spec.encodings.items():
            expected = "mxfp4, nvfp4, int4_g32, int4_g128, fp8_block128 or bf16"
            got = encoding.name + (f" with scales {encoding.scale_dtype}" if encoding.scale_dtype else "")
            reasons.need(_format(encoding) is not None, f"{projection} weights", expected, got)
        alike = spec.up.bits == spec.down.bits
        reasons.need(alike, "up and down weights", "one number of bits", f"{spec.up} and {spec.down}")
        e4m3 = spec.up.bits == 4 and problem.activations.quantized
        if problem.activations.quantized:
            reasons.need(spec.gated, "FP8 activations without a gate")
            reasons.need(problem.weight_on == "output", "routing weight on the input with FP8 activations")
        if spec.up.bits == 4:
            scales = "E8M0 within 2**14 in a row" if e4m3 else "E8M0 up to 2**25 and E4M3 of at least 0"
            reasons.need(not problem.wide_scales, "scales", scales, "scales outside this range")
        reasons.need(spec.local_experts <= 1024, "experts on this rank", "at most 1024", spec.local_experts)
        layout = {4: "w4a8_fragments" if e4m3 else "w4a16_fragments", 8: "w8_fragments"}.get(
            spec.up.bits, "w16_swizzle128"
        )
        return reasons.verdict(Accepted(capturable=True, layouts=(layout,)))

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> CudaConfig:
        """By the mean number of rows that an expert with any rows gets."""
        spec = problem.spec
        hit = cost(problem, machine.device, tokens).active_experts
        mean = tokens * problem.top_k * spec.local_experts / spec.experts / max(hit, 1e-9)
        running = [(bound, config) for bound, config in _table(problem) if _runs(problem, config)]
        found = next((config for bound, config in running if mean <= bound), running[-1][1])
        if found != CudaConfig("prefill", 32, 0) or not _lower_pays(spec.hidden, hit, machine.device.sms):
            return found
        up_too = _lower_pays((2 if spec.gated else 1) * spec.intermediate, hit, machine.device.sms)
        return CudaConfig("prefill", 64, 0) if up_too else _LOWER_DOWN

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """All that fit, :meth:`configure`'s first; of those of which a few tokens cannot be checked, with many."""
        from polymoe.kernels.cuda.launch import DECODE, PREFILL

        if timed:
            return ()
        if _table(problem) is _BY_ROWS:
            every = [CudaConfig("decode", rows, height) for rows, height in DECODE]
            every += [CudaConfig("prefill", rows, 0) for rows in PREFILL]
            every.append(_LOWER_DOWN)
        else:
            every = [config for _, config in _table(problem)]
        fitting = [c for c in every if _runs(problem, c) and (c.kernels != "w8a8" or tokens >= c.check_tokens)]
        return tuple(dict.fromkeys((self.configure(problem, machine, tokens), *fitting)))

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Reading and products one after the other, and launches, at rates of each kind of kernels that were fitted to
        one H200: within 3 % for decode, 15 % for prefill, 5 % for whole, 20 % for those of E4M3 rows."""
        c, kernels = cost(problem, machine.device, tokens), self.configure(problem, machine, tokens).kernels
        memory, products, beside_us = _RATES[kernels]
        time_us = c.memory_us / memory + c.compute_us / products
        if kernels == "whole":
            time_us = max(time_us, c.compute_us / _WHOLE_MOST)
        return Prediction(time_us + beside_us, "cost model")

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Holds the arguments of every call."""
        return _CudaRunner(problem, packed)


@dataclass(frozen=True, slots=True)
class _CudaRunner(RunnerBase):
    problem: Problem
    packed: Packed

    def run(self, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor, **_: object) -> None:
        """See :meth:`polymoe.backends.base.Runner.run`."""
        from polymoe.kernels.cuda import launch, launch_fp8

        assert isinstance(config, CudaConfig)
        if not len(x_TH):
            return
        problem, t = self.problem, self.packed.tensors
        spec = problem.spec
        gated = spec.gated
        first = "gate" if gated else "up"
        up = launch.Matrix(
            _require_format(spec.up), t["up.codes"], t.get("up.scales"),
            (2 if gated else 1) * spec.intermediate, spec.hidden,
            t.get(f"{first}_bias"), t.get("up_bias"), t.get(f"{first}.global_scale"), t.get("up.global_scale"),
        )  # fmt: skip
        down = launch.Matrix(
            _require_format(spec.down), t["down.codes"], t.get("down.scales"), spec.hidden, spec.intermediate,
            t.get("down_bias"), scale=t.get("down.global_scale"),
        )  # fmt: skip
        rows = launch.Rows(
            routing.topk_ids_TA, routing.topk_weights_TA.contiguous(), spec.first_expert, spec.local_experts,
            problem.weight_on == "input",
        )  # fmt: skip
        function = _function(problem.activation)
        if not problem.activations.quantized:  # others round to E4M3 from what x is
            x_TH = x_TH.to(torch.bfloat16)
        x_TH = x_TH.contiguous()
        if x_TH.data_ptr() % 16:  # a view into the midst of something: copies move 16 bytes at least
            x_TH = x_TH.clone()
        with torch.cuda.device_of(x_TH):
            if config.kernels == "decode":
                launch.decode(up, down, gated, function, x_TH, rows, out_TH, config.rows, config.height)
            elif config.kernels in ("fp8", "w8a8"):
                call = launch_fp8.fp8 if config.kernels == "fp8" else launch_fp8.w8a8
                call(up, down, function, x_TH, rows, out_TH, config.rows)
            else:
                down_rows = config.down_rows or config.rows
                launch.in_tiles(config.kernels, up, down, gated, function, x_TH, rows, out_TH, config.rows, down_rows)


def _format(encoding: Encoding) -> str | None:
    """Which of the kernels' formats it is, or None."""
    granularity = encoding.granularity
    if encoding.element == "bf16":
        return "bf16"
    if encoding.element == "e4m3":
        return "fp8_block128" if granularity == PerGroup(128, 128) else None
    if not isinstance(granularity, PerGroup) or granularity.n != 1 or encoding.zero_points:
        return None
    key = encoding.element, encoding.scale_dtype or "", granularity.k
    return {
        ("e2m1", "e8m0", 32): "mxfp4",
        ("e2m1", "e4m3", 16): "nvfp4",
        ("int4", "bfloat16", 32): "int4_g32",
        ("int4", "bfloat16", 128): "int4_g128",
    }.get(key)


def _table(problem: Problem) -> tuple[tuple[float, CudaConfig], ...]:
    if problem.spec.up.bits == 4 and problem.activations.quantized:
        return _W4A8_BY_ROWS
    return {4: _BY_ROWS, 8: _FP8_BY_ROWS, 16: _WHOLE_BY_ROWS}[problem.spec.up.bits]


def _lower_pays(rows: int, items: float, sms: int) -> bool:
    """Whether ``rows`` rows of weights for each item are sooner done in tiles as low as the kernel for 64 rows of x has
    them than in those of the one for 32: there are fewer of the high ones, and the last round may be nearly empty."""
    from polymoe.kernels.cuda.launch import PREFILL

    low, high = (
        height * math.ceil(items * math.ceil(rows / height) / sms)
        for height in (PREFILL[block].warpgroups * PREFILL[block].groups * 64 for block in (64, 32))
    )
    return _LOWER * low < high


def _require_format(encoding: Encoding) -> str:
    found = _format(encoding)
    assert found is not None
    return found


def _runs(problem: Problem, config: CudaConfig) -> bool:
    """Whether there are such kernels for both matrices, of the kind that may be asked for.

    Batch-invariant results need one kind for every number of tokens, since decode and prefill sum over K in different
    orders. In all prefill kernels a row's sum is one accumulator that gets K in order, 16 columns at a time, whatever
    the item's width and the row's place in it; and they are fast enough at both ends. Kernels for E4M3 do the same with
    sums of 128 columns; but those sums are other ones in w8a8.
    """
    from polymoe.kernels.cuda.launch import decode_fits

    if config.kernels != "decode":
        return config.kernels != "w8a8" or not problem.batch_invariant
    spec = problem.spec
    sides = ((spec.up, spec.hidden), (spec.down, spec.intermediate))
    return not problem.batch_invariant and all(decode_fits(_require_format(e), config.rows, k) for e, k in sides)


def _function(activation: Activation) -> launch.Function:
    from polymoe.kernels.cuda.launch import Function

    if isinstance(activation, SwiGLU):
        return Function(0, activation.alpha, activation.beta, activation.limit or 0.0)
    if isinstance(activation, GeGLU):
        return Function(2 if activation.approximate == "tanh" else 1)
    return Function(0)
