"""parse_quantization: every method, wherever it lives; per-layer maps, targets and ignore lists."""

from __future__ import annotations

import time
from typing import Any

import pytest

from polymoe.checkpoint.config import Scheme, parse_quantization
from polymoe.checkpoint.dialects import DIALECTS
from polymoe.checkpoint.scheme import exact_or_regex, matcher
from polymoe.errors import CheckpointError
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup
from polymoe.problem.activation_quantization import FP8_GROUP128, FP8_STATIC, FP8_TOKEN, MXFP8, UNQUANTIZED
from support.configs import CONFIGS, FP8_BLOCK, FP8_CHANNEL, INT4_G32, KIMI_IGNORE, compressed, config

QWEN_UP = "model.layers.3.mlp.experts.0.up_proj"
V4_UP = "layers.3.ffn.experts.0.w3"
INT4_FP16 = Encoding(element="int4", granularity=PerGroup(1, 128), scale_dtype="float16")

MX_GROUPS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def encoding(name: str, scale_dtype: Any = None) -> Encoding:
    """The named format's encoding, with scales of another dtype if given."""
    usual = FORMATS[name].encoding
    if scale_dtype is None:
        return usual
    return Encoding(element=usual.element, granularity=usual.granularity, scale_dtype=scale_dtype)


def qwen(section: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return config("qwen3-bf16") | {"quantization_config": section} | changed


def qwen_scheme(section: dict[str, Any], module: str = QWEN_UP) -> Scheme:
    return parse_quantization(qwen(section)).scheme(module)


PLAIN = Scheme("plain", encoding("bf16"))
NVFP4 = Scheme("modelopt_nvfp4", encoding("nvfp4"))
DEEPSEEK = Scheme("deepseek", encoding("fp8_block128"), FP8_GROUP128)
DEEPSEEK_V4 = Scheme("deepseek_v4", encoding("fp8_block128"), FP8_GROUP128)
FP8 = Scheme("modelopt_fp8", encoding("fp8_tensor"), FP8_STATIC)
BY_CHANNEL = Scheme("ct_float", encoding("fp8_channel", "bfloat16"), FP8_TOKEN)
INT4 = Scheme("ct_int4", encoding("int4_g32"))


@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("gpt-oss-mxfp4", "model.layers.0.mlp.experts.gate_up_proj", Scheme("gpt_oss", encoding("mxfp4"))),
        ("gpt-oss-mxfp4", "model.layers.0.self_attn.q_proj", PLAIN),
        ("gpt-oss-mxfp4", "model.layers.11.mlp.router", PLAIN),
        ("gpt-oss-bf16", "model.layers.0.mlp.experts.gate_up_proj", PLAIN),
        ("deepseek-v3-fp8", "model.layers.3.mlp.experts.0.gate_proj", DEEPSEEK),
        ("deepseek-v3.1-ue8m0", "model.layers.3.mlp.experts.0.down_proj", DEEPSEEK),
        ("deepseek-v4-fp4", V4_UP, Scheme("deepseek_v4", encoding("mxfp4"), FP8_GROUP128)),
        ("deepseek-v4-fp4", "layers.3.ffn.shared_experts.w3", DEEPSEEK_V4),
        ("deepseek-v4-base-fp8", V4_UP, DEEPSEEK_V4),
        ("deepseek-v4-nvfp4", V4_UP, NVFP4),
        ("deepseek-v4-nvfp4", "mtp.0.ffn.experts.0.w3", PLAIN),
        ("kimi-k2-thinking-int4", "model.layers.1.mlp.experts.7.down_proj", INT4),
        ("kimi-k2-thinking-int4", "model.layers.0.mlp.gate_proj", PLAIN),
        ("kimi-k2-thinking-int4", "model.layers.1.mlp.shared_experts.up_proj", PLAIN),
        ("kimi-k2.5-int4", "language_model.model.layers.1.mlp.experts.7.down_proj", INT4),
        ("nemotron-3-nvfp4", "backbone.layers.1.mixer.experts.5.up_proj", NVFP4),
        ("nemotron-3-nvfp4", "backbone.layers.1.mixer.shared_experts.up_proj", FP8),
        ("nemotron-3-nvfp4", "backbone.layers.1.mixer.fc1_latent_proj", PLAIN),
        ("glm-4.7-fp8-channel", "model.layers.3.mlp.experts.0.up_proj", BY_CHANNEL),
        ("glm-4.7-fp8-channel", "model.layers.3.mlp.shared_experts.up_proj", PLAIN),
        ("glm-4.7-nvfp4", "model.layers.3.mlp.experts.0.up_proj", NVFP4),
        ("glm-4.7-nvfp4", "model.layers.0.mlp.up_proj", PLAIN),
        ("glm-4.7-nvfp4", "model.layers.3.self_attn.q_proj", PLAIN),
        ("glm-4.5-air-nvfp4-ct", "model.layers.3.mlp.experts.0.up_proj", Scheme("ct_nvfp4", encoding("nvfp4"))),
        ("qwen3-fp8", QWEN_UP, Scheme("deepseek", encoding("fp8_block128", "bfloat16"), FP8_GROUP128)),
        ("qwen3-fp8", "model.layers.3.mlp.gate", PLAIN),
        ("qwen3-gptq", QWEN_UP, Scheme("gptq", INT4_FP16)),
        ("qwen3-gptq", "model.layers.3.mlp.gate", Scheme("plain", encoding("fp16"))),
        (
            "qwen3-awq",
            QWEN_UP,
            Scheme(
                "awq", Encoding(element="int4", granularity=PerGroup(1, 128), scale_dtype="float16", zero_points=True)
            ),
        ),
        ("qwen3-awq", "model.layers.3.mlp.gate", Scheme("plain", encoding("fp16"))),
        ("mixtral-fp8-static", "model.layers.0.block_sparse_moe.experts.0.w1", FP8),
        ("llama4-fp8-channel", "language_model.model.layers.1.feed_forward.experts.0.up_proj", BY_CHANNEL),
        ("llama4-fp8-channel", "language_model.model.layers.1.feed_forward.shared_expert.up_proj", PLAIN),
    ],
)
def test_schemes_of_famous_checkpoints(name: str, module: str, expected: Scheme) -> None:
    assert parse_quantization(config(name)).scheme(module) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_every_scheme_has_a_dialect(name: str) -> None:
    assert parse_quantization(config(name)).default().dialect in DIALECTS


