"""Humming, called layer by layer as vLLM calls it, with vLLM's alignment, activation and sum."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polymoe.bench.peers.base import PeerCall, Stacks
from polymoe.bench.peers.vllm import import_vllm
from polymoe.formats import PerGroup
from polymoe.problem import Problem


def prepare(problem: Problem, stacks: Stacks) -> PeerCall:
    """Two ``HummingLayer``s, for gate and up and for down. Kernels are compiled at the first call."""
    import_vllm()
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    spec, mode = problem.spec, problem.activations
    experts, width = spec.local_experts, spec.intermediate
    device = stacks.down["codes"].device
    inputs = None
    if mode.quantized:
        inputs = {"dtype": "float8e4m3", **({"group_size": mode.group_columns} if mode.group_columns else {})}

    def layer(parts: dict[str, Tensor], n: int, k: int) -> tuple[Any, Any]:
        weights, tensors = _arguments(stacks, parts)
        with torch.device(device):
            made = HummingLayer(
                shape_n=n, shape_k=k, weight_config=weights, input_config=inputs and dict(inputs),
                num_experts=experts, torch_dtype=torch.bfloat16,
            )  # fmt: skip
        made.load_from_tensors(tensors)
        made.transform()
        return made, get_heuristics_config(made.humming_config, gemm_type="indexed")

    up, up_tiles = layer(stacks.gate_up, 2 * width, spec.hidden)
    down, down_tiles = layer(stacks.down, spec.hidden, width)

    def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> None:
        rows, top_k = ids_TA.numel(), ids_TA.shape[1]

        def chosen(tiles: Any) -> Any:
            return next(config for low, high, config in tiles if low < rows <= high)

        def aligned(block_m: int) -> dict[str, Any]:
            ids, blocks, padded = moe_align_block_size(ids_TA, block_m, experts, None, ignore_invalid_experts=True)
            return {"sorted_ids": ids, "expert_ids": blocks, "num_tokens_padded": padded}

        own = {"compute_config": {"gemm_type": "indexed"}, "valid_shape_m": rows}
        up_config, down_config = chosen(up_tiles), chosen(down_tiles)
        up_m, down_m = up_config["block_shape"][0], down_config["block_shape"][0]
        ids = aligned(up_m)
        gate_up = up(x_TH, top_k=top_k, tuning_config=up_config, **own, **ids)
        h = torch.empty(rows, width, device=device, dtype=x_TH.dtype)
        torch.ops._C.silu_and_mul(h, gate_up.view(rows, 2 * width))
        # A work tile has as many rows as the GEMM's own tile, which down may choose otherwise.
        ids = ids if up_m == down_m else aligned(down_m)
        y = down(h, top_k=1, tuning_config=down_config, **own, **ids)
        moe_fused_mul_sum(inputs=y.view(*ids_TA.shape, -1), topk_weights=weights_TA, topk_ids=ids_TA, outputs=out_TH)

    return call


def _arguments(stacks: Stacks, parts: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return Humming's weight config, and tensors by its names."""
    encoding, codes, scales = stacks.encoding, parts["codes"], parts["scales"]
    granularity = encoding.granularity
    assert isinstance(granularity, PerGroup)
    if encoding.element == "e4m3":
        config = {"quant_method": "fp8", "weight_block_size": [granularity.n, granularity.k]}
        return config, {"weight": codes, "weight_scale_inv": scales.float()}
    if encoding.element == "int4":
        config = {"dtype": "uint4", "group_size": granularity.k}
        return config, {"weight": codes.view(torch.int32), "weight_scale": scales.bfloat16()}
    if encoding.global_scale:
        config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        return config, {"weight": codes, "weight_scale": scales, "weight_scale_2": parts["global_scale"]}
    return {"quant_method": "mxfp4"}, {"weight": codes, "weight_scale": scales.view(torch.uint8)}
