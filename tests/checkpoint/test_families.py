"""Families: what each config means; wrong configs; and both against Transformers' own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.checkpoint.families import MODEL_FAMILIES, MoeConfig, family_of, text_config
from polymoe.checkpoint.load import Checkpoint
from polymoe.errors import CheckpointError, CheckpointNotFound
from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.routing import HashTopK, SigmoidInput, SigmoidTopK, SoftmaxTopK, SqrtSoftplusTopK, TopKSoftmax
from support.configs import CONFIGS, config

KIMI = SigmoidTopK(2, scaling=2.827)


def describe(found: dict[str, Any]) -> MoeConfig:
    return family_of(found).moe(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_described(name: str) -> None:
    moe = describe(config(name, hidden=96, intermediate=48, experts=12, layers=5, latent=96))
    assert (moe.hidden, moe.intermediate, moe.experts, moe.num_layers) == (96, 48, 12, 5)
    assert moe.top_k == moe.routers[0].top_k
    assert moe.layers
    assert len(moe.layers) == len(moe.routers)


@pytest.mark.parametrize(
    ("name", "family", "layers", "router", "activation"),
    [
        ("gpt-oss-mxfp4", "gpt-oss", (0, 1, 2, 3), TopKSoftmax(2), SwiGLU(1.702, 1.0, 7.0)),
        ("deepseek-v3-fp8", "deepseek-v3", (3,), SigmoidTopK(2, scaling=2.5, n_group=4, topk_group=2), SwiGLU()),
        ("deepseek-v4-fp4", "deepseek-v4", (0, 1, 2, 3), SqrtSoftplusTopK(2, scaling=1.5), SwiGLU(limit=10.0)),
        ("kimi-k2-thinking-int4", "deepseek-v3", (1, 2, 3), KIMI, SwiGLU()),
        ("kimi-k2.5-int4", "kimi-k2.5", (1, 2, 3), KIMI, SwiGLU()),
        ("nemotron-3-nvfp4", "nemotron-h", (1, 3), SigmoidTopK(2, scaling=5.0), ReLU2()),
        ("glm-4.7-nvfp4", "glm-4", (3,), SigmoidTopK(2, scaling=2.5), SwiGLU()),
        ("qwen3-fp8", "qwen3", (0, 1, 2, 3), SoftmaxTopK(2, True), SwiGLU()),
        ("qwen3-next-bf16", "qwen3-next", (0, 1, 2, 3), SoftmaxTopK(2, True), SwiGLU()),
        ("qwen3-vl-bf16", "qwen3-vl", (0, 1, 2, 3), SoftmaxTopK(2, True), SwiGLU()),
        ("qwen3.5-bf16", "qwen3.5", (0, 1, 2, 3), SoftmaxTopK(2, True), SwiGLU()),
        ("mixtral-bf16", "mixtral", (0, 1, 2, 3), SoftmaxTopK(2, True), SwiGLU()),
        ("llama4-bf16", "llama-4", (1, 3), SigmoidInput(1), SwiGLU()),
    ],
)
def test_layers_routers_and_activations(
    name: str, family: str, layers: tuple[int, ...], router: Any, activation: Any
) -> None:
    moe = describe(config(name))
    assert family_of(config(name)).name == family
    assert moe.layers == layers
    assert moe.router(layers[-1]) == router
    assert moe.activation == activation
    assert moe.gated == (activation != ReLU2())
    assert moe.bias == (family == "gpt-oss")
    assert moe.weight_on == ("input" if family == "llama-4" else "output")


def test_deepseek_v4_hash_layers() -> None:
    moe = describe(config("deepseek-v4-fp4", layers=5))
    hashed = HashTopK(2, scaling=1.5)
    assert [moe.router(i) == hashed for i in range(5)] == [True, True, True, False, False]
    kinds = ["moe", "hash_moe", "moe", "moe", "moe"]
    moe = describe(config("deepseek-v4-fp4", layers=5) | {"mlp_layer_types": kinds})
    assert [moe.router(i) == hashed for i in range(5)] == [kind == "hash_moe" for kind in kinds]
    text = {k: v for k, v in config("deepseek-v4-fp4").items() if k not in ("model_type", "num_hash_layers")}
    assert describe({"model_type": "deepseek_v41", "text_config": text}).router(0) == SqrtSoftplusTopK(2, scaling=1.5)


def test_p20_deepseek_v4_has_no_groups_even_if_its_template_left_some() -> None:
    plain = config("deepseek-v4-fp4")
    assert describe(plain | {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc"}) == describe(plain)


def test_layers_of_nemotron_by_pattern_or_by_list() -> None:
    nemotron = config("nemotron-3-nvfp4", layers=6)
    assert describe(nemotron).layers == (1, 3, 5)
    del nemotron["hybrid_override_pattern"]
    nemotron["layers_block_type"] = ["mamba", "attention", "moe", "mamba", "moe"]
    assert (describe(nemotron).layers, describe(nemotron).num_layers) == ((2, 4), 5)
    del nemotron["layers_block_type"]
    with pytest.raises(CheckpointError, match="the kind of each layer"):
        describe(nemotron)


def test_nemotron_without_a_latent_width_uses_the_models() -> None:
    nemotron = config("nemotron-3-nvfp4")
    assert describe(nemotron).hidden == 64
    del nemotron["moe_latent_size"]
    assert describe(nemotron).hidden == 256


@pytest.mark.parametrize(
    ("name", "changed", "layers"),
    [
        ("deepseek-v3-fp8", {"first_k_dense_replace": 0}, (0, 1, 2, 3, 4, 5)),
        ("deepseek-v3-fp8", {"moe_layer_freq": 2}, (4,)),
        ("deepseek-v3-fp8", {"mlp_layer_types": ["dense", "sparse"] * 3}, (1, 3, 5)),
        ("qwen3-bf16", {"decoder_sparse_step": 2}, (1, 3, 5)),
        ("qwen3-bf16", {"mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
        ("glm-4.7-nvfp4", {"first_k_dense_replace": None}, (1, 2, 3, 4, 5)),
    ],
)
def test_dense_layers(name: str, changed: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert describe(config(name, layers=6) | changed).layers == layers


def test_layers_of_llama4() -> None:
    llama = config("llama4-bf16", layers=6)
    assert describe(llama).layers == (1, 3, 5)
    llama["text_config"]["moe_layers"] = [4, 2]
    assert describe(llama).layers == (2, 4)


@pytest.mark.parametrize(
    ("layer", "what"), [(0, "a dense layer"), (2, "a dense layer"), (6, "no such layer"), (-1, "no such layer")]
)
def test_a_layer_without_experts(layer: int, what: str) -> None:
    with pytest.raises(CheckpointNotFound, match=r"a layer with routed experts \(3-5\)") as error:
        describe(config("deepseek-v3-fp8", layers=6)).router(layer)
    assert what in str(error.value)


def test_layers_are_listed_as_ranges() -> None:
    with pytest.raises(CheckpointNotFound, match=r"experts \(1, 3, 5-6\), got"):
        describe(config("nemotron-3-nvfp4") | {"hybrid_override_pattern": "MEMEMEE"}).router(0)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gpt-oss-mxfp4", {"model_type": "gpt_os"}, "did you mean 'gpt_oss'"),
        (
            "gpt-oss-mxfp4",
            {"model_type": None},
            "model_type: expected a known family, or a model of Transformers, got None",
        ),
        ("gpt-oss-mxfp4", {"hidden_size": None}, "hidden_size: expected this key, got nothing"),
        ("gpt-oss-mxfp4", {"hidden_size": "2880"}, "hidden_size: expected an integer from 1 to 1048576, got '2880'"),
        ("gpt-oss-mxfp4", {"hidden_size": 2**40}, "hidden_size: expected an integer from 1 to 1048576"),
        ("gpt-oss-mxfp4", {"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 500"),
        ("deepseek-v3-fp8", {"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 500"),
        ("gpt-oss-mxfp4", {"num_local_experts": 0}, "num_local_experts: expected an integer from 1 to 65536, got 0"),
        ("gpt-oss-mxfp4", {"num_hidden_layers": True}, "num_hidden_layers: expected an integer"),
        ("gpt-oss-mxfp4", {"num_experts_per_tok": 9}, "at most 8, the number of experts, got 9"),
        ("gpt-oss-mxfp4", {"swiglu_limit": -1}, "swiglu_limit: expected a number from 1.2e-38 to 1.7e\\+38, got -1"),
        ("gpt-oss-mxfp4", {"hidden_act": "silo"}, "did you mean 'silu'"),
        ("gpt-oss-mxfp4", {"hidden_act": "relu2"}, "hidden_act: expected an activation for experts with a gate"),
        ("nemotron-3-nvfp4", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: expected an activation for experts without"),
        ("deepseek-v3-fp8", {"scoring_func": "softmax"}, "scoring_func: expected one of sigmoid, got 'softmax'"),
        ("deepseek-v3-fp8", {"topk_method": "greedy"}, "topk_method: expected one of noaux_tc"),
        ("deepseek-v3-fp8", {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, got 1"),
        ("deepseek-v3-fp8", {"first_k_dense_replace": 4}, "a layer with routed experts, got dense layers only"),
        ("deepseek-v3-fp8", {"topk_group": 5}, "topk_group: expected at most n_group=4, got 5"),
        ("deepseek-v3-fp8", {"n_group": 3}, "n_group: expected a divisor of the 8 experts, got 3"),
        ("llama4-bf16", {"text_config": config("mixtral-bf16") | {"moe_layers": [4]}}, "moe_layers: expected layers"),
        ("deepseek-v4-fp4", {"scoring_func": "sigmoid"}, "scoring_func: expected one of sqrtsoftplus"),
        ("deepseek-v4-fp4", {"mlp_layer_types": ["moe"]}, "mlp_layer_types: expected 4 of hash_moe and moe"),
        ("qwen3-bf16", {"mlp_only_layers": 3}, "mlp_only_layers: expected a list of int, got 3"),
        ("qwen3-bf16", {"mlp_only_layers": ["3"]}, "mlp_only_layers: expected a list of int"),
    ],
)
def test_configs_that_are_refused(name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        describe(config(name) | changed)


class Recorded(dict[str, Any]):
    """A config that remembers which of its keys were read."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({k: Recorded(v) if isinstance(v, dict) else v for k, v in config.items()})
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


