"""PlainExperts: names and arrangement of a layer's experts in 16 bits, whatever the checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polymoe.checkpoint.arrangement import BIAS, Arrangement, Fused, part_shape
from polymoe.checkpoint.load import Checkpoint
from polymoe.errors import FormatError
from polymoe.problem.tensors import ExpertsSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """How a layer's experts are named in 16 bits.

    Attributes:
        places: containers, each with an arrangement, in the order in which they are tried.
        whole: sizes and encodings of all experts of the layer.
    """

    places: tuple[tuple[str, Arrangement], ...]
    whole: ExpertsSpec

    @classmethod
    def of(cls, checkpoint: Checkpoint, layer: int) -> PlainExperts:
        """Describe a layer of a checkpoint, whose own experts may be quantized."""
        family = checkpoint.family
        plain = [(c, a) for c, a in family.places if a.dialects is None or "plain" in a.dialects]
        places = tuple((container.format(layer=layer), arrangement) for container, arrangement in plain)
        return cls(places, checkpoint.spec(layer))

    def names(self) -> Iterator[tuple[str, Arrangement, str, int]]:
        """Yield each name with its arrangement, its part (``gate_up_bias`` for a bias) and its expert, 0 if stacked."""
        for container, arrangement in self.places:
            experts = range(1 if arrangement.stacked else self.whole.experts)
            for part in arrangement.parts(gated=self.whole.gated):
                for suffix, end in (("weight", ""), (BIAS, "_bias"))[: 1 + self.whole.bias]:
                    for e in experts:
                        yield arrangement.tensor(container, part, e, suffix), arrangement, part + end, e

    def fitting(self, arrangements: Iterable[Fused], part: str, tensor: Tensor, name: str) -> list[Fused]:
        """Return those of ``arrangements`` in which a stacked tensor has the shape of ``tensor``.

        Several are possible where a matrix is square: the layer's other tensor, which is not, must decide.

        Raises:
            FormatError: if none is.
        """
        whole, bias = self.whole, part.endswith("_bias")
        n, k = part_shape(part.removesuffix("_bias"), whole.hidden, whole.intermediate, gated=whole.gated)
        shapes = {a: (whole.experts, *((n,) if bias else (k, n) if a.k_first else (n, k))) for a in arrangements}
        found = [arrangement for arrangement, shape in shapes.items() if shape == tuple(tensor.shape)]
        if not found:
            raise FormatError(name, expected=f"{whole.experts} experts of {n} x {k}", got=str(list(tensor.shape)))
        return found

    def split(self, arrangement: Fused, part: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Yield part, expert and tensor, in natural order, of each expert in a stacked tensor of ``arrangement``."""
        matrix, bias = part.removesuffix("_bias"), "_bias" if part.endswith("_bias") else ""
        whole = self.whole
        for e, one in enumerate(tensor.mT if arrangement.k_first and not bias else tensor):
            if matrix == "down" or not whole.gated:
                yield ("down" if matrix == "down" else "up") + bias, e, one
                continue
            halves = (one[0::2], one[1::2]) if arrangement.order == "interleaved" else one.split(whole.intermediate)
            yield "gate" + bias, e, halves[0]
            yield "up" + bias, e, halves[1]
