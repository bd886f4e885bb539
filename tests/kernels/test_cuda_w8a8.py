"""Kernels for E4M3 weights and rows: what the others need not do. On a CPU, from their own sources."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.backends.reference import emulate_activations, run_experts
from polymoe.kernels.cuda import modules, spec
from polymoe.kernels.cuda.launch.shape import FEW_ROWS
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES
from polymoe.kernels.cuda.targets import SM90
from polymoe.problem.activations import Activation, GeGLU, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import gpu, pack, quantized_rows, run_emulated
from support.cuda_emulator import Emulator, compile_units, emulated
from support.cuda_families import KERNELS, libraries
from support.cuda_instructions_budget import instructions
from support.problems import GPT_OSS, problem_of, random_call, random_experts, with_input_scales

FORMAT = "fp8_block128"
W8A8, F16 = KERNELS["w8a8"], KERNELS["w8a8_f16"]
many_rows = pytest.mark.parametrize("config", W8A8.configs, ids=str)
MMA, ORDERED = CudaConfig("w8a8_mma", 8), CudaConfig("w8a8_mma_ordered", 8)
CHANNEL = [CudaConfig(name, rows) for name, rows in (
    ("w8a8_mma_channel", 8), ("w8a8_mma_ordered_channel", 8), ("w8a8_f16_channel", 32), ("w8a8_channel", 160),
)]  # fmt: skip
every_channel = pytest.mark.parametrize("config", CHANNEL, ids=str)


# --- One scale for a block of weights -------------------------------------------------------------------------------


@emulated
@many_rows
def test_every_width(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """From one row of a work tile to as many as it holds, and one more: two work tiles. Bitwise the same whether x is
    gathered or in permuted tiles."""
    weights, rows = W8A8.experts(hidden=256, intermediate=128, experts=1), config.block_m
    call: dict[str, Any] = {"coarse": False, "activations": "fp8_group128"}
    for tokens in (*range(1, rows, 13), rows - 1, rows, rows + 1):
        x, routing = random_call(tokens, 256, 1, 1, torch.bfloat16)
        tiles = W8A8.run(monkeypatch, config, weights, x, routing, **call)
        assert (
            relative_error(tiles, run_experts(problem_of(weights, activations="fp8_group128"), weights, x, routing))
            < TOLERANCE
        )
        with monkeypatch.context() as gathers:
            gathers.setitem(KERNEL_FAMILIES, config.family, replace(config.kernels, x=config.kernels.x[1:]))
            assert torch.equal(tiles, W8A8.run(monkeypatch, config, weights, x, routing, **call))


@emulated
@pytest.mark.parametrize("config", F16.configs, ids=str)
def test_every_width_of_16_bits(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    weights = F16.experts(hidden=128, intermediate=128, experts=1)
    for tokens in range(8, config.block_m + 8, 8):
        F16.compare(
            monkeypatch, config, weights, *random_call(tokens, 128, 1, 1, torch.bfloat16), activations="fp8_group128"
        )


@emulated
@many_rows
def test_one_expert_a_token(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """x in permuted tiles of several work tiles, whose pipeline wraps; on the same runner x that the caller quantized,
    which is by token."""
    weights = W8A8.experts(hidden=1024, intermediate=384, experts=3)
    problem = problem_of(weights, activations="fp8_group128")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(2))
    packed = pack(problem, weights)
    emulator = Emulator(libraries(config, FORMAT), list(packed.tensors.values()))
    monkeypatch.setattr(modules, "kernel", emulator)
    runner = CudaRunner(problem, packed, SM90)
    for dtype in (torch.float32, torch.bfloat16):
        x, routing = random_call(200, 1024, 3, 1, dtype)
        routing.topk_ids_TA[7] = -1
        groups = x.float().unflatten(1, (-1, 128))
        scales = groups.abs().amax(2) / 448
        codes = (groups / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
        out, again = (torch.full(x.shape, float("nan"), dtype=torch.bfloat16) for _ in range(2))
        runner.run(CallArguments(x, *routing, out), config)
        runner.run(CallArguments(codes, *routing, again, x_scales=scales), config)
        assert torch.equal(out, again)
        assert relative_error(out, run_experts(problem, weights, x, routing)) < TOLERANCE
    kernel, rounding = config.kernels.kernel, ["quantize_permuted"] if config.kernels.rounded_h.step else []
    down = [*rounding, kernel("down", config.block_m), "finalize_many_bf16"]
    tiles, gathers = (kernel(part, config.block_m) for part in ("gate_up_tiles", "gate_up"))
    whole = ["permutation_one_cta", "quantize_permuted", tiles, *down]
    assert emulator.made[: 2 * len(whole) - 1] == [*whole, "permutation_one_cta", gathers, *down]


@emulated
@pytest.mark.parametrize("coarse", [False, True])
def test_experts_of_this_rank(monkeypatch: pytest.MonkeyPatch, coarse: bool) -> None:
    """Of seven, the third to the fifth, of which one has nothing to do and one has almost all."""
    weights = W8A8.experts(experts=3)
    weights = ExpertWeights(replace(weights.spec, experts=7, first_expert=2, local_experts=3), weights.expert)
    x, routing = random_call(170, 384, 7, 2, torch.bfloat16)
    routing.topk_ids_TA[routing.topk_ids_TA == 3] = 4
    routing.topk_ids_TA[:150, 1] = 2
    W8A8.compare(monkeypatch, W8A8.configs[-1], weights, x, routing, coarse=coarse, activations="fp8_group128")


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [128, 384, 1024, 8320])
def test_rows_are_rounded_as_the_reference_rounds_them(
    monkeypatch: pytest.MonkeyPatch, columns: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(modules, "kernel", Emulator(compile_units(), []))
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2, :128], x[3] = 0, 1e-3 * torch.arange(columns).to(dtype)
    out = quantized_rows("quantize_rows", x)
    codes = out[:, :columns].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
    scales = out[:, columns : columns + columns // 32].contiguous().view(torch.float32)
    assert torch.equal((codes * scales[:, :, None]).flatten(1), emulate_activations(x.float(), "fp8_group128"))


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 16, 28])
def test_few_and_more_rows(monkeypatch: pytest.MonkeyPatch, tokens: int, dtype: torch.dtype) -> None:
    """Rows that kernels sort and rows that a launch sorts; experts with more rows than a work tile holds, half a tile
    of the layout, rows of zeros, ids of other ranks."""
    x, routing = random_call(tokens, 384, 2, 2, dtype)
    x[-1, :128], x[tokens // 2, 128:] = 0, 0
    if tokens > 1:
        routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 2, 2])
        routing.topk_weights_TA[0, 0] = float("nan")
    kernels = KERNELS["w8a8_mma"]
    made = kernels.compare(
        monkeypatch, MMA, kernels.experts(bias=True), x, routing, activation=GPT_OSS, activations="fp8_group128"
    )
    gemms = ["w8a8_mma_gate_up_m8", "w8a8_mma_down_m8", "finalize_f32"]
    assert made == gemms if 2 * tokens <= FEW_ROWS else made[1:] == gemms


@emulated
@pytest.mark.parametrize(
    ("hidden", "intermediate", "activation"), [(128, 384, GeGLU("tanh")), (384, 256, GPT_OSS), (2432, 128, SwiGLU())]
)
def test_same_bits_as_with_more_rows(
    monkeypatch: pytest.MonkeyPatch, hidden: int, intermediate: int, activation: Activation
) -> None:
    """One, two and sixteen warps that share a unit; work tiles of eight rows, three and one."""
    weights = random_experts(FORMAT, experts=2, hidden=hidden, intermediate=intermediate, bias=True)
    for tokens in (9, 11):
        x, routing = random_call(tokens, hidden, 2, 2, torch.float32)
        x[1] *= 2.0**-120
        results = [
            run_emulated(
                monkeypatch, libraries(config, FORMAT), weights, x, routing, config, aligned=True,
                activations="fp8_group128", activation=activation,
            )[0]
            for config in (ORDERED, CudaConfig("w8a8_f16", 32))
        ]  # fmt: skip
        assert torch.equal(*results)


# --- One scale for a row of weights, or one in all ------------------------------------------------------------------


def experts(format: str = "fp8_channel", **kwargs: Any) -> ExpertWeights:
    return with_input_scales(random_experts(format, **{"hidden": 384, "intermediate": 256, "experts": 2, **kwargs}))


def compare(
    monkeypatch: pytest.MonkeyPatch, weights: ExpertWeights, call: Any, config: CudaConfig, **kwargs: Any
) -> list[str]:
    """With the reference; returns the kernels launched."""
    kernels = next(kernels for kernels in KERNELS.values() if config in kernels.configs)
    return kernels.compare(
        monkeypatch, config, weights, *call, **{"coarse": True, "activations": "fp8_token", **kwargs}
    )


@emulated
@every_channel
@pytest.mark.parametrize("activations", ["fp8_token", "fp8_static"])
def test_without_a_gate_and_one_scale_in_all(
    monkeypatch: pytest.MonkeyPatch, config: CudaConfig, activations: str
) -> None:
    """With ReLU squared; K of fewer blocks than warps and of more; float32 x."""
    for hidden, intermediate in ((128, 384), (2176, 128)):
        weights = experts("fp8_tensor", hidden=hidden, intermediate=intermediate, experts=3, gated=False)
        call = random_call(40 if config.family == "w8a8_channel" else 6, hidden, 3, 3, torch.float32)
        compare(monkeypatch, weights, call, config, blocks=5, activations=activations)


@emulated
@pytest.mark.parametrize(
    ("hidden", "gated", "kwargs"),
    [
        (384, True, {"activations": "fp8_token", "activation": GPT_OSS}),
        (384, False, {"activations": "fp8_static"}),
        (256, True, {"activations": "fp8_token", "activation": GeGLU("tanh"), "weight_on": "input"}),
        pytest.param(2432, True, {"activations": "fp8_token"}, marks=pytest.mark.slow),
    ],
)
def test_few_rows_have_the_bits_of_more(
    monkeypatch: pytest.MonkeyPatch, hidden: int, gated: bool, kwargs: dict[str, Any]
) -> None:
    weights = experts(hidden=hidden, intermediate=128, gated=gated, bias=True)
    x, routing = random_call(5, hidden, 2, 1 if "weight_on" in kwargs else 2, torch.float32)
    x[1] *= 2.0**-120
    results = [
        run_emulated(monkeypatch, libraries(c, "fp8_channel"), weights, x, routing, c, aligned=True, **kwargs)[0]
        for c in CHANNEL[1:3]
    ]
    assert torch.equal(*results)


@emulated
@every_channel
def test_routing_weights_on_the_input(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    call = random_call(40 if config.family == "w8a8_channel" else 3, 384, 2, 1, torch.float16)
    made = compare(monkeypatch, experts(), call, config, weight_on="input", activation=GeGLU("tanh"))
    family = config.kernels
    gemms = [family.kernel(part, config.block_m) for part in ("gate_up", "down")]
    if config.block_m == 8:
        assert made == [*gemms, "finalize_f32"]
    else:
        rounds = "quantize_whole_rows"
        assert made[1:-1] == [rounds, gemms[0], rounds, gemms[1]]
        assert made[-1] in ("finalize_bf16", "finalize_many_bf16")


@emulated
@every_channel
def test_x_that_is_rounded_already(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """Bitwise what comes of the same x in bfloat16, which the kernels round."""
    x, routing = random_call(5, 384, 2, 2, torch.float32)
    scales = x.abs().amax(1, keepdim=True) / 448
    codes = (x / scales).to(torch.float8_e4m3fn)
    scales = 2.0 ** scales.log2().round()
    weights = experts()
    as_float = codes.float() * scales
    as_float[:, 0] = 448 * scales[:, 0]
    codes[:, 0] = 448
    units = libraries(config, "fp8_channel")
    whole, out = (
        run_emulated(
            monkeypatch, units, weights, x, routing, config, options=options, out_dtype=torch.bfloat16,
            activations="fp8_token",
        )[0]
        for x, options in ((as_float.bfloat16(), {}), (codes, {"x_scales": scales}))
    )  # fmt: skip
    assert torch.equal(out, whole)


# --- Instructions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", spec.W8A8.tiles)
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_instructions_of_a_stage(part: str, rows: int) -> None:
    """At 4.3 TB/s an SM gets a stage's weights in 1840 cycles, 7360 issue slots for its eight warps. Two chains of 128
    columns in each warp, of four wgmma that are waited for once."""
    tools = instructions()
    found = tools.disassembled(spec.W8A8.unit(FORMAT), spec.W8A8.kernel(part, rows))
    widest = 0
    for body in tools.loops(found):
        widths = [int(width) for text in body for width in re.findall(r"QGMMA\.64x(\d+)x32", text)]
        if len(widths) in (8, 16) and len(body) < 1000:
            several = len(widths) // 8  # MMAs side by side, where one would be too wide
            widest = max(widest, several * widths[0])
            assert len(body) <= 150 + 40 * several + 1.7 * several * widths[0]
            assert len([text for text in body if "QGMMA" in text and "gsb0" in text]) == 2 * several
    assert widest == rows


@pytest.mark.parametrize(
    ("family", "rows"),
    [(f, m) for f in (spec.W8A8_SHARED, spec.W8A8_SHARED_N128) for m in f.tiles],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("part", ["gate_up", "gate_up_tiles", "down"])
def test_instructions_of_a_stage_of_w8a8_shared(part: str, family: spec.KernelFamily, rows: int) -> None:
    """A chain of four wgmma takes the tensor cores 256 cycles, and two warps of a scheduler have chains at a time. Each
    accumulates 64 sums of a chain; scales, barriers and descriptors take less than that."""
    tools = instructions()
    found = tools.disassembled(family.unit(FORMAT), family.kernel(part, rows))
    most = 0
    for body in tools.loops(found):
        mmas = [text for text in body if "QGMMA.64x128x32" in text]
        if len(body) < 300 and mmas:
            chains = len(mmas) // 4
            most = max(most, chains)
            assert len([text for text in body if text.startswith("FFMA")]) == 64 * chains
            assert len(body) <= 64 * chains + 90
    assert most == rows // 64


@pytest.mark.parametrize("rows", spec.W8A8_F16.tiles)
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_instructions_and_products_under_way(part: str, rows: int) -> None:
    """At 4.3 TB/s an SM gets eight weights for each lane of a warp every 57 issue slots. Where the assembler
    cannot see that registers are safe, each product waits for itself: every one then ends a group (gsb0)."""
    tools = instructions()
    found = tools.disassembled(spec.W8A8_F16.unit(FORMAT), spec.W8A8_F16.kernel(part, rows))
    shortest: dict[int, list[str]] = {}  # by the width of wgmma, of loops over whole stages
    for body in tools.loops(found):
        widths = [int(width) for text in body for width in re.findall(r"HGMMA\.64x(\d+)x16", text)]
        if len(widths) == 16 and len(body) < len(shortest.get(widths[0], found)):
            shortest[widths[0]] = body
    assert max(shortest) == rows
    for width, body in shortest.items():
        assert len(body) <= 16 * (9.5 + width / 10)  # in a stage a warp has 16 times eight weights a lane
        assert len([text for text in body if "HGMMA" in text and "gsb0" in text]) == 8
        assert len([text for text in body if re.search(r"DEPBAR.*gsb0, 0x1", text)]) >= 7


@pytest.mark.parametrize("config", [MMA, ORDERED], ids=str)
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_instructions_of_few_rows(config: CudaConfig, part: str) -> None:
    """At 4.3 TB/s an SM gets a block of 4 KB every 230 clocks, 920 issue slots. The longest loop over blocks is that of
    float32 rows with all their divisions."""
    tools = instructions()
    family = config.kernels
    found = tools.disassembled(family.unit(FORMAT), family.kernel(part, 8))
    bodies = [body for body in tools.loops(found) if len([t for t in body if t.startswith("HMMA")]) == 16]
    assert bodies
    assert min(map(len, bodies)) <= 700
