"""quantize_checkpoint: a checkpoint with its experts in another format, which other engines read unchanged.

Only experts change. Every other tensor is copied byte for byte, with all files beside the weights. One expert is in
memory at a time: a shard's header is known from its first expert, and tensors are written to their places in the file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymoe.checkpoint.calibration import LEAST_TOKENS, Calibration, InputSquares
from polymoe.checkpoint.config import parse_quantization
from polymoe.checkpoint.dialects import headers_of
from polymoe.checkpoint.layer import StoredLayer
from polymoe.checkpoint.load import Checkpoint
from polymoe.checkpoint.opener import read_bytes
from polymoe.checkpoint.quantized import quantize_expert
from polymoe.checkpoint.write import expert_tensors
from polymoe.common.atomic import locked, replace_file
from polymoe.common.units import format_bytes
from polymoe.errors import ArgumentError, CheckpointError, FormatError
from polymoe.formats import FORMATS, QuantTensor
from polymoe.formats.base import MatrixTile, map_tiles
from polymoe.problem.tensors import Expert

DIALECTS_OF: Mapping[str, tuple[str, ...]] = {
    "mxfp4": ("compressed-tensors", "gpt-oss"),
    "nvfp4": ("compressed-tensors", "modelopt"),
    "int4_g32": ("compressed-tensors",),
    "int4_g128": ("compressed-tensors",),
    "fp8_block128": ("deepseek",),
    "mxfp8": ("compressed-tensors", "modelopt"),
}
"""Dialects in which each format is written; the first is the usual one, and gpt-oss models in MXFP4 have their own."""

SEARCHED_FORMATS = ("mxfp4", "nvfp4", "int4_g32", "int4_g128")
"""Formats whose scales are searched, so that calibration changes them."""

_NO_SEARCH = "whose scales follow from the largest weight"

_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "actorder": None,
            "block_structure": None, "observer": "minmax", "observer_kwargs": {}}  # fmt: skip
_COMPRESSED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mxfp4": ("mxfp4-pack-quantized", {"strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {"strategy": "tensor_group", "group_size": 16}),
    "int4_g32": ("pack-quantized", {"type": "int", "strategy": "group", "group_size": 32}),
    "int4_g128": ("pack-quantized", {"type": "int", "strategy": "group", "group_size": 128}),
    # By the dtype of its scales vLLM tells it from FP8 in groups.
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
}


def quantize_checkpoint(
    path: str | Path,
    format: str,
    out: str | Path,
    *,
    dialect: str | None = None,
    calibrate: Callable[[], Calibration] | None = None,
    begin: Callable[[Sequence[StoredLayer], bool], None] = lambda layers, stacked: None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write the checkpoint at ``path`` with its experts in ``format`` to a new directory; a killed run continues.

    Until it is complete, everything is in ``.NAME.quantizing`` beside ``out``.

    Args:
        path: a checkpoint with experts in 16 bits: its directory, or a Hub id.
        format: a key of :data:`DIALECTS_OF`.
        out: the directory to create.
        dialect: one of the format's; None is its usual one.
        calibrate: measures the inputs of the experts, by which the search of scales weighs errors; called when nothing
            else can be refused.
        begin: called before the work with the layers that will be written, and whether the source stacks experts.
        progress: called with each shard that begins.

    Returns:
        What ``report.json`` has: the relative error of each layer's projections, and their worst experts.

    Raises:
        ArgumentError: for a format or a dialect that is not written, or an ``out`` that exists or cannot be created.
        CheckpointError: if ``out`` is being written, for a model without experts, weights that are quantized already,
            sizes that the format does not allow, or missing tensors.
        FormatError: for weights that are not finite.
        OSError: if a file cannot be written.
    """
    out = Path(out).absolute()
    if format not in DIALECTS_OF:
        raise ArgumentError("format", expected=" or ".join(DIALECTS_OF), got=repr(format))
    _require_new(out)
    with Checkpoint.open(path, experts=format) as checkpoint:
        job = _Job(checkpoint, format, _dialect(checkpoint, format, dialect))
        if calibrate is not None and format not in SEARCHED_FORMATS:
            raise ArgumentError("calibrate", expected=" or ".join(SEARCHED_FORMATS), got=f"{format}, {_NO_SEARCH}")
        begin([*job.layers.values()], job.stacked)
        if calibrate is not None:
            job.calibration = calibrate()
        with _alone(out):
            work = out.with_name(f".{out.name}.quantizing")
            work.mkdir(exist_ok=True)
            job.require_same(work)
            try:
                report = job.run(work, progress)
            except FormatError:  # the source has to change, and then nothing of this run can be continued
                shutil.rmtree(work)
                raise
            os.replace(work, out)
    return report


