"""The opener: what is no regular file, where links may lead, and which JSON and headers are refused."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polymoe.checkpoint.files import CheckpointFiles
from polymoe.checkpoint.opener import MOST_BYTES, is_inside, open_weights, read_bytes, read_json
from polymoe.errors import CheckpointError, CheckpointNotFound

# --- Files that are none --------------------------------------------------------------------------------------------


def make_socket(path: Path) -> None:
    # Names of sockets have at most 107 bytes, and those of pytest's directories may have more.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a directory": os.mkdir,
    "a device": lambda path: os.symlink("/dev/zero", path),
}


@pytest.mark.timeout(20)  # whoever opens a FIFO waits for ever
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json", "model.safetensors"]
)
def test_what_is_no_regular_file_is_never_opened(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    KINDS[kind](tmp_path / name)
    with pytest.raises(CheckpointError, match=f"expected a regular file, got {kind}") as error:
        CheckpointFiles.open(tmp_path)
    assert name in str(error.value)


def test_links_in_a_circle(tmp_path: Path) -> None:
    os.symlink("config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="can be read"):
        CheckpointFiles.open(tmp_path)


def test_a_name_with_a_null_character() -> None:
    with pytest.raises(CheckpointError, match="null"):
        CheckpointFiles.open("a\0b")


def test_a_file_of_text_has_a_largest_size(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"at most {MOST_BYTES} bytes"):
        read_bytes(file)
    assert read_bytes(file, most=MOST_BYTES + 1) == bytes(MOST_BYTES + 1)


# --- Links ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def test_links_are_followed(tmp_path: Path, elsewhere: Path) -> None:
    (elsewhere / "config.json").write_text('{"a": 1}')
    (tmp_path / "models").mkdir()
    os.symlink(elsewhere / "config.json", tmp_path / "models/config.json")  # as a store of files by hash
    os.symlink(tmp_path / "models", tmp_path / "directory")
    os.symlink(tmp_path / "models/config.json", tmp_path / "mine.json")
    for path in ("models", "directory", "mine.json"):
        assert CheckpointFiles.open(tmp_path / path).config == {"a": 1}


@pytest.mark.parametrize("name", ["a.safetensors", "sub/a.safetensors", "..a/b"])
def test_names_inside(name: str) -> None:
    assert is_inside(name)


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../../b", "..\\a", "C:\\a", "\\\\host\\a", "a\0b", "a\nb"])
def test_names_outside(name: str) -> None:
    assert not is_inside(name)


# --- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is in one object twice"),
        (b"{", "(?s)expected JSON.*hint: correct it, or download it again"),
        (b"[1]", "JSON object, got list"),
        (b'{"a": ' + b"1" * 5000 + b"}", "expected JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ('{"a": "é"}'.encode("latin-1"), "can't decode byte"),
        (rb'{"\ud800": 1}', "surrogates not allowed"),
        (rb'{"a": ["\uDFFF"]}', "surrogates not allowed"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "more than 100 levels"),
    ],
    ids=[
        "a key twice", "cut off", "list", "digits", "NaN", "BOM", "not UTF-8", "half a pair as key",
        "half a pair in a value", "deep",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_json_that_is_none_or_that_others_would_read_differently(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        CheckpointFiles.open(tmp_path)
    assert name in error.value.where


def test_json_of_releases(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(rb'{"time_step_limit": [0.0, Infinity], "pair": "\ud83d\ude00"}')
    assert read_json(tmp_path / "config.json") == {"time_step_limit": [0.0, float("inf")], "pair": "\U0001f600"}


# --- Headers of weights ---------------------------------------------------------------------------------------------


def entry(*shape: int, dtype: str = "U8", offsets: tuple[int, int] = (0, 64)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ENTRY = b'"a": ' + json.dumps(entry(64)).encode()


def write_weights(path: Path, header: object, *, length: int | None = None, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_a_header_is_read(tmp_path: Path) -> None:
    assert list(open_weights(write_weights(tmp_path / "a.safetensors", {"a": entry(64)})).keys()) == ["a"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(64, offsets=(0, 65))}, "a complete safetensors file"),
        ({"a": entry(64, offsets=(64, 0))}, "a complete safetensors file"),
        ({"a": entry(32, offsets=(0, 32)), "b": entry(32, offsets=(16, 48))}, "a complete safetensors file"),
        ({"a": entry(16, offsets=(0, 16)), "b": entry(32, offsets=(32, 64))}, "a complete safetensors file"),
        ({"a": entry(32)}, "a complete safetensors file"),
        ({"a": entry(2**40, 2**40)}, "overflow"),
        ({"a": entry(-64)}, "a complete safetensors file"),
        ({"a": entry(64, dtype="F8")}, "a complete safetensors file"),
        ({"a": {"dtype": "U8"}}, "a complete safetensors file"),
        ({"a": entry(64), "b": entry(0, 2**63, offsets=(64, 64))}, r"tensor b: expected at most 8 dimensions, each"),
        ({"a": entry(*[1] * 8, 64)}, "tensor a: expected at most 8 dimensions"),
        ({"a\x1b[2J": entry(64)}, "names of tensors: expected 1 to 500 printable characters"),
        (b"{" + ENTRY, "a complete safetensors file"),
        (b'{"a": 1, "a": 2}', "a complete safetensors file"),
        (b"{%s, %s}" % (ENTRY, ENTRY), "the key 'a' is in one object twice"),
    ],
    ids=[
        "past the end", "backwards", "overlap", "gap", "size and shape", "overflow", "negative", "dtype", "no shape",
        "a size of 2^63", "nine dimensions", "control characters", "cut off", "no object", "a tensor twice",
    ],
)  # fmt: skip
def test_headers_that_are_refused(header: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        open_weights(write_weights(tmp_path / "a.safetensors", header))
    assert "a.safetensors" in error.value.where


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_another_length(length: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a complete safetensors file"):
        open_weights(write_weights(tmp_path / "a.safetensors", {"a": entry(64)}, length=length))


def test_a_header_has_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MOST_BYTES + 1))
        file.truncate(MOST_BYTES + 100)
    with pytest.raises(CheckpointError, match=f"a header of at most {MOST_BYTES} bytes"):
        open_weights(path)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="complete the download"):
        open_weights(tmp_path / "a.safetensors")


def test_control_characters_in_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"a\x1b[2J": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names of tensors: expected 1 to 500 printable characters"):
        CheckpointFiles.open(tmp_path)
