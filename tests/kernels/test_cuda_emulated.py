"""The CUDA kernels' own sources, run on a CPU with every asynchronous instruction emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.reference import emulate_activations
from polymoe.formats import FORMATS, QuantTensor, format_of
from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.launch import shape
from polymoe.kernels.cuda.launch.args import FinalizeArgs, PermutationArgs, QuantizePermutedArgs, dtype_number
from polymoe.kernels.cuda.launch.shape import BUFFERS, FEW_ROWS, permutation_words, sorting_ctas, tokens_per_cta
from polymoe.kernels.cuda.launch.steps import PERMUTATION
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, W4A16_WGMMA
from polymoe.kernels.cuda.targets import SM90
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from support.cuda_calls import run_emulated
from support.cuda_emulator import Emulator, compile_units, emulated
from support.cuda_families import KERNELS, Kernels, libraries
from support.problems import GPT_OSS, random_call, random_experts

pytestmark = emulated
MMA = CudaConfig("w4a16_mma", 8, 64)
WGMMA = [*(CudaConfig("w4a16_wgmma", rows) for rows in (32, 64, 128, 256)), CudaConfig("w4a16_wgmma", 32, 0, 64)]
ORDERED = CudaConfig("w4a16_mma_ordered", 8, 64)
NARROW = CudaConfig("w4a16_wgmma", 128, narrow_m=32)
W4A8 = KERNELS["w4a8"]


def formats(*quick: str, slow: tuple[str, ...] = ("int4_g128",)) -> pytest.MarkDecorator:
    """Over formats. Of int4, the kernels differ in how many columns have one scale alone."""
    return pytest.mark.parametrize("format", [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)])


def in_format(format: str) -> Kernels:
    return replace(KERNELS["w4a16"], format=format)


@pytest.mark.parametrize("config", [*WGMMA[:4], NARROW], ids=str)
def test_copied_rows_are_those_that_are_gathered(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """To the bit: where gate and up have many tiles, a launch copies x for them."""
    weights = random_experts(hidden=336, intermediate=208)
    call, outs = random_call(60, 336, 5, 3, torch.bfloat16), []
    for most_gathered_n in (416, 415):
        gathers = dict.fromkeys(W4A16_WGMMA.tiles, most_gathered_n)
        monkeypatch.setitem(KERNEL_FAMILIES, config.family, replace(W4A16_WGMMA, gathers=gathers))
        out, made = run_emulated(monkeypatch, libraries(config, "mxfp4"), weights, *call, config)
        assert ("permute_x" in made) == (most_gathered_n == 415)
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("format", "config"),
    [
        ("nvfp4", MMA),
        ("int4_g32", MMA),
        *(
            pytest.param(format, config, marks=pytest.mark.slow)
            for format, configs in (
                ("nvfp4", [ORDERED, *WGMMA]), ("int4_g32", [ORDERED, *WGMMA]), ("int4_g128", [MMA, ORDERED, *WGMMA]),
            )
            for config in configs
        ),
    ],
    ids=str,
)  # fmt: skip
def test_other_formats(monkeypatch: pytest.MonkeyPatch, format: str, config: CudaConfig) -> None:
    weights = random_experts(format, hidden=336, intermediate=208, bias=True)
    call = random_call(30, 336, 5, 3, torch.float16)
    in_format(format).compare(monkeypatch, config, weights, *call, activation=GPT_OSS, weight_on="input")


@formats(slow=("int4_g128_zp", "int4_g32_zp"))
@pytest.mark.parametrize("config", [MMA, ORDERED, *WGMMA], ids=str)
def test_zero_points(monkeypatch: pytest.MonkeyPatch, format: str, config: CudaConfig) -> None:
    """In kernels that have offsets beside the scales."""
    weights = random_experts(format, hidden=336, intermediate=208, bias=True)
    in_format(format).compare(monkeypatch, config, weights, *random_call(30, 336, 5, 3, torch.bfloat16))


def test_scales_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = replace(FORMATS["int4_g32"].encoding, scale_dtype="float16")
    weights = random_experts(format_of(encoding), hidden=336, intermediate=208)
    in_format("int4_g32").compare(monkeypatch, MMA, weights, *random_call(30, 336, 5, 3, torch.bfloat16))


@formats("mxfp4", slow=("nvfp4", "int4_g32", "int4_g128", "int4_g128_zp"))
@pytest.mark.parametrize(
    ("gated", "tokens", "intermediate", "weight_on"),
    [(True, 10, 208, "input"), (True, 10, 400, "output"), (False, 30, 592, "output")],
)
def test_ordered_sums_are_those_of_wgmma(
    monkeypatch: pytest.MonkeyPatch, format: str, gated: bool, tokens: int, intermediate: int, weight_on: str
) -> None:
    """To the bit: K of whole and of broken stages and short ones, with and without a launch for the permutation."""
    weights = random_experts(format, experts=3, hidden=592, intermediate=intermediate, gated=gated, bias=True)
    call = random_call(tokens, 592, 3, 2, torch.bfloat16)
    outs = [
        run_emulated(monkeypatch, libraries(c, format), weights, *call, c, aligned=True, weight_on=weight_on)[0]
        for c in (ORDERED, WGMMA[0])
    ]
    assert torch.equal(*outs)


@formats("mxfp4", "nvfp4", slow=("int4_g32", "int4_g128"))
def test_a_row_does_not_depend_on_its_work_tile(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Bitwise, in one kernel: which of an expert's rows share a work tile depends on timing. One, or as many as fit."""
    weights = random_experts(format, hidden=272, intermediate=208, experts=2)
    x, routing = random_call(MMA.block_m, 272, 2, 2, torch.bfloat16)
    whole, _ = run_emulated(monkeypatch, libraries(MMA, format), weights, x, routing, MMA)
    first = Routing(*(values[:1] for values in routing))
    out, _ = run_emulated(monkeypatch, libraries(MMA, format), weights, x[:1], first, MMA)
    assert torch.equal(out, whole[:1])


