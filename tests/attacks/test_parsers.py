"""Property-based tests of what reads files: whatever they hold, there is a result or one error of polymoe, soon."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polymoe
from attacks.json_mutators import HOSTILE, Raw, dumps, paths
from attacks.mutations import CHECKPOINTS
from attacks.source import Source, build
from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.files import CheckpointFiles
from polymoe.errors import ArgumentError, PolymoeError
from polymoe.planning import table_files

SOON_S = 5.0
"""CPU time: far more than any of these takes."""

words = st.text(max_size=12)
names = words | st.sampled_from(
    ["a", "b", "model.layers.0.mlp.experts", "weight_map", "../x.safetensors", "", "\x00", "a/b"]
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | names | st.sampled_from([Raw(text) for text in HOSTILE])
)
trees = st.recursive(
    leaves, lambda below: st.lists(below, max_size=4) | st.dictionaries(words, below, max_size=4), max_leaves=8
)
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
SIZE = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


@contextlib.contextmanager
def one_error_or_none() -> Iterator[None]:
    """The block ends soon, and raises nothing but polymoe's errors, with a message of bounded length."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"it takes more than {SOON_S} s")

    message = "none"
    before = signal.signal(signal.SIGVTALRM, hangs)
    signal.setitimer(signal.ITIMER_VIRTUAL, SOON_S)
    try:
        yield
    except PolymoeError as error:
        message = str(error)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert 0 < len(message) < 3000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each example writes its files here anew."""
    return tmp_path_factory.mktemp("checkpoint")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A valid header and its data."""
    header: dict[str, Any] = {}
    size = 0
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPES))), draw(st.lists(st.integers(0, 3), max_size=3))
        count = SIZE[dtype]
        for length in shape:
            count *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, size + count]}
        size += count
    return header, draw(st.binary(min_size=size, max_size=size))


def written(directory: Path, **files: bytes) -> Path:
    """A checkpoint with these files: ``config``, ``index`` and ``shard``."""
    for key, name in (
        ("config", "config.json"),
        ("index", "model.safetensors.index.json"),
        ("shard", "model.safetensors"),
    ):
        (directory / name).unlink(missing_ok=True)
        if key in files or key == "config":
            (directory / name).write_bytes(files.get(key, b"{}"))
    return directory


@given(shapes())
def test_tensors_are_what_a_valid_header_says(directory: Path, stored: tuple[dict[str, Any], bytes]) -> None:
    header, data = stored
    with CheckpointFiles.open(written(directory, shard=build(header, data))) as files:
        assert files.names == header.keys()
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            tensor = files.get(name)
            assert (tensor.dtype, list(tensor.shape)) == (DTYPES[entry["dtype"]], entry["shape"])
            assert files.header(name).dtype == entry["dtype"]
            assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == data[start:stop]


@given(shapes(), st.data())
def test_a_header_with_any_value_anywhere(
    directory: Path, stored: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    header, content = stored
    changed(header, data)
    with one_error_or_none(), CheckpointFiles.open(written(directory, shard=build(dumps(header), content))) as files:
        read_all(files)


@given(st.binary(max_size=200) | shapes().map(lambda stored: build(*stored)), st.data())
def test_any_bytes_as_a_shard(directory: Path, content: bytes, data: st.DataObject) -> None:
    for at in data.draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=4)) if content else ():
        content = content[:at] + data.draw(st.binary(min_size=1, max_size=1)) + content[at + 1 :]
    with one_error_or_none(), CheckpointFiles.open(written(directory, shard=content)) as files:
        read_all(files)


@given(trees | st.fixed_dictionaries({"weight_map": trees | st.dictionaries(names, names)}))
def test_any_index_stays_inside_the_directory(directory: Path, index: Any) -> None:
    inside = directory.resolve()
    with one_error_or_none(), CheckpointFiles.open(written(directory, index=dumps(index))) as files:
        for name in files.names:
            assert files.shard_of(name).resolve().is_relative_to(inside)
        read_all(files)


@given(st.sampled_from(CHECKPOINTS), st.data())
def test_any_value_anywhere_in_a_config(directory: Path, checkpoint: str, data: st.DataObject) -> None:
    config = Source.of(checkpoint).json("config.json")
    for _ in range(data.draw(st.integers(1, 3))):
        changed(config, data)
    (directory / "config.json").write_bytes(dumps(config))
    with one_error_or_none():
        str(polymoe.explain(directory / "config.json", device="h200").to_dict())


@given(st.binary(max_size=60) | trees.map(dumps))
def test_any_bytes_as_a_config(directory: Path, content: bytes) -> None:
    with one_error_or_none():
        Checkpoint.open(written(directory, config=content))


characters = st.text("ab1.*+?|()[]{}^$\\d-,:<>=!P", max_size=40)
patterns = (
    characters | characters.map(lambda text: "re:" + text) | st.sampled_from(["re:" + "(a*)*" * 20 + "b", "*a" * 30])
)


@given(
    st.lists(patterns, max_size=5), st.sampled_from(["qwen3-fp8", "llama-4-fp8", "nemotron-h-nvfp4", "gpt-oss-mxfp4"])
)
def test_any_patterns_of_modules(directory: Path, listed: list[str], name: str) -> None:
    config = Source.of(f"sums-{name}").json("config.json")
    quantization = config["quantization_config"]
    quantization[next(key for key in ("ignore", "modules_to_not_convert") if key in quantization)] = listed
    (directory / "config.json").write_text(json.dumps(config))
    with one_error_or_none():
        quantized = Checkpoint.open(directory / "config.json").quantization
        for module in ("model.layers.1.mlp.experts.3.up_proj", "lm_head", "a" * 400, ".".join("ab" * 60)):
            with contextlib.suppress(PolymoeError):
                quantized.scheme(module)


@given(st.binary(max_size=200) | st.lists(trees.map(dumps), max_size=3).map(b"\n".join))
def test_any_bytes_as_a_table(content: bytes) -> None:
    lines = table_files.parse(content, "a table")
    assert len(lines.rows) + len(lines.errors) == len(content.splitlines())


ROW = {
    "device": "NVIDIA H200", "backend": "triton", "problem": "p", "tokens": 16, "config": {}, "median_us": 1.5,
    "torch": "2.11.0", "triton": "3.6.0", "polymoe": "0.1.0", "driver": "13.0", "date": "2026-01-01T00:00:00Z",
}  # fmt: skip


@given(st.sampled_from(sorted(ROW)), trees)
def test_any_value_in_a_row_of_a_table(name: str, value: Any) -> None:
    lines = table_files.parse(dumps(ROW | {name: value}), "a table")
    assert len(lines.rows) + len(lines.errors) == 1


@given(st.lists(st.binary(max_size=60) | trees.map(dumps), max_size=4))
def test_any_lines_as_records(directory: Path, lines: list[bytes]) -> None:
    from polymoe.bench import records

    file = directory / "records.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    with contextlib.suppress(ArgumentError):
        records.read(file)


def changed(tree: Any, data: st.DataObject) -> None:
    """Put any value anywhere into a JSON tree, or remove one."""
    *above, key = random.Random(data.draw(st.integers(0, 2**32))).choice(paths(tree))
    for step in above:
        tree = tree[step]
    if data.draw(st.integers(0, 5)) == 0:
        del tree[key]
    else:
        tree[key] = data.draw(trees)


def read_all(files: CheckpointFiles) -> None:
    """Read every tensor; each may be refused."""
    for name in sorted(files.names):
        with contextlib.suppress(PolymoeError):
            files.header(name)
            files.get(name)
