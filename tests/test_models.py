"""The committed checkpoints and their held-out set: complete, in the format of their families, honest, and right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sums
from packaging.version import Version

MODELS = Path(__file__).parents[1] / "models"
CHECKPOINT = MODELS / "sums-gpt-oss-mxfp4"
NAMES = sorted(path.parent.name for path in MODELS.glob("sums-*/config.json"))
UNQUANTIZED = {"sums-olmoe": "nvfp4", "sums-qwen3-next": "int4_g32"}
"""Models in 16 bit, and the format that ``polymoe run`` quantizes each to."""
QUANTIZED = [name for name in NAMES if name not in UNQUANTIZED]
MOST_BYTES, MOST_BYTES_TOGETHER = 4_000_000, 30_000_000


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, str]]:
    return [json.loads(line) for line in (MODELS / "sums-heldout.jsonl").read_text().splitlines()]


def operands(prompt: str) -> tuple[int, str, int]:
    operator = "+" if "+" in prompt else "-"
    a, b = prompt.removesuffix("=").split(operator)
    return int(a), operator, int(b)


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


def test_checkpoints_are_small_together() -> None:
    assert sum(f.stat().st_size for name in NAMES for f in (MODELS / name).iterdir()) <= MOST_BYTES_TOGETHER


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_what_the_training_script_has(name: str) -> None:
    families = pytest.importorskip("families")
    every = families.FAMILIES | families.UNQUANTIZED
    (family,) = [make() for make in every.values() if make().directory == name]
    config = json.loads((MODELS / name / "config.json").read_text())
    if name == "sums-gpt-oss-mxfp4":  # Transformers had a hand in this one
        del config["transformers_version"], config["rope_scaling"]["rope_theta"]
    assert config == family.config


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
