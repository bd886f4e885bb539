"""QuantTensor: what it refuses, its numbers against a decoder written from the definitions, and its slices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import support.plain_formats as plain
from polymoe.errors import FormatError
from polymoe.formats import FORMATS, Encoding, PerGroup, QuantTensor
from polymoe.formats.elements import CODE_DTYPES, SCALE_DTYPES, encode_e4m3, encode_e8m0, pack_nibbles
from polymoe.formats.tensor import expand_groups
from support.variants import ENCODINGS

ROWS, COLUMNS = 320, 288  # neither is a multiple of 128: blocks at the end are partial
MXFP4 = FORMATS["mxfp4"].encoding
BLOCK = FORMATS["fp8_block128"].encoding
INT4_ZP = Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype="bfloat16", zero_points=True)


def random_bytes(
    encoding: Encoding, rows: int = ROWS, columns: int = COLUMNS, *lead: int, seed: int = 0
) -> QuantTensor:
    """Any bits as codes (NaN aside), any positive normal scales."""
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (*lead, *shape), generator=g)

    shape = encoding.codes_shape(rows, columns)
    if encoding.bits == 4:
        codes = integers(0, 256, *shape).to(torch.uint8)
    elif encoding.bits == 8:
        codes = integers(0, 127, *shape) | integers(0, 2, *shape) << 7
        codes = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        codes = torch.randn(*lead, *shape, generator=g).to(CODE_DTYPES[encoding.element])
    if encoding.granularity is None or encoding.scale_dtype is None:
        return QuantTensor(codes, encoding)
    grid = encoding.granularity.scale_shape(rows, columns)
    if encoding.scale_dtype == "e8m0":
        scales = encode_e8m0(integers(-20, 20, *grid))
    else:
        scales = (torch.rand(*lead, *grid, generator=g) + 0.01).to(SCALE_DTYPES[encoding.scale_dtype])
    return QuantTensor(
        codes,
        encoding,
        scales,
        zero_points=integers(0, 16, *grid).to(torch.uint8) if encoding.zero_points else None,
        global_scale=torch.rand(lead, generator=g) + 0.01 if encoding.global_scale else None,
    )


def one_block(encoding: Encoding, columns: list[float], scale: float, global_scale: float | None = None) -> QuantTensor:
    """A single row of one group, from E2M1 or E4M3 values that are exact."""
    x = torch.tensor([columns])
    if encoding.element == "e4m3":
        codes = encode_e4m3(x)
    else:
        codes = pack_nibbles(torch.tensor([[plain.e2m1(np.arange(16)).tolist().index(v) for v in columns]]).byte())
    assert encoding.scale_dtype is not None
    scales = torch.tensor([[scale]]).to(SCALE_DTYPES[encoding.scale_dtype])
    return QuantTensor(
        codes, encoding, scales, global_scale=None if global_scale is None else torch.tensor(global_scale)
    )


# --- numbers ---


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_dequantize_equals_the_plain_decoder(encoding: Encoding) -> None:
    q = random_bytes(encoding)
    wanted = plain.weights(q)
    assert np.isfinite(wanted).all()
    # A product of codes of at most 8 bits and scales of at most 24 is exact in float64 and rounded twice in float32.
    np.testing.assert_array_equal(q.dequantize(torch.float64).numpy(), wanted)
    got = q.dequantize()
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), wanted, rtol=2**-23, atol=0)
    assert torch.equal(q.dequantize(torch.bfloat16), got.bfloat16())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stacks_dequantize_like_their_matrices(encoding: Encoding) -> None:
    q = random_bytes(encoding, 5, 288, 3)
    assert q.shape == (3, 5, 288)
    np.testing.assert_array_equal(q.dequantize(torch.float64).numpy(), plain.weights(q))
    assert all(torch.equal(q[e].dequantize(), q.dequantize()[e]) for e in range(3))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_dequantize_leaves_the_parts_alone(encoding: Encoding) -> None:
    q = random_bytes(encoding)
    before = {name: part.clone() for name, part in q.parts().items()}
    first, second = q.dequantize(), q.dequantize()
    assert torch.equal(first, second)
    for name, part in q.parts().items():
        assert torch.equal(part.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_strides_do_not_matter(encoding: Encoding) -> None:
    q = random_bytes(encoding, 32, 288)
    turned = q.map(lambda part: part if part.dim() < 2 else part.transpose(-1, -2).contiguous().transpose(-1, -2))
    assert not turned.codes.is_contiguous()
    assert torch.equal(turned.dequantize(), q.dequantize())
    assert all(part.is_contiguous() for part in turned.contiguous().parts().values())


def test_1_2_and_1_4_mxfp4() -> None:
    codes = torch.full((1, 16), 0x21, dtype=torch.uint8)
    codes[0, 1] = 0xA3
    q = QuantTensor(codes, MXFP4, torch.tensor([[120]], dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert (q.dequantize()[0, :4] * 2**7).tolist() == [0.5, 1.0, 1.5, -1.0]


def test_1_3_scale_byte_zero_is_subnormal_not_zero() -> None:
    q = one_block(MXFP4, [6.0, 0.5] * 16, 2.0**-127)
    assert q.scales is not None
    assert q.scales.view(torch.uint8).item() == 0
    assert q.dequantize()[0, :2].tolist() == [6 * 2.0**-127, 2.0**-128]


def test_1_4_nvfp4_global_scale_multiplies() -> None:
    amax = 0.4
    weight_scale_2 = float(np.float32(amax / (6 * 448)))
    q = one_block(FORMATS["nvfp4"].encoding, [6.0, -1.5] * 8, 448.0, weight_scale_2)
    assert q.dequantize(torch.float64)[0, :2].tolist() == [6 * 448 * weight_scale_2, -1.5 * 448 * weight_scale_2]
    assert q.dequantize()[0, 0].item() == pytest.approx(amax, rel=1e-7)
    # The other dialect stores the reciprocal, 2688 / amax, and divides; mixing them up is off by the square.
    weight_global_scale = 2688 / amax
    wrong = replace(q, global_scale=torch.tensor(weight_global_scale))
    assert wrong.dequantize()[0, 0] / q.dequantize()[0, 0] == pytest.approx(weight_scale_2**-2, rel=1e-6)


def test_1_4_fp8_scale_inv_multiplies() -> None:
    q = one_block(BLOCK, [448.0, -2.0], 0.25)
    assert q.dequantize().tolist() == [[112.0, -0.5]]


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel"])
def test_1_4_fp8_scale_multiplies(name: str) -> None:
    encoding = FORMATS[name].encoding
    assert encoding.granularity is not None
    grid = encoding.granularity.scale_shape(2, 3)
    scales = torch.tensor([0.5, 2.0])[: grid[0], None]
    q = QuantTensor(encode_e4m3(torch.tensor([[1.0, 2.0, 3.0]] * 2)), encoding, scales)
    assert q.dequantize()[0].tolist() == [0.5, 1.0, 1.5]
    assert q.dequantize()[1].tolist() == ([2.0, 4.0, 6.0] if name == "fp8_channel" else [0.5, 1.0, 1.5])


def test_1_4_and_1_5_int4_symmetric() -> None:
    word = torch.tensor([[0x73B305FC]], dtype=torch.int32).view(torch.uint8)
    encoding = Encoding(element="int4", granularity=PerGroup(1, 4), scale_dtype="bfloat16")
    q = QuantTensor(word, encoding, torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16))
    assert q.dequantize().tolist() == [[2.0, 3.5, -1.5, -4.0, -10.0, 6.0, -10.0, -2.0]]


def test_1_4_int4_zero_points() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.int32).view(torch.uint8)
    encoding = Encoding(element="int4", granularity=PerGroup(1, 4), scale_dtype="float16", zero_points=True)
    scales, zeros = torch.tensor([[0.5, 2.0]], dtype=torch.float16), torch.tensor([[3, 16]], dtype=torch.uint8)
    q = QuantTensor(word, encoding, scales, zero_points=zeros)  # 16: a GPTQ zero of 15, stored less one
    assert q.dequantize().tolist() == [[-1.5, -1.0, -0.5, 0.0, -24.0, -22.0, -20.0, -18.0]]


# --- what is refused ---


@pytest.mark.parametrize(
    ("encoding", "change", "message"),
    [
        (MXFP4, {"codes": torch.zeros(4, 32, dtype=torch.int8)}, "mxfp4 codes: expected torch.uint8, got torch.int8"),
        (MXFP4, {"codes": torch.zeros(32, dtype=torch.uint8)}, r"expected \[..., N, K\], got \[32\]"),
        (MXFP4, {"scales": None}, "mxfp4 scales: expected a tensor"),
        (MXFP4, {"scales": torch.ones(4, 3).to(torch.float8_e8m0fnu)}, r"expected shape \[4, 2\], got \[4, 3\]"),
        (MXFP4, {"scales": torch.ones(4, 2)}, "expected torch.float8_e8m0fnu, got torch.float32"),
        (MXFP4, {"scales": torch.ones(4, 2, dtype=torch.uint8)}, "hint: view raw bytes, do not cast them"),
        (MXFP4, {"zero_points": torch.zeros(4, 2, dtype=torch.uint8)}, "mxfp4 zero_points: expected None"),
        (MXFP4, {"global_scale": torch.tensor(1.0)}, "mxfp4 global_scale: expected None"),
        (INT4_ZP, {"zero_points": torch.zeros(4, 2)}, "zero points: expected torch.uint8, got torch.float32"),
        (INT4_ZP, {"zero_points": torch.zeros(4, 1, dtype=torch.uint8)}, r"zero points: expected shape \[4, 2\]"),
        (FORMATS["nvfp4"].encoding, {"global_scale": torch.ones(1)}, r"global scale: expected shape \[\], got \[1\]"),
        (FORMATS["nvfp4"].encoding, {"global_scale": None}, "nvfp4 global_scale: expected a tensor"),
        (FORMATS["bf16"].encoding, {"scales": torch.ones(1, 1)}, "bf16 scales: expected None"),
    ],
)
def test_parts_that_do_not_fit(encoding: Encoding, change: dict[str, torch.Tensor | None], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        replace(random_bytes(encoding, 4, 64), **change)


def test_stacks_have_a_global_scale_each() -> None:
    q = random_bytes(FORMATS["nvfp4"].encoding, 4, 64, 3)
    with pytest.raises(FormatError, match=r"global scale: expected shape \[3\], got \[\]"):
        replace(q, global_scale=torch.tensor(1.0))


@pytest.mark.parametrize(
    "operation",
    [
        lambda q: torch.add(q, 1),
        lambda q: torch.stack([q, q]),
        lambda q: torch.cat([q]),
        lambda q: torch.nn.functional.linear(torch.ones(1, 64), q),
        lambda q: torch.zeros_like(q),
    ],
    ids=["add", "stack", "cat", "linear", "zeros_like"],
)
def test_torch_operations_raise(operation: Callable[[QuantTensor], object]) -> None:
    with pytest.raises(TypeError, match="got a QuantTensor: call"):
        operation(random_bytes(MXFP4, 4, 64))


@pytest.mark.parametrize("operation", [operator.add, operator.mul, operator.matmul])
@pytest.mark.parametrize("other", [2, torch.ones(64, 64)], ids=["number", "tensor"])
def test_operators_raise(operation: Callable[[object, object], object], other: object) -> None:
    q = random_bytes(MXFP4, 64, 64)
    for pair in ((q, other), (other, q)):
        with pytest.raises(TypeError, match="QuantTensor"):
            operation(*pair)


# --- what it says ---


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_nbytes(encoding: Encoding) -> None:
    q = random_bytes(encoding)
    held, stored = q.nbytes, encoding.nbytes(ROWS, COLUMNS)
    if encoding.zero_points:  # held as bytes, stored two a byte
        assert q.zero_points is not None
        held -= q.zero_points.numel() // 2
    assert held == stored


def test_repr() -> None:
    assert repr(random_bytes(MXFP4, 4, 64, 2)) == "QuantTensor(mxfp4, [2, 4, 64], cpu)"


def test_parts_are_in_a_fixed_order() -> None:
    assert list(random_bytes(INT4_ZP, 4, 64).parts()) == ["codes", "scales", "zero_points"]
    assert list(random_bytes(FORMATS["nvfp4"].encoding, 4, 64).parts()) == ["codes", "scales", "global_scale"]
    assert list(random_bytes(FORMATS["bf16"].encoding, 4, 64).parts()) == ["codes"]


def test_to_moves_every_part() -> None:
    q = random_bytes(FORMATS["nvfp4"].encoding, 4, 64).to("meta")
    assert {part.device.type for part in q.parts().values()} == {"meta"} == {q.device.type}
    assert q.shape == (4, 64)


# --- slices ---


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_and_columns_slice_like_numbers(encoding: Encoding) -> None:
    q = random_bytes(encoding)
    whole = q.dequantize()
    for start, stop in ((0, 128), (128, 320), (256, 320), (0, 320), (128, 128)):
        part = q.rows(start, stop)
        assert part.shape == (stop - start, COLUMNS)
        assert torch.equal(part.dequantize(), whole[start:stop])
    for start, stop in ((0, 128), (128, 288), (256, 288), (0, 288)):
        part = q.columns(start, stop)
        assert part.shape == (ROWS, stop - start)
        assert torch.equal(part.dequantize(), whole[:, start:stop])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_slices_of_a_stack(encoding: Encoding) -> None:
    q = random_bytes(encoding, 256, 256, 2)
    part = q.rows(128, 256).columns(0, 128)
    assert torch.equal(part.dequantize(), q.dequantize()[:, 128:256, 0:128])


def test_interleaved_rows() -> None:
    q = random_bytes(MXFP4, 10, 64)  # gpt-oss: gate in even rows, up in odd ones
    assert torch.equal(q.rows(0, 10, step=2).dequantize(), q.dequantize()[0::2])
    assert torch.equal(q.rows(1, 10, step=2).dequantize(), q.dequantize()[1::2])
    with pytest.raises(FormatError, match="expected step 1 across blocks, got step 2"):
        random_bytes(BLOCK).rows(0, 320, step=2)


def test_slices_are_views() -> None:
    q = random_bytes(MXFP4, 10, 64)
    for part in (q.rows(2, 8), q.columns(32, 64)):
        assert part.codes.untyped_storage().data_ptr() == q.codes.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("name", "start", "stop", "grain"),
    [("mxfp4", 16, 64, 32), ("mxfp4", 0, 48, 32), ("nvfp4", 8, 64, 16), ("int4_g128", 64, 128, 128)],
)
def test_columns_never_cut_a_group(name: str, start: int, stop: int, grain: int) -> None:
    with pytest.raises(FormatError, match=rf"columns {start}:{stop}: expected multiples of {grain}, or the end at 288"):
        random_bytes(FORMATS[name].encoding).columns(start, stop)


def test_rows_never_cut_a_block() -> None:
    with pytest.raises(FormatError, match="rows 0:192: expected multiples of 128, or the end at 320, got a cut block"):
        random_bytes(BLOCK).rows(0, 192)


def test_columns_never_cut_a_byte() -> None:
    odd = Encoding(element="int4", granularity=PerGroup(1, 3), scale_dtype="float32")
    q = random_bytes(odd, 4, 18)
    assert torch.equal(q.columns(6, 12).dequantize(), q.dequantize()[:, 6:12])
    for start, stop in ((0, 3), (3, 6), (9, 18)):
        with pytest.raises(FormatError, match="multiples of 6"):
            q.columns(start, stop)


@pytest.mark.parametrize(("start", "stop"), [(-32, 64), (0, 320), (64, 32)])
def test_slices_stay_inside(start: int, stop: int) -> None:
    with pytest.raises(FormatError, match="expected a range within 0 to 288"):
        random_bytes(MXFP4).columns(start, stop)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (64, 64), (32, 32), (128, 32), (1, 128)])
def test_refine_is_lossless(n: int, k: int) -> None:
    q = random_bytes(BLOCK)
    fine = q.refine(n, k)
    assert fine.encoding == replace(BLOCK, granularity=PerGroup(n, k))
    assert torch.equal(fine.dequantize(), q.dequantize())
    assert fine.codes is q.codes


@pytest.mark.parametrize("scale_dtype", ["e8m0", "bfloat16", "float16"])
def test_refine_keeps_the_scale_dtype(scale_dtype: str) -> None:
    q = random_bytes(replace(BLOCK, scale_dtype=scale_dtype), 320, 288, 2)  # type: ignore[arg-type]
    fine = q.refine(64, 32)
    assert torch.equal(fine.dequantize(), q.dequantize())


def test_p5_a_slice_of_192_rows_works_on_a_finer_grid() -> None:
    q = random_bytes(BLOCK, 1536, 256)
    part = q.refine(64, 64).rows(192, 384)
    assert torch.equal(part.dequantize(), q.dequantize()[192:384])


@pytest.mark.parametrize(("n", "k"), [(96, 128), (128, 256), (0, 32)])
def test_refine_only_divides(n: int, k: int) -> None:
    with pytest.raises(FormatError):
        random_bytes(BLOCK).refine(n, k)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "bf16"])
def test_refine_needs_blocks(name: str) -> None:
    with pytest.raises(FormatError, match=f"refine {name}"):
        random_bytes(FORMATS[name].encoding).refine(1, 1)


# --- stacks ---


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stack_and_index(encoding: Encoding) -> None:
    matrices = [random_bytes(encoding, 4, 256, seed=e) for e in range(3)]
    stack = QuantTensor.stack(matrices)
    assert stack.shape == (3, 4, 256)
    for e, matrix in enumerate(matrices):
        assert torch.equal(stack[e].dequantize(), matrix.dequantize())


def test_a_matrix_has_no_members() -> None:
    with pytest.raises(FormatError, match=r"expected a stack \[E, N, K\], got \[4, 64\]"):
        random_bytes(MXFP4, 4, 64)[0]


def test_stack_refuses_a_mixture() -> None:
    a, b = (random_bytes(FORMATS[name].encoding, 4, 64) for name in ("mxfp4", "nvfp4"))
    with pytest.raises(FormatError, match="matrices of one encoding and shape"):
        QuantTensor.stack([a, b])
    with pytest.raises(FormatError, match="matrices of one encoding and shape"):
        QuantTensor.stack([a, a.rows(0, 2)])
    with pytest.raises(FormatError, match="got none"):
        QuantTensor.stack([])


# --- validation ---


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_good_scales_validate(encoding: Encoding) -> None:
    random_bytes(encoding).validate("layer")


def test_byte_255_does_not_validate() -> None:
    q = random_bytes(MXFP4, 4, 64, 2)
    assert q.scales is not None
    q.scales.view(torch.uint8)[1, 2, 1] = 255
    with pytest.raises(FormatError, match=r"^down scales: expected finite numbers, got NaN or infinity at \[1, 2, 1\]"):
        q.validate("down")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
def test_bad_scales_do_not_validate(bad: float, scale_dtype: str) -> None:
    q = random_bytes(replace(BLOCK, scale_dtype=scale_dtype))  # type: ignore[arg-type]
    assert q.scales is not None
    q.scales[2, 1] = bad
    with pytest.raises(FormatError, match=r"at \[2, 1\]"):
        q.validate("up")


def test_a_bad_global_scale_does_not_validate() -> None:
    q = replace(random_bytes(FORMATS["nvfp4"].encoding), global_scale=torch.tensor(float("nan")))
    with pytest.raises(FormatError, match="up global scale: expected finite numbers, got NaN or infinity\n"):
        q.validate("up")


# --- expand_groups ---


def test_expand_groups_by_example() -> None:
    encoding = Encoding(element="e4m3", granularity=PerGroup(2, 3), scale_dtype="float32")
    spread = expand_groups(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), encoding, (3, 5))
    assert spread.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]
