"""The contract of every format: what quantizing promises, for each row of FORMATS and variants of it."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

import support.plain_formats as plain
from polymoe.errors import FormatError
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup, PerTensor, QuantTensor, base, format_of
from polymoe.formats.elements import CODE_DTYPES, SCALE_DTYPES
from polymoe.formats.rules import group_reduce
from support.quantized import assert_same, bits, rough_weights
from support.variants import ENCODINGS

every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
SYMMETRIC = [p for p in ENCODINGS if not p.values[0].zero_points]  # type: ignore[union-attr]
LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "int4": 8.0}


# --- what comes out ---


@every_encoding
def test_parts(encoding: Encoding) -> None:
    f = format_of(encoding)
    q = f.quantize(rough_weights(37, 288))
    assert f.encoding == q.encoding == encoding
    assert f.name == encoding.name
    assert q.shape == (37, 288)
    assert q.codes.dtype == CODE_DTYPES[encoding.element]
    assert q.codes.is_contiguous()
    if encoding.scale_dtype is not None:
        assert q.scales is not None
        assert q.scales.dtype == SCALE_DTYPES[encoding.scale_dtype]
        signed = encoding.element == "int4" and not encoding.zero_points and encoding.scale_dtype != "e8m0"
        assert (plain.floats(q.scales) != 0).all()
        assert signed or (plain.floats(q.scales) > 0).all()
    q.validate("it")


@every_encoding
def test_dequantize(encoding: Encoding) -> None:
    f = format_of(encoding)
    q = f.quantize(rough_weights(37, 288))
    np.testing.assert_array_equal(f.dequantize(q, torch.float64).numpy(), plain.weights(q))
    np.testing.assert_allclose(f.dequantize(q).numpy(), plain.weights(q), rtol=2**-23, atol=0)


def test_dequantize_refuses_another_format() -> None:
    q = FORMATS["mxfp4"].quantize(rough_weights(4, 64))
    with pytest.raises(FormatError, match=r"nvfp4\.dequantize"):
        FORMATS["nvfp4"].dequantize(q)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_the_table_are_found_by_their_encoding(name: str) -> None:
    assert format_of(FORMATS[name].encoding) == FORMATS[name]


# --- how near it is ---


@every_encoding
@pytest.mark.parametrize("shape", [(37, 288), (320, 200), (1, 2), (3, 50)], ids=str)
def test_every_code_is_the_nearest_one(encoding: Encoding, shape: tuple[int, int]) -> None:
    """Each weight takes the element nearest to it, given its scale; zero points included."""
    w = rough_weights(*shape)
    q = format_of(encoding).quantize(w)
    x, got = w.double().numpy(), plain.weights(q)
    if encoding.scale_dtype is None:
        wanted = np.abs(w.to(CODE_DTYPES[encoding.element]).double().numpy() - x)
        np.testing.assert_array_equal(np.abs(got - x), wanted)
        return
    step = plain.steps(q)
    grid = plain.GRIDS[encoding.element]
    if q.zero_points is None:
        nearest = plain.distance_to_grid(x / step, grid)
    else:
        zero = plain.spread(q.zero_points.numpy().astype(np.float64), encoding, *shape)
        nearest = plain.distance_to_grid(x / step + zero, np.arange(16.0))
    # The quotient w / scale is rounded to float32 before it is compared.
    slack = 2**-22 * np.maximum(np.abs(x / step), LARGEST[encoding.element])
    assert (np.abs((got - x) / step) <= nearest + slack).all()


@pytest.mark.parametrize(
    "encoding",
    [p for p in SYMMETRIC if (e := p.values[0]).granularity and (e.element == "e4m3" or e.scale_dtype == "e8m0")],
)
def test_nothing_is_clipped(encoding: Encoding) -> None:
    """Scales are no smaller than the largest weight needs, up to MXFP4's own rule, where no search chooses them."""
    w = rough_weights(320, 200)
    x = w.double().numpy() / plain.steps(format_of(encoding).quantize(w))
    high = {"e2m1": 6.0, "e4m3": 448.0, "int4": 7.0}[encoding.element]
    low = -8.0 if encoding.element == "int4" else -high
    slack = 1 + 2**-22
    if encoding.element == "e2m1":
        slack = 8 / 6
    assert x.max() <= high * slack
    assert x.min() >= low * slack


