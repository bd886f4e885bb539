"""Route ``sm12x_nvfp4``: CuTe DSL kernels for NVFP4 weights on SM120 and SM121, in two families that read one layout.

``sm12x_nvfp4_w4a16`` keeps x and h in 16 bits and multiplies without tensor cores: for calls of few tokens, which read
weights only. ``sm12x_nvfp4_w4a4`` rounds x and h to NVFP4 for block-scaled MMAs. With ``activations="nvfp4"`` a plan
has the former below 64 tokens and the latter from there on, unless a table of measured times says otherwise; without,
it has the former alone.

Both add the experts of a token with atomics, the former in float32 and the latter in bfloat16, so that repeated calls
differ in rounding. Each is compiled for a number of tokens at the first call that has it, which must not be captured:
calls are filled up to a power of two. No GPU ran this route yet.

Where an id names none of the experts, ``sm12x_nvfp4_w4a16`` computes one of them with a weight of 0; the other family
skips it. So calls of the former are filled up with the experts of the first token, whose weights are read anyway, and
ranks of an expert parallel group are refused: they would read weights for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polymoe.backends.base import Prediction, Runner, RunnerBase, aligned, require_aligned
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.flashinfer.config import FlashInferConfig
from polymoe.backends.flashinfer.routes import Route, RouteRates, function_of, local_ids, need_shared_memory
from polymoe.errors import FormatError
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import NVFP4, UNQUANTIZED, ActivationQuantization
from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

    from polymoe.problem.call import CallArguments

_W4A16, _W4A4 = "sm12x_nvfp4_w4a16", "sm12x_nvfp4_w4a4"
_THRESHOLD = 64
"""The least number of tokens of the latter family: as published for TensorRT-LLM's hybrid plans (TRT-LLM#13773)."""

_MOST = {_W4A16: 512, _W4A4: 8192}
"""Tokens of one launch of a family; more are split. Workspaces grow with it."""

_RATES = {_W4A16: RouteRates(0.7, 0.05, 20.0), _W4A4: RouteRates(0.6, 0.5, 40.0)}
"""Estimates: no times of these kernels are published. Without tensor cores products are some twenty times slower."""

_MODULE = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_nvfp4"
_PARAMETERS = (
    "hidden_states", "topk_ids", "topk_weights", "w13", "w13_sf", "w13_gs", "w2", "w2_sf", "w2_gs", "out",
)  # fmt: skip
_DSL = "nvidia-cutlass-dsl"


class Sm12xNvfp4(Route):
    """``run_moe_w4a16`` and ``run_moe_w4a4``."""

    name: ClassVar[str] = "sm12x_nvfp4"
    architectures: ClassVar[tuple[tuple[int, int], ...]] = ((12, 0), (12, 1))
    format: ClassVar[str] = "nvfp4"
    layouts: ClassVar[tuple[str, ...]] = ("flashinfer_sm12x_nvfp4",)
    activations: ClassVar[tuple[ActivationQuantization, ...]] = (UNQUANTIZED, NVFP4)
    functions: ClassVar[tuple[type, ...]] = (SwiGLU, ReLU2)
    least: ClassVar[str] = "0.7.2"
    wrong: ClassVar[Mapping[str, str]] = {"0.6.17": "returns wrong results of tuned tactics (flashinfer#4841)"}
    rates: ClassVar[RouteRates] = _RATES[_W4A16]
    repeatable: ClassVar[bool] = False
    token_bounds: ClassVar[tuple[int, ...]] = (_THRESHOLD - 1,)
    notes: ClassVar[tuple[str, ...]] = ("compiles kernels at the first call with each power of two of tokens",)

    def check(self, problem: Problem, machine: Machine, reasons: Reasons) -> Sequence[str]:
        notes = super().check(problem, machine, reasons)
        function, driver, spec = problem.activation, machine.driver, problem.spec
        if isinstance(function, SwiGLU):
            reasons.need(function == SwiGLU(), "activation", "SwiGLU without constants", function.name)
        others = spec.experts - spec.local_experts
        reasons.need(not others, "experts of other ranks", "none, because they would be computed too", others)
        need_shared_memory(reasons, machine, 99)
        if driver is not None or not machine.elsewhere:
            got = "none" if driver is None else f"CUDA {driver[0]}.{driver[1]}"
            reasons.need(driver is not None and driver >= (13, 0), "driver", "CUDA 13 or newer", got)
        if machine.elsewhere:
            return (*notes, f"needs {_DSL}[cu13] there")
        # Its compiler for CUDA 12 emits instructions that ptxas refuses. Both may be installed: what counts is which is
        # loaded (TensorRT-LLM#15853).
        loaded = machine.cutlass_cuda
        got = f"CUDA {loaded[0]}.{loaded[1]}" if loaded else "none that can be imported"
        expected = "that for CUDA 13, which flashinfer-python[cu13] installs"
        reasons.need(loaded is not None and loaded >= (13, 0), f"active compiler of {_DSL}", expected, got)
        return notes

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> FlashInferConfig:
        large = problem.activations == NVFP4 and tokens >= _THRESHOLD
        return FlashInferConfig(_W4A4 if large else _W4A16)

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]]
    ) -> Sequence[Config]:
        """Both families where both may run."""
        own = self.configure(problem, machine, tokens)
        both = (FlashInferConfig(_W4A16), FlashInferConfig(_W4A4)) if problem.activations == NVFP4 else ()
        return () if timed else tuple(dict.fromkeys((own, *both)))

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        rates = _RATES[self.configure(problem, machine, tokens).route]
        return rates.predict(cost(problem, machine.device, tokens))

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return _Sm12xRunner(problem, packed)


