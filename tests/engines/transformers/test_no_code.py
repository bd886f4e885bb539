"""No code of a checkpoint runs, whichever field names it, and nobody is asked whether it may."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from polymoe.checkpoint.architectures.config import neutral
from polymoe.engines.transformers import load, load_tokenizer
from polymoe.engines.transformers.generator import Generator
from support.packed_model import CHECKPOINT, MODELS

OWN = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast
class Config(GptOssConfig): pass
class Model(GptOssForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(model, *args, **kwargs): return model
"""


TRUST = {"trust_remote_code": True}


def edit(path: Path, **values: Any) -> None:
    described = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**described, **values}))


def code_in_the_tokenizer(path: Path) -> None:
    edit(path / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]})
    edit(path / "tokenizer_config.json", tokenizer_class="Tokenizer")


def code_in_an_old_tokenizer(path: Path) -> None:
    edit(path / "tokenizer_config.json", auto_map=["own.Tokenizer", "own.Tokenizer"], tokenizer_class="Tokenizer")


def code_in_the_config(path: Path) -> None:
    edit(path / "config.json", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})


def code_of_another_repository(path: Path) -> None:
    edit(path / "config.json", auto_map={"AutoConfig": "org/name--own.Config"})
    edit(path / "tokenizer_config.json", auto_map={"AutoTokenizer": ["org/name--own.Tokenizer", None]})


def code_in_the_processor(path: Path) -> None:
    for name in ("processor_config.json", "preprocessor_config.json"):
        edit(path / name, auto_map={"AutoProcessor": "own.Tokenizer"}, processor_class="Tokenizer")


def code_to_generate(path: Path) -> None:
    (path / "custom_generate").mkdir()
    shutil.copy(path / "own.py", path / "custom_generate" / "generate.py")
    (path / "custom_generate" / "requirements.txt").write_text("no-such-package\n")
    edit(path / "generation_config.json", custom_generate=str(path), **TRUST)


def kernels_of_the_hub(path: Path) -> None:
    names = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")
    edit(path / "config.json", **dict.fromkeys(names, "org/kernel"), use_kernels=True, **TRUST)


def an_adapter(path: Path) -> None:
    edit(path / "adapter_config.json", base_model_name_or_path="org/name", auto_mapping={"parent_library": "own"})


PLACES: tuple[Callable[[Path], None], ...] = (
    code_in_the_tokenizer, code_in_an_old_tokenizer, code_in_the_config, code_of_another_repository,
    code_in_the_processor, code_to_generate, kernels_of_the_hub, an_adapter,
)  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a checkpoint beside code that leaves a mark when it runs."""

    def asked(*_: object) -> str:
        pytest.fail("the user was asked")

    monkeypatch.setattr("builtins.input", asked)
    path = shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")
    (path / "own.py").write_text(OWN.format(marker=str(tmp_path / "marker")))
    return path


def answers_and_ran_nothing(path: Path) -> None:
    model, tokenizer = load(path, device="cpu")
    assert type(model).__name__ == "GptOssForCausalLM"
    assert type(model).__module__.startswith("transformers.models.gpt_oss")
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert not hasattr(model.config, "auto_map")
    (answer,) = Generator(model, tokenizer).answer(["123+456="], max_tokens=8)
    assert answer.text == "579"
    assert not (path.parent / "marker").exists()


def test_code_in_all_places_at_once(hostile: Path) -> None:
    for place in PLACES:
        place(hostile)
    answers_and_ran_nothing(hostile)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_code_in_each_place(place: Callable[[Path], None], hostile: Path) -> None:
    place(hostile)
    answers_and_ran_nothing(hostile)


def test_code_in_a_tokenizer_alone(hostile: Path) -> None:
    """As ``bench serve --tokenizer`` loads it."""
    code_in_the_tokenizer(hostile)
    code_in_the_config(hostile)
    assert load_tokenizer(hostile)("1+2=")["input_ids"] == load_tokenizer(CHECKPOINT)("1+2=")["input_ids"]
    assert not (hostile.parent / "marker").exists()


def test_names_of_code_are_left_out_of_every_part_of_a_config(caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((MODELS / "sums-llama-4-fp8" / "config.json").read_text())
    assert neutral(config) == config
    code = {
        "auto_map": {"AutoConfig": "own.Config"}, "attn_implementation": "org/kernel", "transformers_weights": "../x",
        "_experts_implementation": "org/kernel", "linear_implementation": "x", "_name_or_path": "org/name",
        "configuration_files": ["config.9.9.9.json"], "custom_pipelines": {"x": {"impl": "own.Model"}},
    }  # fmt: skip
    changed = {**config, **code, "text_config": config["text_config"] | code}
    changed["vision_config"] = config["vision_config"] | {"attn_implementation": None} | code
    assert neutral(changed) == config
    assert not caplog.text
    assert neutral(changed, "config.json") == config
    assert "attn_implementation: 'org/kernel' is not used: the caller chooses implementations" in caplog.text
