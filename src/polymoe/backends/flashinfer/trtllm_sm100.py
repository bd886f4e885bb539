"""Routes ``trtllm_*``: the grouped GEMMs that TensorRT-LLM generates for SM100, with 4-bit weights.

A call has five launches: two that assign rows to experts, gate and up with the activation, down, and finalize, which
adds the experts of a token in float32, in the order of their ids in the call. Which compiled kernel runs follows from
the sizes alone: FlashInfer's own default, whatever its tuner found for others. No GPU ran these routes yet.

An id of an expert that is not here becomes the id of one that another rank would have, which the kernels skip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polymoe.backends.base import Runner, RunnerBase, aligned, require_aligned
from polymoe.backends.config import Config
from polymoe.backends.flashinfer.config import FlashInferConfig
from polymoe.backends.flashinfer.routes import (
    PACKAGE,
    Route,
    RouteRates,
    function_of,
    local_ids,
    need_shared_memory,
    swiglu_constants,
)
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import MXFP8, NVFP4, UNQUANTIZED, ActivationQuantization
from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

    from polymoe.problem.call import CallArguments

_CUBINS = "flashinfer-cubin"
_MOST_EXPERTS, _MOST_ACTIVE = 2048, 32
_SPARE = 4
"""Ids beyond the layer's, for experts that are elsewhere; their number is a multiple of this."""

_GIVEN = 5  # RoutingMethodType.TopK: ids and weights are the call's, and are not normalized
_SWIGLU, _RELU2 = 3, 6  # ActivationType

_COMMON = (
    "topk_ids", "hidden_states", "gemm1_weights", "gemm1_weights_scale", "gemm1_alpha", "gemm1_beta",
    "gemm1_clamp_limit", "gemm2_weights", "gemm2_weights_scale", "num_experts", "top_k", "n_group", "topk_group",
    "intermediate_size", "local_expert_offset", "local_num_experts", "routed_scaling_factor", "routing_method_type",
    "do_finalize", "output",
)  # fmt: skip
_FP4 = (
    "routing_bias", "hidden_states_scale", "gemm1_bias", "gemm2_bias", "output1_scale_scalar",
    "output1_scale_gate_scalar", "output2_scale_scalar", "activation_type",
)  # fmt: skip


class _Trtllm(Route):
    """What the routes share."""

    architectures: ClassVar[tuple[tuple[int, int], ...]] = ((10, 0), (10, 3))
    functions: ClassVar[tuple[type, ...]] = (SwiGLU,)
    least: ClassVar[str] = "0.7.2"
    wrong: ClassVar[Mapping[str, str]] = {
        "0.6.16": "returns NaN from tiles of 192 rows (flashinfer#4486)",
        "0.6.17": "returns NaN from tiles of 192 rows (flashinfer#4486)",
    }
    # Published for other sizes: 62 to 64 % of 8 TB/s at 256 tokens on a GB200 (flashinfer#4985), 26 us at one token.
    rates: ClassVar[RouteRates] = RouteRates(0.63, 0.5, 20.0)

    def check(self, problem: Problem, machine: Machine, reasons: Reasons) -> Sequence[str]:
        notes = super().check(problem, machine, reasons)
        need_shared_memory(reasons, machine, 227)
        experts, most = problem.spec.local_experts, _MOST_EXPERTS - _SPARE
        reasons.need(experts <= most, "experts on this rank", f"at most {most}", experts)
        reasons.need(problem.top_k <= _MOST_ACTIVE, "experts of a token", f"at most {_MOST_ACTIVE}", problem.top_k)
        return (*notes, *_need_cubins(reasons, machine))

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> FlashInferConfig:
        return FlashInferConfig(self.name)


