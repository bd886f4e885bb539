"""The Triton backend on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.reference import run_experts
from polymoe.backends.triton import Tile, Triton, TritonConfig
from polymoe.errors import PlanError
from polymoe.formats import FORMATS, QuantTensor, format_of
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from support.captured import captured_follows_new_rows
from support.problems import GPT_OSS, problem_of, random_call, random_experts, with_input_scales

CHOICE = {"triton": Triton()}


def scaled(expert: Expert, exponent: int) -> Expert:
    """The expert with down's E8M0 scales times a power of two, and up's divided by it."""

    def times(tensor: QuantTensor, exponent: int) -> QuantTensor:
        assert tensor.scales is not None
        moved = (tensor.scales.view(torch.uint8).int() + exponent).to(torch.uint8)
        return replace(tensor, scales=moved.view(torch.float8_e8m0fnu))

    return replace(expert, up=times(expert.up, -exponent), down=times(expert.down, exponent))


def on_gpu(weights: ExpertWeights, x: torch.Tensor, routing: Routing, **kwargs: Any) -> None:
    """Compare with the reference, and require that twenty runs are bitwise identical; outputs start as NaN."""
    config = kwargs.pop("config", None)
    problem = problem_of(weights, **kwargs)
    here = Machine.of("cuda")
    expected = run_experts(problem, weights, x, routing)
    packed = LAYOUTS["natural"].pack(weights, torch.device("cuda"))
    config = config or Triton().configure(problem, here, x.shape[0])
    first = None
    for _ in range(20):
        out = torch.full_like(x, float("nan"), device="cuda")
        there = Routing(*(part.cuda() for part in routing))
        Triton().bind(problem, packed).run(CallArguments(x.cuda(), *there, out), config)
        first = out if first is None else first
        assert torch.equal(out, first)
    assert first is not None
    assert relative_error(first.cpu(), expected) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format: str, tokens: int) -> None:
    weights = random_experts(format, hidden=256, intermediate=192)
    on_gpu(weights, *random_call(tokens, 256, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("mode", ["fp8_token", "fp8_group128", "fp8_static"])
@pytest.mark.parametrize("format", [*(f for f in FORMATS if f != "mxfp8"), "int4_g32_zp", "int4_g128_zp"])
def test_fp8_activations(format: str, mode: str, tokens: int) -> None:
    weights = with_input_scales(random_experts(format, hidden=384, intermediate=320))
    on_gpu(weights, *random_call(tokens, 384, 5, dtype=torch.bfloat16), activations=mode)


@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *((f, "mxfp8") for f in ("mxfp8", "fp8_block128", "mxfp4", "bf16", "int4_g32")),
        ("mxfp8", "fp8_token"),
        ("mxfp8", "fp8_group128"),
        *((f, "fp8_group128_ue8m0") for f in ("mxfp4", "fp8_block128")),
    ],
)
def test_mxfp8_weights_and_activations(format: str, mode: str, tokens: int) -> None:
    weights = random_experts(format, hidden=384, intermediate=320)
    on_gpu(weights, *random_call(tokens, 384, 5, dtype=torch.bfloat16), activations=mode)


@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize(
    ("format", "mode", "gated", "hidden", "intermediate"),
    [
        ("mxfp4", "mxfp8", True, 1024, 512),
        ("mxfp4", "fp8_group128_ue8m0", True, 1024, 576),
        ("mxfp8", "mxfp8", False, 672, 352),
    ],
)
def test_block_scaled_mmas(format: str, mode: str, gated: bool, hidden: int, intermediate: int, tokens: int) -> None:
    """On SM120 they are native. Elsewhere Triton converts their operands to bfloat16: the same kernel, other MMAs."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert to E4M3")
    tile = Tile(128, 128, 8, 2)
    config = TritonConfig(64, tile, tile, pdl=torch.cuda.get_device_capability() >= (9, 0), block_scaled=True)
    weights = random_experts(format, hidden=hidden, intermediate=intermediate, gated=gated, bias=True)
    call = random_call(tokens, hidden, 5, dtype=torch.bfloat16)
    on_gpu(weights, *call, activations=mode, config=config)


@pytest.mark.parametrize("format", ["fp8_block128", "fp8_channel"])
def test_e8m0_scales_of_fp8(format: str) -> None:
    """DeepSeek-V4's FP8 stores such scales of its blocks."""
    plain = random_experts(format, hidden=384, intermediate=256)
    weights = ExpertWeights.quantize(*plain.dequantize(), format_of(replace(plain.spec.up, scale_dtype="e8m0")))
    on_gpu(weights, *random_call(33, 384, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 40, 500])
@pytest.mark.parametrize(
    ("format", "mode"),
    [("fp8_block128", "fp8_group128"), ("int4_g32", "16bit"), ("int4_g32", "fp8_token"), ("mxfp8", "16bit")],
)
def test_several_n_blocks_per_cta(format: str, mode: str, tokens: int) -> None:
    config = TritonConfig(
        16 if tokens < 100 else 64, Tile(64, 128), Tile(64, 128, n_blocks_per_cta=4), tail_block_m=8, pdl=True
    )
    weights = random_experts(format, hidden=1152, intermediate=256)
    call = random_call(tokens, 1152, 5, dtype=torch.bfloat16)
    on_gpu(weights, *call, activations=mode, config=config)


