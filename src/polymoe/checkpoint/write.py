"""write_checkpoint: write experts to files, with the names, arrangement and dialect of their config.

Names, dialects and encodings come from the same tables that reading uses, so that files read back the same.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from polymoe.checkpoint.arrangement import BIAS
from polymoe.checkpoint.config import QuantizationConfig, parse_quantization
from polymoe.checkpoint.families import ModelFamily, MoeConfig, family_of
from polymoe.checkpoint.layer import StoredLayer
from polymoe.errors import ArgumentError, CheckpointError
from polymoe.formats import Encoding, PerChannel, PerGroup, QuantTensor, format_of
from polymoe.problem.tensors import Expert, ExpertWeights

if TYPE_CHECKING:
    from torch import Tensor

FloatExperts: TypeAlias = "tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]"
"""``(gate_up_EFH, down_EHF)``, and biases ``gate_up_EF``, ``down_EH`` where the model has them, in natural order: all
gate rows, then all up rows (experts without a gate: up rows only)."""


def write_checkpoint(
    path: str | Path,
    config: Mapping[str, Any],
    layers: Mapping[int, ExpertWeights | FloatExperts],
    *,
    other_tensors: Mapping[str, Tensor] | None = None,
    side: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a checkpoint directory: ``config.json``, safetensors shards and, for more than one, their index.

    It appears as a whole or not at all: files are written beside ``path`` and renamed.

    Args:
        path: the directory to create.
        config: ``config.json`` as in the model's own releases; ``quantization_config`` defines the encodings.
        layers: experts by layer. Float weights are quantized as the config says; quantized ones must already match it.
            Layers may be left out.
        other_tensors: everything else, by name.
        side: ``hf_quant_config.json``, if it contains the description of the quantization.
        max_shard_bytes: largest size of a shard, unless it consists of one tensor.

    Returns:
        ``path``.

    Raises:
        CheckpointError: if ``path`` exists, the config is not supported, two tensors have the same name, or the
            arrangement cannot hold these experts.
        ArgumentError: if sizes or encodings of weights differ from the config.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(str(path), expected="a new directory", got="one that exists", hint="nothing was written")
    family = family_of(config)
    writer = _Writer(family, family.moe(config), parse_quantization(config, side, family))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
        directory = Path(temporary) / path.name
        directory.mkdir()
        shards = _Shards(directory, max_shard_bytes)
        for name, tensor in (other_tensors or {}).items():
            shards.add(name, tensor)
        for layer, weights in layers.items():
            for name, tensor in writer.tensors(layer, weights):
                shards.add(name, tensor)
        shards.finish()
        _write_json(directory / "config.json", config)
        if side is not None:
            _write_json(directory / "hf_quant_config.json", side)
        # safetensors makes its files readable for the owner only; a config file follows the user's umask.
        readable = (directory / "config.json").stat().st_mode
        for file in directory.iterdir():
            file.chmod(readable)
        shutil.move(directory, path)
    return path


@dataclass(frozen=True, slots=True)
class _Writer:
    """Converts experts to named tensors."""

    family: ModelFamily
    moe: MoeConfig
    quantization: QuantizationConfig

    def tensors(self, layer: int, weights: ExpertWeights | FloatExperts) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of one layer; stacked tensors come after the last expert."""
        self.moe.place(layer)
        stored = StoredLayer.described(self.family, self.moe, self.quantization, layer)
        self._check(stored, layer, weights)
        formats = {name: format_of(encoding) for name, encoding in stored.spec().encodings.items()}
        stacks: dict[str, Tensor] = {}
        for e in range(self.moe.experts):
            if isinstance(weights, ExpertWeights):
                expert = weights.expert(e)
            else:
                gate_up, down, *biases = (t[e] for t in weights)
                expert = Expert.quantize(formats, gate_up, down, *(b.to(torch.bfloat16) for b in biases))
            for name, tensor in expert_tensors(stored, expert, e):
                if not stored.arrangement.stacked:
                    yield name, tensor
                    continue
                if name not in stacks:
                    stacks[name] = torch.empty((self.moe.experts, *tensor.shape), dtype=tensor.dtype, device="cpu")
                stacks[name][e] = tensor
        yield from stacks.items()

    def _check(self, stored: StoredLayer, layer: int, weights: ExpertWeights | FloatExperts) -> None:
        wanted = stored.spec()
        where = f"experts of layer {layer}"
        if isinstance(weights, ExpertWeights):
            have = weights.spec
            # The dtype of scales is free: configs do not contain it.
            found = [have.hidden, have.intermediate, have.local_experts, have.bias, *map(str, have.encodings.values())]
            expected = [self.moe.hidden, self.moe.intermediate, self.moe.experts, wanted.bias]
            expected += map(str, wanted.encodings.values())
            what = "H, F, experts, bias and encodings"
        else:
            h, f, experts = self.moe.hidden, self.moe.intermediate, self.moe.experts
            rows = f * (2 if self.moe.gated else 1)
            found = [list(t.shape) for t in weights]
            expected = [[experts, rows, h], [experts, h, f]] + ([[experts, rows], [experts, h]] if wanted.bias else [])
            what = "shapes"
        if found != expected:
            raise ArgumentError(where, expected=f"{what} {expected}, as the config says", got=str(found))


