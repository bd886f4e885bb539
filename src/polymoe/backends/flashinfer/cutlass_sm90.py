"""Route ``cutlass_sm90``: CUTLASS grouped GEMMs of MXFP4 weights and BF16 rows on SM90.

The scale of 32 columns multiplies sums in float32 after the MMA. A third kernel adds the experts of a token in float32,
in the order of their ids in the call, so repeated calls are bitwise identical.

FlashInfer numbers the tactics of a GEMM: tiles of weights x rows x bytes of K, each with four shapes of clusters. A
configuration names them, because their numbers changed in 0.6.18. FlashInfer's own tuning is never used: calls pass the
numbers of both GEMMs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polymoe.backends.base import Runner, RunnerBase, aligned, mapped_ids, require_aligned
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.flashinfer.config import FlashInferConfig
from polymoe.backends.flashinfer.routes import PACKAGE, Route, RouteRates, swiglu_constants
from polymoe.backends.packages import at_least
from polymoe.errors import PlanError, nearest
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import SwiGLU

if TYPE_CHECKING:
    from torch import Tensor

    from polymoe.problem.call import CallArguments

    _Call = Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor], tuple[Tensor | None, ...], list[int]], None
    ]
    """Of output, x, ids, weights, both matrices, their scales, the constants of SwiGLU, and the numbers of both
    tactics."""

_FOLDED = "0.6.18"
"""The first version with other codes, scales and tactics."""

_FLAT_TILES = ("64x16x128", "64x32x128", "64x64x128", "64x128x128", "128x16x128", "128x32x128", "128x64x128")
_ROWS = ("64x16", "64x32", "64x64", "64x128", "128x16", "128x32", "128x64", "128x128")
_FOLDED_TILES = (
    *(f"{rows}x{k}" for rows in _ROWS for k in (128, 256, 512)),
    "128x256x128", "128x256x256", "256x128x128", "256x128x256", "256x256x128",
)  # fmt: skip
_CLUSTERS = ("", " 2x1", " 1x2", " 2x2")
_UNSUPPORTED = ("64x128x512", "128x128x512", "128x256x256", "256x128x256")
"""Tiles that have a number but no kernel for these weights."""

_CHOICES = (
    (1.01, "64x16x128"), (16.0, "128x16x128"), (32.0, "128x32x128 2x1"), (float("inf"), "128x64x128 2x1"),
)  # fmt: skip
"""Tactics by the largest mean of rows per expert that has any: of all that FlashInfer 0.6.14 has, the fastest on one
H200 at 1, 16 to 256, 1024 and 4096 tokens of DeepSeek-V4-Flash (1, 1.2 to 6, 24 and 96 rows). Both generations have
these."""

_CLOSE = 4
"""How many of the fastest tactics are tried for one GEMM each when a layer is tuned."""


class CutlassSM90(Route):
    """FlashInfer's ``cutlass_fused_moe`` with ``use_w4_group_scaling``."""

    name: ClassVar[str] = "cutlass_sm90"
    architectures: ClassVar[tuple[tuple[int, int], ...]] = ((9, 0),)
    format: ClassVar[str] = "mxfp4"
    layouts: ClassVar[tuple[str, ...]] = ("flashinfer_sm90", "flashinfer_sm90_folded")
    functions: ClassVar[tuple[type, ...]] = (SwiGLU,)
    least: ClassVar[str] = "0.6.14"
    # Fitted to FlashInfer 0.6.14 on one H200 with 256 experts of 4096 x 2048 and the tactics that configure chooses:
    # within 4 % at 1, 16, 64, 256 and 4096 tokens, 18 % less than measured at 1024.
    rates: ClassVar[RouteRates] = RouteRates(0.49, 0.33, 48.0)
    notes: ClassVar[tuple[str, ...]] = ("a token must not select an expert twice",)

    def layout(self, machine: Machine) -> str:
        """Versions 0.6.18 and newer read the folded layout."""
        return self.layouts[_folded(machine)]

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> FlashInferConfig:
        """The tactic for the mean number of rows of an expert that has any."""
        mean = cost(problem, machine.device, tokens).mean_rows
        tactic = next(tactic for most, tactic in _CHOICES if mean <= most)
        return FlashInferConfig(self.name, tactic, tactic)

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]]
    ) -> Sequence[Config]:
        """First every tactic for both GEMMs; then each pair of those that were fastest."""
        if not timed:
            own = self.configure(problem, machine, tokens)
            both = (FlashInferConfig(self.name, t, t) for t in _tactics(_folded(machine)) if _exists(t))
            return tuple(dict.fromkeys((own, *both)))
        best = [c for c, _ in sorted(timed, key=lambda pair: pair[1]) if isinstance(c, FlashInferConfig)]
        names = list(dict.fromkeys(c.up for c in best if c.up == c.down))[:_CLOSE]
        pairs = [FlashInferConfig(self.name, up, down) for up in names for down in names]
        return [pair for pair in pairs if pair not in best]

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return _Sm90Runner(problem, packed)


