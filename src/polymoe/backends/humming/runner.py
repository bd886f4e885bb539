"""HummingRunner: the calls of one layer on Humming's kernels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from humming.config import LayerConfig  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from humming.ops import humming_gemm  # pyright: ignore[reportMissingImports]
from humming.tune import get_heuristics_config  # pyright: ignore[reportMissingImports]
from torch import Tensor

from polymoe.backends.base import RunnerBase, aligned, mapped_ids
from polymoe.backends.config import Config
from polymoe.backends.humming.config import HummingConfig
from polymoe.backends.triton.arguments import activation_arguments
from polymoe.errors import PlanError
from polymoe.formats import Encoding, PerChannel, PerGroup, PerTensor
from polymoe.formats.elements import SCALE_DTYPES
from polymoe.kernels.triton.expanded_rows import PaddedTiles, activate_rows, pad_tiles
from polymoe.kernels.triton.finalize import finalize
from polymoe.kernels.triton.permute import permutation_words, permute
from polymoe.layouts import Packed
from polymoe.layouts.humming import NATIVE_ELEMENTS
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments

__all__ = ["HummingRunner", "layer_fields"]

_COMPUTE = json.dumps({"gemm_type": "indexed"})
_LOCKS = 2048
_ELEMENTS = {"e2m1": "float4e2m1", "int4": "uint4", "e4m3": "float8e4m3"}
_SCALES = {"e8m0": "float8e8m0", "e4m3": "float8e4m3", "bfloat16": "bfloat16"}


def layer_fields(encoding: Encoding) -> dict[str, Any]:
    """Return the fields of Humming's ``LayerConfig`` for weights of an encoding with bfloat16 activations."""
    granularity = encoding.granularity
    fields: dict[str, Any] = {"b_dtype": _ELEMENTS[encoding.element], "a_dtype": "bfloat16", "c_dtype": "bfloat16"}
    if isinstance(granularity, PerGroup) and granularity.n == 1:
        fields |= {"weight_scale_type": "group", "weight_scale_group_size": granularity.k}
        fields |= {"bs_dtype": _SCALES[encoding.scale_dtype or ""], "has_zero_point": encoding.zero_points}
    elif isinstance(granularity, PerGroup):
        fields |= {"weight_scale_type": "block", "weight_scale_group_size": granularity.k, "bs_dtype": "float32"}
        fields["weight_scale_group_size_n"] = granularity.n
    elif isinstance(granularity, PerChannel):
        fields |= {"weight_scale_type": "channel", "bs_dtype": _SCALES[encoding.scale_dtype or ""]}
    else:
        fields |= {"weight_scale_type": "tensor", "bs_dtype": "float32"}
    if encoding.global_scale:
        fields["weight_scale_2_type"] = "tensor"
    return fields


class HummingRunner(RunnerBase):
    """Holds views of the packed tensors as Humming takes them, and its tiles by the number of rows.

    Calls of one layer must not run at the same time on two streams: Humming's CTAs add up parts of a sum through a
    buffer of the layer.
    """

    def __init__(self, problem: Problem, packed: Packed) -> None:
        self.problem, spec = problem, problem.spec
        self.device = packed.tensors["up.codes"].device
        locks = torch.zeros(_LOCKS, dtype=torch.int32, device=self.device)
        rows = (2 if spec.gated else 1) * spec.intermediate
        self.up = _Gemm(problem, packed, "up", rows, spec.hidden, locks)
        self.down = _Gemm(problem, packed, "down", spec.hidden, spec.intermediate, locks)
        self.activation = activation_arguments(problem.activation)
        self.scales = _scales_of_gate_and_up(problem, packed)

    @property
    def options(self) -> frozenset[str]:
        """``expert_map``."""
        return frozenset(("expert_map",))

    def run(self, call: CallArguments, config: Config) -> None:
        """See :meth:`polymoe.backends.base.Runner.run`. The first call of a number of rows may compile kernels."""
        assert isinstance(config, HummingConfig)
        spec, first_expert = self.problem.spec, self.problem.spec.first_expert
        ids_TA, weights_TA = call.routing
        if call.expert_map is not None:
            ids_TA, first_expert = mapped_ids(ids_TA, call.expert_map), 0
        tokens, top_k = ids_TA.shape
        rows = tokens * top_k
        up, down = (gemm.tiles(config.rows or rows) for gemm in (self.up, self.down))

        def tiles(block_m: int) -> PaddedTiles:
            words = permutation_words(rows, spec.local_experts, block_m)
            buffer = torch.empty(words, dtype=torch.int32, device=self.device)
            return pad_tiles(permute(buffer, ids_TA, first_expert, spec.local_experts, block_m), block_m)

        up_tiles = tiles(up.block_m)
        gate_up_RN = self.up.run(aligned(call.x_TH.to(torch.bfloat16)), up_tiles, up, rows, top_k)
        h_RF = torch.empty(rows, spec.intermediate, dtype=torch.bfloat16, device=self.device)
        experts = spec.local_experts
        activate_rows(gate_up_RN, h_RF, self.activation, ids_TA, first_expert, experts, self.scales)
        down_tiles = up_tiles if down.block_m == up.block_m else tiles(down.block_m)
        y_RH = self.down.run(h_RF, down_tiles, down, rows, 1)
        finalize(y_RH[None], ids_TA, weights_TA, call.out_TH, first_expert, experts, weighted=True, pdl=False)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Humming's tiles of one GEMM: its own JSON, and the rows of a work tile."""

    text: str
    block_m: int


