"""CheckpointFiles: the files of a checkpoint, checked: configs as dicts, tensors as memory-mapped views.

This module knows safetensors and the Hub, but no models or formats. Pickles are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymoe.checkpoint.hub import locate
from polymoe.checkpoint.opener import exists, is_inside, open_weights, read_json
from polymoe.checkpoint.patterns import check_name
from polymoe.checkpoint.tokenizer_files import TOKENIZER_FILES
from polymoe.errors import CheckpointError, CheckpointNotFound, quoted

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
SIDE = "hf_quant_config.json"
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
CONFIGS = (CONFIG, SIDE)
WEIGHTS = (GENERATION, "*.safetensors", "*.safetensors.index.json")
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
OTHER_PICKLES = ("training_args.bin", "optimizer.pt", "scheduler.pt")  # files that trainers write beside the weights
OTHER_SAFETENSORS = ("adapter", "consolidated")  # LoRA weights; the same model again under its authors' own names
NUMBERED = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor's entry in the header of its shard: safetensors' dtype name (``BF16``, ``F8_E4M3``, ``U8``) and
    shape."""

    dtype: str
    shape: tuple[int, ...]


class CheckpointFiles:
    """A checkpoint's ``config.json``, the files beside it, and its tensors by name.

    Use :meth:`open`. Shards are opened when first needed, and mapped instead of read. A missing shard is an error only
    for its own tensors, so a checkpoint may contain just some layers of its index.

    Attributes:
        path: the directory, or the config file if it was opened alone.
        directory: the directory.
        config: ``config.json``.
        side: ``hf_quant_config.json``, or None.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], side: dict[str, Any] | None, shards: Mapping[str, str]
    ) -> None:
        self.path, self.config, self.side = path, config, side
        self._shards = dict(shards)
        self._handles: dict[str, tuple[Any, frozenset[str]]] = {}

    @classmethod
    def open(cls, path_or_hub_id: str | Path, *, config_only: bool = False, **hub: Any) -> CheckpointFiles:
        """Open the checkpoint in a directory, a config file alone, or a Hub repository. The arguments are those of
        :meth:`polymoe.checkpoint.Checkpoint.open`.

        Raises:
            CheckpointNotFound: if the path or repository does not exist or has no ``config.json``.
            CheckpointError: if a file is invalid, files contradict each other, or weights are pickles.
        """
        path = locate(path_or_hub_id, CONFIGS if config_only else (*CONFIGS, *WEIGHTS, *TOKENIZER_FILES), **hub)
        if path.is_dir():
            directory, config_file = path, path / CONFIG
        else:
            if path.suffix != ".json":
                raise _other_model(path) or CheckpointError(
                    str(path), expected="a directory, or a config.json", got="another file"
                )
            directory, config_file = path.parent, path
        if not exists(config_file):
            raise _other_model(path) or CheckpointNotFound(
                str(path), expected=f"a {CONFIG}", got="none", hint="name the directory that holds the model's files"
            )
        config = read_json(config_file)
        side = read_json(directory / SIDE) if exists(directory / SIDE) else None
        shards = {} if config_only or path != directory else _find_shards(directory)
        return cls(path, config, side, shards)

    @property
    def directory(self) -> Path:
        """The directory that the files are in."""
        return self.path if self.path.is_dir() else self.path.parent

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return exists(self.directory / name)

    def json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file beside ``config.json``, or None if there is none; raises CheckpointError if invalid."""
        file = self.directory / name
        return read_json(file) if exists(file) else None

    @property
    def has_tensors(self) -> bool:
        """Whether there are any tensors."""
        return bool(self._shards)

    @property
    def is_whole(self) -> bool:
        """Whether every shard is there, and at least one."""
        return self.has_tensors and all(exists(self.path / shard) for shard in set(self._shards.values()))

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def shard_of(self, name: str) -> Path:
        """Return the file of a tensor, which need not exist; raises CheckpointNotFound for an unknown tensor."""
        if name not in self._shards:
            raise CheckpointNotFound(f"{self.path}: tensor {name}", expected="in the checkpoint", got="no such tensor")
        return self.path / self._shards[name]

    def header(self, name: str) -> Header:
        """Return dtype and shape of a tensor from the header of its shard; raises like :meth:`get`."""
        piece = self._shard(name).get_slice(name)
        return Header(piece.get_dtype(), tuple(piece.get_shape()))

    def get(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or one item of its leading axis: a view of the mapped file, read when it is used.

        Raises:
            CheckpointNotFound: if the tensor or its shard is missing.
            CheckpointError: if its shard is truncated or corrupt, or lacks a tensor that the index lists.
        """
        tensor = self._shard(name).get_tensor(name)
        return tensor if index is None else tensor[index]

    def close(self) -> None:
        """Close the opened shards; tensors that are still referenced stay valid."""
        self._handles.clear()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shard(self, name: str) -> Any:
        handle, names = self._handles.get(self._shards.get(name, "")) or self._open_shard(name)
        if name not in names:
            raise CheckpointError(
                f"{self.shard_of(name)}: tensor {name}",
                expected="in this shard, as the index says",
                got="no such tensor",
                hint="index and shards are of different revisions; download the checkpoint again",
            )
        return handle

    def _open_shard(self, name: str) -> tuple[Any, frozenset[str]]:
        handle = open_weights(self.shard_of(name))
        opened = self._handles[self._shards[name]] = handle, frozenset(handle.keys())
        return opened


def _find_shards(directory: Path) -> dict[str, str]:
    """Return the file name of every tensor's shard, from the index or else from the headers."""
    files = sorted(f.name for f in directory.glob("*.safetensors") if not f.name.startswith(OTHER_SAFETENSORS))
    indices = sorted(f.name for f in directory.glob("*.safetensors.index.json"))
    if indices:
        return _read_index(directory, INDEX if INDEX in indices else indices[0], files)
    if not files:
        _refuse_pickles(directory)
    for file in files:
        _check_all_shards(directory, file, files)
    shards: dict[str, str] = {}
    for file in files:
        for name in open_weights(directory / file).keys():  # noqa: SIM118
            if name in shards:
                raise CheckpointError(
                    f"{directory}: tensor {name}",
                    expected="in one file",
                    got=f"in {shards[name]} and {file}",
                    hint="remove the file that belongs to another model or revision",
                )
            shards[name] = file
    return shards


def _read_index(directory: Path, index: str, files: list[str]) -> dict[str, str]:
    where = str(directory / index)
    weight_map = read_json(directory / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(where, expected="'weight_map', an object with entries", got=type(weight_map).__name__)
    for name, shard in weight_map.items():
        check_name(name, f"{where}: names of tensors")
        if not isinstance(shard, str) or not is_inside(shard):
            raise CheckpointError(
                f"{where}: {name}",
                expected="a file inside the checkpoint's directory",
                got=quoted(shard),
                hint="do not trust this checkpoint",
            )
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{where}: {name}", expected="a .safetensors file", got=quoted(shard))
    listed = set(weight_map.values())
    stems = {m["stem"] for shard in listed if (m := NUMBERED.fullmatch(shard))} | {"model"}
    for file in files:
        match = NUMBERED.fullmatch(file)
        if file not in listed and (match["stem"] in stems if match else file == "model.safetensors"):
            raise CheckpointError(
                str(directory / file),
                expected=f"a file that {index} lists",
                got="tensors that it does not mention",
                hint="the file is left from another revision; remove it, or download the checkpoint again",
            )
    return weight_map


def _other_model(path: Path) -> CheckpointError | None:
    """The error for a file, or a directory without a config, that is a model of another kind; None if it is not."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if any(file.suffix == ".gguf" for file in files):
        return CheckpointError(
            str(path),
            expected="a config.json and .safetensors files",
            got="a GGUF file",
            hint="polymoe reads the model's original checkpoint; llama.cpp runs GGUF",
        )
    if path.is_dir() and exists(path / ADAPTER):
        base = read_json(path / ADAPTER).get("base_model_name_or_path")
        return CheckpointError(
            str(path),
            expected="a model",
            got=f"a LoRA adapter of {quoted(base)}" if base else "a LoRA adapter",
            hint="load its base model; model.load_adapter(path) adds the adapter in Transformers",
        )
    return None


def _check_all_shards(directory: Path, file: str, files: list[str]) -> None:
    """Require all of the numbered shards without an index, since nothing else tells which tensors are missing."""
    match = NUMBERED.fullmatch(file)
    if match is None:
        return
    found = sum(1 for f in files if (m := NUMBERED.fullmatch(f)) and m.groups() == match.groups())
    if found != int(match["count"]):
        raise CheckpointNotFound(
            str(directory),
            expected=f"{int(match['count'])} shards like {file}, or an index",
            got=f"{found}",
            hint="complete the download of the checkpoint",
        )


def _refuse_pickles(directory: Path) -> None:
    pickles = sorted(f.name for pattern in PICKLES for f in directory.glob(pattern) if f.name not in OTHER_PICKLES)
    if pickles:
        raise CheckpointError(
            str(directory / pickles[0]),
            expected="weights in .safetensors files",
            got="a pickle, which can run any code when it is opened",
            hint="convert the checkpoint to safetensors",
        )