class _Sm12xRunner(RunnerBase):
    """Calls of one layer. Each allocates its workspace, so that layers and streams share none."""

    options = frozenset(("expert_map",))

    def __init__(self, problem: Problem, packed: Packed) -> None:
        t, self._spec = packed.tensors, problem.spec
        self._weights = {
            "w13": t["up.codes"],
            "w13_sf": t["up.scales"].view(torch.float8_e4m3fn),
            "w13_gs": t["gate.global_scale" if self._spec.gated else "up.global_scale"],
            "w2": t["down.codes"],
            "w2_sf": t["down.scales"].view(torch.float8_e4m3fn),
            "w2_gs": t["kernel.down_scale"],
        }
        self._input_scales = {"a13_gs": t["kernel.x_scale"], "a2_gs": t["kernel.h_scale"]}
        self._calls: dict[str, Callable[..., Any]] = {
            _W4A16: function_of(f"{_MODULE}_w4a16", "run_moe_w4a16", _PARAMETERS)
        }
        if problem.activations == NVFP4:
            _require_one_scale(problem, t)
            parameters = (*_PARAMETERS, *self._input_scales)
            self._calls[_W4A4] = function_of(f"{_MODULE}_w4a4", "run_moe_w4a4", parameters)

    def run(self, call: CallArguments, config: Config) -> None:
        assert isinstance(config, FlashInferConfig)
        x_TH, out_TH = call.x_TH, call.out_TH
        require_aligned("out", out_TH)
        experts = self._spec.local_experts
        ids_TA = local_ids(call.topk_ids_TA, self._spec.first_expert, experts, call.expert_map)
        nothing_TA = ids_TA == experts
        weights_TA = call.topk_weights_TA.masked_fill(nothing_TA, 0.0)
        if config.route == _W4A16:  # 0 times NaN or infinity would not be 0
            x_TH = x_TH.masked_fill(nothing_TA.all(1, keepdim=True), 0.0)
        most = _MOST[config.route]
        for first in range(0, len(x_TH), most):
            some = slice(first, first + most)
            self._run(config.route, x_TH[some], ids_TA[some], weights_TA[some], out_TH[some])

    def _run(self, family: str, x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> None:
        tokens = len(x_TH)
        more = (1 << (tokens - 1).bit_length()) - tokens
        if more:
            x_TH, weights_TA = (torch.nn.functional.pad(part, (0, 0, 0, more)) for part in (x_TH, weights_TA))
            none = ids_TA.new_full((1, ids_TA.shape[1]), self._spec.local_experts)
            ids_TA = torch.cat((ids_TA, (ids_TA[:1] if family == _W4A16 else none).expand(more, -1)))
        x_TH = aligned(x_TH)
        out = torch.empty_like(x_TH) if more else out_TH
        given = {"hidden_states": x_TH, "topk_ids": ids_TA, "topk_weights": weights_TA.contiguous(), "out": out}
        scales = self._input_scales if family == _W4A4 else {}
        self._calls[family](**given, **self._weights, **scales)
        if more:
            out_TH.copy_(out[:tokens])


def _require_one_scale(problem: Problem, tensors: Mapping[str, Tensor]) -> None:
    """Refuse experts whose gate and up have different global scales: h, off by a factor, would be rounded to other
    numbers than the reference's.

    Raises:
        FormatError: naming the first such expert.
    """
    if not problem.spec.gated or tensors["up.global_scale"].device.type == "meta":
        return
    gate, up = tensors["gate.global_scale"], tensors["up.global_scale"]
    for e in (gate != up).nonzero()[:1].flatten().tolist():
        raise FormatError(
            f"expert {problem.spec.first_expert + e}, gate and up",
            expected="one global scale, with NVFP4 inputs",
            got=f"{float(gate[e]):g} and {float(up[e]):g}",
            hint='load with activations="16bit", or with another backend',
        )