class _Gemm:
    """One of the two GEMMs of a layer.

    Args:
        problem: the problem.
        packed: the packed layer.
        matrix: "up" or "down".
        n, k: rows and columns of an expert's matrix.
        locks: int32 zeros, which Humming leaves zero.
    """

    def __init__(self, problem: Problem, packed: Packed, matrix: str, n: int, k: int, locks: Tensor) -> None:
        spec, encoding = problem.spec, problem.spec.encodings[matrix]
        experts, self.locks = spec.local_experts, locks
        parts = {name.partition(".")[2]: t for name, t in packed.tensors.items() if name.startswith(f"{matrix}.")}
        fields = layer_fields(encoding)
        self.config = LayerConfig(shape_n=n, shape_k=k, num_experts=experts, **fields)
        native = packed.layout == "humming_a16_native" and encoding.element in NATIVE_ELEMENTS
        if self.config.use_native_dequant != native:
            order = {True: "the order of columns", False: "the order for arithmetic"}
            raise PlanError(
                f"humming, {matrix} codes in layout {packed.layout}", expected=f"kernels that read {order[native]}",
                got=f"kernels that read {order[not native]}",
                hint="from SM100 on, Humming must compile with CUDA 13.2 or newer: NVRTC's, or nvcc's with "
                "HUMMING_COMPILER=nvcc",
            )  # fmt: skip
        self.text = self.config.to_str()
        self.weight = parts["codes"].view(torch.int32).view(experts, k // 16, n * encoding.bits // 2)
        ones = torch.ones(experts, dtype=torch.float32, device=locks.device)
        self.scale_2 = None
        if isinstance(encoding.granularity, PerTensor):
            # Gate and up may differ in their scales, which multiply before the activation.
            self.scale = ones if matrix == "up" else parts["scales"].view(torch.float32).view(experts)
        else:
            blocks = isinstance(encoding.granularity, PerGroup) and encoding.granularity.n > 1
            dtype = torch.float32 if blocks else SCALE_DTYPES[encoding.scale_dtype or ""]
            groups = k // encoding.granularity.k if isinstance(encoding.granularity, PerGroup) else 1
            self.scale = parts["scales"].view(dtype).view(experts, groups, -1)
        if encoding.global_scale:
            self.scale_2 = ones if matrix == "up" else parts["global_scale"]
        self.zero_points = None
        if encoding.zero_points:
            self.zero_points = parts["zero_points"].view(torch.int32).view(experts, self.scale.shape[1], -1)
        self.n = n
        self._ranges: list[tuple[int, int, _Tiles]] | None = None

    def tiles(self, rows: int) -> _Tiles:
        """Return the tiles that Humming's heuristics choose for so many rows.

        Raises:
            PlanError: if they have none.
        """
        if self._ranges is None:
            found = get_heuristics_config(self.config, gemm_type="indexed", device=self.locks.device)
            self._ranges = [(low, high, _Tiles(json.dumps(c), c["block_shape"][0])) for low, high, c in found]
        for low, high, tiles in self._ranges:
            if low < rows <= high:
                return tiles
        raise PlanError("humming", expected=f"tiles for {rows} rows", got="none from Humming's heuristics")

    def run(self, x: Tensor, tiles: PaddedTiles, chosen: _Tiles, rows: int, top_k: int) -> Tensor:
        """Return the product of x, whose row ``r // top_k`` is that of expanded row r: bfloat16 [rows, n]. Rows of
        other ranks' experts are not written."""
        out_RN = torch.empty(rows, self.n, dtype=torch.bfloat16, device=x.device)
        humming_gemm(
            layer_config=self.text,
            compute_config=_COMPUTE,
            tuning_config=chosen.text,
            inputs=x,
            weight=self.weight,
            weight_scale=self.scale,
            weight_scale_2=self.scale_2,
            zero_point=self.zero_points,
            outputs=out_RN,
            sorted_ids=tiles.rows,
            expert_ids=tiles.experts,
            num_tokens_padded=tiles.num_rows,
            locks=self.locks,
            top_k=top_k,
            valid_shape_m=rows,
        )
        return out_RN


def _scales_of_gate_and_up(problem: Problem, packed: Packed) -> tuple[Tensor, Tensor] | None:
    """Return the scales of whole matrices, float32 [E] of the gate and of up, or None where there are none."""
    spec, tensors = problem.spec, packed.tensors
    gate = "gate" if spec.gated else "up"
    if spec.up.global_scale:
        return tensors[f"{gate}.global_scale"], tensors["up.global_scale"]
    if isinstance(spec.up.granularity, PerTensor):
        scales = tensors["up.scales"].view(torch.float32).view(spec.local_experts, -1)
        return scales[:, 0], scales[:, -1]
    return None
