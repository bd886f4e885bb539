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
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (  # pyright: ignore
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import current_platform  # pyright: ignore

from polymoe.backends import BACKENDS
from polymoe.engines.serving.chooser import machine_of
from polymoe.engines.vllm.facts import activation_of, exchanges_batches, exchanges_rows
from polymoe.errors import FormatError, UnsupportedProblem
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup, PerTensor
from polymoe.formats.encoding import Element, ScaleDtype
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, ReLU2, SwiGLU
from polymoe.problem.tensors import ExpertsSpec

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
    )
    return Problem(spec=spec, activation=function, top_k=2)


@cache
def _runs(problem: Problem) -> bool:
    """Whether a backend runs ``problem`` on this machine."""
    machine = machine_of(current_platform.device_type)
    return PlanRequest(machine, "mixed", "auto", BACKENDS, LAYOUTS).select(problem).plan is not None


class ModularExperts(FusedMoEExpertsModular):
    """The experts of one packed layer, run by its ``method``: x in 16 bits, rows of the output weighted and summed."""

    weighs_input = False
    """Whether the steps before the experts weight a token that its experts' input is weighted by."""

    def __init__(self, method: Any, layer: Any, moe_config: Any, quant_config: Any, **of_batches: int) -> None:
        super().__init__(moe_config, quant_config, **of_batches)
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


class BatchedExperts(ModularExperts):
    """The same for all-to-all backends that give each expert a batch of rows and their number, as DeepEP's low-latency
    kernels do: the layer is called with the rows of all batches, each for one expert; those beyond the number for none.

    The plan is that of a call with as many tokens as all batches have rows, and rows of no token are written, too.

    Args:
        max_num_tokens, num_dispatchers: most tokens of a rank, and the number of ranks: a batch has as many rows.
    """

    weighs_input = True

    @property
    def expects_unquantized_inputs(self) -> bool:
        """False: ``quant_config`` says whether they come in FP8, and without it they come in 16 bits."""
        return False

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Batches of rows."""
        return FusedMoEActivationFormat.BatchedExperts

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return exchanges_batches(moe_parallel_config)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceDelegate:
        """What combines the rows weights them, too."""
        return TopKWeightAndReduceDelegate()

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, ...]:
        """Return E on this rank, rows of a batch, rows of ``w1``, H and A."""
        return super().moe_problem_size(a1[0], w1, w2, topk_ids)

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any, **__: Any) -> tuple[tuple[int, ...], ...]:
        """No workspace of vLLM's; the output has the rows of all batches."""
        return (0,), (0,), (self._method.plan.problem.spec.local_experts, M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        a1q_scale: Tensor | None = None,
        expert_tokens_meta: Any = None,
        **_: Any,
    ) -> None:
        """Write each row's expert's output to ``output`` [E, rows, H].

        Args:
            output: in 16 bits.
            hidden_states: [E, rows, H], in 16 bits or float8_e4m3fn.
            topk_weights, topk_ids: of this rank's own tokens, not of these rows.
            a1q_scale: float32 [E, rows, H / 128] of float8_e4m3fn.
            expert_tokens_meta: has ``expert_num_tokens``, int32 [E].
        """
        experts, rows, hidden = hidden_states.shape
        device = hidden_states.device
        first = self._method.plan.problem.spec.first_expert
        ids_E1 = torch.arange(first, first + experts, dtype=torch.int32, device=device)[:, None]
        places_R = torch.arange(rows, dtype=torch.int32, device=device)
        ids_ER = torch.where(places_R < expert_tokens_meta.expert_num_tokens[:, None], ids_E1, -1)
        ones = torch.ones(experts * rows, 1, dtype=torch.float32, device=device)
        scales = None if a1q_scale is None else a1q_scale.reshape(experts * rows, -1).contiguous()
        self._method.run_experts(
            self._layer, hidden_states.view(-1, hidden), ids_ER.view(-1, 1), ones, output.view(-1, hidden), scales
        )


def modular_kernel(method: Any, layer: Any) -> FusedMoEKernel:
    """Return vLLM's kernel around the experts of ``layer``, with vLLM's own choice of what prepares and finalizes.

    Raises:
        UnsupportedProblem: if vLLM has none for this parallel config, or one that gives no rows of tokens.
    """
    moe = layer.moe_config
    quantization = method.get_fused_moe_quant_config(layer)
    prepare_finalize = maybe_make_prepare_finalize(moe, quantization, allow_new_interface=True)
    form = getattr(prepare_finalize, "activation_format", None)
    batched = form == FusedMoEActivationFormat.BatchedExperts
    if prepare_finalize is None or (batched and method.plan.mapped):
        raise UnsupportedProblem(
            method.packed.where,
            expected="an all-to-all backend with prepare and finalize steps, and experts placed linearly",
            got=moe.moe_parallel_config.all2all_backend,
            hint="without POLYMOE=require vLLM runs this layer",
        )
    if batched:
        size = {
            "max_num_tokens": prepare_finalize.max_num_tokens_per_rank(),
            "num_dispatchers": prepare_finalize.num_dispatchers(),
        }
        experts = BatchedExperts(method, layer, moe, quantization, **size)
    else:
        experts = ModularExperts(method, layer, moe, quantization)
    return FusedMoEKernel(prepare_finalize, experts)
