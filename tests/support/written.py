"""Small checkpoints on disk from random weights, and ways to damage copies of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polymoe.checkpoint import Checkpoint, write_checkpoint
from support.configs import config

LAYER = 3  # has experts in every family but Nemotron's and Llama-4's patterns too
SIZES = {"hidden": 256, "intermediate": 192, "experts": 8, "top_k": 2, "layers": 4}


def sizes(name: str) -> dict[str, int]:
    """192 is not a multiple of 128; groups of 128 need one."""
    return SIZES | {"intermediate": 256} if name in ("qwen3-gptq", "qwen3-awq") else SIZES


def random_layer(checkpoint: Checkpoint, seed: int = 0) -> tuple[Tensor, ...]:
    """Float weights (and biases, where the model has them) of one layer, natural order."""
    generator = torch.Generator().manual_seed(seed)
    moe = checkpoint.moe
    rows = moe.intermediate * (2 if moe.gated else 1)
    shapes = [(moe.experts, rows, moe.hidden), (moe.experts, moe.hidden, moe.intermediate)]
    shapes += [(moe.experts, rows), (moe.experts, moe.hidden)] if moe.bias else []
    return tuple(torch.randn(shape, generator=generator) * 0.1 for shape in shapes)


def write(directory: Path, name: str, described: dict[str, Any] | None = None) -> Path:
    """The checkpoint of configuration ``name`` (or of ``described``) with one layer of random experts."""
    described = described or config(name, **sizes(name))
    alone = directory.with_suffix(".json")
    alone.write_text(json.dumps(described), encoding="utf-8")
    layer = random_layer(Checkpoint.open(alone))
    return write_checkpoint(directory, described, {LAYER: layer})  # type: ignore[dict-item]


class Library:
    """Written checkpoints by name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, name: str) -> Path:
        path = self.root / name
        return path if path.exists() else write(path, name)


def damaged(source: Path, target: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a written checkpoint whose tensors ``change`` has changed in place, added or removed."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors")
    return target


def changed(pattern: str, change: Callable[[Tensor], Tensor | None]) -> Any:
    """Put what ``change`` makes of them in the place of the tensors whose names match; None leaves them out."""

    def apply(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if re.search(pattern, name)]:
            if (tensor := change(tensors.pop(name))) is not None:
                tensors[name] = tensor

    return apply


def without(pattern: str) -> Any:
    return changed(pattern, lambda tensor: None)


def reshaped(pattern: str, *shape: int) -> Any:
    return changed(pattern, lambda tensor: torch.zeros(shape, dtype=tensor.dtype))


def cast(pattern: str, dtype: torch.dtype) -> Any:
    return changed(pattern, lambda tensor: tensor.to(dtype))


def patch_config(directory: Path, **changed: Any) -> None:
    """Replace keys of a checkpoint's ``config.json``; None removes one."""
    file = directory / "config.json"
    merged = json.loads(file.read_text(encoding="utf-8")) | changed
    file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}), encoding="utf-8")
