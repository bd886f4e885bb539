from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polymoe.errors import FormatError, PlanError
from polymoe.formats import FORMATS, QuantTensor
from polymoe.formats.elements import SCALE_DTYPES
from polymoe.layouts import LAYOUTS, Layout, Packed
from polymoe.layouts.cuda.w4a16_fragments import e4m3_codes
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights
from support.every_byte import assert_same, every_byte, spec_of
from support.problems import random_experts

CPU = torch.device("cpu")
FOUR_BITS = ["mxfp4", "nvfp4", "int4_g32", "int4_g128"]
SIZES = [(4096, 16), (2880, 48), (16, 2688), (64, 1536), (64, 336), (192, 192), (80, 208)]
EVERY = [(format, *sizes) for format in (*FOUR_BITS, "mxfp8", "bf16") for sizes in SIZES]
EVERY += [("fp8_block128", *sizes) for sizes in ((128, 128), (384, 640), (7168, 256))]
EVERY += [(format, *sizes) for format in ("fp8_channel", "fp8_tensor") for sizes in ((128, 128), (384, 640))]


def layout_of(spec: ExpertsSpec) -> Layout:
    """The layout for 16-bit activations, or for FP8 weights."""
    if spec.up.name == "mxfp8":
        return LAYOUTS["w8a16_fragments"]
    return LAYOUTS[{4: "w4a16_fragments", 8: "w8_swizzle128", 16: "w16_swizzle128"}[spec.up.bits]]


def pack(weights: ExpertWeights, device: torch.device = CPU, out: Packed | None = None) -> Packed:
    return layout_of(weights.spec).pack(weights, device, out)


def unpack(packed: Packed) -> ExpertWeights:
    return LAYOUTS[packed.layout].unpack(packed)


@pytest.mark.parametrize(("format", "hidden", "intermediate"), EVERY)
def test_round_trip_of_every_size(format: str, hidden: int, intermediate: int) -> None:
    for gated in (True, False):
        weights = every_byte(format, hidden, intermediate, gated=gated)
        packed = pack(weights)
        assert packed.nbytes == layout_of(weights.spec).nbytes(weights.spec)
        assert_same(unpack(packed), weights)
        refilled = pack(every_byte(format, hidden, intermediate, gated=gated, seed=1), out=packed)
        assert_same(unpack(refilled), every_byte(format, hidden, intermediate, gated=gated, seed=1))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "fp8_block128", "bf16"])
def test_biases_have_their_bytes(format: str) -> None:
    weights = random_experts(format, hidden=256, intermediate=128, bias=True)
    packed = pack(weights)
    assert packed.nbytes == layout_of(weights.spec).nbytes(weights.spec)
    assert_same(unpack(packed), weights)


@pytest.mark.parametrize("format", FOUR_BITS)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_for_instructions_that_convert_fp4(format: str, hidden: int, intermediate: int) -> None:
    """As many bytes, and of FP4 the same bits of codes at other places; INT4 is stored alike."""
    layout = LAYOUTS["w4a16_fragments_cvt"]
    weights = every_byte(format, hidden, intermediate, gated=True)
    packed, others = layout.pack(weights, CPU), pack(weights).tensors
    assert packed.nbytes == layout.nbytes(weights.spec) == layout_of(weights.spec).nbytes(weights.spec)
    assert_same(unpack(packed), weights)
    for name, tensor in packed.tensors.items():
        assert tensor.shape == others[name].shape
        if name.endswith(".codes") and not format.startswith("int4"):
            sets = [torch.stack([t >> bit & 1 for bit in range(8)]).sum() for t in (tensor, others[name])]
            assert sets[0] == sets[1]
        elif format.startswith("int4"):
            assert torch.equal(tensor, others[name])


