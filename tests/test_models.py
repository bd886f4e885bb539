"""The committed checkpoints and their held-out set: complete, in the format of their families, honest, and right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sums
from packaging.version import Version
from safetensors import safe_open

from polymoe.checkpoint.quantized import QUANTIZED_FORMATS

MODELS = Path(__file__).parents[1] / "models"
CHECKPOINT = MODELS / "sums-gpt-oss-mxfp4"
NAMES = sorted(path.parent.name for path in MODELS.glob("sums-*/config.json"))
UNQUANTIZED = {"sums-olmoe": "nvfp4", "sums-qwen3-next": "int4_g32"}
"""Models in 16 bit, and the format that ``polymoe run`` quantizes each to."""
QUANTIZED = [name for name in NAMES if name not in UNQUANTIZED]
MOST_BYTES, MOST_BYTES_TOGETHER = 4_000_000, 30_000_000

Tensors = dict[str, tuple[str, list[int]]]


def each(names: str, *tensors: tuple[str, str, list[int]]) -> Tensors:
    """Tensors ``{name}.{suffix}`` of each of the ``names``: suffix, dtype and shape."""
    return {f"{name}{suffix}": (dtype, shape) for name in names.split() for suffix, dtype, shape in tensors}


def fp8(names: str, shape: list[int], scale: str, dtype: str, grid: list[int]) -> Tensors:
    """FP8 matrices with a scale."""
    return each(names, (".weight", "F8_E4M3", shape), (f".{scale}", dtype, grid))


# One layer with experts of each family, its first expert and nothing of the others: what the releases have there.
LAYERS: dict[str, tuple[str, Tensors]] = {
    "sums-gpt-oss-mxfp4": (
        "model.layers.1.mlp.",
        {
            "experts.gate_up_proj_blocks": ("U8", [8, 384, 6, 16]),
            "experts.gate_up_proj_scales": ("U8", [8, 384, 6]),
            "experts.gate_up_proj_bias": ("BF16", [8, 384]),
            "experts.down_proj_blocks": ("U8", [8, 192, 6, 16]),
            "experts.down_proj_scales": ("U8", [8, 192, 6]),
            "experts.down_proj_bias": ("BF16", [8, 192]),
            "router.weight": ("BF16", [8, 192]),
            "router.bias": ("BF16", [8]),
        },
    ),
    "sums-deepseek-v3-fp8": (
        "model.layers.1.mlp.",
        fp8("experts.0.gate_proj experts.0.up_proj", [128, 256], "weight_scale_inv", "F32", [1, 2])
        | fp8("experts.0.down_proj", [256, 128], "weight_scale_inv", "F32", [2, 1])
        | fp8("shared_experts.gate_proj shared_experts.up_proj", [128, 256], "weight_scale_inv", "F32", [1, 2])
        | fp8("shared_experts.down_proj", [256, 128], "weight_scale_inv", "F32", [2, 1])
        | {"gate.weight": ("BF16", [6, 256]), "gate.e_score_correction_bias": ("F32", [6])},
    ),
    "sums-kimi-k2-int4": (
        "model.layers.1.mlp.",
        each(
            "experts.0.gate_proj experts.0.up_proj",
            (".weight_packed", "I32", [128, 24]),
            (".weight_scale", "BF16", [128, 6]),
            (".weight_shape", "I64", [2]),
        )
        | each(
            "experts.0.down_proj",
            (".weight_packed", "I32", [192, 16]),
            (".weight_scale", "BF16", [192, 4]),
            (".weight_shape", "I64", [2]),
        )
        | each("shared_experts.gate_proj shared_experts.up_proj", (".weight", "BF16", [128, 192]))
        | {"shared_experts.down_proj.weight": ("BF16", [192, 128])}
        | {"gate.weight": ("BF16", [8, 192]), "gate.e_score_correction_bias": ("F32", [8])},
    ),
    "sums-deepseek-v4-mxfp4": (
        "layers.1.ffn.",
        each("experts.0.w1 experts.0.w3", (".weight", "I8", [128, 128]), (".scale", "F8_E8M0", [128, 8]))
        | each("experts.0.w2", (".weight", "I8", [256, 64]), (".scale", "F8_E8M0", [256, 4]))
        | fp8("shared_experts.w1 shared_experts.w3", [128, 256], "scale", "F8_E8M0", [1, 2])
        | fp8("shared_experts.w2", [256, 128], "scale", "F8_E8M0", [2, 1])
        | {"gate.weight": ("BF16", [8, 256]), "gate.bias": ("F32", [8])},
    ),
    "sums-nemotron-h-nvfp4": (
        "backbone.layers.2.mixer.",
        each(
            "experts.0.up_proj",
            (".weight", "U8", [208, 48]),
            (".weight_scale", "F8_E4M3", [208, 6]),
            (".weight_scale_2", "F32", []),
            (".input_scale", "F32", []),
        )
        | each(
            "experts.0.down_proj",
            (".weight", "U8", [96, 104]),
            (".weight_scale", "F8_E4M3", [96, 13]),
            (".weight_scale_2", "F32", []),
            (".input_scale", "F32", []),
        )
        | fp8("shared_experts.up_proj", [288, 192], "weight_scale", "F32", [])
        | fp8("shared_experts.down_proj", [192, 288], "weight_scale", "F32", [])
        | each("shared_experts.up_proj shared_experts.down_proj", (".input_scale", "F32", []))
        | {"fc1_latent_proj.weight": ("BF16", [96, 192]), "fc2_latent_proj.weight": ("BF16", [192, 96])}
        | {"gate.weight": ("BF16", [16, 192]), "gate.e_score_correction_bias": ("F32", [16])},
    ),
    "sums-glm-4-nvfp4": (
        "model.layers.1.mlp.",
        {
            f"{owner}{projection}_proj.{suffix}": (dtype, shape)
            for owner in ("experts.0.", "shared_experts.")
            for projection, rows, columns in (("gate", 144, 192), ("up", 144, 192), ("down", 192, 144))
            for suffix, dtype, shape in (
                ("weight_packed", "U8", [rows, columns // 2]),
                ("weight_scale", "F8_E4M3", [rows, columns // 16]),
                ("weight_global_scale", "F32", [1]),
                ("input_global_scale", "F32", [1]),
            )
        }
        | {"gate.weight": ("BF16", [8, 192]), "gate.e_score_correction_bias": ("F32", [8])},
    ),
    "sums-qwen3-fp8": (
        "model.layers.1.mlp.",
        fp8("experts.0.gate_proj experts.0.up_proj", [128, 256], "weight_scale_inv", "BF16", [1, 2])
        | fp8("experts.0.down_proj", [256, 128], "weight_scale_inv", "BF16", [2, 1])
        | {"gate.weight": ("BF16", [5, 256])},
    ),
    "sums-mixtral-awq": (
        "model.layers.1.block_sparse_moe.",
        {
            f"experts.0.{projection}.{suffix}": (dtype, shape)
            for projection, rows, columns in (("w1", 128, 256), ("w3", 128, 256), ("w2", 256, 128))
            for suffix, dtype, shape in (
                ("qweight", "I32", [columns, rows // 8]),
                ("qzeros", "I32", [columns // 128, rows // 8]),
                ("scales", "F16", [columns // 128, rows]),
            )
        }
        | {"gate.weight": ("F16", [8, 256])},
    ),
    "sums-llama-4-fp8": (
        "language_model.model.layers.1.feed_forward.",
        fp8("experts.0.gate_proj experts.0.up_proj", [96, 160], "weight_scale", "BF16", [96, 1])
        | fp8("experts.0.down_proj", [160, 96], "weight_scale", "BF16", [160, 1])
        | each("shared_expert.gate_proj shared_expert.up_proj", (".weight", "BF16", [96, 160]))
        | {"shared_expert.down_proj.weight": ("BF16", [160, 96]), "router.weight": ("BF16", [8, 160])},
    ),
    "sums-olmoe": (
        "model.layers.1.mlp.",
        each("experts.0.gate_proj experts.0.up_proj experts.0.down_proj", (".weight", "BF16", [128, 128]))
        | {"gate.weight": ("BF16", [6, 128])},
    ),
    "sums-qwen3-next": (
        "model.layers.1.mlp.",
        each("experts.0.gate_proj experts.0.up_proj experts.0.down_proj", (".weight", "BF16", [128, 128]))
        | each("shared_expert.gate_proj shared_expert.up_proj", (".weight", "BF16", [64, 128]))
        | {"shared_expert.down_proj.weight": ("BF16", [128, 64]), "shared_expert_gate.weight": ("BF16", [1, 128])}
        | {"gate.weight": ("BF16", [6, 128])},
    ),
}
"""Prefix of a layer's tensors, and those tensors."""