@pytest.mark.parametrize(
    ("name", "most"),
    [("mxfp4", 0.1115), ("nvfp4", 0.082), ("int4_g32", 0.082), ("int4_g128", 0.098), ("fp8_block128", 0.0265)],
)
def test_error_on_normal_weights(name: str, most: float) -> None:
    """Of the usual size: MXFP4's error is between 0.1111 and 0.1126, as its scales are powers of 2."""
    w = 0.02 * torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    assert (FORMATS[name].quantize(w).dequantize() - w).norm() / w.norm() <= most


SEARCHED = ("mxfp4", "nvfp4", "int4_g32", "int4_g128")


@pytest.mark.parametrize("name", SEARCHED)
def test_weights_that_a_format_can_hold_come_back_unchanged(name: str) -> None:
    """Also those of a second scale, sign or largest code: a model that was trained in the format loses nothing."""
    once = FORMATS[name].quantize(rough_weights(256, 384)).dequantize()
    error = FORMATS[name].quantize(once).dequantize() - once
    # A largest group that was clipped gives NVFP4's matrix another global scale.
    assert error.abs().max() <= (0.05 * once.abs().max() if name == "nvfp4" else 0)


def test_nvfp4_takes_the_best_of_all_scales() -> None:
    """By brute force in float64, over every positive E4M3 number."""
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    q = FORMATS["nvfp4"].quantize(w)
    assert q.global_scale is not None
    groups = w.double().numpy().reshape(32, -1, 1, 16) / q.global_scale.item()
    scales = plain.floats(torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)).reshape(1, 1, -1, 1)
    best = ((plain.distance_to_grid(groups / scales, plain.GRIDS["e2m1"]) * scales) ** 2).sum(-1).min(-1)
    got = ((plain.weights(q) - w.double().numpy()).reshape(32, -1, 16) / q.global_scale.item()) ** 2
    np.testing.assert_allclose(got.sum(-1), best, rtol=1e-3)


@pytest.mark.parametrize("name", SEARCHED)
def test_importance_moves_the_error_to_columns_that_count_less(name: str) -> None:
    w = torch.randn(128, 512, generator=torch.Generator().manual_seed(2))
    importance = torch.logspace(-2, 2, 512)[torch.randperm(512, generator=torch.Generator().manual_seed(3))]

    def weighted(q: QuantTensor) -> float:
        return float(((q.dequantize() - w).square() * importance).sum())

    f = FORMATS[name]
    assert weighted(f.quantize(w, importance)) < (0.99 if name == "mxfp4" else 0.95) * weighted(f.quantize(w))
    assert weighted(f.quantize(w, torch.full((512,), 3.0))) == weighted(f.quantize(w))
    stacked = f.quantize(torch.stack([w, w]), torch.stack([importance, torch.ones(512)]))
    assert weighted(stacked[0]) == weighted(f.quantize(w, importance))
    assert weighted(stacked[1]) == weighted(f.quantize(w))


@pytest.mark.parametrize("bad", [torch.ones(63), -torch.ones(64), torch.full((64,), float("nan"))])
def test_importance_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(FormatError, match=r"importance: expected shape \[64\], 0 or more"):
        FORMATS["nvfp4"].quantize(torch.ones(4, 64), bad)