def test_where_the_description_lives() -> None:
    base, section = config("qwen3-bf16"), config("kimi-k2-thinking-int4")["quantization_config"]
    wrapper = {"model_type": "kimi_k25", "text_config": config("kimi-k2-bf16")}
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    for found in (
        base | {"quantization_config": section},
        base | {"compression_config": section},
        base | {"compression_config": {k: v for k, v in section.items() if k != "quant_method"}},
        wrapper | {"text_config": wrapper["text_config"] | {"quantization_config": section}},
        wrapper | {"text_config": wrapper["text_config"] | {"compression_config": section}},
        wrapper | {"quantization_config": section},
    ):
        quantization = parse_quantization(found)
        assert quantization.quantized
        assert quantization.method == "compressed-tensors"
        assert quantization.scheme(QWEN_UP).dialect == "ct_int4"
    assert parse_quantization(base, side).scheme(QWEN_UP) == NVFP4
    assert parse_quantization(base, side).scheme("lm_head").dialect == "plain"
    # What config.json says comes before the side file.
    assert parse_quantization(base | {"quantization_config": section}, side).scheme(QWEN_UP).dialect == "ct_int4"
    for nothing in (base, base | {"quantization_config": None}, base | {"quantization_config": {}}):
        assert not parse_quantization(nothing).quantized
        assert parse_quantization(nothing).scheme(QWEN_UP) == PLAIN


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_models_own_dtype(key: str) -> None:
    base = {k: v for k, v in config("qwen3-bf16").items() if "dtype" not in k}
    assert parse_quantization(base | {key: "float16"}).scheme(QWEN_UP) == Scheme("plain", encoding("fp16"))
    assert parse_quantization(base).scheme(QWEN_UP) == PLAIN