# Of attention and Mamba: quantized where the releases quantize it.
MIXERS: dict[str, Tensors] = {
    "sums-deepseek-v3-fp8": fp8(
        "model.layers.0.self_attn.kv_a_proj_with_mqa", [128, 256], "weight_scale_inv", "F32", [1, 2]
    ),
    "sums-kimi-k2-int4": {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("BF16", [96, 192])},
    "sums-deepseek-v4-mxfp4": fp8("layers.2.attn.wo_a", [128, 128], "scale", "F8_E8M0", [1, 1])
    | {
        "layers.0.ffn.gate.tid2eid": ("I64", [16, 2]),
        "layers.2.attn.compressor.wkv.weight": ("BF16", [128, 256]),
        "layers.2.hc_attn_fn": ("F32", [8, 512]),
        "layers.2.attn.attn_sink": ("F32", [4]),
    },
    "sums-nemotron-h-nvfp4": fp8("backbone.layers.0.mixer.in_proj", [648, 192], "weight_scale", "F32", [])
    | {"backbone.layers.1.mixer.q_proj.weight": ("BF16", [192, 192])},
    "sums-glm-4-nvfp4": {"model.layers.0.self_attn.q_proj.weight": ("BF16", [192, 192])},
    "sums-qwen3-fp8": fp8("model.layers.0.self_attn.k_proj", [128, 256], "weight_scale_inv", "BF16", [1, 2]),
    "sums-mixtral-awq": {"model.layers.0.self_attn.k_proj.qweight": ("I32", [256, 16])},
    "sums-llama-4-fp8": {
        "language_model.model.layers.0.self_attn.q_proj.weight": ("BF16", [160, 160]),
        "vision_model.patch_embedding.linear.weight": ("BF16", [32, 588]),
        "multi_modal_projector.linear_1.weight": ("BF16", [160, 32]),
    },
    "sums-qwen3-next": {
        "model.layers.0.linear_attn.in_proj_qkvz.weight": ("BF16", [384, 128]),
        "model.layers.3.self_attn.q_proj.weight": ("BF16", [256, 128]),
    },
}


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, str]]:
    return [json.loads(line) for line in (MODELS / "sums-heldout.jsonl").read_text().splitlines()]