@pytest.mark.parametrize("k", [16, 32, 128])
def test_mxfp4_takes_the_better_of_two_scales(k: int) -> None:
    """By brute force in float64: the specification's scale, and the next larger one."""
    encoding = Encoding(element="e2m1", granularity=PerGroup(1, k), scale_dtype="e8m0")
    w = rough_weights(64, 256).double()
    q = format_of(encoding).quantize(w)
    got = (plain.weights(q) - w.numpy()) ** 2
    groups = w.numpy().reshape(64, -1, k)
    amax = np.abs(groups).max(-1, keepdims=True)
    exponent = np.floor(np.log2(np.where(amax == 0, 4, amax))) - 2
    errors = []
    for scale in (2.0**exponent, 2.0 ** (exponent + 1)):
        errors.append(((plain.distance_to_grid(groups / scale, plain.GRIDS["e2m1"]) * scale) ** 2).sum(-1))
    assert (errors[1] < errors[0]).any()
    assert (errors[1] > errors[0]).any()
    np.testing.assert_allclose(got.reshape(64, -1, k).sum(-1), np.minimum(*errors), rtol=1e-4)


def test_mxfp4_prefers_the_specification_where_both_scales_are_exact() -> None:
    q = FORMATS["mxfp4"].quantize(torch.tensor([[4.0, 2.0] * 16]))
    assert q.scales is not None
    assert plain.floats(q.scales).tolist() == [[1.0]]


@pytest.mark.parametrize("exponent", [-110, -70, 0, 70, 110])
def test_mxfp4_does_not_depend_on_the_size_of_the_weights(exponent: int) -> None:
    w = rough_weights(16, 128)
    q = FORMATS["mxfp4"].quantize(w)
    scaled = FORMATS["mxfp4"].quantize(w * 2.0**exponent)
    assert torch.equal(scaled.codes, q.codes)
    assert torch.equal(scaled.dequantize(torch.float64), q.dequantize(torch.float64) * 2.0**exponent)


def test_1_4_nvfp4_global_scale() -> None:
    w = rough_weights(3, 8, 64)
    q = FORMATS["nvfp4"].quantize(w)
    assert q.global_scale is not None
    np.testing.assert_allclose(q.global_scale.numpy(), w.abs().amax((-2, -1)).numpy() / (6 * 448), rtol=1e-6)
    assert q.scales is not None
    assert plain.floats(q.scales).max() == 448.0  # of the group with the largest weight


def test_1_3_nvfp4_group_scales() -> None:
    w = torch.zeros(1, 48)
    w[0, 0], w[0, 16] = 6 * 448.0, 1e-6  # global scale 1; the second group would need a scale below the smallest
    q = FORMATS["nvfp4"].quantize(w)
    assert q.scales is not None
    assert plain.floats(q.scales).tolist() == [[448.0, 2.0**-9, 1.0]]  # and 1 for a group of zeros


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
def test_int4_keeps_zero(scale_dtype: str) -> None:
    """With zero points a group of one sign still represents zero exactly."""
    encoding = Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype=scale_dtype, zero_points=True)  # type: ignore[arg-type]
    w = torch.rand(4, 64) + 0.5
    w[2:] *= -1
    w[:, ::3] = 0
    q = format_of(encoding).quantize(w)
    assert (q.dequantize()[:, ::3] == 0).all()
    assert q.zero_points is not None
    assert q.zero_points.tolist() == [[0, 0], [0, 0], [15, 15], [15, 15]]


@pytest.mark.parametrize("sign", [1, -1])
def test_int4_groups_of_one_sign_reach_to_zero(sign: int) -> None:
    encoding = Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype="float32", zero_points=True)
    w = sign * torch.linspace(20, 30, 32)[None]
    q = format_of(encoding).quantize(w)
    assert q.scales is not None
    assert q.scales.item() == pytest.approx(2.0)  # 30 / 15, not 10 / 15
    assert (q.dequantize() - w).abs().max() <= 1.0


