"""RoutingTrace: which experts each call of each layer chose, in a file that ``--record-routing`` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymoe.checkpoint.opener import open_weights
from polymoe.common.atomic import replace_file
from polymoe.common.json_input import parse_json, read_fields
from polymoe.errors import ArgumentError, CheckpointError

_VERSION = "1"
_KEY = "polymoe_routing"  # of the version, among the metadata
_TENSORS = {"layers": torch.int16, "tokens": torch.int32, "ids": torch.int16}


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer whose calls were recorded.

    Attributes:
        name: of its experts module.
        experts: their number.
        expert_bytes: of one as it is stored, about what a miss copies.
        top_k: experts of a token, A.
    """

    name: str
    experts: int
    expert_bytes: int
    top_k: int


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of a layer.

    Attributes:
        layer: number of the layer in the trace.
        tokens: T.
        needed: the distinct experts, in order of id.
    """

    layer: int
    tokens: int
    needed: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """The expert ids of calls, in the order of these. In the file, a safetensors one, each is a tensor, and model and
    layers are metadata.

    Attributes:
        model: name of the checkpoint.
        layers: the layers that were called.
        layers_C: which of them, of each call; int16.
        tokens_C: tokens of each call; int32.
        ids_N: ids of all calls, of each ``[T, A]``, one after the other; int16. A layer ignores those of no expert.
    """

    model: str
    layers: tuple[TracedLayer, ...]
    layers_C: Tensor
    tokens_C: Tensor
    ids_N: Tensor

    def save(self, path: Path) -> None:
        """Write the file, completely or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        from safetensors.torch import save

        layers = json.dumps([asdict(layer) for layer in self.layers])
        tensors = {"layers": self.layers_C, "tokens": self.tokens_C, "ids": self.ids_N}
        replace_file(path, save(tensors, {_KEY: _VERSION, "model": self.model, "layers": layers}))

    @classmethod
    def load(cls, path: Path) -> RoutingTrace:
        """Read a file that :meth:`save` wrote.

        Raises:
            ArgumentError: for a file that is not there, cut short, or none of these.
        """
        try:
            opened = open_weights(path)
        except CheckpointError as error:
            got = f"{path}: {error.got}"
            hint = "the file is cut short or no recording; record it again" if path.exists() else None
            raise ArgumentError("trace", expected=_EXPECTED, got=got, hint=hint) from error
        with opened as file:
            about: dict[str, str] = file.metadata() or {}
            if about.get(_KEY) != _VERSION:
                got = f"{path}: {f'version {about[_KEY]}' if _KEY in about else 'another safetensors file'}"
                raise ArgumentError("trace", expected=f"{_EXPECTED}, version {_VERSION}", got=got)
            try:
                layers = tuple(read_fields(TracedLayer, row) for row in parse_json(about["layers"]))
                trace = cls(about["model"], layers, *(_read(file, name, dtype) for name, dtype in _TENSORS.items()))
                trace._check()
                return trace
            except (KeyError, TypeError, ValueError) as error:
                raise ArgumentError("trace", expected=_EXPECTED, got=f"{path}: {error}") from error

    def _check(self) -> None:
        """Check that what a file says fits together.

        Raises:
            ValueError: if it does not.
        """
        layers, layers_C, tokens_C = self.layers, self.layers_C, self.tokens_C
        if not layers or any(min(row.experts, row.top_k, row.expert_bytes) < 1 for row in layers):
            raise ValueError(f"layers: {layers}"[:200])
        if not len(layers_C) == len(tokens_C) > 0:
            raise ValueError(f"layers of {len(layers_C)} calls, tokens of {len(tokens_C)}")
        if not 0 <= int(layers_C.min()) <= int(layers_C.max()) < len(layers) or int(tokens_C.min()) < 0:
            raise ValueError(f"calls of layers other than 0 to {len(layers) - 1}, or of fewer than 0 tokens")
        ids = number_of_ids(layers, layers_C, tokens_C)
        if ids != len(self.ids_N):
            raise ValueError(f"{len(self.ids_N)} ids, and calls with {ids}")

    def calls(self) -> Iterator[TracedCall]:
        """The calls in their order."""
        ids, start = self.ids_N.tolist(), 0
        for number, tokens in zip(self.layers_C.tolist(), self.tokens_C.tolist(), strict=True):
            layer = self.layers[number]
            end = start + tokens * layer.top_k
            yield TracedCall(number, tokens, sorted({e for e in ids[start:end] if 0 <= e < layer.experts}))
            start = end


def number_of_ids(layers: Sequence[TracedLayer], layers_C: Tensor, tokens_C: Tensor) -> int:
    """Return how many ids calls have, whose layers and tokens are given as in :class:`RoutingTrace`."""
    return int((torch.tensor([row.top_k for row in layers])[layers_C.long()] * tokens_C).sum())


_EXPECTED = "a whole file that --record-routing wrote"


def _read(file: Any, name: str, dtype: torch.dtype) -> Tensor:
    if name not in file.keys():  # noqa: SIM118 (safetensors' handle is no mapping)
        raise ValueError(f"no tensor {name!r}")
    tensor: Tensor = file.get_tensor(name)
    if tensor.dtype != dtype or tensor.dim() != 1:
        raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, not {dtype} in one dimension")
    return tensor
