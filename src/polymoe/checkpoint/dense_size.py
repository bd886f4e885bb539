"""Bytes of a model outside its experts, from tensor headers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from polymoe.checkpoint.dense_tensors import DenseMatrix, DenseTensor
from polymoe.checkpoint.load import Checkpoint
from polymoe.common.shapes import ceil_div
from polymoe.errors import CheckpointNotFound

_EMBEDDINGS = ("embed_tokens.weight", "embed.weight", "embeddings.weight")
"""How names of input embeddings end in the supported families."""
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_model|vision_tower|multi_modal_projector|mm_projector)\.")
"""In names of tensors that only images go through."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class DenseSize:
    """Bytes outside the routed experts, as Transformers holds them with polymoe: quantized matrices in 16 bit.

    Attributes:
        total_bytes: of all tensors.
        unread_bytes: of tensors that a decode step does not read: the vision tower, and the input embedding but for
            one row.
    """

    total_bytes: int
    unread_bytes: int

    @property
    def read_bytes(self) -> int:
        """Bytes that each decode step reads."""
        return self.total_bytes - self.unread_bytes

    def sliced(self, tp: int) -> DenseSize:
        """Return one rank's part of ``tp`` ranks, as if every tensor were sliced: slightly less than in an engine."""
        return DenseSize(ceil_div(self.total_bytes, tp), self.unread_bytes // tp)


def dense_size(checkpoint: Checkpoint) -> DenseSize | None:
    """Return the size of what is outside the experts, or None where tensors are missing.

    Layers for multi-token prediction do not count, because nothing here runs them.

    Raises:
        CheckpointError, FormatError: if a header cannot be read, or a quantized matrix misses a tensor.
    """
    if not checkpoint.files.has_tensors:
        return None
    total = unread = 0
    for name, tensor in checkpoint.dense_tensors().items():
        vision, layer = _VISION.search(name), _LAYER.search(name)
        if name.startswith("mtp.") or (not vision and layer and int(layer[1]) >= checkpoint.moe.num_layers):
            continue
        try:
            nbytes = math.prod(tensor.get_shape()) * (2 if isinstance(tensor, DenseMatrix) else _itemsize(tensor))
        except CheckpointNotFound:  # some shards are elsewhere
            return None
        total += nbytes
        if vision or name.endswith(_EMBEDDINGS):
            unread += nbytes
    return DenseSize(total, unread)


def _itemsize(tensor: DenseTensor) -> int:
    """Bytes of one element, from the bits in safetensors' name of its dtype; BOOL is one byte."""
    bits = re.search(r"\d+", tensor.get_dtype())
    return int(bits[0]) // 8 if bits else 1