def test_int4_uses_both_ends() -> None:
    w = torch.tensor([[-8.0, 7.0, 0.0, 3.0], [8.0, -7.0, 0.0, 3.0]])
    q = format_of(Encoding(element="int4", granularity=PerChannel(), scale_dtype="float32")).quantize(w)
    assert q.dequantize().tolist() == w.tolist()
    assert q.scales is not None
    assert q.scales.flatten().tolist() == [1.0, -1.0]  # +8 is no code


@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(), PerGroup(128, 128)], ids=str)
def test_fp8_e8m0_scales_are_the_next_power_of_two(granularity: PerTensor | PerChannel | PerGroup) -> None:
    f = format_of(Encoding(element="e4m3", granularity=granularity, scale_dtype="e8m0"))
    for amax, scale in ((448.0, 1.0), (449.0, 2.0), (447.0, 1.0), (224.0, 0.5), (1.0, 2.0**-8)):
        q = f.quantize(torch.tensor([[amax, 0.0]]))
        assert q.scales is not None
        assert plain.floats(q.scales).tolist() == [[scale]]


# --- again ---


@pytest.mark.parametrize("encoding", SYMMETRIC)  # with zero points the outermost codes can stay unused
def test_quantizing_again_changes_nothing(encoding: Encoding) -> None:
    f = format_of(encoding)
    w = rough_weights(64, 256, scale=1.0)
    once = f.quantize(w)
    twice = f.quantize(once.dequantize())
    # FP8 scales may differ: amax * 448 / 448 in its last bit, a power of two where the largest was rounded down.
    if encoding.element == "e4m3" and encoding.scale_dtype != "e8m0":
        assert torch.equal(bits(twice.codes), bits(once.codes))
    np.testing.assert_allclose(plain.weights(twice), plain.weights(once), rtol=2**-21 if encoding.bits < 16 else 0)
    if encoding.element == "e2m1" and not encoding.global_scale:
        assert torch.equal(twice.dequantize(), once.dequantize())


# --- awkward weights ---


@every_encoding
def test_zeros(encoding: Encoding) -> None:
    q = format_of(encoding).quantize(torch.zeros(4, 64))
    if q.scales is not None:
        assert (plain.floats(q.scales) == 1).all()
    assert torch.equal(q.dequantize(), torch.zeros(4, 64))


@every_encoding
def test_negative_zero(encoding: Encoding) -> None:
    w = torch.tensor([[0.0, -0.0, 1.0, -1.0] * 16])
    got = format_of(encoding).quantize(w).dequantize()
    assert (got[w == 0] == 0).all()
    if encoding.element != "int4":
        assert torch.equal(torch.signbit(got), torch.signbit(w))


@every_encoding
def test_tiny_weights(encoding: Encoding) -> None:
    """Down to the smallest subnormal numbers and through every scale dtype's smallest: finite, never larger."""
    for size in (1e-3, 1e-5, 1e-7, 1e-9, 1e-20, 1e-36, 1e-38, 1e-40, 1e-45):
        require_small(encoding, size)


def require_small(encoding: Encoding, size: float) -> None:
    w = torch.full((2, 64), size)
    w[0, ::2] *= -0.6
    q = format_of(encoding).quantize(w)
    if encoding.name.startswith("mxfp4") and size < 1e-37:  # every scale is 2**-127, as in a file of zeros
        with pytest.raises(FormatError, match="tiny scales: expected a scale other than 0, got only zeros"):
            q.validate("tiny")
    else:
        q.validate("tiny")
    got = q.dequantize(torch.float64)
    # No bf16, MXFP4 or FP32-scaled weight vanishes above this; the rest is bounded by what it rounds to.
    representable = {"fp16": 1e-7, "bf16": 1e-39}.get(
        encoding.element, 1e-4 if encoding.scale_dtype == "float16" else 1e-37
    )
    if size >= representable:
        assert (got != 0).all()
        assert (got - w.double()).abs().max() <= 0.35 * size
    assert got.abs().max() <= 1.5 * float(w.abs().max())


