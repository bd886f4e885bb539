"""Read one expert's stored tensors and write them again, to check that reading loses no bit."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from polymoe.checkpoint.expert_tensors import expert_tensor
from polymoe.checkpoint.files import CheckpointFiles
from polymoe.checkpoint.layer import StoredLayer
from polymoe.checkpoint.naming import BIAS, tensor_name


def stored_names(files: CheckpointFiles, stored: StoredLayer, expert: int) -> Iterator[tuple[str, str, str]]:
    """Yield ``(tensor name, part, suffix)`` of everything stored for an expert; stacked tensors hold all experts."""
    for part in stored.parts.values():
        for suffix in (*part.dialect.suffixes, BIAS):
            name = tensor_name(stored.container, stored.arrangement, part.name, expert, suffix)
            if name in files:
                yield name, part.name, suffix


def repacked(files: CheckpointFiles, stored: StoredLayer, expert: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield ``(tensor name, as stored, as written again)`` for an expert's matrices in natural order.

    Tensors are read to a ``QuantTensor`` and written back by their dialect. Biases are left out, since they are not
    packed.
    """
    for part in stored.parts.values():
        names = {s: n for n, p, s in stored_names(files, stored, expert) if p == part.name and s != BIAS}
        tensors = {s: expert_tensor(files, n, stored.arrangement, stored.moe, expert) for s, n in names.items()}
        matrix = part.dialect.read(tensors, part.shape, part.encoding)
        again = part.dialect.rewrite(matrix, tensors)
        for suffix, tensor in tensors.items():
            yield names[suffix], tensor, again[suffix]
