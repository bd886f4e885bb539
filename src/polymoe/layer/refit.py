"""IncomingExperts: a layer's experts that arrive in 16 bits, and are quantized to the format in which it is held.

Trainers send the weights of a model in BF16 while an engine holds its experts quantized. Each expert is quantized on
the layer's device as soon as all of its tensors are there, whole, before it is sliced for the rank: the codes and
scales are those of :func:`polymoe.load` with ``experts=``. Nothing of the old experts is used, so that no scale can be
stale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from polymoe.checkpoint.quantized import quantize_expert
from polymoe.checkpoint.shard import Shard, shard_expert
from polymoe.common.units import first_few
from polymoe.errors import CheckpointError, FormatError, UnsupportedProblem
from polymoe.formats import FORMATS, QuantTensor, format_of
from polymoe.problem import Problem
from polymoe.problem.call import DTYPES
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights


class IncomingExperts:
    """The new experts of one layer on one rank, as far as they have arrived.

    Args:
        where: the layer's name, for messages.
        problem: what the layer runs.
        whole: sizes and encodings of the layer's experts before they are sliced for tensor parallelism.
        shard: this rank.
        uneven: whether the last rank's slices may be smaller.
        device: where experts are quantized, and are then.

    Raises:
        UnsupportedProblem: for a layer whose inputs have static scales, which were calibrated for the old weights, or
            whose format polymoe only reads.
    """

    def __init__(
        self,
        where: str,
        problem: Problem,
        whole: ExpertsSpec,
        *,
        device: torch.device,
        shard: Shard | None = None,
        uneven: bool = False,
    ) -> None:
        if problem.activations.static:
            raise UnsupportedProblem(
                f"new weights of {where}",
                expected="inputs with dynamic scales, or in 16 bits",
                got="static scales, which were calibrated with the old weights",
                hint="start with activations other than fp8_static",
            )
        try:
            for encoding in whole.encodings.values():
                format_of(encoding)
        except FormatError as error:
            raise UnsupportedProblem(
                f"new weights of {where}",
                expected=f"a format that polymoe quantizes to: {error.where} with {error.expected}",
                got=str(error.got),
                hint="start the engine again with the new weights",
            ) from error
        self.where, self._spec, self._whole, self._device = where, problem.spec, whole, device
        self._shard, self._uneven = shard or Shard(), uneven
        self._parts = tuple(part for p in whole.encodings for part in (p, f"{p}_bias")[: 1 + whole.bias])
        self._arrived: dict[int, dict[str, tuple[str, Tensor]]] = {}
        self._done: dict[int, Expert] = {}

    def put(self, part: str, expert: int, tensor: Tensor, name: str) -> None:
        """Take one tensor of one expert; it is copied, as senders use their buffers again.

        Args:
            part: gate, up or down, or a bias such as ``up_bias``.
            expert: its place among this rank's experts.
            tensor: bfloat16 or float16, whole: gate and up [F, H], down [H, F], biases [F], [F] and [H].
            name: the name under which it came, for messages.

        Raises:
            CheckpointError: for a tensor that has come already, or one that the layer has not.
            FormatError: for another dtype or shape, and for numbers that are not finite.
        """
        if part not in self._parts or not 0 <= expert < self._spec.local_experts:
            held = f"{', '.join(self._parts)} of experts 0 to {self._spec.local_experts - 1}"
            raise CheckpointError(name, expected=f"a tensor of {self.where}: {held}", got=f"{part} of expert {expert}")
        here = self._arrived.setdefault(expert, {})
        if expert in self._done or part in here:
            raise CheckpointError(name, expected="each tensor once in an update", got="a second one")
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            raise FormatError(name, expected="bfloat16 or float16", got=str(tensor.dtype))
        shape = self._whole.matrix_shape(part.removesuffix("_bias"))[: 1 if part.endswith("_bias") else 2]
        if tuple(tensor.shape) != shape:
            raise FormatError(name, expected=f"shape {list(shape)}", got=str(list(tensor.shape)))
        tensor = tensor.detach().to(self._device, copy=True)
        if not bool(torch.isfinite(tensor).all()):
            raise FormatError(name, expected="finite numbers", got="NaN or infinity")
        here[part] = name, tensor
        if len(here) == len(self._parts):
            self._done[expert] = self._quantized(self._arrived.pop(expert))

    def _quantized(self, parts: dict[str, tuple[str, Tensor]]) -> Expert:
        matrices = {
            part: QuantTensor(tensor.contiguous(), FORMATS[DTYPES[tensor.dtype]].encoding)
            for part, (_, tensor) in parts.items()
            if not part.endswith("_bias")
        }
        biases = {part: tensor for part, (_, tensor) in parts.items() if part.endswith("_bias")}
        whole = Expert(gate=matrices.get("gate"), up=matrices["up"], down=matrices["down"], **biases)
        found = quantize_expert(whole, self._whole.encodings, lambda part: parts[part][0])
        return shard_expert(found, self._shard, uneven=self._uneven)

    @property
    def complete(self) -> bool:
        """Whether all experts of this rank are there."""
        return len(self._done) == self._spec.local_experts

    def missing(self) -> Iterator[str]:
        """What has not come, such as "up of expert 3" as the router counts experts."""
        for e in range(self._spec.local_experts):
            here = self._parts if e in self._done else self._arrived.get(e, {})
            yield from (f"{part} of expert {self._spec.first_expert + e}" for part in self._parts if part not in here)

    def require_complete(self) -> None:
        """Raise CheckpointError if a tensor has not come; the message names those that are missing."""
        lacking = list(self.missing())
        if lacking:
            raise CheckpointError(
                f"new weights of {self.where}",
                expected="every tensor of its experts",
                got=f"none for {first_few(lacking)}",
                hint="send all of the model's tensors again",
            )

    def weights(self) -> ExpertWeights:
        """The experts, quantized, each sliced for this rank.

        Raises:
            CheckpointError: if a tensor is missing.
        """
        self.require_complete()
        return ExpertWeights(self._spec, self._done.__getitem__)