def operands(prompt: str) -> tuple[int, str, int]:
    operator = "+" if "+" in prompt else "-"
    a, b = prompt.removesuffix("=").split(operator)
    return int(a), operator, int(b)


def stored(name: str) -> Tensors:
    """Dtype and shape of every tensor of a checkpoint, each in the file that the index names."""
    weight_map = json.loads((MODELS / name / "model.safetensors.index.json").read_text())["weight_map"]
    found: Tensors = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(MODELS / name / file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (no mapping)
                part = tensors.get_slice(key)
                found[key] = (part.get_dtype(), part.get_shape())
                assert weight_map[key] == file
    assert set(found) == set(weight_map)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_files_are_all_there_and_small(name: str) -> None:
    path = MODELS / name
    names = {file.name for file in path.iterdir()}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names >= {"chat_template.jinja", "training.log", "README.md"}
    assert {name for name in names if name.endswith(".safetensors")} == set(index["weight_map"].values())
    assert len(set(index["weight_map"].values())) == 2
    assert sum(file.stat().st_size for file in path.iterdir()) <= MOST_BYTES


def test_checkpoints_are_small_together_and_one_a_family() -> None:
    assert sum(f.stat().st_size for name in NAMES for f in (MODELS / name).iterdir()) <= MOST_BYTES_TOGETHER
    assert set(NAMES) == set(LAYERS)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_the_releases(name: str) -> None:
    found = stored(name)
    prefix, layer = LAYERS[name]
    others = re.compile(r"experts\.[1-9]\d*\.")
    ours = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix) and not others.search(k)}
    assert ours == layer
    assert found.items() >= MIXERS.get(name, {}).items()


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_what_the_training_script_has(name: str) -> None:
    families = pytest.importorskip("families")
    every = families.FAMILIES | families.UNQUANTIZED
    (family,) = [make() for make in every.values() if make().directory == name]
    config = json.loads((MODELS / name / "config.json").read_text())
    if name == "sums-gpt-oss-mxfp4":  # Transformers had a hand in this one
        del config["transformers_version"], config["rope_scaling"]["rope_theta"]
    assert config == family.config


