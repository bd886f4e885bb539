"""Stand-ins of FlashInfer's functions for SM100 and SM120: what their documentation says, in plain torch on a CPU.

Each takes the parameters of the real function (``tests/backends/flashinfer_signatures.json``), checks shapes and
dtypes, finds every weight in the documented layout, and computes the result in float32.
"""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.formats.elements import E2M1_VALUES, encode_e2m1, encode_e4m3

SIGNATURES: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[1] / "backends" / "flashinfer_signatures.json").read_text()
)
VALUES = torch.tensor(E2M1_VALUES)


class Installed:
    """Modules that look like FlashInfer 0.7.2; ``calls`` has the arguments of each call by the function's name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.skipped: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sm12x = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x"
        for module, functions in {
            "flashinfer": (self._mxfp8_quantize, self._fp4_quantize),
            "flashinfer.fused_moe": (
                self._trtllm_mxint4_block_scale_routed_moe,
                self._trtllm_fp4_block_scale_routed_moe,
            ),
            "flashinfer.autotuner": (self._autotune,),
            f"{sm12x}.moe_nvfp4_w4a16": (self._run_moe_w4a16,),
            f"{sm12x}.moe_nvfp4_w4a4": (self._run_moe_w4a4,),
        }.items():
            made = ModuleType(module)
            for function in functions:
                name = function.__name__[1:]
                setattr(made, name, self._checked(name, function))
            for at in (i for i, letter in enumerate(module) if letter == "."):
                monkeypatch.setitem(sys.modules, module[:at], sys.modules.get(module[:at], ModuleType(module[:at])))
            monkeypatch.setitem(sys.modules, module, made)

    def _checked(self, name: str, function: Any) -> Any:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(n, kind, default=None) for n in SIGNATURES[f"{name} 0.7.2"]])

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(signature.bind(*args, **kwargs).arguments)
            self.calls.append((name, given))
            return function(**given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    @contextmanager
    def _autotune(self, tune_mode: bool, skip_ops: str) -> Any:
        assert tune_mode is False
        self.skipped.append(skip_ops)
        yield
        self.skipped.append("")

    def _trtllm_mxint4_block_scale_routed_moe(
        self, *, topk_ids: Tensor, hidden_states: Tensor, **a: Any
    ) -> list[Tensor]:
        assert self.skipped[-1] == "flashinfer::trtllm_mxint4_block_scale_moe"
        ids, weights = topk_ids >> 16, (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
        assert (topk_ids.dtype, hidden_states.dtype) == (torch.int32, torch.bfloat16)
        experts, (hidden, inner) = a["local_num_experts"], (hidden_states.shape[1], a["intermediate_size"])
        matrices = []
        for name, rows, columns in (("gemm1", 2 * inner, hidden), ("gemm2", hidden, inner)):
            codes, scales = (
                described(a[f"{name}_weights"], experts, columns // 256, rows, 128),
                a[f"{name}_weights_scale"],
            )
            assert scales.dtype == torch.bfloat16
            nibbles = nibbles_of(codes.permute(0, 2, 1, 3).reshape(experts, rows, columns // 2)).to(torch.int8)
            numbers = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
            found = unswizzled(described(scales, experts, rows, columns // 32).float())
            matrices.append(unshuffled(numbers * found.repeat_interleave(32, 2)))
        return self._routed(a, ids, weights, hidden_states.float(), matrices)

    def _trtllm_fp4_block_scale_routed_moe(
        self, *, topk_ids: tuple[Tensor, Tensor], hidden_states: Tensor, hidden_states_scale: Tensor | None, **a: Any
    ) -> list[Tensor]:
        assert self.skipped[-1] == "flashinfer::trtllm_fp4_block_scale_moe"
        ids, weights = topk_ids
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        experts, inner = a["local_num_experts"], a["intermediate_size"]
        nvfp4 = hidden_states.dtype == torch.uint8
        group, hidden = (16, 2 * hidden_states.shape[1]) if nvfp4 else (32, hidden_states.shape[1])
        rows_of_gemm1 = inner * (2 if a["activation_type"] == 3 else 1)
        matrices = []
        for name, rows, columns in (("gemm1", rows_of_gemm1, hidden), ("gemm2", hidden, inner)):
            codes = described(a[f"{name}_weights"], experts, rows, columns // 2)
            scales = described(a[f"{name}_weights_scale"], experts, rows, columns // group)
            assert scales.dtype == torch.float8_e4m3fn
            found = unswizzled(scale_numbers(scales, nvfp4))
            matrices.append(unshuffled(fp4(codes) * found.repeat_interleave(group, 2)))
        x = hidden_states.float()
        if hidden_states_scale is not None:
            scales = described(hidden_states_scale, len(ids), hidden // group)
            x = fp4(hidden_states) if nvfp4 else x
            x = x * scale_numbers(scales, nvfp4).repeat_interleave(group, 1)
        return self._routed(a, ids, weights, x, matrices)

    def _routed(
        self, a: dict[str, Any], ids: Tensor, weights: Tensor, x: Tensor, matrices: list[Tensor]
    ) -> list[Tensor]:
        experts, out = a["local_num_experts"], a["output"]
        assert (a["num_experts"] % 4, a["local_expert_offset"], a["top_k"]) == (0, 0, ids.shape[1])
        assert experts < a["num_experts"]
        assert int(ids.min()) >= 0
        assert int(ids.max()) < a["num_experts"]
        assert a["routed_scaling_factor"] is None
        assert a["routing_method_type"] == 5
        assert a["do_finalize"] is True
        out.zero_()
        for e in range(experts):
            t, slot = (ids == e).nonzero(as_tuple=True)

            def of(name: str, usual: float, e: int = e) -> Tensor:
                return torch.tensor(usual) if a.get(name) is None else described(a[name], experts)[e]

            sums = x[t] @ matrices[0][e].T
            gate_scale, h_scale = of("output1_scale_gate_scalar", 1.0), of("output1_scale_scalar", 1.0)
            if a.get("activation_type", 3) == 6:
                h = (sums * gate_scale).relu().square() * h_scale
            else:
                up, gate = sums[:, 0::2], sums[:, 1::2] * gate_scale
                limit = of("gemm1_clamp_limit", float("inf"))
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                h = gate * torch.sigmoid(of("gemm1_alpha", 1.0) * gate) * (up + of("gemm1_beta", 0.0)) * h_scale
            if a.get("output2_scale_scalar") is not None:
                h = rounded(h, torch.ones(1))
            y = h @ matrices[1][e].T * of("output2_scale_scalar", 1.0)
            out.index_add_(0, t, (y * weights[t, slot, None]).to(out.dtype))
        return [out]

    def _mxfp8_quantize(self, input: Tensor, is_sf_swizzled_layout: bool) -> tuple[Tensor, Tensor]:
        assert is_sf_swizzled_layout is False
        blocks = input.float().unflatten(1, (-1, 32))
        exponents = torch.ceil(torch.log2(blocks.abs().amax(2) / 448)).clamp(-127, 127)
        codes = encode_e4m3(blocks / torch.exp2(exponents)[..., None]).flatten(1)
        return codes, (exponents + 127).to(torch.uint8).flatten()

    def _fp4_quantize(
        self, input: Tensor, global_scale: Tensor, sf_vec_size: int, sf_use_ue8m0: bool, is_sf_swizzled_layout: bool
    ) -> tuple[Tensor, Tensor]:
        assert (sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout) == (16, False, False)
        codes, scales = quantized(input.float(), described(global_scale, 1))
        return codes[:, 0::2] | codes[:, 1::2] << 4, scales.view(torch.uint8).flatten()

    def _run_moe_w4a16(self, *, topk_ids: Tensor, topk_weights: Tensor, **a: Any) -> None:
        """An id that is no expert's stands for the nearest one, with a weight of 0."""
        ids = topk_ids.clamp(0, len(a["w13"]) - 1)
        a |= {"topk_ids": ids, "topk_weights": torch.where(ids == topk_ids, topk_weights, 0.0)}
        self._sm12x(a, None, None)

    def _run_moe_w4a4(self, *, a13_gs: Tensor, a2_gs: Tensor, **a: Any) -> None:
        self._sm12x(a, described(a13_gs, 1), described(a2_gs, 1))

    def _sm12x(self, a: dict[str, Any], x_scale: Tensor | None, h_scale: Tensor | None) -> None:
        x, ids, weights, out = a["hidden_states"], a["topk_ids"], a["topk_weights"], a["out"]
        experts, rows, _ = a["w13"].shape
        hidden, inner = x.shape[1], 2 * a["w2"].shape[2]
        assert [t.dtype for t in (x, ids, weights, out)] == [torch.bfloat16, torch.int32, torch.float32, torch.bfloat16]
        assert all(t.is_contiguous() for t in (x, ids, weights, out))
        assert ids.shape == weights.shape == (len(x), ids.shape[1])
        assert out.shape == x.shape
        matrices = []
        for name, n, k in (("w13", rows, hidden), ("w2", hidden, inner)):
            scales = described(a[f"{name}_sf"], experts, n, k // 16)
            assert scales.dtype == torch.float8_e4m3fn
            numbers = fp4(described(a[name], experts, n, k // 2)) * unswizzled(scales.float()).repeat_interleave(16, 2)
            matrices.append(numbers * described(a[f"{name}_gs"], experts)[:, None, None])
        x = x.float() if x_scale is None else rounded(x.float(), x_scale)
        total = torch.zeros_like(x)
        for e in range(experts):
            t, slot = (ids == e).nonzero(as_tuple=True)
            sums = x[t] @ matrices[0][e].T
            h = (
                torch.nn.functional.silu(sums[:, :inner]) * sums[:, inner:]
                if rows == 2 * inner
                else sums.relu().square()
            )
            h = h if h_scale is None else rounded(h, h_scale)
            total.index_add_(0, t, h @ matrices[1][e].T * weights[t, slot, None])
        out.copy_(total)


def described(tensor: Tensor, *shape: int) -> Tensor:
    """The tensor, contiguous and of this shape."""
    assert tensor.is_contiguous()
    assert list(tensor.shape) == list(shape)
    return tensor


def nibbles_of(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def fp4(codes: Tensor) -> Tensor:
    return VALUES[nibbles_of(codes).int()]


def scale_numbers(scales: Tensor, nvfp4: bool) -> Tensor:
    """What the bytes stand for: E8M0 scales come under E4M3's name too."""
    return scales.float() if nvfp4 else scales.view(torch.uint8).view(torch.float8_e8m0fnu).float()


def quantized(x: Tensor, multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, one a byte, and E4M3 scales of groups of 16."""
    blocks = x.unflatten(1, (-1, 16))
    scales = encode_e4m3((blocks.abs().amax(2) * (multiplier / 6)).clamp(max=448))
    ratio = multiplier / scales.float().clamp_min(1e-20)
    return encode_e2m1(blocks * ratio[..., None]).flatten(1), scales


def rounded(x: Tensor, multiplier: Tensor) -> Tensor:
    codes, scales = quantized(x, multiplier)
    return VALUES[codes.int()] * scales.float().repeat_interleave(16, 1) / multiplier


@cache
def scale_places(rows: int, groups: int) -> Tensor:
    """Where the scale of each row and group lies: FlashInfer's 128x4 layout."""
    places = [
        ((m // 128) * (groups // 4) + g // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + g % 4
        for m in range(rows)
        for g in range(groups)
    ]
    return torch.tensor(places)


def unswizzled(scales: Tensor) -> Tensor:
    experts, rows, groups = scales.shape
    return scales.reshape(experts, -1)[:, scale_places(rows, groups)].view(scales.shape)


def unshuffled(rows: Tensor) -> Tensor:
    """Row r of 32 lies at 8 * (r % 4) + r // 4: TensorRT-LLM's shuffle for tiles of 128 rows."""
    places = torch.tensor([m // 32 * 32 + m % 4 * 8 + m % 32 // 4 for m in range(rows.shape[1])])
    return rows[:, places]
