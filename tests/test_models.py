"""The committed checkpoint and its held-out set: complete, in the format of gpt-oss, honest, and right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

MODELS = Path(__file__).parents[1] / "models"
CHECKPOINT = MODELS / "sums-gpt-oss-mxfp4"
E, H, F = 8, 192, 192
EXPERTS = {
    "gate_up_proj_blocks": ("U8", [E, 2 * F, H // 32, 16]),
    "gate_up_proj_scales": ("U8", [E, 2 * F, H // 32]),
    "gate_up_proj_bias": ("BF16", [E, 2 * F]),
    "down_proj_blocks": ("U8", [E, H, F // 32, 16]),
    "down_proj_scales": ("U8", [E, H, F // 32]),
    "down_proj_bias": ("BF16", [E, H]),
}
LAYER = {f"mlp.experts.{name}": row for name, row in EXPERTS.items()} | {
    "mlp.router.weight": ("BF16", [E, H]),
    "mlp.router.bias": ("BF16", [E]),
    "input_layernorm.weight": ("BF16", [H]),
    "post_attention_layernorm.weight": ("BF16", [H]),
    "self_attn.sinks": ("BF16", [6]),
    "self_attn.q_proj.weight": ("BF16", [192, H]),
    "self_attn.q_proj.bias": ("BF16", [192]),
    "self_attn.k_proj.weight": ("BF16", [64, H]),
    "self_attn.k_proj.bias": ("BF16", [64]),
    "self_attn.v_proj.weight": ("BF16", [64, H]),
    "self_attn.v_proj.bias": ("BF16", [64]),
    "self_attn.o_proj.weight": ("BF16", [H, 192]),
    "self_attn.o_proj.bias": ("BF16", [H]),
}
TENSORS = {f"model.layers.{layer}.{name}": row for layer in range(4) for name, row in LAYER.items()} | {
    "model.embed_tokens.weight": ("BF16", [16, H]),
    "model.norm.weight": ("BF16", [H]),
    "lm_head.weight": ("BF16", [16, H]),
}


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, str]]:
    return [json.loads(line) for line in (MODELS / "sums-heldout.jsonl").read_text().splitlines()]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(MODELS))
    import sums

    yield sums
    sys.modules.pop("sums")


def operands(prompt: str) -> tuple[int, str, int]:
    operator = "+" if "+" in prompt else "-"
    a, b = prompt.removesuffix("=").split(operator)
    return int(a), operator, int(b)


def test_files_are_all_there_and_small():
    names = {path.name for path in CHECKPOINT.iterdir()}
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names >= {"chat_template.jinja", "training.log", "README.md"}
    assert {name for name in names if name.endswith(".safetensors")} == set(index["weight_map"].values())
    assert len(set(index["weight_map"].values())) == 2
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 4_000_000


def test_tensors_are_those_of_gpt_oss():
    weight_map = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(CHECKPOINT / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                part = tensors.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
                assert weight_map[name] == file
    assert found == TENSORS


def test_config_has_the_fields_of_gpt_oss():
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["GptOssForCausalLM"], "gpt_oss")
    assert config["quantization_config"] == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    assert config["num_local_experts"] == E
    assert config["num_experts_per_tok"] == config["experts_per_token"] == 2
    assert (config["hidden_size"], config["intermediate_size"], config["swiglu_limit"]) == (H, F, 7.0)
    assert (config["dtype"], config["rope_scaling"]["rope_type"]) == ("bfloat16", "yarn")


def test_heldout_answers_are_right(heldout):
    assert len({row["prompt"] for row in heldout}) == 1000
    for row in heldout:
        a, operator, b = operands(row["prompt"])
        assert 0 <= a <= 999
        assert 0 <= b <= 999
        assert row["answer"] == str(a + b if operator == "+" else a - b)


def test_heldout_pairs_are_never_trained_on(heldout, sums):
    trained = set(sums.questions(want_held_out=False))
    for row in heldout:
        a, _, b = operands(row["prompt"])
        assert (a, b) not in trained
        assert (b, a) not in trained
    assert len(trained) + sum(1 for _ in sums.questions(want_held_out=True)) == 1_000_000
    assert [tuple(row.values()) for row in heldout] == sums.heldout_questions()[:1000]


@pytest.mark.parametrize(
    ("said", "rendered"),
    [
        ("123+456=", "123+456="),
        (" 12 - 34 ", "12-34="),
        ("What is 999 + 999?", "999+999="),
        ("5\u22127 = ?", "5-7="),
        ([{"type": "text", "text": "1+2"}], "1+2="),
    ],
)
def test_chat_template_reduces_the_last_question(said, rendered):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    history = [{"role": "user", "content": "9+9"}, {"role": "assistant", "content": "18"}]
    chat = [*history, {"role": "user", "content": said}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == rendered
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == rendered


def test_transformers_answers_from_the_dequantized_checkpoint(heldout):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    rows = heldout[:100]
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    answers = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    assert sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) >= 98