def _folded(machine: Machine) -> bool:
    version = machine.packages.get(PACKAGE)
    return version is None or at_least(version, _FOLDED)


def _tactics(folded: bool) -> tuple[str, ...]:
    """Names of the tactics of one GEMM, in FlashInfer's order."""
    return tuple(tile + cluster for tile in (_FOLDED_TILES if folded else _FLAT_TILES) for cluster in _CLUSTERS)


def _exists(tactic: str) -> bool:
    return tactic.partition(" ")[0] not in _UNSUPPORTED


class _Sm90Runner(RunnerBase):
    """Calls of one layer. The constants of the activation are the only tensors beside the packed ones."""

    options = frozenset(("expert_map",))

    def __init__(self, problem: Problem, packed: Packed) -> None:
        t, spec = packed.tensors, problem.spec
        self._first_expert = spec.first_expert
        self._tactics = {name: i for i, name in enumerate(_tactics(packed.layout == "flashinfer_sm90_folded"))}
        self._weights = (t["up.codes"], t["down.codes"], [t["up.scales"], t["down.scales"]])
        self._constants = swiglu_constants(problem.activation, spec.local_experts, t["up.codes"].device)
        self._call = _call(t["up.codes"].device)

    def run(self, call: CallArguments, config: Config) -> None:
        assert isinstance(config, FlashInferConfig)
        x_TH, out_TH = call.x_TH, call.out_TH
        require_aligned("out", out_TH)
        ids_TA, weights_TA = call.routing
        if call.expert_map is not None:
            ids_TA = mapped_ids(ids_TA, call.expert_map)
        elif self._first_expert:
            ids_TA = ids_TA - self._first_expert
        # Ids outside of the layer's experts are skipped by each kernel.
        ids_TA = ids_TA.to(torch.int32).contiguous()
        tactics = [self._number(config.up), self._number(config.down)]
        self._call(out_TH, aligned(x_TH), ids_TA, weights_TA.contiguous(), *self._weights, self._constants, tactics)

    def _number(self, tactic: str) -> int:
        if tactic not in self._tactics:
            hint = f"{nearest(tactic, self._tactics)}; a table of times may be of another version of FlashInfer"
            raise PlanError("FlashInferConfig", expected="a tactic of this version", got=repr(tactic), hint=hint)
        return self._tactics[tactic]


@cache
def _call(device: torch.device) -> _Call:
    """FlashInfer's function, or of a version in which it takes no tactics, what this function itself calls.

    A runner of FlashInfer divides tiles among as many SMs as the device has that is current when it is made, so each
    device has its own here. From 0.6.16 on, FlashInfer itself keeps one for all devices of a process: on GPUs with
    another number of SMs than the first one's, results are right, and measured times do not apply.
    """
    from flashinfer.fused_moe import cutlass_fused_moe  # pyright: ignore

    parameters = inspect.signature(cutlass_fused_moe).parameters

    def public(out, x, ids, weights, up, down, scales, constants, tactics) -> None:  # type: ignore[no-untyped-def]
        alpha, beta, limit = constants
        cutlass_fused_moe(
            x, ids, weights, up, down, torch.bfloat16, quant_scales=scales, use_w4_group_scaling=True, output=out,
            swiglu_alpha=alpha, swiglu_beta=beta, swiglu_limit=limit, use_fused_finalize=False, profile_ids=tactics,
        )  # fmt: skip

    if "profile_ids" in parameters:  # 0.6.16 and newer
        return public

    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module  # pyright: ignore
    from flashinfer.tllm_enums import ActivationType  # pyright: ignore

    fused_finalize = (False,) if "use_fused_finalize" in parameters else ()  # 0.6.15
    module: Any = gen_cutlass_fused_moe_sm90_module().build_and_load()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        runner = module.init(torch.bfloat16, torch.uint8, torch.bfloat16, False, True, False, False, *fused_finalize)
    # The function has a pointer to its runner, which it does not keep alive.
    kept, swiglu = (runner.run_moe, runner), ActivationType.Swiglu

    def inner(out, x, ids, weights, up, down, scales, constants, tactics) -> None:  # type: ignore[no-untyped-def]
        one_rank = (1, 0) * 3  # of tensor, expert and cluster parallelism
        kept[0](
            out, x, ids, weights, up, None, down, None, scales, None, *constants, True, *one_rank, False, False,
            tactics, True, swiglu,
        )  # fmt: skip

    return inner
