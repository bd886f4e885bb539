"""Broken checkpoints through load(): one clear error that names the file, whatever a library would have raised."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from polymoe.common.untrusted import reading
from polymoe.engines.transformers import load
from polymoe.errors import ArgumentError, CheckpointError, FormatError, MissingDependency
from support.packed_model import CHECKPOINT, MODELS
from support.tiny_models import KNOWS_CONVERSIONS

Change = Callable[[Path], None]
INDEX = "model.safetensors.index.json"


def json_file(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(path: Path) -> None:
        described = json.loads((path / name).read_text()) if (path / name).exists() else {}
        change(described)
        (path / name).write_text(json.dumps(described))

    return edit


def config(**values: Any) -> Change:
    return json_file("config.json", lambda found: found.update(values))


def generation(**values: Any) -> Change:
    return json_file("generation_config.json", lambda found: found.update(values))


def tokenizer(**values: Any) -> Change:
    return json_file("tokenizer_config.json", lambda found: found.update(values))


def cut(name: str) -> Change:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-100])  # type: ignore[return-value]


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def edit(path: Path) -> None:
        shard = path / json.loads((path / INDEX).read_text())["weight_map"][name]
        tensors = load_file(shard)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, shard, {"format": "pt"})

    return edit


def elsewhere(absolute: bool) -> Change:
    """The index leads to a file outside that would fit."""

    def edit(path: Path) -> None:
        other = path.parent / "other.safetensors"
        found = json.loads((path / INDEX).read_text())
        name = next(iter(found["weight_map"]))
        shutil.copy(path / found["weight_map"][name], other)
        found["weight_map"][name] = str(other) if absolute else "../other.safetensors"
        (path / INDEX).write_text(json.dumps(found))

    return edit


def code_alone(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    tokenizer(auto_map={"AutoTokenizer": ["own.Tokenizer", None]})(path)


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[Change, str]] = {
    # Indexes.
    "index cut off": (cut(INDEX), f"{INDEX}: expected JSON"),
    "index to a file above": (elsewhere(absolute=False), "inside the checkpoint's directory, got '../other"),
    "index to a file anywhere": (elsewhere(absolute=True), "inside the checkpoint's directory, got '/"),
    "index of numbers": (
        json_file(INDEX, lambda found: found["weight_map"].update({NORM: 7})),
        f"{INDEX}: {NORM}: expected a file inside",
    ),
    "index without a tensor": (json_file(INDEX, lambda found: found["weight_map"].pop(NORM)), f"none for {NORM}"),
    "shard that is missing": (
        lambda path: (path / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002.safetensors"
    ),
    # Configs.
    "heads as text": (config(num_attention_heads="6"), "config.json: num_attention_heads: expected an integer"),
    "heads that are none": (config(num_attention_heads=0), "config.json: num_attention_heads: expected an integer"),
    "heads of another model": (config(num_attention_heads=12), r"o_proj\.weight: expected shape \[192, 384\], got"),
    "rope of text": (config(rope_scaling={"rope_type": "yarn", "factor": "x"}), "expected a"),
    "rope that is unknown": (config(rope_scaling={"rope_type": "x", "factor": 2}), "expected a"),
    "dtype as number": (config(dtype=64, torch_dtype=64), "config.json: dtype"),
    "dtype of another kind": (config(dtype="int8", torch_dtype="int8"), "dtype"),
    "layer types": (config(layer_types=["x"] * 4), "expected a config that Transformers accepts"),
    "layers without tensors": (config(num_hidden_layers=5, layer_types=["full_attention"] * 5), "layer 4"),
    "more layers than tensors": (
        config(num_nextn_predict_layers=10_000), "num_nextn_predict_layers: expected at most 79, the number of tensors"
    ),
    "a number of 70 bits": (config(head_dim=2**70), "config.json: head_dim: expected an integer"),
    "vocabulary of the config": (config(vocab_size=2**30), r"lm_head\.weight: expected shape \[1073741824, 192\]"),
    # Generation configs.
    "generation config cut off": (cut("generation_config.json"), r"generation_config\.json: expected JSON"),
    "pad token outside": (generation(pad_token_id=16), "pad_token_id: expected a token from 0 to 15, got 16"),
    # Tokenizers.
    "tokenizer cut off": (cut("tokenizer.json"), r"tokenizer\.json: expected JSON"),
    "tokenizer that is none": (
        json_file("tokenizer.json", lambda found: found.update(model={"type": "BPE"})),
        "tokenizer: expected one that Transformers reads",
    ),
    "tokenizer that is missing": (
        lambda path: (path / "tokenizer.json").unlink(),
        r"tokenizer: expected tokenizer\.json, or .*got none of them(?s:.*)copy tokenizer\.json",
    ),
    "tokenizer of code": (code_alone, "runs no code from a checkpoint"),
    "padding side": (tokenizer(padding_side=3), "tokenizer: expected one that Transformers reads"),
    "inputs of the tokenizer": (tokenizer(model_input_names=["input_ids"]), "expected input_ids and attention_mask"),
    "special tokens": (
        json_file("special_tokens_map.json", lambda found: found.update(eos_token={"content": 3})),
        "tokenizer: expected one that Transformers reads, got TypeError",
    ),
    "token outside the embedding": (
        json_file("tokenizer.json", lambda found: found["model"]["vocab"].update(x=16)),
        "tokenizer: expected ids below 16, the number of rows of the embedding, got ids up to 16",
    ),
    # Weights.
    "shape of a dense tensor": (tensor(NORM, lambda t: t[:-1]), rf"{NORM}: expected shape \[192\], got \[191\]"),
    "codes for a dense tensor": (
        tensor("model.layers.0.self_attn.q_proj.weight", lambda t: t.to(torch.uint8)), "q_proj.weight: expected a scale"
    ),
    "NaN in a dense tensor": (tensor(NORM, lambda t: t * float("nan")), "expected logits that are numbers, got NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_one_clear_error(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    path = shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")
    change(path)
    with pytest.raises((CheckpointError, FormatError), match=message) as error:
        load(path, device="cpu")
    assert "/tmp/polymoe-" not in str(error.value)  # where Transformers reads copies


def test_missing_tensors_are_not_allocated(tmp_path: Path) -> None:
    """An embedding that no file has, in a size that no machine has."""
    path = shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")
    name = "model.embed_tokens.weight"
    config(vocab_size=2**31 - 1)(path)
    json_file(INDEX, lambda found: found["weight_map"].pop(name))(path)
    with pytest.raises(CheckpointError, match=rf"expected every tensor of the model, got none for {re.escape(name)}"):
        load(path, device="cpu")


def test_numbers_that_contradict_each_other_are_found_by_computing(tmp_path: Path) -> None:
    path = shutil.copytree(MODELS / "sums-nemotron-h-nvfp4", tmp_path / "checkpoint")
    config(n_groups=3)(path)
    with pytest.raises(CheckpointError, match="expected"):
        load(path, device="cpu")


# --- The border -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not KNOWS_CONVERSIONS, reason="Transformers before 5.23")
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_experts_in_16_bits_that_are_not_finite(number: float, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    shutil.copytree(MODELS / "sums-olmoe", path)
    tensor("model.layers.1.mlp.experts.2.down_proj.weight", lambda w: w.index_fill(1, torch.tensor([3]), number))(path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.down_proj: expected finite numbers"):
        load(path, device="cpu")


def test_exceptions_of_libraries_become_errors_of_the_checkpoint() -> None:
    message = r"here: expected an integer, got JSONDecodeError: Expecting value"
    with pytest.raises(CheckpointError, match=message) as error, reading("here", "an integer"):
        json.loads("x\n")
    assert isinstance(error.value.__cause__, json.JSONDecodeError)


def test_a_panic_is_no_exception() -> None:
    class PanicException(BaseException):  # as pyo3 defines it
        pass

    with pytest.raises(CheckpointError, match="PanicException: out of range"), reading("here", "a tokenizer"):
        raise PanicException("out of range")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), MemoryError(), torch.OutOfMemoryError("GPU")])
def test_what_is_not_the_checkpoint_s_fault_stays(error: BaseException) -> None:
    with pytest.raises(type(error)), reading("here", "a tokenizer"):
        raise error


def test_errors_of_polymoe_stay_and_missing_packages_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"^device$"), reading("here", "a tokenizer"):
        raise ArgumentError("device")
    says = "sentencepiece\n  hint: install the package"  # no file is damaged
    with pytest.raises(MissingDependency, match=says), reading("here", "a tokenizer", hint="download it again"):
        raise ImportError("no module named sentencepiece")


def test_bugs_of_polymoe_stay_bugs() -> None:
    with pytest.raises(TypeError), reading("here", "a tokenizer"):
        exec("int([])", {"__name__": "polymoe.checkpoint.files"})


def test_long_causes_are_cut() -> None:
    with pytest.raises(CheckpointError) as error, reading("here", "a tokenizer"):
        raise ValueError("x" * 10_000)
    assert len(str(error.value)) < 600