def _require_new(out: Path) -> None:
    above = next(parent for parent in out.parents if parent.exists())
    if not above.is_dir():
        raise ArgumentError("out", expected="a new directory", got=f"a path below {above}, which is a file")
    if out.exists():
        hint = "give another one, or remove it"
        raise ArgumentError("out", expected="a new directory", got=f"{str(out)!r}, which exists", hint=hint)


def _dialect(checkpoint: Checkpoint, format: str, asked: str | None) -> str:
    own = checkpoint.family.name == "gpt-oss" and format == "mxfp4"
    known = [d for d in DIALECTS_OF[format] if (d == "gpt-oss") == own]
    if asked is not None and asked not in known:
        raise ArgumentError(
            "dialect", expected=f"{' or '.join(known)} for {format} of {checkpoint.model_type}", got=repr(asked)
        )
    return asked or known[0]


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Refuse a second run into the same directory. Its lock lies beside it, and goes when ``out`` is there."""
    lock = out.with_name(f".{out.name}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        hint = "choose a place where you may create directories and files"
        got = f"{out}: {error.strerror}"
        raise ArgumentError("out", expected="a directory that can be created", got=got, hint=hint) from error
    try:
        with locked(lock, descriptor, wait=False):
            _require_new(out)  # the run that had the lock may have just ended
            yield
    except BlockingIOError:
        raise CheckpointError(
            str(out), expected="one run at a time", got="another that is writing it",
            hint="wait for its end, or write to another directory",
        ) from None  # fmt: skip
    finally:
        os.close(descriptor)
        if out.exists():
            lock.unlink(missing_ok=True)


def _description(format: str, dialect: str, ignore: list[str]) -> dict[str, Any]:
    """``quantization_config`` as releases have it. Modules outside the experts are named in it.

    NVFP4 has no scale of inputs here, since nothing has measured one: compressed-tensors can say so, ModelOpt cannot.
    """
    if dialect == "gpt-oss":
        return {"quant_method": "mxfp4", "modules_to_not_convert": ignore}
    if dialect == "modelopt":
        producer = {"name": "modelopt", "version": "0.43.0"}
        algorithm = {"quant_algo": "NVFP4", "group_size": 16} if format == "nvfp4" else {"quant_algo": "MXFP8"}
        return {"producer": producer, "quant_method": "modelopt", **algorithm, "ignore": ignore}
    if dialect == "deepseek":
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
                "modules_to_not_convert": ignore}  # fmt: skip
    name, weights = _COMPRESSED[format]
    inputs = {**_WEIGHTS, **weights, "dynamic": True, "observer": None} if format == "mxfp8" else None
    group = {
        "format": name,
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**_WEIGHTS, **weights},
    }
    return {"config_groups": {"group_0": group}, "format": name, "ignore": ignore, "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "compressed"}  # fmt: skip


@dataclass(slots=True)
class _Job:
    """What one run writes."""

    checkpoint: Checkpoint
    format: str
    dialect: str
    config: dict[str, Any] = field(init=False)
    others: dict[str, list[str]] = field(init=False)
    calibration: Calibration | None = field(default=None, init=False)
    stacked: bool = field(init=False)
    layers: dict[tuple[int, int], StoredLayer] = field(init=False)
    """By layer and the number of its group of experts."""
    beside: dict[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        c = self.checkpoint
        self._require_plain()
        for part in c.parts:
            for layer in part.layers:
                part.weights(layer)  # raises for tensors that are missing, other formats and sizes
        stored = {
            (layer, group): part.layer(layer)
            for layer, group, part in sorted((n, i, part) for i, part in enumerate(c.parts) for n in part.layers)
        }
        self.stacked = any(layer.arrangement.stacked for layer in stored.values())
        experts = {
            name
            for layer in stored.values()
            for e in range(1 if layer.arrangement.stacked else layer.moe.experts)
            for name, _, _ in layer.names(c.files, e)
        }
        others = sorted(c.files.names - experts)
        containers = "|".join({re.escape(layer.container) for layer in stored.values()})
        stray = re.compile(rf"(?:{containers})\.\d+\..*")
        if beyond := next(filter(stray.fullmatch, others), None):
            raise CheckpointError(
                beyond,
                expected=f"tensors of the experts that the config has, which are {c.moe.experts}",
                got="one of another expert, or one that experts do not have",
                hint="make the number of experts in config.json that of the tensors, or remove what is not the model's",
            )
        self.others = {}
        for name in others:
            self.others.setdefault(c.files.shard_of(name).name, []).append(name)
        ignore = {"lm_head"} | {n.removesuffix(".weight") for n in others
                  if n.endswith(".weight") and len(c.files.header(n).shape) == 2 and "embed" not in n}  # fmt: skip
        self.config = {**c.config, "quantization_config": _description(self.format, self.dialect, sorted(ignore))}
        quantization = parse_quantization(self.config, None, c.family)
        self.layers = {}
        for (layer, group), found in stored.items():
            family = c.parts[group].family
            described = StoredLayer.described(family, found.moe, quantization, layer)
            places = [(t.format(layer=layer), arrangement) for t, arrangement in family.places]
            if (found.container, described.arrangement) in places:
                described = replace(described, container=found.container)
            self.layers[layer, group] = replace(described, bias=found.bias)
        # Read now, so that a file that cannot be copied is refused before the work.
        beside = (f for f in sorted(c.files.directory.iterdir()) if f.is_file() and not f.name.startswith("."))
        self.beside = {file.name: read_bytes(file) for file in beside if not _of_weights(file.name)}

    def _require_plain(self) -> None:
        """Refuse what the one description in a config could not say."""
        c = self.checkpoint
        for part in c.parts:
            for layer in part.layers:
                part.spec(layer)  # its message for quantized experts says more
        nested = [c.config, *(v for v in c.config.values() if isinstance(v, dict))]
        if c.files.side or any(v.get("quantization_config") or v.get("compression_config") for v in nested):
            raise CheckpointError(
                c.name, expected="a checkpoint in 16 bits", got="one whose config describes quantized weights",
                hint="give the release in 16 bits from which this one was made",
            )  # fmt: skip

    def require_same(self, work: Path) -> None:
        """Continue only what an earlier run of the same job has left."""
        from polymoe import __version__

        c = self.checkpoint
        files = sorted({c.files.shard_of(name) for name in c.files.names})
        stamp = {"polymoe": __version__, "config": self.config, "source": str(c.files.directory.resolve()),
                 "format": self.format, "dialect": self.dialect,
                 "calibration": self.calibration and self.calibration.texts.digest,
                 "shards": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]}  # fmt: skip
        file = work / ".job.json"
        if file.exists() and json.loads(file.read_text()) != stamp:
            raise CheckpointError(
                str(work),
                expected="an unfinished run from the same files to the same format",
                got="another",
                hint="remove this directory, or write to another one",
            )
        replace_file(file, json.dumps(stamp))

    def run(self, work: Path, progress: Callable[[str], None]) -> dict[str, Any]:
        """Write all that is missing."""
        c = self.checkpoint
        writers: list[tuple[str, Callable[[Path], dict[str, Any]]]] = [
            *((f"other tensors of {file}", partial(self._others, names=names)) for file, names in self.others.items()),
            *((self._name(*key), partial(self._layer, layer=key[0], group=key[1])) for key in self.layers),
        ]
        index: dict[str, str] = {}
        reports, total = [], 0
        for number, (what, write) in enumerate(writers, 1):
            name = f"model-{number:05}-of-{len(writers):05}.safetensors"
            shard, note = work / name, work / f".{name}.json"
            if not (shard.exists() and note.exists()):
                progress(what)
                replace_file(note, json.dumps(write(shard)))
            found = json.loads(note.read_text())
            if twice := index.keys() & found["tensors"]:
                raise CheckpointError(min(twice), expected="one tensor of this name", got="an expert's, and another")
            index |= dict.fromkeys(found["tensors"], name)
            total += found["bytes"]
            reports += found["reports"]
        self._finish(work, index, total)
        report = {"source": c.name, "format": self.format, "dialect": self.dialect, "layers": reports}
        if (made := self.calibration) is not None:
            texts = made.texts
            report["calibration"] = {"file": texts.file.name, "texts": len(texts.lines), "tokens": made.tokens}
        replace_file(work / "report.json", json.dumps(report, indent=2) + "\n")
        for file in work.glob(".*"):
            file.unlink()
        return report

    def _finish(self, work: Path, index: dict[str, str], total: int) -> None:
        """Write the files beside the weights, and open the result as a reader would."""
        for name, content in self.beside.items():
            replace_file(work / name, content)
        whole = {"metadata": {"total_size": total}, "weight_map": index}
        replace_file(work / "model.safetensors.index.json", json.dumps(whole, indent=2) + "\n")
        replace_file(work / "config.json", json.dumps(self.config, indent=2) + "\n")
        with Checkpoint.open(work) as written:
            for (layer, group), stored in self.layers.items():
                spec = written.parts[group].weights(layer).spec
                if spec.format != self.format or spec.bias != stored.bias:
                    raise CheckpointError(
                        f"{work}: {self._name(layer, group)}", expected=f"experts in {self.format}", got=spec.format,
                        hint="this model cannot be written in this format; please report it",
                    )  # fmt: skip

    def _others(self, shard: Path, names: list[str]) -> dict[str, Any]:
        files = self.checkpoint.files
        headers = {name: files.header(name) for name in names}
        sizes = {name: (h.dtype, list(h.shape), files.get(name).nbytes) for name, h in headers.items()}
        with _ShardFile.create(shard, sizes) as file:
            for name in names:
                file.write(name, files.get(name))
        return {"tensors": names, "bytes": file.total, "reports": []}

    def _name(self, layer: int, group: int) -> str:
        several = sum(n == layer for n, _ in self.layers) > 1
        return f"layer {layer}, group {group} of its experts" if several else f"layer {layer}"

    def _layer(self, shard: Path, layer: int, group: int) -> dict[str, Any]:
        stored, c = self.layers[layer, group], self.checkpoint.parts[group]
        source, count, stacked = c.layer(layer), c.moe.experts, stored.arrangement.stacked
        report = _Report(layer, group, None if self.calibration is None else self.calibration.layers[layer, group])

        def quantized(e: int) -> Expert:
            before = source.read(c.files, e)
            where = partial(source.where, expert=e)
            encodings = dict.fromkeys(before.projections, FORMATS[self.format].encoding)
            return report.note(e, before, quantize_expert(before, encodings, where, importance=report.importance(e)))

        first = quantized(0)
        sizes: dict[str, tuple[str, list[int], int]] = {}
        for e in [0] if stacked else range(count):
            found = dict(expert_tensors(stored, first, e))
            for name, header in headers_of(found).items():
                shape = [count, *header.shape] if stacked else list(header.shape)
                sizes[name] = header.dtype, shape, found[name].nbytes * (count if stacked else 1)
        with _ShardFile.create(shard, sizes) as file:
            for e in range(count):
                for name, t in expert_tensors(stored, first if e == 0 else quantized(e), e):
                    file.write(name, t, e if stacked else 0)
        return {"tensors": list(sizes), "bytes": file.total, "reports": [report.rows()]}


@dataclass(slots=True)
class _Report:
    """The errors of one layer's experts, by projection."""

    layer: int
    group: int
    inputs: InputSquares | None
    errors: dict[str, list[float]] = field(default_factory=dict)
    weighted: dict[str, list[float]] = field(default_factory=dict)

    def importance(self, expert: int) -> dict[str, Tensor] | None:
        return None if self.inputs is None else self.inputs.importance(expert)

    def note(self, e: int, before: Expert, after: Expert) -> Expert:
        """Measure an expert, and return it."""
        importance = self.importance(e)
        for name, q in after.projections.items():
            columns = None if importance is None else importance["down" if name == "down" else "gate_up"]
            error, weighted = _errors(before.projections[name].codes, q, columns)
            self.errors.setdefault(name, []).append(error)
            if columns is not None:
                self.weighted.setdefault(name, []).append(weighted)
        return after

    def rows(self) -> dict[str, Any]:
        """What report.json has of this layer."""
        found: dict[str, Any] = {"layer": self.layer, "group": self.group}
        if self.inputs is not None:
            found["experts_without_tokens"] = int((self.inputs.tokens_E < LEAST_TOKENS).sum())
        for part, each in self.errors.items():
            worst = max(range(len(each)), key=each.__getitem__)
            found[part] = {"error": _root(each), "worst_expert": worst, "worst_error": round(each[worst], 5)}
            if part in self.weighted:
                found[part]["weighted_error"] = _root(self.weighted[part])
        return found


