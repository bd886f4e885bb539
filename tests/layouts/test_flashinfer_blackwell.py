"""Layouts of FlashInfer's kernels for SM100 and SM120: the bytes of FlashInfer's own helpers, and exact inverses."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polymoe.formats import FORMATS, QuantTensor
from polymoe.layouts import LAYOUTS, Packed
from polymoe.layouts.flashinfer_blackwell import FlashInferSM12x, FlashInferTrtllm
from polymoe.problem.tensors import Expert, ExpertWeights
from support.every_byte import assert_same, every_byte, spec_of

CPU = torch.device("cpu")
NAMES = {
    "flashinfer_trtllm_int4": "int4_g32", "flashinfer_trtllm_mxfp4": "mxfp4", "flashinfer_trtllm_nvfp4": "nvfp4",
    "flashinfer_sm12x_nvfp4": "nvfp4",
}  # fmt: skip


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("name", "format"), NAMES.items())
def test_round_trip(name: str, format: str, gated: bool) -> None:
    layout = LAYOUTS[name]
    for hidden, intermediate in ((256, 256), (512, 768)):
        weights = every_byte(format, hidden, intermediate, gated=gated)
        packed = layout.pack(weights, CPU)
        assert packed.nbytes == layout.nbytes(weights.spec)
        assert sum(t.nbytes for n, t in packed.tensors.items() if "kernel." not in n) == weights.spec.local_bytes
        assert_same(layout.unpack(packed), weights)
        other = every_byte(format, hidden, intermediate, gated=gated, seed=1)
        addresses = {n: t.data_ptr() for n, t in packed.tensors.items()}
        again = layout.pack(other, CPU, out=packed)
        assert {n: t.data_ptr() for n, t in again.tensors.items()} == addresses
        assert_same(layout.unpack(again), other)
        fresh = layout.pack(other, CPU)
        assert all(torch.equal(again.tensors[n], t) for n, t in fresh.tensors.items() if "kernel." in n)


def matrix(format: str, rows: int, columns: int, seed: int) -> QuantTensor:
    g = torch.Generator().manual_seed(seed)
    e = FORMATS[format].encoding
    codes = torch.randint(256, (rows, columns // 2), generator=g, dtype=torch.uint8)
    grid = (rows, columns // e.group_columns)
    if e.scale_dtype == "bfloat16":
        scales = torch.rand(grid, generator=g).bfloat16()
    else:
        dtype = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}[e.scale_dtype or ""]
        scales = torch.randint(1, 127, grid, generator=g, dtype=torch.uint8).view(dtype)
    return QuantTensor(codes, e, scales, global_scale=torch.tensor(1.0) if e.global_scale else None)


# Of what FlashInfer 0.7.2 makes of the same matrices on a CPU. SM100: _maybe_get_cached_w3_w1_permute_indices (of up,
# then gate) or get_w2_permute_indices_with_cache, convert_to_block_layout for INT4, and the index of its
# block_scale_interleave. SM120: prepare_cutile_nvfp4_weights.
GOLDEN = {
    ("flashinfer_trtllm_int4", 2): ("612a1bce205b25ae", "416644b7a3413b47", (2, 512, 128)),
    ("flashinfer_trtllm_mxfp4", 2): ("5bd8c44cd210265c", "5670cfeff66e9bf5", (512, 256)),
    ("flashinfer_trtllm_nvfp4", 2): ("5bd8c44cd210265c", "03cee447897b8468", (512, 256)),
    ("flashinfer_trtllm_nvfp4", 1): ("6969509759a5ccb1", "e9f93fecea892f4f", (256, 256)),
    ("flashinfer_sm12x_nvfp4", 2): ("402f62adbf25dd38", "e2072360af7faf5a", (512, 256)),
    ("flashinfer_sm12x_nvfp4", 1): ("67bc7b1a3d9316f3", "462447b8e6ed6a49", (256, 256)),
}


@pytest.mark.parametrize(("name", "halves"), GOLDEN)
def test_bytes_are_those_of_flashinfers_helpers(name: str, halves: int) -> None:
    layout = LAYOUTS[name]
    assert isinstance(layout, (FlashInferTrtllm, FlashInferSM12x))
    parts, _ = layout.pack_matrix([matrix(NAMES[name], 256, 512, seed) for seed in range(halves)])
    codes, scales, shape = GOLDEN[name, halves]
    assert (digest(parts["codes"]), digest(parts["scales"])) == (codes, scales)
    assert tuple(parts["codes"].shape) == shape


def test_sizes_that_would_need_padding_are_refused() -> None:
    def refused(name: str, hidden: int, intermediate: int, gated: bool = True) -> list[str]:
        spec = spec_of(NAMES[name], hidden, intermediate, gated)
        return [str(reason) for reason in LAYOUTS[name].check(spec)]

    assert refused("flashinfer_trtllm_int4", 7168, 256) == []
    assert refused("flashinfer_trtllm_int4", 7168, 128) == ["F: expects a multiple of 256, got 128"]
    assert refused("flashinfer_trtllm_mxfp4", 2880, 2880) == [
        "H: expects a multiple of 128, got 2880", "F: expects a multiple of 128, got 2880",
    ]  # fmt: skip
    for name in ("flashinfer_trtllm_nvfp4", "flashinfer_sm12x_nvfp4"):
        assert refused(name, 1024, 1344, gated=True) == []
        assert refused(name, 1024, 1344, gated=False) == ["F: expects a multiple of 128, got 1344"]
    wrong = LAYOUTS["flashinfer_trtllm_int4"].check(spec_of("int4_g128", 256, 256))
    assert {str(r) for r in wrong} == {f"{p} weights: expects int4_g32, got int4_g128" for p in ("gate", "up", "down")}
    encoding = replace(FORMATS["int4_g32"].encoding, scale_dtype="float16")
    spec = replace(spec_of("int4_g32", 256, 256), gate=encoding, up=encoding, down=encoding)
    assert str(LAYOUTS["flashinfer_trtllm_int4"].check(spec)[0]) == (
        "gate weights: expects int4_g32, got int4_g32 with scales float16"
    )


def calibrated(gated: bool) -> ExpertWeights:
    weights = every_byte("nvfp4", 128, 128, gated=gated)

    def one(e: int) -> Expert:
        scales = torch.tensor(0.5 - 0.25 * e), torch.tensor(0.25 * (1 + e))  # the largest are 0.5 and 0.5
        return replace(weights.expert(e), gate_up_input_scale=scales[0], down_input_scale=scales[1])

    return ExpertWeights.of([one(e) for e in range(2)])


def made(packed: Packed) -> dict[str, list[float]]:
    return {n.partition(".")[2]: t.tolist() for n, t in packed.tensors.items() if n.startswith("kernel.")}


@pytest.mark.parametrize("gated", [True, False])
def test_scales_for_kernels(gated: bool) -> None:
    weights = calibrated(gated)
    world = {p: [float(getattr(x, p).global_scale) for x in weights] for p in weights.spec.encodings}
    first = world["gate" if gated else "up"]
    found = made(LAYOUTS["flashinfer_trtllm_nvfp4"].pack(weights, CPU))
    assert found["x_scale"] == [2.0]
    assert found["gate_scale"] == pytest.approx([0.5 * g for g in first])
    assert found["h_scale"] == pytest.approx([u * 0.5 / 0.5 if gated else 1 / 0.5 for u in world["up"]])
    assert found["down_scale"] == pytest.approx([0.5 * d for d in world["down"]])
    found = made(LAYOUTS["flashinfer_sm12x_nvfp4"].pack(weights, CPU))
    assert (found["x_scale"], found["h_scale"]) == ([2.0], [2.0])
    ratios = [u / g for u, g in zip(world["up"], first, strict=True)]
    assert found["down_scale"] == pytest.approx([d * r for d, r in zip(world["down"], ratios, strict=True)])


def test_experts_that_were_never_calibrated_have_a_global_scale_of_one() -> None:
    for name in ("flashinfer_trtllm_nvfp4", "flashinfer_sm12x_nvfp4"):
        assert made(LAYOUTS[name].pack(every_byte("nvfp4", 128, 128), CPU))["x_scale"] == [1.0]
        one = replace(calibrated(True).expert(1), gate_up_input_scale=None)
        some = ExpertWeights.of([calibrated(True).expert(0), one])
        found = made(LAYOUTS[name].pack(some, CPU))
        assert found["x_scale"] == [1.0]