def test_scales_beyond_the_fast_range_are_exact() -> None:
    plain = random_experts("mxfp4", hidden=128, intermediate=128)
    weights = ExpertWeights(plain.spec, lambda e: scaled(plain.expert(e), 30))
    x, routing = random_call(9, 128, 5)
    problem = problem_of(weights)
    choice = PlanRequest(Machine.of("cuda"), "mixed", "triton", CHOICE, LAYOUTS)
    experts = FusedExperts.pack(problem, weights, choice)
    assert experts.problem.scales is not None
    assert experts.problem.scales.outside_bfloat16
    expected = run_experts(problem, weights, x, routing)
    y = experts(x.cuda(), *(part.cuda() for part in routing))
    assert relative_error(y.cpu(), expected) < TOLERANCE
    with pytest.raises(PlanError, match="load these experts again"):
        FusedExperts.pack(problem, plain, choice).update(weights)


def test_wide_tiles_are_deterministic() -> None:
    """Weights are wgmma's operand in registers, which assemblers before 13.3 may let be overwritten too early."""
    weights = random_experts("mxfp4", hidden=1024, intermediate=512, experts=4)
    problem, here = problem_of(weights), Machine.of("cuda")
    packed = LAYOUTS["natural"].pack(weights, torch.device("cuda"))
    x, routing = random_call(1000, 1024, 4, dtype=torch.bfloat16)
    expected = run_experts(problem, weights, x, routing)
    x, there = x.cuda(), Routing(*(part.cuda() for part in routing))
    for tile in (Tile(64, 128), Tile(128, 128, 8), Tile(64, 64, 4, 4), Tile(128, 128, 4, 2)):
        config = replace(Triton().configure(problem, here, 1000), block_m=64, up=tile, down=tile)
        outs = [torch.empty_like(x) for _ in range(2)]
        Triton().bind(problem, packed).run(CallArguments(x, *there, outs[0]), config)
        assert relative_error(outs[0].cpu(), expected) < TOLERANCE
        for _ in range(250):
            Triton().bind(problem, packed).run(CallArguments(x, *there, outs[1]), config)
            assert torch.equal(*outs)


@pytest.mark.parametrize("tokens", [1, 12])
def test_compiled_graph_without_a_break(tokens: int) -> None:
    weights = random_experts("mxfp4", hidden=128, intermediate=128)
    experts = FusedExperts.from_weights(weights, SwiGLU(), top_k=2, device="cuda", backend="triton")
    x, routing = random_call(tokens, 128, 5, dtype=torch.bfloat16)
    call = (x.cuda(), *(part.cuda() for part in routing))
    compiled = torch.compile(lambda *a: experts(*a) + 1, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        assert torch.equal(compiled(*call), experts(*call) + 1)


def test_another_stream() -> None:
    weights = random_experts("nvfp4", hidden=128, intermediate=128)
    experts = FusedExperts.from_weights(weights, SwiGLU(), top_k=2, device="cuda", backend="triton")
    x, routing = random_call(40, 128, 5, dtype=torch.bfloat16)
    call = (x.cuda(), *(part.cuda() for part in routing))
    expected = experts(*call)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = experts(*call)
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", ["fp16", "bf16", "mxfp4"])
def test_dtypes_of_x(format: str, dtype: torch.dtype) -> None:
    on_gpu(random_experts(format), *random_call(9, 64, 5, dtype=dtype))


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("activation", [GPT_OSS, GeGLU(), GeGLU("tanh")], ids=lambda a: a.name)
def test_activations(activation: Any, weight_on: str) -> None:
    weights = random_experts(bias=True)
    on_gpu(weights, *random_call(9, 64, 5, dtype=torch.bfloat16), activation=activation, weight_on=weight_on)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "gated", "top_k"), [(2880, 2880, True, 4), (1024, 2688, False, 22), (192, 336, True, 1)]
)
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_odd_sizes(tokens: int, hidden: int, intermediate: int, gated: bool, top_k: int) -> None:
    weights = random_experts("nvfp4", hidden=hidden, intermediate=intermediate, gated=gated, experts=7)
    on_gpu(weights, *random_call(tokens, hidden, 7, top_k, torch.bfloat16))


@pytest.mark.parametrize("block_m", [8, 16, 32, 64, 128])
def test_tiles(block_m: int) -> None:
    config = TritonConfig(block_m, Tile(64, 64), Tile(64, 64, split_k=2))
    weights = random_experts(bias=True, hidden=192)
    on_gpu(weights, *random_call(3 * block_m, 192, 5, dtype=torch.bfloat16), config=config)


def test_ids_of_others_are_never_read() -> None:
    weights = random_experts(bias=True)
    x, routing = random_call(40, 64, 5, dtype=torch.bfloat16)
    routing.topk_ids_TA[::3, 0] = -1
    routing.topk_ids_TA[1::3, 1] = 5
    routing.topk_weights_TA[::3, 0] = float("nan")
    on_gpu(weights, x, routing)


def test_hooks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets a hook on Triton's compiler, to which Triton 3.6 cannot describe the GEMMs."""
    import triton

    knobs: Any = triton.knobs  # type: ignore[attr-defined]
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **_: None)
    weights = random_experts("int4_g128", hidden=384, intermediate=640, experts=3)  # compiled by no other test
    on_gpu(weights, *random_call(5, 384, 3, 2, torch.bfloat16))


def test_captured_graph_follows_new_routings() -> None:
    weights = random_experts("mxfp4", experts=16, hidden=256, intermediate=256)
    problem = problem_of(weights)
    choice = PlanRequest(Machine.of("cuda"), "mixed", "triton", CHOICE, LAYOUTS)
    experts = FusedExperts.pack(problem, weights, choice)
    captured_follows_new_rows(experts, weights, 20, replays=5)
