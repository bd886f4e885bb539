"""The files of a tokenizer: which are read, and what of ``tokenizer_config.json`` is left out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from polymoe.checkpoint.tokenizer_files import MOST_TEMPLATE_BYTES, read_tokenizer_files
from polymoe.errors import CheckpointError


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def read_config(directory: Path) -> Any:
    return json.loads(read_tokenizer_files(directory)["tokenizer_config.json"])


def test_only_files_of_tokenizers_are_read(tmp_path: Path) -> None:
    write(tmp_path, {})
    for name in ("tokenization_own.py", "config.json", "generation_config.json", "model.safetensors", "secret.txt"):
        (tmp_path / name).write_text("not JSON")
    for name in ("chat_template.jinja", "additional_chat_templates/rag.jinja", "tokenizer.model", "merges.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("ü")
    found = read_tokenizer_files(tmp_path)
    assert set(found) == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja",
        "tokenizer.model", "merges.txt",
    }  # fmt: skip
    assert found["merges.txt"] == "ü".encode()


def test_what_names_code_or_files_is_left_out(tmp_path: Path) -> None:
    own = {"eos_token": "</s>", "model_max_length": 10**30, "added_tokens_decoder": {"0": {"content": "<file>"}}}
    other = {
        "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "vocab_file": "/etc/passwd", "vocab": "/etc/passwd",
        "merges_file": "../merges.txt", "fast_tokenizer_files": ["tokenizer.../../x.json"], "name_or_path": "org/name",
        "init_inputs": ["/etc/passwd"], "tokenizer_object": 1, "cache_dir": "/", "gguf_file": "x",
    }  # fmt: skip
    deep = {"sp_model_kwargs": {"model_file": "/etc/passwd", "enable_sampling": False}}
    assert read_config(write(tmp_path, own | other | deep)) == own | {"sp_model_kwargs": {"enable_sampling": False}}


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["own.Tokenizer", None]}, ["own.Tokenizer", None]], ids=type)
def test_a_tokenizer_that_is_code_is_refused(auto_map: Any, tmp_path: Path) -> None:
    write(tmp_path, {"auto_map": auto_map})
    assert read_config(tmp_path) == {}
    (tmp_path / "tokenizer.json").rename(tmp_path / "tiktoken.model")
    with pytest.raises(CheckpointError, match="runs no code from a checkpoint"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"])
def test_json_is_checked(name: str, tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / name).write_text('{"a": 1, "a": 2}')
    with pytest.raises(CheckpointError, match=rf"{name}: expected JSON, got the key 'a'"):
        read_tokenizer_files(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_what_is_no_file_of_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, {})
    file = tmp_path / name
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="regular file"):
        read_tokenizer_files(tmp_path)
    file.unlink()
    os.symlink("/dev/zero", file)
    with pytest.raises(CheckpointError, match="regular file"):
        read_tokenizer_files(tmp_path)


def test_a_chat_template_has_a_largest_size(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (MOST_TEMPLATE_BYTES + 1))
    with pytest.raises(CheckpointError, match="at most"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", {"model": {"vocab": {"x" * 1025: 0}}}, "tokens of at most 1024 characters, got one of 1025"),
        ("tokenizer.json", {"model": {"vocab": [["x" * 1025, 0.5]]}}, "tokens of at most 1024 characters"),
        ("vocab.json", {"x" * 1025: 0}, "tokens of at most 1024 characters"),
        ("added_tokens.json", {"<a>": 2**24 + 1}, "ids up to 16777216, got '16777217'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1" * 5000: {"content": "<a>"}}}, "ids up to 16777216"),
    ],
)
def test_tokens_that_take_for_ever(name: str, content: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as error:
        read_tokenizer_files(tmp_path)
    assert name in error.value.where


@pytest.mark.parametrize("model", [None, 3, [], {"vocab": 3}, {"vocab": [[], 3, None]}, {"vocab": {"x" * 1024: -1}}])
@pytest.mark.parametrize("added", [None, 3, [], {"x": None, "3": 5, "4": {}}, {"\u00b2": 2**24}])
def test_what_tokenizers_themselves_refuse_is_left_to_them(model: Any, added: Any, tmp_path: Path) -> None:
    write(tmp_path, {"added_tokens_decoder": added})
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert len(read_tokenizer_files(tmp_path)) == 2
