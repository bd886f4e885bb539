"""Load balancing of experts (EPLB): what vLLM copies between ranks, and what has to hold before it does.

Between two steps vLLM copies rows of each layer's tensors, one row for each expert, to other rows and other ranks, and
then changes its map of experts to rows. It has one buffer for all layers of a model. Packed tensors have such rows, and
kernels read them where they are, so that captured graphs stay valid.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polymoe.engines.hooks import wrap
from polymoe.engines.serving.stand_aside import BALANCING
from polymoe.engines.serving.take_over import TakenOver
from polymoe.errors import UnsupportedProblem
from polymoe.layer.rows import require_rows, rows_as_bytes
from polymoe.planning.agreement import Gather, require_agreement

_HINT = "start without --enable-eplb, or with POLYMOE=0"


def let_experts_move(method: TakenOver, layer: Any) -> None:
    """Make vLLM move the packed tensors of ``layer``, whose own are gone, once it has checked them.

    Raises:
        UnsupportedProblem: if they are not rows of experts.
    """
    packed = method.packed
    where = f"{BALANCING} in {packed.where}"
    require_rows(packed.selection, packed.packed(layer), where, _HINT)

    def get_expert_weights() -> list[Tensor]:
        """Rows of experts as bytes, [local experts, bytes]: not every communicator of vLLM's takes all dtypes."""
        return [rows_as_bytes(tensor) for tensor in packed.tensors(layer) if tensor.numel()]

    layer.get_expert_weights = get_expert_weights
    _check_models()


def _check_models() -> None:
    """Check each model that vLLM begins to balance in this process."""
    from vllm.distributed.eplb.eplb_state import EplbState  # pyright: ignore
    from vllm.distributed.parallel_state import get_ep_group  # pyright: ignore

    def add_model(theirs: Any, state: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = theirs(state, model, *args, **kwargs)
        require_alike(model, get_ep_group().cpu_group)
        return found

    wrap(EplbState, "add_model", add_model)


def require_alike(model: Any, ranks: Any | Gather) -> None:
    """Check that experts can move between ``ranks``: packed alike there, with scales that all of them decode, and in
    all layers of the model.

    Args:
        model: vLLM's, with ``expert_weights``: the tensors of each layer whose experts move.
        ranks: the group, in which every rank has to call it.

    Raises:
        PlanError: if ranks differ.
        UnsupportedProblem: if layers differ.
    """
    found = (getattr(module, "quant_method", None) for module in model.modules())
    methods = [method for method in found if isinstance(method, TakenOver)]
    for method in methods:
        require_agreement(method.packed.selection, ranks, f"{BALANCING} in {method.packed.where}", scales=True)
    kinds = [tuple((tuple(w.shape), w.dtype) for w in weights) for weights in model.expert_weights]
    odd = [i for i, kind in enumerate(kinds) if kind != kinds[0]]
    if methods and odd:
        sizes = " and ".join(str(sum(w.nbytes for w in model.expert_weights[i])) for i in (0, odd[0]))
        raise UnsupportedProblem(
            BALANCING,
            expected="the same tensors in every layer of experts: vLLM moves all of them through one buffer",
            got=f"{sizes} bytes in layers number 0 and {odd[0]} of them",
            hint=_HINT,
        )