def test_modelopt_per_layer_map_may_be_in_the_side_file() -> None:
    nemotron = config("nemotron-3-nvfp4")
    layers = nemotron["quantization_config"].pop("quantized_layers")
    module = "backbone.layers.1.mixer.experts.5.up_proj"
    side = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    assert parse_quantization(nemotron, side).scheme(module).dialect == "modelopt_nvfp4"
    with pytest.raises(CheckpointError, match="quantized_layers"):
        parse_quantization(nemotron)


@pytest.mark.parametrize(
    "key",
    ["model.layers.3.mlp.experts.0.up_proj", "model.layers.3.mlp.experts", "layers.3.mlp", "backbone.layers.3.mlp"],
)
def test_modelopt_per_layer_map_names_a_module_or_what_lies_above(key: str) -> None:
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
    section["quantized_layers"] = {key: {"quant_algo": "NVFP4"}, "model.layers.4": {"quant_algo": "FP8"}}
    assert qwen_scheme(section).dialect == "modelopt_nvfp4"
    assert qwen_scheme(section, "model.layers.4.mlp.experts.0.up_proj").dialect == "modelopt_fp8"
    assert qwen_scheme(section, "model.layers.30.mlp.experts.0.up_proj").dialect == "plain"


def test_stacked_experts_take_the_scheme_of_their_single_modules() -> None:
    layers = {"model.layers.3.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"}}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert qwen_scheme(section, "model.layers.3.mlp.experts.gate_up_proj").dialect == "modelopt_nvfp4"
    assert qwen_scheme(section, "model.layers.4.mlp.experts.gate_up_proj").dialect == "plain"


def test_the_per_layer_map_counts_more_than_the_ignore_list() -> None:
    # Released mixed-precision checkpoints list modules as excluded that are stored quantized.
    section = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["model.layers.3*", "model.layers.5*"],
        "quantized_layers": {"model.layers.3.mlp.experts": {"quant_algo": "NVFP4"}},
    }
    assert qwen_scheme(section).dialect == "modelopt_nvfp4"
    assert (
        qwen_scheme(section | {"quant_algo": "FP8"}, "model.layers.4.mlp.experts.0.up_proj").dialect == "modelopt_fp8"
    )
    assert qwen_scheme(section | {"quant_algo": "FP8"}, "model.layers.5.mlp.experts.0.up_proj").dialect == "plain"


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("FP8", FP8),
        ("FP8_PER_CHANNEL_PER_TOKEN", Scheme("ct_float", encoding("fp8_channel"), FP8_TOKEN)),
        ("fp8_pb_wo", Scheme("ct_float", encoding("fp8_block128"))),
        ("FP8_BLOCK_SCALES", Scheme("ct_float", encoding("fp8_block128"))),
        ("W4A16_NVFP4", NVFP4),
        ("MXFP8", Scheme("modelopt_mxfp8", encoding("mxfp8"), MXFP8)),
    ],
)
def test_modelopt_algorithms(algorithm: str, expected: Scheme) -> None:
    assert qwen_scheme({"quant_method": "modelopt", "quant_algo": algorithm}) == expected
    assert qwen_scheme({"quant_method": "modelopt_fp4", "quantization": {"quant_algo": algorithm}}) == expected
    assert qwen_scheme({"quant_algo": algorithm}) == expected


def test_minimax_mxfp8() -> None:
    """MiniMax-M3 names its method mxfp8; what it calls its block does not matter."""
    section = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["model.layers.0.mlp.gate"]}
    assert qwen_scheme(section) == Scheme("minimax_mxfp8", encoding("mxfp8"), MXFP8)
    assert qwen_scheme(section, "model.layers.0.mlp.gate").dialect == "plain"


def test_deepseek_v4_repack_without_a_map_means_all_routed_experts() -> None:
    v4 = config("deepseek-v4-nvfp4")
    del v4["quantization_config"]["quantized_layers"]
    quantization = parse_quantization(v4)
    assert quantization.scheme(V4_UP) == NVFP4
    assert quantization.scheme("layers.3.ffn.shared_experts.w3").dialect == "deepseek_v4"


