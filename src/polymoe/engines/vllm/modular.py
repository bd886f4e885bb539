"""polymoe's experts in vLLM's modular kernel: vLLM prepares and finalizes, which is where other ranks get their tokens.

vLLM calls a quantization method without such a kernel after it has gathered all tokens itself. Its all-to-all backends
exchange only the tokens that a rank needs, and work with a modular kernel alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize  # pyright: ignore
from vllm.model_executor.layers.fused_moe.modular_kernel import (  # pyright: ignore
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEKernel,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP  # pyright: ignore

from polymoe.errors import UnsupportedProblem

__all__ = ["ModularExperts", "modular_kernel"]


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

    # vLLM asks these of the classes among which it chooses; polymoe has chosen already.
    _supports_current_device = staticmethod(lambda: True)
    _supports_no_act_and_mul = staticmethod(lambda: True)
    _supports_quant_scheme = staticmethod(lambda *_: True)
    _supports_activation = staticmethod(lambda *_: True)
    _supports_parallel_config = staticmethod(lambda *_: True)
    _supports_batch_invariance = staticmethod(lambda: True)

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
        output.copy_(self._method.run(self._layer, hidden_states, topk_weights, topk_ids))


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