@pytest.mark.parametrize("scales", ["float32", "bfloat16", "e8m0"])
def test_e4m3_with_scales_of_every_dtype(scales: str) -> None:
    """They are held as float32: back they are what they were, those beyond its normal numbers too."""
    weights = every_byte("fp8_block128", 2048, 2048)  # of E8M0, every byte

    def changed(q: QuantTensor) -> QuantTensor:
        assert q.scales is not None
        part = q.scales.to(SCALE_DTYPES[scales])
        if scales == "e8m0":
            part = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).view(part.shape)
        return replace(q, encoding=replace(q.encoding, scale_dtype=scales), scales=part)

    weights = ExpertWeights.of(
        [Expert(**{n: changed(q) for n, q in x.projections.items()}) for x in weights]  # type: ignore[arg-type]
    )
    assert layout_of(weights.spec).check(weights.spec) == ()
    packed = pack(weights)
    assert packed.nbytes == layout_of(weights.spec).nbytes(weights.spec) <= 1.01 * 2 * weights.spec.expert_bytes
    assert_same(unpack(packed), weights)


@pytest.mark.parametrize(("scales", "zero_points"), [("float16", False), ("float16", True), ("bfloat16", True)])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 48), (64, 336), (192, 192), (80, 208)])
def test_int4_as_gptq_and_awq_store_it(
    hidden: int, intermediate: int, group: int, scales: str, zero_points: bool
) -> None:
    """What bfloat16 cannot hold, and zero points, come back from the rest."""
    e = replace(FORMATS[f"int4_g{group}"].encoding, scale_dtype=scales, zero_points=zero_points)
    dtype, g = SCALE_DTYPES[scales], torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> QuantTensor:
        assert e.granularity is not None
        grid = e.granularity.scale_shape(rows, columns)
        codes = torch.randint(256, (rows, columns // 2), generator=g, dtype=torch.uint8)
        values = torch.rand(grid, generator=g) * torch.exp2(torch.randint(-30, 1, grid, generator=g))  # subnormal too
        zeros = torch.randint(17, grid, generator=g, dtype=torch.uint8) if zero_points else None
        return QuantTensor(codes, e, values.to(dtype), zero_points=zeros)

    for gated in (True, False):
        shapes = {
            "gate": gated and (intermediate, hidden),
            "up": (intermediate, hidden),
            "down": (hidden, intermediate),
        }
        weights = ExpertWeights.of(
            [Expert(**{n: matrix(*s) if s else None for n, s in shapes.items()}) for _ in range(2)]  # type: ignore[arg-type]
        )
        assert layout_of(weights.spec).check(weights.spec) == ()
        packed = pack(weights)
        assert packed.nbytes == layout_of(weights.spec).nbytes(weights.spec)
        assert_same(unpack(packed), weights)


@pytest.mark.parametrize("format", [*FOUR_BITS, "mxfp8", "bf16", "fp8_block128"])
def test_hardly_larger_than_the_checkpoint(format: str) -> None:
    for hidden, intermediate in itertools.product(
        (4096, 2880, 7168, 1024), (2048, 2880, 2688, 1536, 336, 672, 736, 192)
    ):
        spec = spec_of(format, hidden, intermediate)
        found = layout_of(spec).check(spec)
        if format == "fp8_block128" and (hidden % 128 or intermediate % 128):
            assert {r.expected for r in found} == {"a multiple of 128"}
        else:
            assert found == ()
            assert layout_of(spec).nbytes(spec) <= 1.01 * spec.local_experts * spec.expert_bytes


def with_scales(weights: ExpertWeights, byte: int) -> ExpertWeights:
    """The same experts with every byte of their scales set."""

    def fill(q: QuantTensor | None) -> QuantTensor | None:
        if q is None or q.scales is None:
            return None
        same = torch.full((q.scales.numel() * q.scales.element_size(),), byte, dtype=torch.uint8)
        return replace(q, scales=same.view(q.scales.dtype).view(q.scales.shape))

    return ExpertWeights.of([replace(x, gate=fill(x.gate), up=fill(x.up), down=fill(x.down)) for x in weights])


@pytest.mark.parametrize("format", [*FOUR_BITS, "mxfp8"])
def test_padding_belongs_to_no_weight(format: str) -> None:
    weights = every_byte(format, 80, 208)
    packed = pack(weights)
    # Every bit of the scales differs between these two: what is equal is padding.
    low, high = {"mxfp4": (0, 51), "mxfp8": (0, 51), "nvfp4": (1, 15)}.get(format, (0, 255))
    low_packed, high_packed = (pack(with_scales(weights, b)).tensors for b in (low, high))
    for name in ("up.scales", "down.scales"):
        padding = ~(low_packed[name] ^ high_packed[name])
        assert int(padding.count_nonzero()) > 0
        packed.tensors[name] ^= padding
    assert_same(unpack(packed), weights)


def rotate(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & 0xFFFFFFFF


def bf16(bits: int) -> float:
    return float(torch.tensor(bits if bits < 0x8000 else bits - 0x10000, dtype=torch.int16).view(torch.bfloat16))


def e2m1_registers(word: int) -> list[int]:
    """The four registers of bfloat16 pairs that the kernels' instructions make of a word."""
    mask = 0x81C081C0
    last = (word << 6) & 0x80C080C0 | (word >> 2) & 0x01000100
    return [word & mask, (word << 4) & mask, rotate(word, 10) & mask, last]


def int4_registers(word: int) -> list[int]:
    return [rotate(word, 32 - 4 * i) & 0x80708070 | 0x00080008 for i in range(4)]


def words(tensor: Tensor) -> list[int]:
    return [int.from_bytes(bytes(w), "little") for w in tensor.view(-1, 4).tolist()]


def fragment(matrix: str, rows: int, columns: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(place of the word, register, half, row, column) for a whole matrix, by the formula of m16n8k16's A operand
    (PTX ISA, "Matrix Fragments for mma.m16n8k16"), written without any of the layout's code."""
    place = 0
    for group in range(0, rows, 64):
        tiles = min(64, rows - group) // 16
        for block in range(0, columns, 64):
            steps = min(64, columns - block) // 16
            for tile in range(tiles):
                slots = [(lane, step) for lane in range(32) for step in range(4)]
                if steps < 4:
                    slots = [(lane, step) for step in range(steps) for lane in range(32)]
                for lane, step in slots:
                    for register in range(4):
                        for half in range(2):
                            row = group + 16 * tile + lane // 4 + 8 * (register % 2)
                            column = block + 16 * step + lane % 4 * 2 + 8 * (register // 2) + half
                            yield place, register, half, row, column
                    place += 1


@pytest.mark.parametrize(("format", "gated"), [("mxfp4", True), ("mxfp4", False), ("int4_g32", True)])
def test_words_are_registers_of_the_a_operand(format: str, gated: bool) -> None:
    weights = every_byte(format, 144, 48, gated=gated)  # rows end with 3 tiles of 4, columns with 1 step of 4
    expert = weights.expert(1)
    packed = pack(weights)
    natural = {n: q.dequantize(torch.float64) / scales_by_column(q) for n, q in expert.projections.items()}
    if gated:
        pairs = [natural[n].unflatten(0, (-1, 8)) for n in ("gate", "up")]
        natural["up"] = torch.stack(pairs, 1).flatten(0, 2)
    for matrix in ("up", "down"):
        found = words(packed.tensors[f"{matrix}.codes"][1])
        expected = natural[matrix]
        count = 0
        for place, register, half, row, column in fragment(matrix, *expected.shape):
            if format == "mxfp4":
                bits = e2m1_registers(found[place])[register] >> 16 * half & 0xFFFF
                value = bf16(bits) * 2.0**126
            else:
                bits = int4_registers(found[place])[register] >> 16 * half & 0xFFFF
                value = bf16(bits) * 2.0**129 - 0.5
            assert value == expected[row, column], (matrix, place, register, half, row, column)
            count += 1
        assert count == expected.numel() == 8 * len(found)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_bytes_are_what_instructions_convert(format: str) -> None:
    """A byte of codes is a pair of a register, with the first code in its low half; scales are bytes as stored, of rows
    g and g + 8 beside each other."""
    weights = every_byte(format, 144, 48, gated=False)
    packed, expert = LAYOUTS["w4a16_fragments_cvt"].pack(weights, CPU), weights.expert(1)
    for matrix, q in (("up", expert.up), ("down", expert.down)):
        found = words(packed.tensors[f"{matrix}.codes"][1])
        for place, register, half, row, column in fragment(matrix, *q.shape):
            code = int(q.codes[row, column // 2]) >> 4 * (column % 2) & 15
            assert found[place] >> 8 * register + 4 * half & 15 == code
        assert q.scales is not None
        scales, group = q.scales.view(torch.uint8), q.encoding.group_columns
        stored = packed.tensors[f"{matrix}.scales"][1].view(-1, -(-q.shape[1] // 64), 8, 4, 64 // group, 2)
        for row in range(q.shape[0]):
            for column in range(0, q.shape[1], group):
                at = stored[row // 64, column // 64, row % 8, row % 64 // 16, column % 64 // group, row % 16 // 8]
                assert at == scales[row, column // group]


def scales_by_column(q: QuantTensor) -> Tensor:
    assert q.scales is not None
    return q.scales.double().repeat_interleave(32, 1)[:, : q.shape[1]]


def test_scale_words_are_bfloat16_after_a_mask() -> None:
    weights = every_byte("mxfp4", 144, 48)
    packed = pack(weights)
    expert = weights.expert(0)
    scales = expert.down.scales
    assert scales is not None
    found = iter(words(packed.tensors["down.scales"][0]))
    exponents = scales.view(torch.uint8).int() - 127
    for group in range(0, 144, 64):  # one block of 48 columns
        for g in range(8):
            for tile in range(4):
                word = next(found)
                for pair, register in enumerate((word & 0x7F807F80, rotate(word, 8) & 0x7F807F80)):
                    for half in range(2):
                        row = group + 16 * tile + g + 8 * half
                        if row < 144:
                            # The codes' bits are 2**-126 of their value, and the accumulator gets 2**24 back.
                            assert register >> 16 * half + 7 & 0xFF == int(exponents[row, pair]) + 127 + 102
    assert next(found, None) is None


def pieces(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Row and piece of 16 bytes of each place of a matrix, by the formulas of wgmma's operands in memory (PTX ISA,
    "128-Byte swizzle mode"; core matrices of 8 rows without swizzle), written without any of the layout's code."""
    for group in range(0, rows, 64):
        here = min(64, rows - group)
        whole = row_bytes // 128
        for block in range(whole):
            for row in range(here):
                for place in range(8):
                    yield group + row, block * 8 + (place ^ row % 8)
        for piece in range(whole * 8, row_bytes // 16):
            for row in range(here):
                yield group + row, piece


def natural_rows(matrix: str, rows: int, gated: bool) -> list[int]:
    """For each row of a packed matrix, which one it is: of gate and behind it up, or of the one matrix of ``rows``."""
    if matrix == "up" and gated:
        return [half * rows + i + row for i in range(0, rows, 8) for half in (0, 1) for row in range(8)]
    # in a thread's hands: rows g and g + 8, and after a transposition four neighbours
    return [i + g // 2 * 4 + half * 2 + g % 2 for i in range(0, rows, 16) for half in (0, 1) for g in range(8)]


@pytest.mark.parametrize("gated", [True, False])
def test_places_are_those_of_operands_in_shared_memory(gated: bool) -> None:
    weights = every_byte("bf16", 144, 48, gated=gated)
    expert = weights.expert(1)
    packed = pack(weights)
    for matrix in ("up", "down"):
        natural = expert.projections[matrix].codes.view(torch.uint8)
        rows = natural_rows(matrix, natural.shape[0], gated)
        if matrix == "up" and expert.gate is not None:
            natural = torch.cat([expert.gate.codes.view(torch.uint8), natural])
        expected = natural[rows].unflatten(1, (-1, 16))
        found = packed.tensors[f"{matrix}.codes"][1].view(-1, 16)
        place_of = list(pieces(expected.shape[0], natural.shape[1]))
        assert len(place_of) == len(found)
        assert torch.equal(found, torch.stack([expected[row, piece] for row, piece in place_of]))


def codes_as_swizzled(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Row and column of each byte: tiles of 256 rows, of these blocks of 128 columns, of these pieces of 16 bytes."""
    for tile in range(0, rows, 256):
        for block in range(0, columns, 128):
            for row in range(tile, min(tile + 256, rows)):
                for byte in range(128):
                    yield row, block + (byte // 16 ^ row % 8) * 16 + byte % 16


@pytest.mark.parametrize("gated", [True, False])
def test_e4m3_codes_are_swizzled_by_128_bytes(gated: bool) -> None:
    weights = every_byte("fp8_block128", 384, 256, gated=gated)  # `down` ends with half a tile
    expert = weights.expert(1)
    packed = pack(weights)
    for matrix in ("up", "down"):
        natural = expert.projections[matrix].codes.view(torch.uint8)
        rows = natural_rows(matrix, natural.shape[0], gated)
        if matrix == "up" and expert.gate is not None:
            natural = torch.cat([expert.gate.codes.view(torch.uint8), natural])
        places = torch.tensor(list(codes_as_swizzled(*natural.shape)))
        expected = natural[torch.tensor(rows)[places[:, 0]], places[:, 1]]
        assert torch.equal(packed.tensors[f"{matrix}.codes"][1], expected)
    scales = [expert.projections[name].scales for name in (("gate", "up") if gated else ("up",))]
    found = packed.tensors["up.scales"][1].view(torch.float32)
    assert torch.equal(found, torch.cat([part.flatten() for part in scales if part is not None]))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp8", "bf16", "fp8_block128"])
def test_tensors_without_memory_have_the_same_shapes(format: str) -> None:
    """For tuning, which compiles in other processes."""
    weights = every_byte(format, *((128, 256) if format == "fp8_block128" else (80, 208)))
    expert = weights.expert(0).to(torch.device("meta"))
    there = pack(ExpertWeights(weights.spec, lambda e: expert), torch.device("meta")).tensors
    here = pack(weights).tensors
    assert {n: (t.shape, t.dtype) for n, t in there.items()} == {n: (t.shape, t.dtype) for n, t in here.items()}


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_scales_that_no_kernel_decodes_are_refused(format: str) -> None:
    weights = with_scales(every_byte(format, 64, 32), 152)
    assert_same(unpack(pack(weights)), weights)
    with pytest.raises(FormatError, match=r"expert 0 up scales.*2\*\*25.*2\*\*26") as error:
        pack(with_scales(weights, 153))
    assert "natural" in (error.value.hint or "")


def test_e4m3_scale_words_are_bfloat16_after_a_mask() -> None:
    """With two bits of exponent and less 2**65, which is what a zero is otherwise, they are 2**88 of their value."""
    assert sorted(e4m3_codes().tolist()) == list(range(256))
    weights = every_byte("nvfp4", 144, 48)
    scales = weights.expert(0).down.scales
    assert scales is not None
    scales[3, 1] = 0
    found = iter(words(pack(weights).tensors["down.scales"][0]))
    for group in range(0, 144, 64):  # one block of 48 columns
        for g in range(8):
            for tile in range(4):
                pair = (next(found), next(found))
                registers = [r & 0x0FF00FF0 | 0x60006000 for w in pair for r in (w, rotate(w, 8))]
                for column, register in enumerate(registers[:3]):
                    for half in range(2):
                        row = group + 16 * tile + g + 8 * half
                        if row < 144:
                            value = torch.tensor(bf16(register >> 16 * half & 0xFFFF)).bfloat16()
                            assert float(value - 2.0**65) == float(scales[row, column]) * 2.0**88
    assert next(found, None) is None


def test_negative_e4m3_scales_are_refused() -> None:
    pack(with_scales(every_byte("nvfp4", 64, 32), 126))
    for byte in (127, 0x88):
        with pytest.raises(FormatError, match=rf"expert 0 up scales.*0 to 448.*{byte:#x}"):
            pack(with_scales(every_byte("nvfp4", 64, 32), byte))


def test_other_sizes_and_formats_are_refused_with_every_reason() -> None:
    found = LAYOUTS["w4a16_fragments"].check(spec_of("fp16", 100, 40))
    assert [r.what for r in found] == ["gate elements", "up elements", "down elements", "H", "F"]
    found = LAYOUTS["w8a16_fragments"].check(spec_of("fp8_block128", 64, 40))
    assert [r.what for r in found] == ["gate scales", "up scales", "down scales", "F"]
    found = LAYOUTS["w8_swizzle128"].check(spec_of("mxfp8", 64, 128))
    assert [r.what for r in found] == ["gate scales", "up scales", "down scales", "H"]
    mixed = replace(spec_of("mxfp4", 64, 128), down=FORMATS["bf16"].encoding)
    assert [[r.what for r in LAYOUTS[name].check(mixed)] for name in ("w4a16_fragments", "w16_swizzle128")] == [
        ["down elements"],
        ["gate elements", "up elements"],
    ]
    with pytest.raises(PlanError, match="load these experts again"):
        pack(random_experts(hidden=96), out=pack(random_experts()))