def _errors(w_NK: Tensor, q: QuantTensor, importance_K: Tensor | None) -> tuple[float, float]:
    """The norm of the difference over that of the weights, without and with the importance of columns."""

    def squares(tile: MatrixTile) -> list[float]:
        _, rows, columns = tile
        wanted = w_NK[rows, columns].float()
        stored = q.rows(rows.start, rows.stop).columns(columns.start, columns.stop)
        both = [part.square_().sum(0) for part in (stored.dequantize().sub_(wanted), wanted)]
        weighted = both if importance_K is None else [part * importance_K[columns] for part in both]
        return [float(part.sum()) for part in (*both, *weighted)]

    sums = torch.tensor([found for _, found in map_tiles(squares, w_NK[None], q.encoding)], dtype=torch.float64).sum(0)
    return _ratio(sums[0], sums[1]), _ratio(sums[2], sums[3])


def _ratio(difference: Tensor, wanted: Tensor) -> float:
    return float((difference / wanted).sqrt()) if wanted > 0 else 0.0


def _root(errors: list[float]) -> float:
    """The root mean square."""
    return round((sum(error**2 for error in errors) / len(errors)) ** 0.5, 5)


def _of_weights(name: str) -> bool:
    others = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
    return name.endswith((".safetensors", ".safetensors.index.json", *others))