class TrtllmMxint4(_Trtllm):
    """``trtllm_mxint4_block_scale_routed_moe``: INT4 weights are converted to bfloat16 before each MMA."""

    name: ClassVar[str] = "trtllm_mxint4"
    format: ClassVar[str] = "int4_g32"
    layouts: ClassVar[tuple[str, ...]] = ("flashinfer_trtllm_int4",)
    notes: ClassVar[tuple[str, ...]] = ("routing weights are rounded to bfloat16",)

    def check(self, problem: Problem, machine: Machine, reasons: Reasons) -> Sequence[str]:
        sm100 = machine.device.capability == (10, 0)
        reasons.need(sm100, "GPU", "SM100: on SM103 the kernel fails (vllm#40419)", machine.device.arch)
        return super().check(problem, machine, reasons)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return _Mxint4Runner(problem, packed)


class TrtllmMxfp4(_Trtllm):
    """``trtllm_fp4_block_scale_routed_moe`` with MXFP4 weights: inputs are bfloat16, or MXFP8."""

    name: ClassVar[str] = "trtllm_mxfp4"
    format: ClassVar[str] = "mxfp4"
    layouts: ClassVar[tuple[str, ...]] = ("flashinfer_trtllm_mxfp4",)
    activations: ClassVar[tuple[ActivationQuantization, ...]] = (UNQUANTIZED, MXFP8)

    def check(self, problem: Problem, machine: Machine, reasons: Reasons) -> Sequence[str]:
        if problem.activations == UNQUANTIZED:
            sm100 = machine.device.capability == (10, 0)
            reasons.need(sm100, "GPU with 16-bit activations", "SM100, whose kernels there are", machine.device.arch)
        return super().check(problem, machine, reasons)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return _Fp4Runner(problem, packed)


class TrtllmNvfp4(_Trtllm):
    """``trtllm_fp4_block_scale_routed_moe`` with NVFP4 weights and inputs."""

    name: ClassVar[str] = "trtllm_nvfp4"
    format: ClassVar[str] = "nvfp4"
    layouts: ClassVar[tuple[str, ...]] = ("flashinfer_trtllm_nvfp4",)
    activations: ClassVar[tuple[ActivationQuantization, ...]] = (NVFP4,)
    functions: ClassVar[tuple[type, ...]] = (SwiGLU, ReLU2)
    notes: ClassVar[tuple[str, ...]] = ("inputs are NVFP4 at every token count",)

    def check(self, problem: Problem, machine: Machine, reasons: Reasons) -> Sequence[str]:
        function = problem.activation
        if isinstance(function, SwiGLU):
            # The limit would apply to sums that have no global scale yet.
            reasons.need(function == SwiGLU(), "activation", "SwiGLU without constants", function.name)
        return super().check(problem, machine, reasons)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return _Fp4Runner(problem, packed)


def _need_cubins(reasons: Reasons, machine: Machine) -> Sequence[str]:
    """Add a reason if FlashInfer would download compiled kernels without permission; return notes."""
    version, cubins = machine.packages.get(PACKAGE), machine.packages.get(_CUBINS)
    if version is None or (cubins is None and machine.elsewhere):  # that FlashInfer is missing is a reason already
        return (f"needs {_CUBINS} of the same version there",) if machine.elsewhere else ()
    same = cubins is not None and cubins.partition("+")[0] == version.partition("+")[0]
    if same:
        return ()
    expected = f"{version} like {PACKAGE}, or POLYMOE_DOWNLOAD_KERNELS=1 to let FlashInfer download its kernels"
    reasons.need(machine.downloads, f"package {_CUBINS}", expected, cubins or "not installed")
    return ("downloads compiled kernels at the first call",)