@pytest.mark.parametrize(("where", "dtype"), [("text", "fp4"), ("section", "fp4"), ("none", "fp4"), ("section", "fp8")])
def test_deepseek_v4_expert_dtype(where: str, dtype: str) -> None:
    v4 = config("deepseek-v4-fp4")
    del v4["expert_dtype"]
    if where != "none":
        (v4 if where == "text" else v4["quantization_config"])["expert_dtype"] = dtype
    expected = encoding("mxfp4" if dtype == "fp4" else "fp8_block128")
    assert parse_quantization(v4).scheme(V4_UP).encoding == expected


def test_deepseek_v4_expert_dtype_that_is_not_known() -> None:
    with pytest.raises(CheckpointError, match="expert_dtype: expected fp4 or fp8, got 'fp6'"):
        parse_quantization(config("deepseek-v4-fp4") | {"expert_dtype": "fp6"})


def test_deepseek_v41_blocks_are_32_by_32() -> None:
    text = config("deepseek-v4-fp4")
    section = text.pop("quantization_config") | {"weight_block_size": [32, 32], "expert_dtype": "fp8"}
    scheme = parse_quantization({"model_type": "deepseek_v41", "text_config": text, "quantization_config": section})
    assert scheme.scheme(V4_UP).encoding.granularity == PerGroup(32, 32)
    assert scheme.scheme(V4_UP).activations == UNQUANTIZED


def test_compressed_tensors_groups_by_name_then_pattern_then_class() -> None:
    int4 = {"targets": ["Linear"], "weights": INT4_G32}
    fp8 = {"targets": [r"re:.*down_proj$"], "weights": FP8_CHANNEL, "format": "float-quantized"}
    nvfp4 = {
        "targets": ["model.layers.3.mlp.experts.1.down_proj"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    }
    mxfp4 = {
        "targets": ["re:^model.layers.4.*"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    }
    section = compressed("mixed-precision", {}, None, ["lm_head"])
    section["config_groups"] = {"a": int4, "b": mxfp4, "c": fp8, "d": nvfp4}
    quantization = parse_quantization(qwen(section))
    got = {
        module: quantization.scheme(f"model.layers.{module}").dialect
        for module in ("3.mlp.experts.0.up_proj", "3.mlp.experts.0.down_proj", "3.mlp.experts.1.down_proj")
    }
    assert list(got.values()) == ["ct_int4", "ct_float", "ct_nvfp4"]
    assert quantization.scheme("model.layers.4.mlp.experts.0.down_proj") == Scheme("ct_mxfp4", encoding("mxfp4"))
    assert quantization.scheme("lm_head").dialect == "plain"


def test_compressed_tensors_modules_that_nothing_targets_are_plain() -> None:
    section = compressed("pack-quantized", INT4_G32, None, [])
    section["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    assert qwen_scheme(section).dialect == "ct_int4"
    assert qwen_scheme(section, "model.layers.3.self_attn.q_proj").dialect == "plain"


@pytest.mark.parametrize(
    ("weights", "inputs", "expected"),
    [
        (
            INT4_G32 | {"group_size": 128, "symmetric": False, "actorder": "weight"},
            None,
            Scheme(
                "ct_int4",
                Encoding(element="int4", granularity=PerGroup(1, 128), scale_dtype="bfloat16", zero_points=True),
            ),
        ),
        (
            INT4_G32 | {"group_size": None, "strategy": "channel"},
            None,
            Scheme("ct_int4", Encoding(element="int4", granularity=PerChannel(), scale_dtype="bfloat16")),
        ),
        (
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            Scheme("ct_float", encoding("fp8_tensor", "bfloat16"), FP8_STATIC),
        ),
        (
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
            Scheme("ct_float", encoding("fp8_block128", "bfloat16"), FP8_GROUP128),
        ),
        (MX_GROUPS, None, Scheme("ct_mxfp8", encoding("mxfp8"))),
        (MX_GROUPS, MX_GROUPS | {"dynamic": True}, Scheme("ct_mxfp8", encoding("mxfp8"), MXFP8)),
        (FP8_CHANNEL, None, Scheme("ct_float", encoding("fp8_channel", "bfloat16"))),
    ],
)
def test_compressed_tensors_schemes(weights: dict[str, Any], inputs: dict[str, Any] | None, expected: Scheme) -> None:
    assert qwen_scheme(compressed("any", weights, inputs, [])) == expected


@pytest.mark.parametrize(
    ("weights", "inputs", "message"),
    [
        (INT4_G32 | {"num_bits": 8}, None, "got int 8 bit by 'group'"),
        (INT4_G32, {"num_bits": 8, "type": "int"}, "with quantized inputs"),
        (INT4_G32 | {"actorder": "group"}, None, "actorder"),
        (MX_GROUPS | {"group_size": 64}, None, "got float 8 bit by 'group'"),
        (INT4_G32 | {"type": "complex"}, None, "one of int, float"),
        ({"type": "int"}, None, "num_bits: expected this key"),
        ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128]}, None, "two integers from 1"),
    ],
)
def test_compressed_tensors_schemes_that_are_not_known(weights: Any, inputs: Any, message: str) -> None:
    quantization = parse_quantization(qwen(compressed("any", weights, inputs, ["lm_head"])))
    assert quantization.scheme("lm_head").dialect == "plain"  # an odd scheme harms no one who does not meet it
    with pytest.raises(CheckpointError, match=message):
        quantization.scheme(QWEN_UP)


