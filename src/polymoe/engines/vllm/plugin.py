"""The patch of ``RoutedExperts._get_quant_method``: for each layer, vLLM's method or polymoe's, and the log lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polymoe.common.shapes import round_up
from polymoe.engines.hooks import missing_hooks, wrap
from polymoe.engines.serving.chooser import LayerChooser
from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.sources import VLLM
from polymoe.engines.serving.stand_aside import LayerFacts
from polymoe.engines.vllm.facts import created_tensors, facts_of, gathers, is_elastic, refusals, role_of
from polymoe.engines.vllm.hooks import HOOKS, MODULAR_HOOKS
from polymoe.engines.vllm.neutral import missing_plain_backends, neutral_choice


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

    wrap(RoutedExperts, "_get_quant_method", MethodChooser("vLLM", settings, log).method)


class MethodChooser(LayerChooser):
    """Chooses the method of each layer of this process."""

    def method(self, theirs: Any, layer: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        """Return the method for a layer: polymoe's, or vLLM's own.

        Args:
            theirs: vLLM's ``RoutedExperts._get_quant_method``; the others are its arguments, of a layer that is half
                made.

        Raises:
            PlanError: unless all ranks that share the layer's experts plan alike.
            UnsupportedProblem: if polymoe cannot run the layer and the user requires it.
        """
        from vllm.config import get_current_vllm_config  # pyright: ignore
        from vllm.distributed.parallel_state import get_ep_group  # pyright: ignore

        from polymoe.engines.vllm.method import PackedMethod

        config, moe, parallel = get_current_vllm_config(), moe_config, moe_config.moe_parallel_config
        alone = parallel.tp_size * parallel.ep_size == 1

        def make() -> Any:
            return theirs(layer, prefix, quant_config, moe_config)

        def create() -> tuple[Any, Mapping[str, Tensor], int, str]:
            with neutral_choice() as chosen:
                method = make()
                row = VLLM.get(type(method).__name__)
                # As the method's loader fills it.
                intermediate = round_up(moe.intermediate_size_per_partition, row.multiple if row else 1)
                tensors = created_tensors(method, layer, moe, intermediate) if row else {}
            return method, tensors, intermediate, chosen[0] if chosen else "unknown"

        def describe(created: tuple[Any, Mapping[str, Tensor], int, str]) -> tuple[Any, LayerFacts, str]:
            method, tensors, intermediate, instead = created
            facts = facts_of(layer, method, moe, tensors, intermediate, prefix, _batch_invariant())
            return method, facts, instead

        refused = refusals(layer, moe, config, self.settings, prefix)
        for lack in () if gathers(parallel) else missing_hooks(MODULAR_HOOKS):
            refused.need(False, f"vLLM without {lack}")
        ours = self.choose(
            prefix,
            refused,
            create,
            describe,
            PackedMethod,
            device=torch.device(moe.device).type,
            role=role_of(config),
            load_format=str(getattr(config.load_config, "load_format", "auto")),
            first_rank=parallel.tp_rank == parallel.ep_rank == parallel.dp_rank == 0,
            # With elastic expert parallelism, where vLLM keeps all layers, torch does not know the group.
            ranks=None if alone or is_elastic(config) else get_ep_group().cpu_group,
        )
        return make() if ours is None else ours


def _batch_invariant() -> bool:
    import vllm.envs as envs  # pyright: ignore

    return bool(envs.VLLM_BATCH_INVARIANT)
