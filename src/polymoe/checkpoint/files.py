"""CheckpointFiles: the files of a checkpoint, checked: configs as dicts, tensors as memory-mapped views.

This module knows safetensors and the Hub, but no models or formats. Pickles are never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from polymoe.errors import CheckpointError, CheckpointNotFound

__all__ = ["CheckpointFiles", "Header"]

CONFIG = "config.json"
SIDE = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
OTHER_PICKLES = ("training_args.bin", "optimizer.pt", "scheduler.pt")  # files that trainers write beside the weights
OTHER_SAFETENSORS = ("adapter", "consolidated")  # LoRA weights; the same model again under its authors' own names
NUMBERED = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
        config: ``config.json``.
        side: ``hf_quant_config.json``, or None.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], side: dict[str, Any] | None, shards: Mapping[str, str]
    ) -> None:
        self.path, self.config, self.side = path, config, side
        self._shards = dict(shards)
        self._handles: dict[Path, tuple[Any, frozenset[str]]] = {}

    @classmethod
    def open(
        cls, path_or_hub_id: str | Path, *, config_only: bool = False, revision: str | None = None
    ) -> CheckpointFiles:
        """Open the checkpoint in a directory, a config file alone, or a Hub repository (``org/name``).

        Args:
            path_or_hub_id: an existing path, else a Hub repository, which is downloaded to the usual cache.
            config_only: read no tensors; of a Hub repository, fetch only the config files.
            revision: branch, tag or commit of a Hub repository.

        Raises:
            CheckpointNotFound: if the path or repository does not exist or has no ``config.json``.
            CheckpointError: if a file is invalid, files contradict each other, or weights are pickles.
        """
        path = Path(path_or_hub_id)
        try:
            there = path.exists()
        except OSError as error:  # a name that is too long, a directory that may not be entered
            raise CheckpointError(
                str(path)[:200], expected="a path that can be looked up", got=str(error.strerror)
            ) from error
        if not there:
            path = _download(str(path_or_hub_id), config_only, revision)
        if path.is_file():
            if path.suffix != ".json":
                raise CheckpointError(str(path), expected="a directory, or a config.json", got="another file")
            directory, config_file = path.parent, path
        else:
            directory, config_file = path, path / CONFIG
        if not config_file.exists():
            raise CheckpointNotFound(
                str(path), expected=f"a {CONFIG}", got="none", hint="name the directory that holds the model's files"
            )
        config = _read_json(config_file)
        side = _read_json(directory / SIDE) if (directory / SIDE).exists() else None
        shards = {} if config_only or path.is_file() else _find_shards(directory)
        return cls(path, config, side, shards)

    @property
    def has_tensors(self) -> bool:
        """Whether there are any tensors."""
        return bool(self._shards)

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
        shard = self.shard_of(name)
        if shard not in self._handles:
            handle = _open_shard(shard)
            self._handles[shard] = handle, frozenset(handle.keys())
        handle, names = self._handles[shard]
        if name not in names:
            raise CheckpointError(
                f"{shard}: tensor {name}",
                expected="in this shard, as the index says",
                got="no such tensor",
                hint="index and shards are of different revisions; download the checkpoint again",
            )
        return handle


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(str(file), expected="a file that can be read", got=str(error.strerror)) from error
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, a number of thousands of digits
        raise CheckpointError(str(file), expected="JSON", got=str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(str(file), expected="a JSON object", got=type(value).__name__)
    return value


def _open_shard(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointNotFound(
            str(file), expected="this shard", got="no such file", hint="complete the download of the checkpoint"
        ) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            str(file),
            expected="a complete safetensors file",
            got=str(error),
            hint="the file is truncated or damaged; download it again",
        ) from error


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
        for name in _open_shard(directory / file).keys():  # noqa: SIM118
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
    weight_map = _read_json(directory / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(where, expected="'weight_map', an object with entries", got=type(weight_map).__name__)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise CheckpointError(
                f"{where}: {name}",
                expected="a file inside the checkpoint's directory",
                got=repr(shard),
                hint="do not trust this checkpoint",
            )
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{where}: {name}", expected="a .safetensors file", got=repr(shard))
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


def _stays_inside(shard: str) -> bool:
    """Whether a name stays inside the directory. Only the name counts: files may be links to anywhere, as in Hub
    caches."""
    parts = (*PurePosixPath(shard).parts, *PureWindowsPath(shard).parts)
    absolute = PurePosixPath(shard).is_absolute() or PureWindowsPath(shard).anchor
    return bool(shard) and not absolute and ".." not in parts


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
    pickles = sorted(_pickles(directory))
    if pickles:
        raise CheckpointError(
            str(directory / pickles[0]),
            expected="weights in .safetensors files",
            got="a pickle, which can run any code when it is opened",
            hint="convert the checkpoint to safetensors",
        )


def _pickles(directory: Path) -> Iterator[str]:
    for pattern in PICKLES:
        yield from (f.name for f in directory.glob(pattern) if f.name not in OTHER_PICKLES)


def _download(name: str, config_only: bool, revision: str | None) -> Path:
    """Download a Hub repository and return its local directory."""
    no_path = "an existing path, or a Hub id like org/name"
    if not HUB_ID.fullmatch(name) or Path(name.split("/")[0]).exists():
        raise CheckpointNotFound(name, expected=no_path, got="neither")
    import huggingface_hub
    from huggingface_hub import errors

    patterns = [CONFIG, SIDE] if config_only else ["*.json", "*.safetensors"]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*", "adapter*"]
            )
        )
    # LocalEntryNotFoundError: offline and not in the cache. OSError covers failing connections.
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointNotFound(
            name,
            expected=no_path,
            got=f"no such path, and from the Hub: {first_line}",
            hint="check the name, the network and, for gated models, that you are logged in",
        ) from error
