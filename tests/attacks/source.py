"""Source: a checkpoint's files in memory, which mutators read, and the edits that they give back."""

from __future__ import annotations

import enum
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

__all__ = [
    "MODELS",
    "Edit",
    "Expect",
    "Fifo",
    "Folder",
    "Link",
    "Long",
    "Mutation",
    "Source",
    "Stored",
    "build",
    "write",
]

MODELS = Path(__file__).parents[2] / "models"
NOT_COPIED = ("README.md", "training.log")

_EXPERT = re.compile(r"layers\.(\d+)\..*\bexperts\b")
_INPUT_SCALE = re.compile(r"input_(global_)?scale$")
_SCALE = re.compile(r"(scale|scales|scale_inv|scale_2|global_scale)$")
_ZEROS = re.compile(r"(qzeros|g_idx|weight_shape|zero_point)$")


class Expect(enum.Enum):
    """What every verb has to do with a mutated checkpoint."""

    SAME = "the original's answer, bitwise identical"
    SAME_OR_REFUSED = "the original's answer, bitwise identical, or one clear error"
    REFUSED = "one clear error from every verb that reads weights"
    ANYTHING = "an answer, or one clear error"


@dataclass(frozen=True, slots=True)
class Fifo:
    """In place of a file: a named pipe that nobody writes to."""


@dataclass(frozen=True, slots=True)
class Folder:
    """In place of a file: an empty directory."""


@dataclass(frozen=True, slots=True)
class Link:
    """In place of a file: a symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class Long:
    """A file with zeros at its end, which take no room on the disk."""

    content: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Edit:
    """One file's new content. None removes it. Names are relative to the checkpoint's directory and may leave it."""

    file: str
    content: bytes | Fifo | Folder | Link | Long | None


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change to a checkpoint.

    Attributes:
        kind: the mutator's name.
        text: what it changes, for a reader.
        edits: the files that it changes.
        expect: what every verb has to do then.
        layer: the layer to load, if only that one is changed.
    """

    kind: str
    text: str
    edits: tuple[Edit, ...]
    expect: Expect = Expect.ANYTHING
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor's place: its shard, safetensors' dtype name, shape, and first and last byte in the file."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """A checkpoint's files by name."""

    name: str
    files: Mapping[str, bytes]

    @classmethod
    @cache
    def of(cls, name: str) -> Source:
        """One of the bundled checkpoints of ``models/``."""
        found = sorted(f for f in (MODELS / name).iterdir() if f.name not in NOT_COPIED)
        return cls(name, {f.name: f.read_bytes() for f in found})

    @cached_property
    def shards(self) -> tuple[str, ...]:
        """Names of the safetensors files."""
        return tuple(name for name in self.files if name.endswith(".safetensors"))

    def json(self, file: str) -> Any:
        """A new copy of a JSON file."""
        return json.loads(self.files[file])

    def header(self, shard: str) -> dict[str, Any]:
        """A new copy of a shard's header."""
        return json.loads(self.files[shard][8 : 8 + header_bytes(self.files[shard])])

    def data(self, shard: str) -> bytes:
        """The bytes of a shard's tensors."""
        return self.files[shard][8 + header_bytes(self.files[shard]) :]

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Every tensor by name."""
        found = {}
        for shard in self.shards:
            first = 8 + header_bytes(self.files[shard])
            for name, entry in self.header(shard).items():
                if name != "__metadata__":
                    start, stop = entry["data_offsets"]
                    found[name] = Stored(shard, entry["dtype"], tuple(entry["shape"]), first + start, first + stop)
        return found

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The first and the last layer with routed experts."""
        numbers = {int(m[1]) for name in self.tensors if (m := _EXPERT.search(name))}
        return tuple(sorted({min(numbers), max(numbers)}))

    def expert_tensors(self, layer: int, role: str) -> list[str]:
        """Names of a layer's expert tensors: ``scale``, ``input_scale``, ``bias``, ``zeros`` or ``codes``."""
        names = [n for n in self.tensors if (m := _EXPERT.search(n)) and int(m[1]) == layer]
        return [n for n in names if _role(n) == role]


def _role(name: str) -> str:
    if _INPUT_SCALE.search(name):
        return "input_scale"
    if _SCALE.search(name):
        return "scale"
    if _ZEROS.search(name):
        return "zeros"
    return "bias" if name.endswith("bias") else "codes"


def layer_of(name: str) -> int:
    """The layer of an expert's tensor."""
    found = _EXPERT.search(name)
    assert found is not None, name
    return int(found[1])


def header_bytes(content: bytes) -> int:
    """The length of a safetensors header."""
    return struct.unpack("<Q", content[:8])[0]


def build(header: Any, data: bytes) -> bytes:
    """A safetensors file; ``header`` as a JSON value or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(source: Source, edits: Sequence[Edit], directory: Path) -> None:
    """Write a mutated copy of a checkpoint to a new directory."""
    directory.mkdir()
    changed = {edit.file for edit in edits}
    for name, content in source.files.items():
        if name not in changed:
            (directory / name).write_bytes(content)
    for edit in edits:
        path = Path(os.path.normpath(directory / edit.file))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.is_file():
            path.unlink()
        if isinstance(edit.content, bytes):
            path.write_bytes(edit.content)
        elif isinstance(edit.content, Link):
            path.symlink_to(edit.content.target)
        elif isinstance(edit.content, Long):
            path.write_bytes(edit.content.content)
            os.truncate(path, edit.content.size)
        elif isinstance(edit.content, Fifo):
            os.mkfifo(path)
        elif isinstance(edit.content, Folder):
            path.mkdir()