def _reserve(descriptor: int, size: int) -> None:
    """Reserve space, where the file system can."""
    reserve = getattr(os, "posix_fallocate", None)  # neither Windows nor macOS has it
    if reserve is None:
        return
    try:
        reserve(descriptor, 0, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise


@dataclass(slots=True)
class _ShardFile:
    """A safetensors file whose tensors are written in any order, and stacked ones item by item."""

    file: Any
    places: dict[str, int]
    total: int

    @classmethod
    @contextmanager
    def create(cls, path: Path, tensors: Mapping[str, tuple[str, list[int], int]]) -> Iterator[_ShardFile]:
        """A file of tensors, by dtype, shape and bytes, that appears at ``path`` when it is complete. Its space is
        reserved at once, so that a full disk is found before anything is computed."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places, end = {}, 0
        # Wide elements first, so that each tensor is aligned.
        widths = {name: nbytes // max(1, prod(shape)) for name, (_, shape, nbytes) in tensors.items()}
        for name, (dtype, shape, nbytes) in sorted(tensors.items(), key=lambda item: -widths[item[0]]):
            places[name], end = end, end + nbytes
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [places[name], end]}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        start, draft = 8 + len(text), path.with_name(f".{path.name}.new")
        try:
            with draft.open("wb") as file:
                _reserve(file.fileno(), start + end)
                file.write(len(text).to_bytes(8, "little") + text)
                yield cls(file, {name: start + place for name, place in places.items()}, end)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException as error:
            draft.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                text = f"{error.strerror}: {format_bytes(start + end)} are needed for this file"
                raise OSError(error.errno, text, str(path)) from error
            raise

    def write(self, name: str, tensor: Tensor, index: int = 0) -> None:
        """Write a tensor, or item ``index`` of one."""
        self.file.seek(self.places[name] + index * tensor.nbytes)
        self.file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
