"""Every dialect against independent decoding of its bytes, and its two directions against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polymoe.checkpoint.dialects import DIALECTS, choose, headers_of, require, stored_as
from polymoe.checkpoint.dialects.base import divided, reciprocal
from polymoe.checkpoint.files import Header
from polymoe.errors import CheckpointError, FormatError
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup, PerTensor, QuantTensor, format_of

E2M1 = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
N, K = 48, 256


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def exponents(*shape: int) -> Tensor:
    return torch.randint(110, 130, shape, dtype=torch.uint8)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def zero_words(rows: int, columns: int, largest: int) -> Tensor:
    """int32 words of nibbles from 0 to ``largest``."""
    nibbles = torch.randint(0, largest + 1, (rows, columns, 8), dtype=torch.int64)
    total = sum(nibbles[..., i] << (4 * i) for i in range(8))
    return (total - ((total >> 31) << 32)).to(torch.int32)


def power(exponent: int) -> Tensor:
    return torch.tensor(2.0**exponent)


STORED = {
    "plain": lambda: {"weight": torch.randn(N, K, dtype=torch.bfloat16)},
    "deepseek": lambda: {"weight": fp8(N, K), "weight_scale_inv": torch.rand(1, 2) + 0.1},
    "deepseek_v4 fp8": lambda: {"weight": fp8(N, K), "scale": exponents(1, 2).view(torch.float8_e8m0fnu)},
    "deepseek_v4 fp4": lambda: {
        "weight": random_bytes(N, K // 2).view(torch.int8),
        "scale": exponents(N, K // 32).view(torch.float8_e8m0fnu),
    },
    "gpt_oss": lambda: {"blocks": random_bytes(N, K // 32, 16), "scales": exponents(N, K // 32)},
    "ct_float tensor": lambda: {
        "weight": fp8(N, K),
        "weight_scale": torch.rand(1) + 0.1,
        "input_scale": torch.tensor([0.25]),
    },
    "ct_float channel": lambda: {"weight": fp8(N, K), "weight_scale": torch.rand(N, 1, dtype=torch.bfloat16) + 0.1},
    "ct_float block": lambda: {"weight": fp8(N, K), "weight_scale": torch.rand(1, 2).half() + 0.1},
    "ct_int4": lambda: {
        "weight_packed": words(N, K // 8),
        "weight_scale": torch.rand(N, K // 32, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([N, K]),
    },
    "ct_int4 asymmetric": lambda: {
        "weight_packed": words(N, K // 8),
        "weight_scale": torch.rand(N, K // 64, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([N, K]),
        "weight_zero_point": zero_words(K // 64, N // 8, 15).T.contiguous(),
    },
    **{
        dialect: lambda scale=scale: {"weight": fp8(N, K), scale: exponents(N, K // 32)}
        for dialect, scale in (
            ("ct_mxfp8", "weight_scale"),
            ("modelopt_mxfp8", "weight_scale"),
            ("minimax_mxfp8", "weight_scale_inv"),
        )
    },
    "ct_mxfp4": lambda: {"weight_packed": random_bytes(N, K // 2), "weight_scale": exponents(N, K // 32)},
    "quark_mxfp4": lambda: {"weight": random_bytes(N, K // 2), "weight_scale": exponents(N, K // 32)},
    "ct_nvfp4": lambda: {
        "weight_packed": random_bytes(N, K // 2),
        "weight_scale": (torch.rand(N, K // 16) + 0.1).to(torch.float8_e4m3fn),
        "weight_global_scale": power(9).reshape(1),
        "input_global_scale": power(5).reshape(1),
    },
    "modelopt_fp8": lambda: {"weight": fp8(N, K), "weight_scale": torch.rand(()) + 0.1, "input_scale": power(-3)},
    "quark_fp8": lambda: {"weight": fp8(N, K), "weight_scale": torch.rand(()) + 0.1, "input_scale": power(-3)},
    "modelopt_nvfp4": lambda: {
        "weight": random_bytes(N, K // 2),
        "weight_scale": (torch.rand(N, K // 16) + 0.1).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.rand(()) + 0.1,
        "input_scale": torch.rand(()) + 0.1,
    },
    "gptq": lambda: {
        "qweight": words(K // 8, N),
        "qzeros": zero_words(K // 128, N // 8, 14),
        "scales": torch.rand(K // 128, N).half(),
        "g_idx": torch.arange(K, dtype=torch.int32) // 128,
    },
    "gptq_v2": lambda: {
        "qweight": words(K // 8, N),
        "qzeros": zero_words(K // 128, N // 8, 15),
        "scales": torch.rand(K // 128, N).half(),
        "g_idx": torch.arange(K, dtype=torch.int32) // 128,
    },
    "awq": lambda: {
        "qweight": words(K, N // 8),
        "qzeros": zero_words(K // 128, N // 8, 15),
        "scales": torch.rand(K // 128, N).half(),
    },
}
ENCODINGS = {
    "plain": "bf16",
    "deepseek": "fp8_block128",
    "deepseek_v4 fp8": "fp8_block128",
    "deepseek_v4 fp4": "mxfp4",
    "gpt_oss": "mxfp4",
    "ct_float tensor": "fp8_tensor",
    "ct_float channel": "fp8_channel",
    "ct_float block": "fp8_block128",
    "ct_int4": "int4_g32",
    "ct_int4 asymmetric": "int4_g64_zp",
    "ct_mxfp8": "mxfp8",
    "modelopt_mxfp8": "mxfp8",
    "minimax_mxfp8": "mxfp8",
    "ct_mxfp4": "mxfp4",
    "quark_mxfp4": "mxfp4",
    "ct_nvfp4": "nvfp4",
    "modelopt_fp8": "fp8_tensor",
    "quark_fp8": "fp8_tensor",
    "modelopt_nvfp4": "nvfp4",
    "gptq": "int4_g128_zp",
    "gptq_v2": "int4_g128_zp",
    "awq": "int4_g128_zp",
}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def stored(case: str) -> dict[str, Tensor]:
    torch.manual_seed(sorted(STORED).index(case))
    return STORED[case]()


def dialect(case: str):
    return DIALECTS[case.split()[0]]


def nibble(word: int, i: int) -> int:
    return (word >> (4 * i)) & 15


def decode_by_hand(case: str, t: dict[str, Tensor], n: int, k: int) -> float:
    """One weight, straight from the stored tensors, by the table in the formats' description."""
    name = case.split()[0]
    if name == "plain":
        return float(t["weight"][n, k])
    if "weight" in t and t["weight"].dtype == torch.float8_e4m3fn:
        scale = next(t[s] for s in ("weight_scale_inv", "scale", "weight_scale") if s in t)
        if scale.dtype == torch.uint8:
            return float(t["weight"][n, k].float()) * 2.0 ** (int(scale[n, k // 32]) - 127)
        scale = scale.float()
        at = scale.reshape(-1)[0] if scale.numel() == 1 else scale[n, 0] if scale.shape[0] == N else scale[0, k // 128]
        return float(t["weight"][n, k].float() * at)
    if name == "gpt_oss":
        code = nibble(int(t["blocks"][n, k // 32, (k % 32) // 2]), k % 2)
        return E2M1[code] * 2.0 ** (int(t["scales"][n, k // 32]) - 127)
    if "fp4" in case:
        code = nibble(int(t.get("weight_packed", t.get("weight"))[n, k // 2]) & 255, k % 2)
        scale = t.get("weight_scale", t.get("scale"))
        if "nvfp4" not in case:
            return E2M1[code] * 2.0 ** (int(scale.view(torch.uint8)[n, k // 32]) - 127)
        factor = t["weight_scale_2"] if "weight_scale_2" in t else 1 / t["weight_global_scale"]
        return float(E2M1[code] * scale[n, k // 16].float() * factor)
    if name == "ct_int4":
        group = K // t["weight_scale"].shape[1]
        zero = 8
        if "weight_zero_point" in t:
            zero = nibble(int(t["weight_zero_point"][n // 8, k // group]), n % 8)
        return (nibble(int(t["weight_packed"][n, k // 8]), k % 8) - zero) * float(t["weight_scale"][n, k // group])
    scale = float(t["scales"][k // 128, n])
    if name in ("gptq", "gptq_v2"):
        zero = nibble(int(t["qzeros"][k // 128, n // 8]), n % 8) + (name == "gptq")
        return (nibble(int(t["qweight"][k // 8, n]), k % 8) - zero) * scale
    position = AWQ_ORDER.index(n % 8)
    zero = nibble(int(t["qzeros"][k // 128, n // 8]), position)
    return (nibble(int(t["qweight"][k, n // 8]), position) - zero) * scale


@pytest.mark.parametrize("case", STORED)
def test_reads_what_the_bytes_mean(case: str):
    tensors = stored(case)
    matrix = dialect(case).read(tensors, (N, K))
    assert matrix.encoding.name == ENCODINGS[case]
    numbers = matrix.dequantize()
    for n, k in [(0, 0), (0, 1), (1, 0), (7, 8), (9, 127), (13, 128), (30, 33), (47, 255), (46, 130)]:
        expected = decode_by_hand(case, tensors, n, k)
        assert float(numbers[n, k]) == pytest.approx(expected, rel=1e-6), (n, k)


@pytest.mark.parametrize("case", STORED)
def test_write_undoes_read_to_the_byte(case: str):
    tensors, d = stored(case), dialect(case)
    back = d.write(d.read(tensors, (N, K)), d.input_scale(tensors))
    assert headers_of(back) == headers_of(tensors)
    for suffix, tensor in tensors.items():
        assert same_bytes(back[suffix], tensor), suffix


@pytest.mark.parametrize("case", STORED)
def test_read_undoes_write(case: str):
    """From our own quantization, sizes that are not a multiple of 128."""
    d, rows, columns = dialect(case), 40, 96
    encoding = dialect(case).read(stored(case), (N, K)).encoding
    if encoding.group_columns > 32 and encoding.element == "int4":
        encoding = Encoding(
            element="int4",
            granularity=PerGroup(1, 32),
            scale_dtype=encoding.scale_dtype,
            zero_points=encoding.zero_points,
        )
    matrix = format_of(encoding).quantize(torch.randn(rows, columns) + (1.0 if encoding.zero_points else 0.0))
    if case == "gptq":
        assert matrix.zero_points is not None
        matrix.zero_points.clamp_(min=1)  # GPTQ has no zero point of 0
    if case == "ct_nvfp4":
        assert matrix.global_scale is not None
        matrix.global_scale.copy_(1 / (1 / matrix.global_scale))
    again = d.read(d.write(matrix), (rows, columns), encoding)
    assert again.encoding == encoding
    for name, part in matrix.parts().items():
        assert same_bytes(again.parts()[name], part), name


VIEWS = [
    "plain",
    "deepseek",
    "minimax_mxfp8",
    "deepseek_v4 fp4",
    "gpt_oss",
    "ct_int4",
    "ct_mxfp4",
    "quark_mxfp4",
    "ct_nvfp4",
    "modelopt_nvfp4",
]


@pytest.mark.parametrize("case", VIEWS)
def test_codes_and_scales_are_views_of_what_is_stored(case: str):
    tensors = stored(case)
    pointers = {t.data_ptr() for t in tensors.values()}
    matrix = dialect(case).read(tensors, (N, K))
    assert matrix.codes.data_ptr() in pointers
    assert matrix.scales is None or matrix.scales.data_ptr() in pointers


def test_golden_words():
    """compressed-tensors packs a row's columns, GPTQ a column's rows, AWQ a row's columns in its own order."""
    signed = torch.tensor([[4, 7, -3, -8, -5, 3, -5, -1]]).repeat(1, 4)
    codes = (signed + 8).to(torch.uint8)
    matrix = QuantTensor(
        codes[:, 0::2] | (codes[:, 1::2] << 4), FORMATS["int4_g32"].encoding, torch.ones(1, 1, dtype=torch.bfloat16)
    )
    assert int(DIALECTS["ct_int4"].write(matrix)["weight_packed"][0, 0]) == 0x73B305FC
    rising = torch.arange(8, dtype=torch.uint8)
    down = rising.repeat(4).repeat(8, 1)  # [N=8, K=32], a row's codes 0 to 7 again and again
    ones = torch.ones(8, 1, dtype=torch.bfloat16)
    matrix = QuantTensor(down[:, 0::2] | (down[:, 1::2] << 4), FORMATS["int4_g32"].encoding, ones)
    assert int(DIALECTS["gptq"].write(matrix)["qweight"][0, 0]) == 0x76543210
    across = rising[:, None].repeat(1, 32)
    matrix = QuantTensor(across[:, 0::2] | (across[:, 1::2] << 4), FORMATS["int4_g32"].encoding, ones)
    assert int(DIALECTS["awq"].write(matrix)["qweight"][0, 0]) == 0x75316420


def test_symmetric_gptq_leaves_its_zero_points_out():
    tensors = stored("gptq") | {"qzeros": torch.full((K // 128, N // 8), 0x77777777, dtype=torch.int32)}
    hint = Encoding(element="int4", granularity=PerGroup(1, 128), scale_dtype="bfloat16")
    matrix = DIALECTS["gptq"].read(tensors, (N, K), hint)
    assert matrix.zero_points is None
    assert torch.equal(DIALECTS["gptq"].write(matrix)["qzeros"], tensors["qzeros"])
    with pytest.raises(FormatError, match="8 everywhere"):
        DIALECTS["gptq"].read(stored("gptq"), (N, K), hint)


def test_gptq_has_no_zero_point_of_0():
    matrix = format_of(DIALECTS["awq"].read(stored("awq"), (N, K)).encoding).quantize(torch.rand(N, K))
    assert matrix.zero_points is not None
    assert not matrix.zero_points.any()  # positive weights
    with pytest.raises(FormatError, match="zero points from 1"):
        DIALECTS["gptq"].write(matrix)


def test_modelopt_and_compressed_tensors_global_scales_are_reciprocal():
    modelopt, compressed = stored("modelopt_nvfp4"), stored("ct_nvfp4")
    modelopt["weight_scale_2"] = power(-9)
    modelopt["weight"], modelopt["weight_scale"] = compressed["weight_packed"], compressed["weight_scale"]
    a = DIALECTS["modelopt_nvfp4"].read(modelopt, (N, K)).dequantize()
    b = DIALECTS["ct_nvfp4"].read(compressed, (N, K)).dequantize()
    assert torch.equal(a, b)
    assert DIALECTS["ct_nvfp4"].input_scale(compressed) == 2.0**-5


def test_reciprocals_read_back_the_same():
    torch.manual_seed(0)
    divisors = torch.rand(20000) * 1000 + 0.001
    factors = divisors.reciprocal()
    assert torch.equal(reciprocal(factors).reciprocal(), factors)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_input_scales_that_were_never_calibrated_are_none(value: float):
    for case in ("modelopt_nvfp4", "ct_nvfp4", "modelopt_fp8", "ct_float tensor"):
        tensors = stored(case)
        suffix = next(s for s in tensors if s.startswith("input"))
        assert dialect(case).input_scale(tensors) is not None
        tensors[suffix] = torch.full_like(tensors[suffix], value)
        assert dialect(case).input_scale(tensors) is None
        del tensors[suffix]
        assert dialect(case).input_scale(tensors) is None


@pytest.mark.parametrize(
    ("shape", "rows_of_scales", "hint", "block"),
    [
        ((192, 256), 2, None, 128),  # ceil(192 / 128) = 2, a ragged last block
        ((320, 256), 3, None, 128),
        ((192, 256), 3, None, 64),
        ((256, 256), 8, None, 32),
        ((192, 256), 2, 96, 96),  # only the config can tell 96 from 128
    ],
)
def test_block_size_comes_from_the_grid(shape, rows_of_scales, hint, block):
    known = hint or block
    columns = -(-shape[1] // known)
    headers = {"weight": Header("F8_E4M3", shape), "weight_scale_inv": Header("F32", (rows_of_scales, columns))}
    told = Encoding(element="e4m3", granularity=PerGroup(hint, hint), scale_dtype="float32") if hint else None
    encoding = DIALECTS["deepseek"].detect(headers, shape, told)
    assert encoding.granularity == PerGroup(block, block)


def test_a_single_block_is_a_tensor_scale_unless_the_config_says_block():
    headers = {"weight": Header("F8_E4M3", (64, 64)), "weight_scale_inv": Header("F32", (1, 1))}
    assert DIALECTS["deepseek"].detect(headers, (64, 64)).granularity == PerTensor()
    block = FORMATS["fp8_block128"].encoding
    assert DIALECTS["deepseek"].detect(headers, (64, 64), block).granularity == PerGroup(128, 128)


def test_group_size_comes_from_the_scales():
    """Repacks with another group size exist; the config's is not asked."""
    tensors = stored("deepseek_v4 fp4") | {"scale": exponents(N, K // 128).view(torch.float8_e8m0fnu)}
    assert DIALECTS["deepseek_v4"].read(tensors, (N, K)).encoding.granularity == PerGroup(1, 128)


def test_groups_that_do_not_fit_the_columns_are_refused_with_a_hint():
    with pytest.raises(FormatError, match=r"(?s)divides 97 columns, got 6\n.*config and tensors of one model"):
        divided(97, 6, "scales")


def test_channel_int4():
    tensors = stored("ct_int4") | {"weight_scale": torch.rand(N, 1, dtype=torch.bfloat16)}
    hint = Encoding(element="int4", granularity=PerChannel(), scale_dtype="bfloat16")
    assert DIALECTS["ct_int4"].read(tensors, (N, K), hint).encoding.granularity == PerChannel()
    assert DIALECTS["ct_int4"].read(tensors, (N, K)).encoding.granularity == PerGroup(1, K)


@pytest.mark.parametrize(
    ("case", "suffix", "change"),
    [
        ("plain", "weight", lambda t: t.float()),
        ("plain", "weight", lambda t: t[:-1]),
        ("plain", "weight", lambda t: t.to(torch.float8_e4m3fn)),
        ("deepseek", "weight", lambda t: t.view(torch.uint8)),
        ("deepseek", "weight_scale_inv", lambda t: t[:, :1].repeat(1, 3)),
        ("deepseek", "weight_scale_inv", lambda t: t.to(torch.int32)),
        ("deepseek_v4 fp4", "weight", lambda t: t.to(torch.int32)),
        ("deepseek_v4 fp4", "scale", lambda t: t.float()),
        ("gpt_oss", "blocks", lambda t: t[:, :, :8]),
        ("gpt_oss", "scales", lambda t: t[:, :5]),
        ("gpt_oss", "scales", lambda t: t[:-1]),
        ("ct_int4", "weight_packed", lambda t: t.to(torch.int64)),
        ("ct_int4", "weight_scale", lambda t: t[:-1]),
        ("ct_int4", "weight_shape", lambda t: t + 1),
        ("ct_int4", "weight_shape", lambda t: t.float()),
        ("ct_int4 asymmetric", "weight_zero_point", lambda t: t[:-1]),
        ("ct_nvfp4", "weight_scale", lambda t: t.view(torch.uint8)),
        ("ct_nvfp4", "weight_global_scale", torch.zeros_like),
        ("modelopt_nvfp4", "weight_scale_2", lambda t: t.repeat(2)),
        ("modelopt_nvfp4", "weight_scale_2", lambda t: t.half()),
        ("gptq", "qweight", lambda t: t.T.contiguous()),
        ("gptq", "qzeros", lambda t: torch.full_like(t, -1)),
        ("gptq", "g_idx", lambda t: t.flip(0)),
        ("awq", "scales", lambda t: t[:, :-8]),
    ],
)
def test_wrong_tensors_are_refused_by_name(case: str, suffix: str, change):
    tensors = stored(case)
    tensors[suffix] = change(tensors[suffix])
    with pytest.raises(FormatError) as refusal:
        dialect(case).read(tensors, (N, K))
    assert refusal.value.where == suffix
    assert refusal.value.expected


def test_reordered_columns_are_refused():
    tensors = stored("ct_int4") | {"weight_g_idx": torch.zeros(K, dtype=torch.int32)}
    with pytest.raises(FormatError, match="desc_act"):
        DIALECTS["ct_int4"].read(tensors, (N, K))


@pytest.mark.parametrize("case", STORED)
def test_rewrite_gives_back_what_was_stored(case: str):
    """Also unusual dtypes and shapes, divisors whose reciprocals collide, and scales that were never calibrated."""
    tensors, d = stored(case), dialect(case)
    if "weight_shape" in tensors:
        tensors["weight_shape"] = tensors["weight_shape"].to(torch.int32)
    if tensors.get("weight", tensors.get("weight_packed", torch.empty(0))).dtype == torch.int8:
        tensors["weight"] = tensors["weight"].view(torch.uint8)
    if "input_scale" in tensors:
        tensors["input_scale"] = torch.full_like(tensors["input_scale"], float("nan"))
    tensors.pop("g_idx", None)
    for value in torch.linspace(1.0, 2.0, 40) if "weight_global_scale" in tensors else [None]:
        if value is not None:
            tensors["weight_global_scale"], tensors["input_global_scale"] = value.reshape(()), value.reshape(())
        again = d.rewrite(d.read(tensors, (N, K)), tensors)
        assert headers_of(again) == headers_of(tensors)
        assert all(same_bytes(again[s], t) for s, t in tensors.items())


def test_rewrite_shows_what_is_lost():
    tensors, d = stored("ct_nvfp4"), DIALECTS["ct_nvfp4"]
    matrix = d.read(tensors, (N, K))
    assert matrix.global_scale is not None
    other = replace(matrix, codes=matrix.codes ^ 1, global_scale=matrix.global_scale * 2)
    again = d.rewrite(other, tensors)
    assert not same_bytes(again["weight_packed"], tensors["weight_packed"])
    assert not same_bytes(again["weight_global_scale"], tensors["weight_global_scale"])


@pytest.mark.parametrize("name", DIALECTS)
def test_no_dialect_takes_what_it_cannot_hold(name: str):
    wrong = "int4_g32" if DIALECTS[name].required[0] in ("weight", "blocks") else "bf16"
    if name in ("ct_mxfp4", "ct_nvfp4"):
        wrong = "int4_g32"
    with pytest.raises(FormatError, match=name):
        DIALECTS[name].write(FORMATS[wrong].quantize(torch.randn(32, 64)))


@pytest.mark.parametrize("case", STORED)
def test_choose_finds_the_dialect_whatever_the_config_says(case: str):
    """Tensors take precedence: a config with another dialect changes nothing where tensors tell them apart."""
    headers = headers_of(stored(case))
    named = "gpt_oss" if case != "gpt_oss" else "plain"
    found, encoding = choose(headers, (N, K), named)
    assert encoding.name == ENCODINGS[case]
    alike = {
        "modelopt_fp8": "ct_float",
        "quark_fp8": "ct_float",
        "modelopt_mxfp8": "ct_mxfp8",
        "gptq_v2": "gptq",
        "ct_mxfp4": "ct_mxfp4",
    }
    assert found.name == alike.get(case.split()[0], case.split()[0])


def test_choose_prefers_the_configured_dialect():
    headers = headers_of(stored("modelopt_fp8"))
    assert choose(headers, (N, K), "modelopt_fp8")[0].name == "modelopt_fp8"
    assert choose(headers, (N, K), "ct_float")[0].name == "ct_float"


@pytest.mark.parametrize("case", [case for case in STORED if case != "plain"])
def test_a_missing_scale_is_an_error_that_names_it(case: str):
    needed = dialect(case).required
    for suffix in needed[1:]:
        headers = headers_of(stored(case))
        del headers[suffix]
        with pytest.raises((CheckpointError, FormatError)) as refusal:
            choose(headers, (N, K), case.split()[0])
        assert refusal.value.where == suffix
        with pytest.raises(CheckpointError, match=suffix):
            require(dialect(case), headers)


def test_fp8_weights_alone_are_no_plain_weights():
    with pytest.raises(FormatError, match="needs its scale"):
        choose({"weight": Header("F8_E4M3", (N, K))}, (N, K), "plain")


def test_stored_as_gives_back_unusual_dtypes_and_shapes():
    tensors = stored("ct_int4")
    written = stored_as(tensors, {"weight_shape": Header("I32", (2,))})
    assert written["weight_shape"].dtype == torch.int32
    fp4 = stored("deepseek_v4 fp4")
    assert stored_as(fp4, {"weight": Header("U8", (N, K // 2))})["weight"].dtype == torch.uint8
    scalar = stored_as(stored("modelopt_fp8"), {"weight_scale": Header("F32", (1, 1))})
    assert scalar["weight_scale"].shape == (1, 1)
    with pytest.raises(FormatError, match="weight_scale"):
        stored_as(stored("modelopt_fp8"), {"weight_scale": Header("F32", (2,))})
