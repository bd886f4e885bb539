"""The patch of ``RoutedExperts._get_quant_method``: for each layer, vLLM's method or polymoe's, and the log lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polymoe.common.shapes import round_up
from polymoe.engines.hooks import missing_hooks
from polymoe.engines.serving.chooser import LayerChooser
from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.sources import VLLM
from polymoe.engines.serving.stand_aside import LayerFacts
from polymoe.engines.vllm.facts import created_tensors, facts_of, gathers, is_elastic, refusals, role_of
from polymoe.engines.vllm.hooks import HOOKS, MODULAR_HOOKS
from polymoe.engines.vllm.neutral import missing_plain_backends, neutral_choice

_MARK = "polymoe"


def install(settings: EngineSettings) -> None:
    """Patch vLLM in this process, once.

    Raises:
        UnsupportedProblem: if this vLLM lacks a hook and ``settings`` require polymoe.
    """
    log = LayerLog("vLLM", "vllm.polymoe", settings, ("--moe-backend",))
    lacking = missing_hooks(HOOKS) or missing_plain_backends()
    if lacking:
        from vllm import __version__  # pyright: ignore

        log.lacking(__version__, lacking, "0.24 to 0.33")
        return
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # pyright: ignore

    theirs = RoutedExperts._get_quant_method
    if hasattr(theirs, _MARK):
        return
    chooser = MethodChooser(settings, log)

    @functools.wraps(theirs)
    def get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        return chooser.method(self, prefix, moe_config, lambda: theirs(self, prefix, quant_config, moe_config))

    setattr(get_quant_method, _MARK, chooser)
    RoutedExperts._get_quant_method = get_quant_method


class MethodChooser(LayerChooser):
    """Chooses the method of each layer of this process."""

    def __init__(self, settings: EngineSettings, log: LayerLog) -> None:
        super().__init__("vLLM", settings, log)

    def method(self, layer: Any, where: str, moe: Any, make: Callable[[], Any]) -> Any:
        """Return the method for a layer: polymoe's, or what ``make`` returns.

        Args:
            layer: vLLM's ``RoutedExperts``, half made.
            where: its name.
            moe: its ``FusedMoEConfig``.
            make: makes vLLM's own method.

        Raises:
            PlanError: unless all ranks that share the layer's experts plan alike.
            UnsupportedProblem: if polymoe cannot run the layer and the user requires it.
        """
        from vllm.config import get_current_vllm_config  # pyright: ignore

        from polymoe.engines.vllm.method import PackedMethod

        config = get_current_vllm_config()

        def create() -> tuple[Any, Mapping[str, Tensor], int, str]:
            with neutral_choice() as chosen:
                method = make()
                intermediate = _padded(method, moe)
                tensors = created_tensors(method, layer, moe, intermediate) if type(method).__name__ in VLLM else {}
            return method, tensors, intermediate, chosen[0] if chosen else "unknown"

        def describe(created: tuple[Any, Mapping[str, Tensor], int, str]) -> tuple[Any, LayerFacts, str]:
            method, tensors, intermediate, instead = created
            facts = facts_of(layer, method, moe, tensors, intermediate, where, _batch_invariant())
            return method, facts, instead

        refused = refusals(layer, moe, config, self.settings, where)
        for lack in () if gathers(moe.moe_parallel_config) else missing_hooks(MODULAR_HOOKS):
            refused.need(False, f"vLLM without {lack}")
        ours = self.choose(
            where,
            refused,
            create,
            describe,
            PackedMethod,
            device=torch.device(moe.device).type,
            role=role_of(config),
            load_format=str(getattr(config.load_config, "load_format", "auto")),
            first_rank=_first_rank(moe),
            ranks=_ranks(moe, config),
        )
        return make() if ours is None else ours


def _padded(method: Any, moe: Any) -> int:
    """Return F on this rank as the loader of ``method`` fills it."""
    row = VLLM.get(type(method).__name__)
    return round_up(moe.intermediate_size_per_partition, row.multiple if row else 1)


def _batch_invariant() -> bool:
    import vllm.envs as envs  # pyright: ignore

    return bool(envs.VLLM_BATCH_INVARIANT)


def _ranks(moe: Any, config: Any) -> Any:
    """The group of the ranks that share a layer's experts: of tensor, data and expert parallelism; None for one."""
    from vllm.distributed.parallel_state import get_ep_group  # pyright: ignore

    parallel = moe.moe_parallel_config
    # With elastic expert parallelism, where vLLM keeps all layers, torch does not know the group.
    alone = parallel.tp_size * parallel.ep_size == 1 or is_elastic(config)
    return None if alone else get_ep_group().cpu_group


def _first_rank(moe: Any) -> bool:
    parallel = moe.moe_parallel_config
    return parallel.tp_rank == parallel.ep_rank == parallel.dp_rank == 0