def test_gptq_rules_change_and_leave_out_modules() -> None:
    rules = {r"+:.*layers\.3\..*": {"group_size": 32}, r".*layers\.4\..*": {"sym": False}, r"-:.*layers\.5\..*": {}}
    section = GPTQ | {"dynamic": rules}
    got = [qwen_scheme(section, f"model.layers.{i}.mlp.experts.0.up_proj").encoding.name for i in (2, 3, 4, 5)]
    assert got == ["int4_g128", "int4_g32", "int4_g128_zp", "bf16"]


def test_gptq_v2_is_a_dialect_of_its_own() -> None:
    assert qwen_scheme(GPTQ | {"checkpoint_format": "gptq_v2"}).dialect == "gptq_v2"


GPTQ = config("qwen3-gptq")["quantization_config"]
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
    "extra_config": {"model.layers.3.mlp.gate": {"bits": 16}, "model.layers.4.mlp.experts.0": {"group_size": 32}},
}  # fmt: skip


def test_auto_round_is_gptq_or_awq() -> None:
    names = ("layers.3.mlp.experts.0.up_proj", "layers.3.mlp.gate", "layers.4.mlp.experts.0.up_proj")
    found = [qwen_scheme(AUTO_ROUND, f"model.{name}") for name in names]
    assert [(s.dialect, s.encoding.name) for s in found] == [
        ("gptq", "int4_g128"), ("plain", "bf16"), ("gptq", "int4_g32"),
    ]  # fmt: skip
    assert qwen_scheme(AUTO_ROUND, "lm_head").dialect == "plain"
    assert qwen_scheme(AUTO_ROUND, "model.layers_more.0.up_proj").dialect == "plain"
    assert qwen_scheme(AUTO_ROUND | {"block_name_to_quantize": ["visual"]}).dialect == "plain"
    awq = qwen_scheme(AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False})
    assert (awq.dialect, awq.encoding.name) == ("awq", "int4_g128_zp")
    assert qwen_scheme(AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}).encoding.name == "int4_g128"


QUARK = "weight: expected fp4 by groups of 32 .*"


def quark(**weight: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head", "*.mlp.gate"]}


def test_quark() -> None:
    section = quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0", is_dynamic=False)
    dynamic = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "input_tensors": {"is_dynamic": True}}
    static = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "input_tensors": {"is_dynamic": False}}
    section |= {"layer_quant_config": {"*layers.4.mlp.experts": dynamic, "*.q_proj": static}}
    assert qwen_scheme(section) == Scheme("quark_mxfp4", encoding("mxfp4"))
    assert qwen_scheme(section, "model.layers.3.mlp.gate").dialect == "plain"
    assert qwen_scheme(section, "lm_head").dialect == "plain"
    experts = qwen_scheme(section, "model.layers.4.mlp.experts.0.up_proj")
    assert (experts.dialect, experts.encoding.name, experts.activations.name) == (
        "quark_fp8", "fp8_channel", "fp8_token",
    )  # fmt: skip
    query = qwen_scheme(section, "model.layers.3.self_attn.q_proj")
    assert (query.encoding.name, query.activations.name) == ("fp8_tensor", "fp8_static")


