"""A stand-in for the package humming: its names, its checks of arguments, and its sums in float32 on the CPU.

It decodes weights by where each code lies, one by one, and shares no code with the layout.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
BLOCKS = {True: 16, False: 32}
"""Rows of a work tile, of GEMMs that are wider than deep and of others."""
NATIVE = False
"""Whether the GPU and the compiler have instructions that convert codes."""
BITS = {"float4e2m1": 4, "uint4": 4, "float8e4m3": 8, "bfloat16": 16}


class LayerConfig:
    """The fields of a layer, as text and back."""

    def __init__(self, **fields: Any) -> None:
        known = {
            "shape_n", "shape_k", "num_experts", "a_dtype", "b_dtype", "c_dtype", "bs_dtype", "weight_scale_type",
            "weight_scale_group_size", "weight_scale_group_size_n", "weight_scale_2_type", "has_zero_point",
        }  # fmt: skip
        assert fields.keys() <= known, fields.keys() - known
        self.fields = fields
        self.use_native_dequant = NATIVE and fields["b_dtype"] in ("float4e2m1", "float8e4m3")

    def to_str(self) -> str:
        return json.dumps(self.fields)


def get_heuristics_config(config: LayerConfig, gemm_type: str, device: Any = None) -> list[Any]:
    assert gemm_type == "indexed"
    block_m = BLOCKS[config.fields["shape_n"] > config.fields["shape_k"]]
    return [(0, 1 << 30, {"block_shape": (block_m, 128, 64)})]


def _weights(f: dict[str, Any], e: int, weight: Tensor) -> Tensor:
    """The codes of expert ``e`` as numbers, [N, K]."""
    n, k = f["shape_n"], f["shape_k"]
    rows, columns = torch.arange(n)[:, None], torch.arange(k)[None]
    bits = BITS[f["b_dtype"]]
    assert weight.shape[1:] == (k // 16, n * 16 * bits // 32)
    lane, half = rows % 8 * 4 + columns % 8 // 2, rows % 16 // 8
    per_pair = 4 if bits == 4 else 2
    word = rows % 64 // 16 if bits == 4 else rows % 64 // 16 * 2 + half
    place = columns % 2 * per_pair + columns % 16 // 8 + (half * 2 if bits == 4 else 0)
    if NATIVE and f["b_dtype"] != "uint4":
        place = columns % 16 // 8 * 2 + columns % 2 + (half * 4 if bits == 4 else 0)
    at = ((columns // 16 * (n // 64) + rows // 64) * 32 + lane) * bits + word
    codes = weight[e].flatten().long()[at] >> place * bits & (1 << bits) - 1
    if bits == 8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.tensor(E2M1)[codes] if f["b_dtype"] == "float4e2m1" else codes.float() - 8


def _scales(f: dict[str, Any], e: int, scale: Tensor, second: Tensor | None) -> Tensor:
    n, k, kind = f["shape_n"], f["shape_k"], f["weight_scale_type"]
    rows, columns = torch.arange(n)[:, None], torch.arange(k)[None]
    if kind == "tensor":
        assert scale.shape == (f["num_experts"],)
        return scale[e].expand(n, k)
    if kind == "block":
        group = f["weight_scale_group_size"]
        assert scale.shape[1:] == (k // group, n // f["weight_scale_group_size_n"])
        return scale[e][columns // group, rows // f["weight_scale_group_size_n"]]
    group = f["weight_scale_group_size"]
    assert scale.shape[1:] == (k // group, n)
    found = scale[e].float()[columns // group, rows // 64 * 64 + rows % 8 * 8 + rows % 64 // 8]
    assert (second is None) == (f.get("weight_scale_2_type") is None)
    return found if second is None else found * second[e]


def humming_gemm(
    *, layer_config: str, compute_config: str, tuning_config: str, inputs: Tensor, weight: Tensor, weight_scale: Tensor,
    weight_scale_2: Tensor | None, zero_point: Tensor | None, outputs: Tensor,
    sorted_ids: Tensor, expert_ids: Tensor, num_tokens_padded: Tensor, locks: Tensor, top_k: int, valid_shape_m: int,
) -> Tensor:  # fmt: skip
    f, block_m = json.loads(layer_config), json.loads(tuning_config)["block_shape"][0]
    assert json.loads(compute_config) == {"gemm_type": "indexed"}
    assert zero_point is None
    assert {t.dtype for t in (sorted_ids, expert_ids, num_tokens_padded, locks, weight)} == {torch.int32}
    assert outputs.shape == (len(inputs) * top_k, f["shape_n"]) == (valid_shape_m, f["shape_n"])
    assert outputs.dtype == torch.bfloat16
    assert inputs.is_contiguous()
    assert inputs.data_ptr() % 16 == 0
    assert inputs.dtype == torch.bfloat16
    x = inputs.float()
    count = int(num_tokens_padded)
    assert count % block_m == 0
    made: dict[int, Tensor] = {}
    for tile in range(count // block_m):
        e = int(expert_ids[tile])
        if e not in made:
            made[e] = _weights(f, e, weight) * _scales(f, e, weight_scale, weight_scale_2)
        rows = sorted_ids[tile * block_m : (tile + 1) * block_m].long()
        rows = rows[rows < valid_shape_m]
        assert len(rows)
        outputs[rows] = (x[rows // top_k] @ made[e].T).bfloat16()
    return outputs


def install() -> None:
    """Be what ``import humming`` finds."""
    for name, members in {
        "humming": {}, "humming.config": {"LayerConfig": LayerConfig}, "humming.ops": {"humming_gemm": humming_gemm},
        "humming.tune": {"get_heuristics_config": get_heuristics_config},
    }.items():  # fmt: skip
        sys.modules[name] = module = ModuleType(name)
        module.__dict__.update(members)