@pytest.mark.parametrize("config", W4A8.params, ids=str)
def test_rows_in_e4m3_beside_scales_of_every_size(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """Of a row by up to 2**14; groups of zeros, whose scales may be any, and rows of them."""
    plain = random_experts(hidden=448, intermediate=320, experts=2)

    def spread(q: QuantTensor) -> QuantTensor:
        assert q.scales is not None
        g = torch.Generator().manual_seed(q.scales.numel())
        scales = q.scales.view(torch.uint8)
        scales = scales.amax(1, keepdim=True) - torch.randint(0, 15, scales.shape, generator=g).byte()
        zeros = torch.rand(scales.shape, generator=g) < 0.1
        zeros[3] = True
        anything = torch.tensor([0, 150], dtype=torch.uint8)[torch.randint(0, 2, scales.shape, generator=g)]
        codes = q.codes.masked_fill(zeros.repeat_interleave(16, 1), 0)
        return replace(q, codes=codes, scales=torch.where(zeros, anything, scales).view(q.scales.dtype))

    def read(e: int) -> Expert:
        expert = plain.expert(e)
        return replace(expert, **{name: spread(q) for name, q in expert.projections.items()})

    call = random_call(config.block_m, 448, 2, 2, torch.bfloat16)
    weights = ExpertWeights(plain.spec, read)
    W4A8.compare(monkeypatch, config, weights, *call, activations="fp8_group128")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(60, 192, 3), (3, 64, 34), (2, 4224, 1)])