def test_awq_keys_under_their_other_names() -> None:
    section = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False, "version": "GEMM"}
    assert qwen_scheme(section).encoding.name == "int4_g64"
    with pytest.raises(CheckpointError, match="version: expected gemm, got 'gemv'"):
        qwen_scheme(section | {"version": "gemv"})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "mxpf4"}, "did you mean 'mxfp4'"),
        ({"quant_method": "bitsandbytes"}, "known: auto-round, awq, compressed-tensors, fp8, gptq, modelopt, mxfp4"),
        ({"quant_method": "fbgemm_fp8"}, "a known method, got 'fbgemm_fp8'"),
        ({"bits": 4}, "quantization_config.quant_method"),
        (["fp8"], "quantization_config: expected an object"),
        ({"quant_method": "compressed-tensors"}, "config_groups: expected groups with targets"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "config_groups.a: expected an object"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers: expected a list of str"),
        (compressed("any", INT4_G32, None, ["re:("]), "regular expressions without backreferences"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}, "quantized_layers.a: expected an object"),
    ],
)
def test_descriptions_that_are_refused(section: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_quantization(qwen(section))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (FP8_BLOCK | {"weight_block_size": [128]}, "weight_block_size: expected two integers from 1 to 1048576"),
        (FP8_BLOCK | {"activation_scheme": "none"}, "activation_scheme: expected one of dynamic, static"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP5"}, "did you mean 'NVFP4'"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP6"}, "a known algorithm, got 'MXFP6'"),
        (GPTQ | {"desc_act": True}, "quantize again without desc_act"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: expected one of gptq, gptq_v2, got 'marlin'"),
        (GPTQ | {"bits": 8}, "bits: expected 4, got 8"),
        (GPTQ | {"group_size": None}, "group_size: expected this key"),
        (GPTQ | {"sym": "yes"}, "sym: expected true or false"),
        (AUTO_ROUND | {"packing_format": "auto_round"}, "packing_format: expected one of auto_round:auto_gptq, auto"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type: expected one of int, got 'mx_fp'"),
        (AUTO_ROUND | {"bits": 2}, "bits: expected 4, got 2"),
        (AUTO_ROUND | {"extra_config": {"a": 5}}, "extra_config.a: expected an object"),
        (AUTO_ROUND | {"block_name_to_quantize": 5}, "expected a list of str"),
        (quark(dtype="int4", qscheme="per_group", group_size=128), f"{QUARK} got 'int4' 'per_group' 128"),
        (quark(dtype="fp4", qscheme="per_group", group_size=16), f"{QUARK} got 'fp4' 'per_group' 16"),
        (quark(dtype="int8", qscheme="per_channel"), f"{QUARK} got 'int8' 'per_channel'"),
    ],
)
def test_schemes_that_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        qwen_scheme(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (FP8_BLOCK | {"weight_block_size": [128, 2**40]}, "weight_block_size: expected two integers"),
        (FP8_BLOCK | {"weight_block_size": [True, 128]}, "weight_block_size: expected a list of int"),
        (FP8_BLOCK | {"ignored_layers": ["a\x1b"]}, "ignored_layers: expected 1 to 2000 printable"),
        (FP8_BLOCK | {"ignored_layers": ["a"] * 1_000_001}, "ignored_layers: expected at most 1000000 entries"),
        (FP8_BLOCK | {"quant_method": 8}, "quant_method: expected a string"),
        (FP8_BLOCK | {"quant_method": "fp" * 10**6}, "quant_method: expected 1 to 2000 printable"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 2**40}, "group_size: expected an integer"),
        ({"quant_method": "modelopt", "quant_algo": ["NVFP4"]}, "quant_algo: expected a string"),
        ({"quant_method": "modelopt", "quant_algo": "N" * 10**6}, "quant_algo: expected 1 to 2000 printable"),
        ({"quant_method": "gptq", "bits": 4.0, "group_size": 128}, "bits: expected an integer from 1 to 64"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size: expected an integer from -1 to 1048576"),
        ({"quant_method": "gptq", "dynamic": {"-:(a": {}}}, "dynamic: expected regular expressions"),
        ({"quant_method": "awq", "version": {}}, "version: expected a string"),
        (compressed("any", INT4_G32 | {"group_size": 2**40}, None, []), "weights.group_size: expected an integer"),
        (compressed("any", INT4_G32 | {"strategy": ["group"]}, None, []), "weights.strategy: expected a string"),
        (compressed("any", INT4_G32, None, ["re:" + "(a{900}|b)" * 30]), "ignore: expected regular expressions of"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {str(i): {} for i in range(1001)}},
            "config_groups: expected at most 1000 entries",
        ),
    ],
)
def test_descriptions_without_sense_or_measure(section: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        qwen_scheme(section)
    assert len(str(refusal.value)) < 500
    assert "config.json: quantization_config." in refusal.value.where


def test_a_map_of_many_modules_is_searched_at_once() -> None:
    names = (f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(100) for e in range(300))
    layers = {name: {"quant_algo": "FP8"} for name in names}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    quantization = parse_quantization(qwen(section))
    start = time.process_time()
    for i in range(100, 300):
        assert quantization.scheme(f"model.layers.{i}.mlp.experts.gate_up_proj").dialect == "plain"
    assert quantization.scheme("model.layers.99.mlp.experts.gate_up_proj").dialect == "modelopt_fp8"
    assert time.process_time() - start < 0.2


def test_an_error_says_where_it_looked() -> None:
    text = config("kimi-k2-bf16") | {"quantization_config": {"quant_method": "int3"}}
    with pytest.raises(CheckpointError, match=r"config\.json: text_config\.quantization_config\.quant_method"):
        parse_quantization({"model_type": "kimi_k25", "text_config": text})
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quant_method"):
        parse_quantization(config("qwen3-bf16"), {"quant_method": "int3"})


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1*", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1.*", "model.layers.1", False),
        ("model.layers.1.*", "model.layers.1.mlp", True),
        ("model.layers.*.mlp.gate", "model.layers.4.mlp.gate", True),
        ("model.layers.*.mlp.gate", "model.layers.4.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.4.mlp.gate", True),
        ("gate", "model.layers.4.mlp.experts.0.gate_proj", False),
        ("experts", "model.layers.4.mlp.experts.0.gate_proj", True),
        ("experts", "model.layers.4.mlp.shared_experts.gate_proj", False),
        ("model.layers.4", "language_model.model.layers.4.mlp", True),
        ("backbone.layers.4", "model.layers.4.mlp", True),
        ("language_model.*", "language_model.model.layers.4", True),
        ("*", "model.layers.4", True),
        ("", "model.layers.4", False),
        (r"re:.*mlp\.(gate|up)_proj.*", "model.layers.0.mlp.up_proj", True),
        (r"re:.*mlp\.(gate|up)_proj.*", "model.layers.1.mlp.experts.0.up_proj", False),
        (r"re:mlp", "model.layers.1.mlp", False),
    ],
)
def test_names_in_lists_of_modules(pattern: str, module: str, expected: bool) -> None:
    assert matcher([pattern], "a list")(module) is expected
    assert matcher(["nothing", pattern, "re:nothing"], "a list")(module) is expected
    assert not matcher([], "a list")(module)


def test_compressed_tensors_names_are_whole_or_regular_expressions() -> None:
    ignored = exact_or_regex(KIMI_IGNORE, "a list")
    assert ignored("lm_head")
    assert ignored("model.layers.0.mlp.gate_proj")
    assert ignored("model.layers.3.mlp.shared_experts.gate_proj")
    assert not ignored("model.layers.3.mlp.experts.0.gate_proj")
    assert not ignored("model.lm_head.weight")
    # A name's substring is no match: a typo in a list leaves the module quantized, as its tensors are.
    assert not exact_or_regex(["re:.*shared_experts"], "a list")("model.layers.3.mlp.shared_expert.up_proj")
    assert not exact_or_regex(["model.layers.3"], "a list")("model.layers.3.mlp")