@every_encoding
def test_a_tiny_group_beside_a_large_one(encoding: Encoding) -> None:
    w = torch.full((256, 256), 3e-7)
    w[:128, :128] = 1.0
    q = format_of(encoding).quantize(w)
    q.validate("both")
    got = q.dequantize()
    assert ((got[:128, :128] - 1).abs() < 0.1).all()
    assert (got[128:, 128:].abs() < 1e-6).all()


@every_encoding
def test_huge_weights(encoding: Encoding) -> None:
    """Quantized to finite numbers of the right size, or refused: never infinity, never NaN."""
    for size in (6e4, 1e6, 1e20, 1e38, 3.4e38):
        require_large(encoding, size)


def require_large(encoding: Encoding, size: float) -> None:
    w = torch.full((2, 64), size)
    w[0, ::2] *= -0.6
    limit = {"fp16": 65504, "bf16": 3.389e38}.get(encoding.element, float("inf"))
    if encoding.scale_dtype == "float16":
        limit = 65504 * {"e4m3": 448, "int4": 15 if encoding.zero_points else 7}[encoding.element]
    if (1.6 * size if encoding.zero_points else size) > limit:  # zero points span from -0.6 to 1
        with pytest.raises(FormatError, match=r"expected (at most|weights up to)"):
            format_of(encoding).quantize(w)
        return
    try:
        q = format_of(encoding).quantize(w)
    except FormatError as error:
        assert "expected weights that are finite when rounded" in str(error)  # noqa: PT017
        assert size == 3.4e38
        return
    q.validate("huge")
    got = q.dequantize(torch.float64)
    assert torch.isfinite(q.dequantize()).all()
    assert ((got - w.double()).abs() <= 0.26 * size).all()


# --- what is refused ---


@every_encoding
def test_weights_must_be_finite(encoding: Encoding) -> None:
    w = torch.ones(4, 64)
    for bad in (float("nan"), float("inf"), -float("inf")):
        w[2, 3] = bad
        with pytest.raises(FormatError, match="finite float32 weights, got NaN or infinity"):
            format_of(encoding).quantize(w)


def test_float64_weights_must_fit_float32() -> None:
    with pytest.raises(FormatError, match="finite float32 weights"):
        FORMATS["mxfp4"].quantize(torch.full((2, 32), 1e300, dtype=torch.float64))


@pytest.mark.parametrize("name", FORMATS)
def test_odd_columns(name: str) -> None:
    f = FORMATS[name]
    if f.encoding.bits == 4:
        with pytest.raises(FormatError, match="even number of columns"):
            f.quantize(torch.ones(4, 33))
    else:
        assert torch.equal(f.quantize(torch.ones(4, 33)).dequantize(), torch.ones(4, 33))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_must_be_float_matrices(name: str) -> None:
    shapes = ((64,), (0, 64), (4, 0), (2, 0, 64))
    for w in (torch.ones(4, 64, dtype=torch.int32), *map(torch.ones, shapes)):
        with pytest.raises(FormatError, match=rf"{name}\.quantize"):
            FORMATS[name].quantize(w)