def expert_tensors(stored: StoredLayer, expert: Expert, e: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of expert ``e`` as ``stored`` says; of stacked ones, its items."""
    matrices: dict[str, QuantTensor] = expert.projections
    biases = {name: getattr(expert, f"{name}_bias") for name in ("gate", "up", "down")}
    if "gate_up" in stored.parts:
        matrices = {"gate_up": _merge(matrices, stored, e), "down": expert.down}
        if stored.bias:
            biases["gate_up"] = _join(biases["gate"], biases["up"], stored)
    for part, plan in stored.parts.items():
        scale = expert.down_input_scale if part == "down" else expert.gate_up_input_scale
        tensors = plan.dialect.write(matrices[part], scale)
        if stored.bias:
            tensors[BIAS] = biases[part]
        for suffix, tensor in tensors.items():
            yield stored.tensor(part, e, suffix), stored.arrangement.turned(tensor)


def _merge(matrices: Mapping[str, QuantTensor], stored: StoredLayer, e: int) -> QuantTensor:
    """Merge gate and up to one matrix, in the arrangement's order of rows."""
    gate, up = matrices["gate"], matrices["up"]
    if gate.encoding != up.encoding or not _by_row(up.encoding):
        raise CheckpointError(
            f"{stored.container} expert {e}",
            expected="gate and up with the same encoding and separate scales for each row",
            got=f"{gate.encoding} and {up.encoding}",
            hint="this model family stores both in one tensor",
        )
    theirs = gate.parts()
    return replace(up, **{name: _join(theirs[name], part, stored) for name, part in up.parts().items()})


def _by_row(encoding: Encoding) -> bool:
    g = encoding.granularity
    return not encoding.global_scale and (
        g is None or isinstance(g, PerChannel) or (isinstance(g, PerGroup) and g.n == 1)
    )


def _join(gate: Tensor, up: Tensor, stored: StoredLayer) -> Tensor:
    """Concatenate or interleave the rows of both, as bytes, so that it works for every dtype."""
    halves = [half.contiguous().unsqueeze(-1).view(torch.uint8) for half in (gate, up)]
    joined = torch.stack(halves, 1).flatten(0, 1) if stored.interleaved else torch.cat(halves)
    return joined.view(up.dtype).squeeze(-1)


@dataclass(slots=True)
class _Shards:
    """Writes tensors to safetensors files of a limited size, in order of arrival."""

    directory: Path
    limit: int
    weight_map: dict[str, int] = field(default_factory=dict)
    total: int = 0
    count: int = 0
    pending: dict[str, Tensor] = field(default_factory=dict)
    pending_bytes: int = 0
    storages: set[int] = field(default_factory=set)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; writes the current shard first if the tensor does not fit."""
        if name in self.weight_map:
            raise CheckpointError(name, expected="one tensor with this name", got="two")
        size = tensor.nbytes
        if self.pending and self.pending_bytes + size > self.limit:
            self.flush()
        tensor = tensor.contiguous()
        # safetensors refuses tensors that share memory, such as one input scale for two projections.
        if tensor.untyped_storage().data_ptr() in self.storages:
            tensor = tensor.clone()
        self.storages.add(tensor.untyped_storage().data_ptr())
        self.pending[name] = tensor
        self.weight_map[name] = self.count
        self.pending_bytes += size
        self.total += size

    def flush(self) -> None:
        """Write the collected tensors to a shard."""
        from safetensors.torch import save_file  # imports torch, which those who only read configs do not need

        save_file(self.pending, self.directory / _draft(self.count), metadata={"format": "pt"})
        self.pending, self.pending_bytes, self.storages = {}, 0, set()
        self.count += 1

    def finish(self) -> None:
        """Write the last shard, give the files their final names, and write the index if there are several."""
        if not self.weight_map:
            return
        self.flush()
        names = [f"model-{i + 1:05}-of-{self.count:05}.safetensors" for i in range(self.count)]
        names = names if self.count > 1 else ["model.safetensors"]
        for i, name in enumerate(names):
            (self.directory / _draft(i)).rename(self.directory / name)
        if self.count > 1:
            weight_map = {name: names[shard] for name, shard in self.weight_map.items()}
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            _write_json(self.directory / "model.safetensors.index.json", index)


def _draft(shard: int) -> str:
    return f"{shard}.safetensors"


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
