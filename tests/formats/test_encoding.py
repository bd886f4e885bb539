from __future__ import annotations

from dataclasses import replace

import pytest

from polymoe.errors import FormatError
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup, PerTensor
from support.variants import ROWS, VARIANTS

MXFP4 = FORMATS["mxfp4"].encoding
NVFP4 = FORMATS["nvfp4"].encoding
INT4 = FORMATS["int4_g32"].encoding
BLOCK = FORMATS["fp8_block128"].encoding


def test_the_names_of_the_formats() -> None:
    wanted = "bf16 fp16 fp8_tensor fp8_channel fp8_block128 mxfp8 mxfp4 nvfp4 int4_g32 int4_g128"
    assert list(FORMATS) == wanted.split()
    assert [f.encoding.name for f in FORMATS.values()] == list(FORMATS)


def test_formats_cannot_be_changed_from_outside() -> None:
    with pytest.raises(TypeError):
        FORMATS["mine"] = FORMATS["mxfp4"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        (replace(INT4, granularity=PerGroup(1, 64)), "int4_g64"),
        (replace(INT4, zero_points=True), "int4_g32_zp"),
        (replace(INT4, granularity=PerChannel()), "int4_channel"),
        (replace(INT4, granularity=PerGroup(4, 32)), "int4_g4x32"),
        (replace(MXFP4, granularity=PerGroup(1, 128)), "mxfp4_1x128"),
        (replace(NVFP4, granularity=PerGroup(1, 32)), "nvfp4_1x32"),
        (replace(BLOCK, granularity=PerGroup(32, 32)), "fp8_block32"),
        (replace(BLOCK, granularity=PerGroup(1, 128)), "fp8_block1x128"),
        (replace(BLOCK, scale_dtype="bfloat16"), "fp8_block128"),
        (replace(BLOCK, granularity=PerGroup(1, 32)), "fp8_block1x32"),  # MX is E8M0 scales
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_names_of_variants(encoding: Encoding, name: str) -> None:
    assert encoding.name == str(encoding) == name


def test_names_differ_unless_only_the_scale_dtype_does() -> None:
    bare = {(e.name, replace(e, scale_dtype="float32") if e.scale_dtype else e) for e in (*ROWS, *VARIANTS)}
    assert len({name for name, _ in bare}) == len(bare)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "codes", "scales"),
    [
        pytest.param("mxfp4", 5760, 2880, (5760, 1440), (5760, 90), id="5.1-gpt-oss"),
        pytest.param("fp8_block128", 2048, 7168, (2048, 7168), (16, 56), id="5.2-deepseek-v3"),
        pytest.param("fp8_block128", 320, 4096, (320, 4096), (3, 32), id="P5-ragged-rows"),
        pytest.param("mxfp8", 2048, 6144, (2048, 6144), (2048, 192), id="mxfp8"),
        pytest.param("nvfp4", 2688, 1024, (2688, 512), (2688, 64), id="5.5-nemotron-3"),
        pytest.param("int4_g32", 2048, 7168, (2048, 3584), (2048, 224), id="5.4-kimi-k2"),
        pytest.param("fp8_channel", 1536, 5120, (1536, 5120), (1536, 1), id="5.6-glm"),
        pytest.param("fp8_tensor", 1536, 5120, (1536, 5120), (1, 1), id="1.4-per-tensor"),
    ],
)
def test_shapes(name: str, rows: int, columns: int, codes: tuple[int, int], scales: tuple[int, int]) -> None:
    encoding = FORMATS[name].encoding
    assert encoding.granularity is not None
    assert encoding.codes_shape(rows, columns) == codes
    assert encoding.granularity.scale_shape(rows, columns) == scales


@pytest.mark.parametrize(
    ("encoding", "nbytes"),
    [
        (FORMATS["bf16"].encoding, 96 * 64 * 2),
        (MXFP4, 96 * 32 + 96 * 2),
        (NVFP4, 96 * 32 + 96 * 4 + 4),
        (INT4, 96 * 32 + 96 * 2 * 2),
        (replace(INT4, zero_points=True), 96 * 32 + 96 * 2 * 2 + 96),  # two zero points a byte
        (BLOCK, 96 * 64 + 4),
        (FORMATS["fp8_channel"].encoding, 96 * 64 + 96 * 4),
        (FORMATS["fp8_tensor"].encoding, 96 * 64 + 4),
    ],
    ids=str,
)
def test_nbytes(encoding: Encoding, nbytes: int) -> None:
    assert encoding.nbytes(96, 64) == nbytes


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("mxfp4", 4.25),
        ("int4_g32", 4.5),
        ("int4_g128", 4.125),
        ("bf16", 16.0),
        ("fp8_block128", 8 + 2**-9),
        ("mxfp8", 8.25),
        ("nvfp4", pytest.approx(4.5, abs=1e-5)),  # and four bytes per matrix
    ],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    assert 8 * FORMATS[name].encoding.nbytes(4096, 4096) / 4096**2 == bits


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g32"])
def test_odd_columns_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="even number of columns"):
        FORMATS[name].encoding.codes_shape(4, 33)


def test_group_columns() -> None:
    columns = [f.encoding.group_columns for f in FORMATS.values()]
    assert columns == [1, 1, 1, 1, 128, 32, 32, 16, 32, 128]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"element": "e5m2"}, "one of .*, got 'e5m2'"),
        ({"element": "e4m3"}, "scales for elements of 8 bits or less, and only for those"),
        ({"element": "bf16", "granularity": PerTensor(), "scale_dtype": "float32"}, "scales for elements"),
        ({"element": "e4m3", "granularity": PerTensor()}, "granularity and scale_dtype together"),
        ({"element": "e4m3", "scale_dtype": "float32"}, "granularity and scale_dtype together"),
        ({"element": "e4m3", "granularity": PerTensor(), "scale_dtype": "float64"}, "Encoding.scale_dtype"),
        (
            {"element": "e2m1", "granularity": PerGroup(1, 32), "scale_dtype": "e8m0", "zero_points": True},
            "int4 elements",
        ),
        (
            {"element": "int4", "granularity": PerGroup(1, 32), "scale_dtype": "e8m0", "global_scale": True},
            "e2m1 elements",
        ),
        ({"element": "bf16", "global_scale": True}, "e2m1 elements"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Encoding(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "k"), [(0, 32), (1, 0), (-1, 32)])
def test_blocks_are_positive(n: int, k: int) -> None:
    with pytest.raises(FormatError, match="positive block sizes"):
        PerGroup(n, k)
