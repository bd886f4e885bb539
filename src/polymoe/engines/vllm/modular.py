"""polymoe's experts in vLLM's modular kernel: vLLM prepares and finalizes, which is where other ranks get their tokens.

In versions such as 0.24 and 0.26, vLLM's runner gathers all tokens itself and calls a quantization method that has no
kernel; its all-to-all backends exchange only the tokens that a rank needs, and work with a kernel alone there too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize  # pyright: ignore
from vllm.model_executor.layers.fused_moe.modular_kernel import (  # pyright: ignore
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEKernel,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP  # pyright: ignore
from vllm.platforms import current_platform  # pyright: ignore

from polymoe.backends import BACKENDS
from polymoe.engines.serving.chooser import machine_of
from polymoe.engines.vllm.facts import activation_of, exchanges_rows
from polymoe.errors import FormatError, UnsupportedProblem
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup, PerTensor
from polymoe.formats.encoding import Element, ScaleDtype
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, ReLU2, SwiGLU
from polymoe.problem.tensors import ExpertsSpec

__all__ = ["ModularExperts", "encoding_of", "modular_kernel"]

_HIDDEN, _INTERMEDIATE, _EXPERTS = 2048, 1024, 8


_ELEMENTS: dict[Any, Element] = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e2m1"}
_SCALES: dict[Any, ScaleDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e8m0fnu: "e8m0",
    torch.uint8: "e8m0",
}
_GRANULARITIES = {(-1, -1): PerTensor(), (-1, 1): PerChannel(), (1, -1): PerChannel()}
_NO_CONSTANTS = SimpleNamespace(swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None)


def encoding_of(key: Any) -> Encoding | None:
    """Return the encoding of weights that vLLM describes by a ``QuantKey``, of bfloat16 for None; None if there
    is none."""
    if key is None:
        return FORMATS["bf16"].encoding
    element: Element | None = "int4" if getattr(key.dtype, "size_bits", 0) == 4 else _ELEMENTS.get(key.dtype)
    shape, scale = tuple(key.scale.group_shape), _SCALES.get(key.scale.dtype)
    if element == "int4" and shape == (1, -1):  # of any size
        shape = (1, 128)
    if element is None or scale is None:
        return None
    try:
        return Encoding(
            element=element,
            granularity=_GRANULARITIES.get(shape) or PerGroup(*shape),
            scale_dtype=scale,
            zero_points=not key.symmetric,
            global_scale=key.scale2 is not None,
        )
    except FormatError:
        return None


def _usual(encoding: Encoding | None = None, activation: Activation | None = None, hidden: int = _HIDDEN) -> Problem:
    """A layer of sizes that suit every format."""
    held, function = encoding or FORMATS["bf16"].encoding, activation or SwiGLU()
    spec = ExpertsSpec(
        hidden=hidden,
        intermediate=_INTERMEDIATE,
        experts=_EXPERTS,
        gate=held if function.gated else None,
        up=held,
        down=held,
        bias=False,
        first_expert=0,
        local_experts=_EXPERTS,
    )
    return Problem(spec=spec, activation=function, top_k=2)


@cache
def _runs(problem: Problem) -> bool:
    """Whether a backend runs ``problem`` on this machine."""
    machine = machine_of(current_platform.device_type)
    return PlanRequest(machine, "mixed", "auto", BACKENDS, LAYOUTS).select(problem).plan is not None


class ModularExperts(FusedMoEExpertsModular):
    """The experts of one layer, run by ``method``: x in 16 bits, and rows of the output that are weighted and summed.

    Args:
        method: polymoe's, whose layer is packed.
        layer: vLLM's ``RoutedExperts``.
        moe_config, quant_config: as vLLM's experts have them.
    """

    def __init__(self, method: Any, layer: Any, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self._method, self._layer = method, layer

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True: polymoe quantizes x itself where a plan says so."""
        return True

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Rows of tokens, in any order."""
        return FusedMoEActivationFormat.Standard

    # vLLM asks these of the classes among which it chooses, before there is a layer. The layer itself is judged as a
    # whole, with its sizes, by polymoe.engines.serving.stand_aside.

    @staticmethod
    def _supports_current_device() -> bool:
        return _runs(_usual())

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return _runs(_usual(hidden=hidden_dim))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return _runs(_usual(activation=ReLU2()))

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        found = activation_of(activation.value, None, _NO_CONSTANTS)
        return found is not None and _runs(_usual(activation=found))

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        """Whatever inputs vLLM would have: they come in 16 bits, and are held so where no backend takes others."""
        encoding = encoding_of(weight_key)
        return encoding is not None and _runs(_usual(encoding))

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return exchanges_rows(moe_parallel_config)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return _runs(replace(_usual(), batch_invariant=True))

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        """Nothing is left to weight and to sum."""
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, ...]:
        """Return E on this rank, tokens, rows of ``w1``, H and A; the tensors of weights have no such shapes."""
        spec = self._method.plan.problem.spec
        rows = spec.intermediate * (2 if spec.gated else 1)
        return spec.local_experts, a1.shape[0], rows, a1.shape[1], topk_ids.shape[1]

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any, **__: Any) -> tuple[tuple[int, ...], ...]:
        """No workspace of vLLM's; the output has one row for each token."""
        return (0,), (0,), (M, K)

    def apply(self, output: Tensor, hidden_states: Tensor, *, topk_weights: Tensor, topk_ids: Tensor, **_: Any) -> None:
        """Write the weighted sum of this rank's experts to ``output`` [T, H]; ids are those of the whole layer."""
        self._method.run(self._layer, hidden_states, topk_weights, topk_ids, output)


def modular_kernel(method: Any, layer: Any) -> FusedMoEKernel:
    """Return vLLM's kernel around the experts of ``layer``, with vLLM's own choice of what prepares and finalizes.

    Raises:
        UnsupportedProblem: if vLLM has none for this parallel config, or one that gives no rows of tokens.
    """
    moe = layer.moe_config
    quantization = method.get_fused_moe_quant_config(layer)
    prepare_finalize = maybe_make_prepare_finalize(moe, quantization, allow_new_interface=True)
    form = getattr(prepare_finalize, "activation_format", None)
    if prepare_finalize is None or form != FusedMoEActivationFormat.Standard:
        raise UnsupportedProblem(
            method.packed.where,
            expected="an all-to-all backend that gives rows of tokens, such as deepep_high_throughput",
            got=moe.moe_parallel_config.all2all_backend,
            hint="without POLYMOE=require vLLM runs this layer",
        )
    return FusedMoEKernel(prepare_finalize, ModularExperts(method, layer, moe, quantization))