class _TrtllmRunner(RunnerBase):
    """Calls of one layer: of FlashInfer's function ``name``, with these of its parameters."""

    options = frozenset(("expert_map",))

    def __init__(self, problem: Problem, packed: Packed, name: str, parameters: Sequence[str]) -> None:
        t, self.spec = packed.tensors, problem.spec
        self.tensors = t
        self._call = function_of("flashinfer.fused_moe", name, parameters)
        self._autotune = function_of("flashinfer.autotuner", "autotune", ("tune_mode", "skip_ops"))
        self._operation = f"flashinfer::{name.replace('_routed', '')}"
        experts = self.spec.local_experts
        fp8 = t["up.scales"].dtype == torch.uint8
        scales = [t[f"{m}.scales"].view(torch.float8_e4m3fn) if fp8 else t[f"{m}.scales"] for m in ("up", "down")]
        alpha, beta, limit = swiglu_constants(problem.activation, experts, t["up.codes"].device)
        self.arguments: dict[str, Any] = {
            "gemm1_weights": t["up.codes"],
            "gemm1_weights_scale": scales[0],
            "gemm1_alpha": alpha,
            "gemm1_beta": beta,
            "gemm1_clamp_limit": limit,
            "gemm2_weights": t["down.codes"],
            "gemm2_weights_scale": scales[1],
            "num_experts": experts + _SPARE - experts % _SPARE,
            "n_group": None,
            "topk_group": None,
            "intermediate_size": self.spec.intermediate,
            "local_expert_offset": 0,
            "local_num_experts": experts,
            "routed_scaling_factor": None,
            "routing_method_type": _GIVEN,
            "do_finalize": True,
        }

    def given(self, x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> dict[str, Any]:
        """Return the arguments that x and its routing become. Weights are 0 where ids name no expert of this layer."""
        raise NotImplementedError

    def run(self, call: CallArguments, config: Config) -> None:
        require_aligned("out", call.out_TH)
        experts = self.spec.local_experts
        ids_TA = local_ids(call.topk_ids_TA, self.spec.first_expert, experts, call.expert_map)
        weights_TA = call.topk_weights_TA.masked_fill(ids_TA == experts, 0.0)
        arguments = self.arguments | self.given(aligned(call.x_TH), ids_TA, weights_TA)
        # The default kernels, also inside of another library's tuning and where it has tuned these sizes.
        with self._autotune(False, skip_ops=self._operation):
            self._call(**arguments, top_k=ids_TA.shape[1], output=call.out_TH)


class _Mxint4Runner(_TrtllmRunner):
    def __init__(self, problem: Problem, packed: Packed) -> None:
        super().__init__(problem, packed, "trtllm_mxint4_block_scale_routed_moe", _COMMON)

    def given(self, x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> dict[str, Any]:
        """Ids are the upper half of a word, whose lower half is the weight as bfloat16."""
        low = weights_TA.bfloat16().view(torch.int16).int() & 0xFFFF
        return {"topk_ids": ids_TA << 16 | low, "hidden_states": x_TH}


class _Fp4Runner(_TrtllmRunner):
    def __init__(self, problem: Problem, packed: Packed) -> None:
        super().__init__(problem, packed, "trtllm_fp4_block_scale_routed_moe", (*_COMMON, *_FP4))
        self._mode, t = problem.activations, self.tensors
        gated = problem.spec.gated
        self.arguments |= {
            "routing_bias": None,
            "gemm1_bias": None,
            "gemm2_bias": None,
            "output1_scale_scalar": t.get("kernel.h_scale"),
            "output1_scale_gate_scalar": t.get("kernel.gate_scale"),
            "output2_scale_scalar": t.get("kernel.down_scale"),
            "activation_type": _SWIGLU if gated else _RELU2,
        }
        if self._mode == MXFP8:
            parameters = ("input", "is_sf_swizzled_layout")
            self._quantize = function_of("flashinfer", "mxfp8_quantize", parameters)
        elif self._mode == NVFP4:
            parameters = ("input", "global_scale", "sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout")
            self._quantize = function_of("flashinfer", "fp4_quantize", parameters)

    def given(self, x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> dict[str, Any]:
        """Ids and float32 weights are two tensors. FlashInfer quantizes x, in a launch of its own."""
        x, scales = x_TH, None
        if self._mode == MXFP8:
            x, scales = self._quantize(x_TH, is_sf_swizzled_layout=False)
        elif self._mode == NVFP4:
            x, scales = self._quantize(
                x_TH, self.tensors["kernel.x_scale"], sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=False
            )
        if scales is not None:
            scales = scales.view(torch.float8_e4m3fn).reshape(len(x_TH), -1)
        return {"topk_ids": (ids_TA, weights_TA), "hidden_states": x, "hidden_states_scale": scales}