@pytest.mark.parametrize(
    ("name", "scales", "message"),
    [
        ("mxfp4", "float32", "Mxfp4: expected scales in e8m0, got float32"),
        ("nvfp4", "e8m0", "Nvfp4: expected scales in e4m3, got e8m0"),
        ("fp8_tensor", "e4m3", "Fp8: expected scales in float32 or"),
    ],
)
def test_formats_refuse_encodings_they_cannot_write(name: str, scales: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        format_of(replace(FORMATS[name].encoding, scale_dtype=scales))


# --- what the weights come as ---


@every_encoding
def test_strides_do_not_matter(encoding: Encoding) -> None:
    w = rough_weights(64, 288)
    f = format_of(encoding)
    turned = w.t().contiguous().t()
    spaced = torch.empty(64, 576)[:, ::2].copy_(w)
    assert not turned.is_contiguous()
    for other in (turned, spaced):
        q = f.quantize(other)
        assert_same(q, f.quantize(w))
        assert all(part.is_contiguous() for part in q.parts().values())


@every_encoding
def test_every_float_dtype(encoding: Encoding) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        w = rough_weights(16, 288).to(dtype)
        assert_same(format_of(encoding).quantize(w), format_of(encoding).quantize(w.float()))


@every_encoding
def test_stacks_are_quantized_matrix_by_matrix(encoding: Encoding) -> None:
    w = rough_weights(3, 40, 288)
    w[1] *= 100
    f = format_of(encoding)
    assert_same(f.quantize(w), QuantTensor.stack([f.quantize(matrix) for matrix in w]))


@every_encoding
def test_a_stack_of_nothing(encoding: Encoding) -> None:
    q = format_of(encoding).quantize(torch.empty(0, 4, 64))
    assert q.shape == (0, 4, 64)
    assert q.dequantize().shape == (0, 4, 64)


@every_encoding
def test_the_weights_are_left_alone(encoding: Encoding) -> None:
    w = rough_weights(16, 288).requires_grad_()
    before = w.detach().clone()
    q = format_of(encoding).quantize(w)
    assert torch.equal(w, before)
    assert not any(part.requires_grad for part in q.parts().values())


@every_encoding
def test_tiles_are_the_whole(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU parts of matrices are quantized side by side. 160 rows and 192 columns end within a block of 128."""
    w = torch.stack([rough_weights(160, 192), 5 * rough_weights(160, 192)])
    importance = torch.linspace(0, 1, 2 * 192).view(2, 192)
    monkeypatch.setattr(base, "_TILE", w.numel())
    whole = format_of(encoding).quantize(w, importance)
    monkeypatch.setattr(base, "_TILE", 1 << 12)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tiled = format_of(encoding).quantize(w, importance)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for name, part in whole.parts().items():
        assert torch.equal(tiled.parts()[name].view(torch.uint8), part.view(torch.uint8)), name


def test_tiles_change_no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that start meanwhile have all of torch's threads. A tile has one; later calls have the same threads."""
    monkeypatch.setattr(base, "_TILE", 1)
    before, seen = torch.get_num_threads(), list[tuple[int, str]]()
    torch.set_num_threads(2)

    def number_of_a_new_thread(_: base.MatrixTile) -> int:
        seen.append((torch.get_num_threads(), threading.current_thread().name))
        numbers: list[int] = []
        new = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
        new.start()
        new.join()
        return numbers[0]

    try:
        for _ in range(3):
            found = base.map_tiles(number_of_a_new_thread, torch.zeros(4, 8, 64), FORMATS["mxfp4"].encoding)
            assert {number for _, number in found} == {2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {number for number, _ in seen} == {1}
    assert len({name for _, name in seen}) <= 2


# --- group_reduce ---


@pytest.mark.parametrize(
    ("granularity", "amax", "amin"),
    [
        (PerTensor(), [[6.0]], [[-9.0]]),
        (PerChannel(), [[3.0], [6.0], [-7.0]], [[1.0], [4.0], [-9.0]]),
        (PerGroup(2, 2), [[5.0, 6.0], [-7.0, -9.0]], [[1.0, 3.0], [-8.0, -9.0]]),
        (PerGroup(4, 4), [[6.0]], [[-9.0]]),
    ],
    ids=str,
)
def test_group_reduce(
    granularity: PerTensor | PerChannel | PerGroup, amax: list[list[float]], amin: list[list[float]]
) -> None:
    """Blocks that reach over the edge count what they have."""
    w = torch.tensor([[1.0, 2, 3], [4, 5, 6], [-7, -8, -9]])
    encoding = Encoding(element="e4m3", granularity=granularity, scale_dtype="float32")
    assert group_reduce(w, encoding).tolist() == amax
    assert group_reduce(w, encoding, "amin").tolist() == amin
    assert group_reduce(w.expand(2, 3, 3), encoding).tolist() == [amax, amax]