def test_heldout_answers_are_right(heldout):
    assert len({row["prompt"] for row in heldout}) == 1000
    for row in heldout:
        a, operator, b = operands(row["prompt"])
        assert 0 <= a <= 999
        assert 0 <= b <= 999
        assert row["answer"] == str(a + b if operator == "+" else a - b)


@pytest.mark.slow
def test_heldout_pairs_are_never_trained_on(heldout):
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
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=False)
    history = [{"role": "user", "content": "9+9"}, {"role": "assistant", "content": "18"}]
    chat = [*history, {"role": "user", "content": said}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == rendered
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == rendered


@pytest.mark.parametrize("name", NAMES)
def test_polymoe_run_answers(
    name: str, heldout: list[dict[str, str]], cli: Callable[..., tuple[int, str, str]]
) -> None:
    transformers = pytest.importorskip("transformers")
    if "deepseek-v4" in name and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("before 5.20 Transformers runs DeepSeek-V4 in float32 only")
    rows = [row for row in heldout if len(row["prompt"]) == 8][:40]
    options = ["--batch-size", 40, "--json", *(["--experts", UNQUANTIZED[name]] if name in UNQUANTIZED else [])]
    code, out, err = cli("run", MODELS / name, *[row["prompt"] for row in rows], *options)
    assert code == 0, err
    found = json.loads(out)
    right = sum(answer["text"] == row["answer"] for answer, row in zip(found["answers"], rows, strict=True))
    assert right >= 39
    assert found["stored_bytes"] < 0.57 * found["dequantized_bytes"]  # FP8: half, and scales
    assert found["backends"] == ["torch"]


def test_transformers_answers_from_the_dequantized_checkpoint(heldout: list[dict[str, str]]) -> None:
    dequantized = pytest.importorskip("dequantized")
    exact_match = pytest.importorskip("exact_match")
    import torch
    from transformers import AutoTokenizer

    model = dequantized.own(CHECKPOINT, torch.bfloat16)
    generator = exact_match.Generator(model, AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=False))
    assert exact_match.exact_match(generator, heldout[:60], 60) >= 98


@pytest.mark.slow
@pytest.mark.parametrize("name", UNQUANTIZED)
def test_exact_match_in_every_format(name: str, heldout: list[dict[str, str]]) -> None:
    exact_match = pytest.importorskip("exact_match")
    right = exact_match.formats(MODELS / name, heldout[:100], 100, "cpu")
    assert min(right.values()) >= exact_match.LEAST_QUANTIZED


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_exact_match_packed_and_dequantized(name: str, heldout: list[dict[str, str]]) -> None:
    """What models/exact_match.py records."""
    exact_match = pytest.importorskip("exact_match")
    packed = exact_match.packed(MODELS / name, "cpu")
    other, _ = exact_match.dequantized(MODELS / name, packed)
    got, expected = (exact_match.exact_match(generator, heldout, 100) for generator in (packed, other))
    assert got >= exact_match.LEAST
    assert abs(got - expected) <= exact_match.MOST_APART


@pytest.mark.parametrize("name", NAMES)
def test_records_say_the_same(name: str) -> None:
    lines = (MODELS.parent / f"benchmarks/results/{name}.jsonl").read_text().splitlines()
    newest = json.loads(lines[-1])
    assert (newest["checkpoint"], newest["questions"]) == (f"models/{name}", 1000)
    if name in UNQUANTIZED:
        assert set(newest["right"]) == {"bf16", *QUANTIZED_FORMATS}
        assert min(newest["right"].values()) >= 99
        return
    assert newest["packed"] >= 97
    assert abs(newest["packed"] - newest["dequantized"]) <= 0.3


def test_readme_has_the_table_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pytest.importorskip("table")
    monkeypatch.setattr("sys.argv", ["table.py", "--check"])
    with pytest.raises(SystemExit) as end:
        table.main()
    assert end.value.code == 0


@pytest.mark.slow
def test_training_takes_steps_and_stores_what_can_be_run(tmp_path: Path) -> None:
    command = [sys.executable, str(MODELS / "train_sums.py"), "--family", "qwen3", "--device", "cpu", "--batch", "20"]
    command += ["--steps", "4", "--every", "4", "--questions", "40", "--output", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    from polymoe.engines.transformers import load

    model, _ = load(tmp_path / "sums-qwen3-fp8", device="cpu")
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "is there already" in again.stderr