NO_INTEGERS = [True, 8.0, "8", [8], {}, -2, 10**5 * 10**400, float("nan")]


@pytest.mark.parametrize("name", [n for n in CONFIGS if n.endswith("bf16") or "deepseek" in n or "glm" in n])
def test_every_number_that_is_read_has_a_type_and_a_range(name: str) -> None:
    """The error names the file, the key and what came, in a line that a terminal can show."""
    recorded = Recorded(config(name))
    describe(recorded)
    text = text_config(recorded)
    where = "config.json: " if text is recorded else "config.json: text_config."
    integers = [key for key in text.read if type(dict(text).get(key)) is int]  # type: ignore[attr-defined]
    assert len(integers) >= 5
    for key in integers:
        for value in NO_INTEGERS:
            changed = text | {key: value}  # type: ignore[operator]
            with pytest.raises(CheckpointError) as refusal:
                describe(changed if text is recorded else recorded | {"text_config": changed})
            assert refusal.value.where == where + key
            assert "an integer from" in str(refusal.value)
            assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gpt-oss-mxfp4", {"swiglu_limit": 10**400}, "swiglu_limit: expected a number from"),
        ("gpt-oss-mxfp4", {"swiglu_limit": 1e-40}, "swiglu_limit: expected a number from"),
        ("deepseek-v3-fp8", {"routed_scaling_factor": float("inf")}, "routed_scaling_factor: expected a number from"),
        ("deepseek-v3-fp8", {"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types: expected dense or sparse for each"),
        ("deepseek-v3-fp8", {"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types: expected dense or sparse"),
        ("deepseek-v3-fp8", {"mlp_layer_types": ["sparse"] * 10**5}, "mlp_layer_types: expected at most 500 entries"),
        ("deepseek-v4-fp4", {"mlp_layer_types": ["moe"] * 5}, "mlp_layer_types: expected 4 of hash_moe and moe"),
        ("nemotron-3-bf16", {"hybrid_override_pattern": "E" * 1500}, "layers_block_type or hybrid"),
        ("nemotron-3-bf16", {"hybrid_override_pattern": ["E"]}, "hybrid_override_pattern: expected a string"),
        ("nemotron-3-bf16", {"layers_block_type": ["moe\x1b[2J"]}, "layers_block_type: expected 1 to 2000 printable"),
        ("qwen3-bf16", {"mlp_only_layers": [0] * 10**5}, "mlp_only_layers: expected at most 500 entries"),
        ("qwen3-bf16", {"num_experts_per_tok": 2**40}, "num_experts_per_tok: expected an integer from 1 to 65536"),
        ("llama4-bf16", {"text_config": 3}, "text_config: expected an object, got 3"),
        ("gpt-oss-mxfp4", {"model_type": "gpt" * 10**6}, "model_type: expected 1 to 2000 printable"),
        ("gpt-oss-mxfp4", {"model_type": ["gpt_oss"]}, "model_type: expected a string"),
        ("gpt-oss-mxfp4", {"hidden_act": "silu" * 10**6}, "hidden_act: expected an activation"),
    ],
)
def test_configs_without_sense_or_measure(name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {message}") as refusal:
        describe(config(name) | changed)
    assert len(str(refusal.value)) < 500


def test_layers_may_be_listed_twice() -> None:
    text = config("llama4-bf16")["text_config"] | {"moe_layers": [3, 1, 3]}
    assert describe(config("llama4-bf16") | {"text_config": text}).layers == (1, 3)


def test_no_model_type_is_claimed_twice() -> None:
    rows = {row.name: row for row in MODEL_FAMILIES.values()}
    assert sum(len(row.model_types) for row in rows.values()) == len(MODEL_FAMILIES)


def test_the_text_part_of_a_wrapper_decides_where_the_wrapper_is_unknown() -> None:
    wrapped = {"model_type": "new_wrapper", "text_config": config("qwen3-bf16")}
    assert family_of(wrapped).name == "qwen3"
    assert describe(wrapped) == describe(config("qwen3-bf16"))


# Transformers: the same config gives the same layers, sizes and constants and, saved, the same weights.

SMALL = {
    **dict.fromkeys(("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "n_groups", "o_groups", "mamba_num_heads"), 2),
    **dict.fromkeys(("head_dim", "q_lora_rank", "kv_lora_rank", "v_head_dim", "o_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "ssm_state_size"), 8),
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "qwen3_vl_moe": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    },
    "qwen3_5_moe": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64},
    "llama4": {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    },
}  # fmt: skip
MODELS = [n for n in CONFIGS if n.endswith("-bf16")] + ["deepseek-v3-fp8", "deepseek-v4-fp4", "glm-4.7-nvfp4"]


def transformers_model(name: str) -> Any:
    """A tiny Transformers model of one of our configs, randomly initialized."""
    transformers = pytest.importorskip("transformers")
    ours = config(name, hidden=64, intermediate=48, layers=5, latent=32)
    ours.pop("quantization_config", None)
    vision = VISION.get(ours["model_type"])
    text = ours["text_config"] if vision else ours
    text.update(SMALL)
    model_type = ours.pop("model_type")
    model_type = {"kimi_k2": "deepseek_v3"}.get(model_type, model_type)
    ours.pop("architectures", None)
    if vision:
        ours["vision_config"] = vision
    theirs = transformers.AutoConfig.for_model(model_type, **ours)
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    return auto.from_config(theirs, dtype=torch.bfloat16, trust_remote_code=False)


def natural(experts: torch.nn.Module, family: str) -> tuple[Tensor, Tensor]:
    """A Transformers module's weights as [E, 2F, H], all gate rows first, and [E, H, F]."""
    gate_up = getattr(experts, "gate_up_proj", None)
    gate_up, down = experts.up_proj if gate_up is None else gate_up, experts.down_proj
    if family in ("gpt-oss", "llama-4"):
        gate_up, down = gate_up.mT, down.mT
    if family == "gpt-oss":
        gate_up = torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), 1)
    return gate_up.detach(), down.detach()


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("name", MODELS)
def test_transformers_models(name: str, tmp_path: Path) -> None:
    model = transformers_model(name)
    model.save_pretrained(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        # The config that Transformers saved means what the original means; saving may add and drop keys.
        assert checkpoint.moe == describe(config(name, hidden=64, intermediate=48, layers=5, latent=32))
        modules = {n: m for n, m in model.named_modules() if n.endswith(".experts")}
        by_layer = {int(n.split(".layers.")[1].split(".")[0]): m for n, m in modules.items()}
        assert tuple(sorted(by_layer)) == checkpoint.layers
        for layer, experts in by_layer.items():
            read = checkpoint.weights(layer).dequantize(torch.bfloat16)
            for got, wanted in zip(read, natural(experts, checkpoint.family.name), strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_defaults_of_missing_keys_are_transformers(name: str, tmp_path: Path) -> None:
    """Keys that a config may lack mean what Transformers' configuration class makes of their absence."""
    optional = (
        "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace", "swiglu_limit",
        "decoder_sparse_step", "mlp_only_layers", "hidden_act", "mlp_hidden_act", "mlp_bias", "moe_layer_freq",
        "interleave_moe_layer_step", "scoring_func", "topk_method",
    )  # fmt: skip
    transformers = pytest.importorskip("transformers")
    full = config(name, experts=64, top_k=2, layers=6)
    bare = {k: v for k, v in text_config(full).items() if k not in optional and k != "architectures"}
    model_type = {"kimi_k2": "deepseek_v3"}.get(bare.pop("model_type")) or text_config(full)["model_type"]
    theirs = transformers.AutoConfig.for_model(model_type, **bare).to_dict()
    described = family_of(full).moe
    assert described(bare) == described(theirs | {"model_type": full["model_type"]})