def test_quantize(monkeypatch: pytest.MonkeyPatch, tokens: int, hidden: int, top_k: int, dtype: torch.dtype) -> None:
    """Bitwise the reference's values, each in its place; beyond the last column they are zeros, and nothing else is
    written."""
    monkeypatch.setattr(modules, "kernel", Emulator(compile_units(), []))
    x, routing = random_call(tokens, hidden, 5, top_k, dtype)
    x *= torch.logspace(-3, 3, hidden).to(dtype)  # subnormal codes too, and scales of every size
    x[0, : hidden // 2], x[1] = 0, 0
    routing.topk_ids_TA[0, 0] = -1
    found = permuted(routing.topk_ids_TA, first_expert=0, experts=5, block_m=16)
    padded = tokens * top_k + 35
    tiles = torch.full((padded, BUFFERS["e4m3_tiles"](0, 1, hidden)), 0xFF, dtype=torch.uint8)
    where = found["expanded_to_permuted"]
    args = QuantizePermutedArgs(x.data_ptr(), tiles.data_ptr(), where.data_ptr(), hidden, top_k, dtype_number(dtype))
    launch = modules.kernel("quantize", "quantize_permuted", SM90).prepare(args, 256)
    launch.set_grid(tokens, -(-hidden // 4096))
    launch(0)
    blocks = -(-hidden // 128)
    expected = torch.nn.functional.pad(emulate_activations(x.float(), "fp8_group128"), (0, -hidden % 128))
    untouched = torch.ones_like(tiles, dtype=torch.bool)
    for expanded, (permuted_row, tile_row, row, room) in enumerate(where.tolist()):
        if permuted_row >= 0:
            codes, scales = (part[:, row] for part in parts_of_tile(tiles[tile_row : tile_row + room], blocks))
            codes = codes[:, torch.arange(8) ^ row % 8]
            values = codes.view(torch.float8_e4m3fn).float().flatten(1) * scales.contiguous().view(torch.float32)
            assert torch.equal(values.flatten(), expected[expanded // top_k])
            for part in parts_of_tile(untouched[tile_row : tile_row + room], blocks):
                part[:, row] = False
    assert (tiles[untouched] == 0xFF).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "top_k", "columns", "local"), [
    (67, 1, 1032, 0.7), (9, 3, 264, 0.5), (13, 6, 64, 0.2), (7, 8, 264, 1.0), (5, 16, 8, 0.1), (33, 1, 8, 0.0),
])  # fmt: skip
def test_weighted_sums_of_many_tokens_are_those_of_few(
    monkeypatch: pytest.MonkeyPatch, tokens: int, top_k: int, columns: int, local: float, dtype: torch.dtype
) -> None:
    """To the bit, with 1 token a CTA and with as many as go in: tokens without rows, and those at the end."""
    generator = torch.Generator().manual_seed(7)
    rows = tokens * top_k
    y = torch.randn(rows, columns, generator=generator).bfloat16()
    there = torch.rand(rows, generator=generator) < local
    where = torch.full((rows, 4), -1, dtype=torch.int32)
    where[there, 0] = torch.randperm(rows, generator=generator)[: int(there.sum())].int()
    weights = torch.randn(rows, generator=generator).where(there, torch.tensor(float("nan")))
    y[torch.isin(torch.arange(rows), where[there, 0], invert=True)] = float("nan")
    monkeypatch.setattr(modules, "kernel", Emulator(compile_units(), []))
    outs = []
    for name, each in (("finalize_bf16", 1), ("finalize_many_bf16", 32 // top_k), ("finalize_many_bf16", 2)):
        out = torch.full((tokens, columns), float("nan"), dtype=dtype)
        args = FinalizeArgs(
            y.data_ptr(), where.data_ptr(), None, weights.data_ptr(), out.data_ptr(), top_k, columns, 0, 1, 0,
            dtype_number(dtype), tokens, each,
        )  # fmt: skip
        launch = modules.kernel("finalize", name, SM90).prepare(args, 128)
        launch.set_grid(-(-tokens // each), -(-columns // 1024))
        launch(0)
        outs.append(out)
    assert not outs[0].isnan().any()
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])


@pytest.mark.parametrize(
    ("tokens", "top_k", "columns", "each"),
    [
        (1, 8, 7168, 1),
        (150, 8, 7168, 1),
        (8192, 8, 7168, 1),
        (8192, 2, 7168, 16),
        (8192, 1, 7168, 32),
        (1024, 1, 7168, 7),
        (8192, 22, 1024, 1),
    ],
)
def test_tokens_of_a_cta(tokens: int, top_k: int, columns: int, each: int) -> None:
    assert tokens_per_cta(tokens, top_k, columns, 132) == each


def permuted(
    ids: torch.Tensor,
    *,
    first_expert: int,
    experts: int,
    block_m: int,
    with_inverse: bool = True,
    narrow_m: int = 0,
    ctas: int = 132,
    even: bool = False,
) -> dict[str, torch.Tensor]:
    """The arrays of a permutation, by name."""
    rows = ids.numel()
    counts = permutation_words(rows, experts, block_m, with_inverse)
    args = PermutationArgs(
        ids=ids.data_ptr(), long_ids=ids.dtype == torch.int64, rows=rows, first_expert=first_expert, experts=experts,
        block_m=block_m, narrow_m=narrow_m, ctas=ctas, even=even,
    )  # fmt: skip
    found = {}
    for name, part in zip(
        counts, torch.empty(sum(counts.values()), dtype=torch.int32).split([*counts.values()]), strict=True
    ):
        setattr(args, name, part.data_ptr())
        found[name] = part if name in ("permuted_to_expanded", "counts") else part.view(-1, 4)
    sorts = "many_ctas_sort" if sorting_ctas(rows) else "one_warp_sorts" if rows <= FEW_ROWS else "one_cta_sorts"
    for step in PERMUTATION:
        if step.when == sorts:
            launch = modules.kernel(step.unit, step.kernel, SM90).prepare(args, int(step.threads))
            launch.set_grid(sorting_ctas(rows) or 1)
            launch(0)
    return found


def parts_of_tile(tiles: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of so many rows in tiles: codes [blocks, rows, 8, 16] and bytes of scales [blocks, rows, 4], where they are."""
    codes, scales = tiles.view(-1).split([len(tiles) * blocks * size for size in (128, 4)])
    return codes.view(blocks, -1, 8, 16), scales.view(blocks, -1, 4)


@pytest.mark.parametrize(("first_expert", "dtype"), [(0, torch.int64), (2, torch.int32)])
def test_few_rows_sorted_by_gemms(monkeypatch: pytest.MonkeyPatch, first_expert: int, dtype: torch.dtype) -> None:
    """The bits of a call with a launch for the permutation. One expert has several work tiles, some are elsewhere."""
    weights = random_experts(experts=4)
    if first_expert:
        spec = replace(weights.spec, experts=7, first_expert=first_expert, local_experts=4)
        weights = ExpertWeights(spec, weights.expert)
    x, routing = random_call(10, 64, 7, 3, dtype=torch.bfloat16)
    routing.topk_ids_TA[:, 1] = 3
    routing.topk_ids_TA[4, 0] = -1
    routing = Routing(routing.topk_ids_TA.to(dtype), routing.topk_weights_TA)
    outs = []
    for few in (FEW_ROWS, 0):
        monkeypatch.setattr(shape, "FEW_ROWS", few)
        out, made = run_emulated(monkeypatch, libraries(MMA, "mxfp4"), weights, x, routing, MMA)
        assert ("permutation_one_cta" in made) == (few == 0), made
        outs.append(out)
    assert torch.equal(*outs)
    assert bool(outs[0].any())


@pytest.mark.parametrize("tokens", [3, 32, 33, 700, 3100])
@pytest.mark.parametrize(
    ("block", "narrow", "even"), [(8, 0, False), (12, 0, False), (128, 0, False), (128, 32, False), (128, 0, True)]
)
def test_permutation(monkeypatch: pytest.MonkeyPatch, tokens: int, block: int, narrow: int, even: bool) -> None:
    """Every local row once, in work tiles of one expert each, in order, padded to multiples of eight rows. Tiles with
    up to ``narrow`` rows have a list of their own, and CTAs by what wide ones cost beside them. Even tiles are as few
    as others, and differ by what a multiple of 16 rows leaves to the last one."""
    emulator = Emulator(compile_units(), [])
    monkeypatch.setattr(modules, "kernel", emulator)
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, 305, (tokens, 1), generator=g)
    ids[::2] = 299  # many rows of one expert
    inverse = block % 8 == 0
    found = permuted(ids, first_expert=3, experts=300, block_m=block, with_inverse=inverse, narrow_m=narrow, even=even)
    name = "permutation_one_warp" if tokens <= 32 else "permutation_one_cta"
    assert emulator.made == ([name] if tokens <= 2048 else ["permutation_count", "permutation_many_ctas"])
    wide, wide_down, few, few_down = found["lists"].tolist()
    assert (wide, few) == (wide_down, few_down)
    assert (wide[1:3], few[1:3]) == ([wide[1]] * 2, [132, 132])  # tiles beyond those that CTAs begin with
    lists = {"work_tiles": wide[0], "narrow_tiles": few[0]}
    by_list = [found[name][:count].tolist() for name, count in lists.items()]
    assert all(number > narrow for _, _, number, _ in by_list[0])
    assert all(number <= narrow for _, _, number, _ in by_list[1])
    tiles = sorted(by_list[0] + by_list[1], key=lambda tile: tile[1])
    cost = 0.9 * wide[0] + 0.012 * sum(number for _, _, number, _ in by_list[0])
    assert wide[1] == (min(132, 1 + int(1.8 * 132 * cost / (cost + few[0]) + 1e-4)) if wide[0] else 0)
    order = found["permuted_to_expanded"]
    seen: list[int] = []
    next_row, next_padded, before, previous = 0, 0, None, 0
    for expert, first, number, padded in tiles:
        assert 0 < number <= block
        assert first == next_row
        mine = order[first : first + number].tolist()
        assert (ids[mine, 0] == expert + 3).all()
        count = int((ids == expert + 3).sum())
        most = -(-count // -(-count // block) // 16) * 16 if even and count > block else block
        assert expert != before or previous == most
        if inverse:
            assert padded == next_padded
            room = -(-number // 8) * 8
            assert found["expanded_to_permuted"][mine].tolist() == [[first + i, padded, i, room] for i in range(number)]
        seen += mine
        next_row, next_padded, before, previous = first + number, padded + -(-number // 8) * 8, expert, number
    local = [3 <= e < 303 for e in ids[:, 0].tolist()]
    assert sorted(seen) == [i for i, mine in enumerate(local) if mine]
    if inverse:
        assert (found["expanded_to_permuted"][~torch.tensor(local), 0] == -1).all()
