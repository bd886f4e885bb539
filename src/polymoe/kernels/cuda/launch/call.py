"""The one launcher: it makes the launches of :mod:`.steps` for a layer. Prepared calls set only addresses."""

from __future__ import annotations

from ctypes import Structure
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Launch
from polymoe.kernels.cuda.launch.args import FinalizeArgs, GemmArgs, dtype_number
from polymoe.kernels.cuda.launch.layer import Layer
from polymoe.kernels.cuda.launch.shape import FINALIZE_COLUMNS, CallShape, Tiles, layer_numbers, steps_of
from polymoe.kernels.cuda.launch.steps import BY_TOKEN, FINALIZE, Step
from polymoe.kernels.cuda.spec import KernelFamily

if TYPE_CHECKING:
    from torch import Tensor

CALL_VALUES = (
    ("workspace",),
    ("x", "ids", "router_weights", "out"),
    ("x_dtype", "out_dtype", "long_ids", "first_expert"),
)
"""What a call has of its own, in groups that change together: addresses of the workspace; of x (a multiple of 16, or x
as the first GEMM reads it), expert ids, router weights and the result; numbers of the dtypes of x and of the result,
whether ids have 64 bits, and the first expert's id. All tensors are contiguous."""

_OF_CALL = {name: (group, i, 0) for group, names in enumerate(CALL_VALUES) for i, name in enumerate(names)}
_NOT_SET: tuple[tuple[int, ...], ...] = ((),) * len(CALL_VALUES)
_ABSENT: dict[str, Any] = dict.fromkeys(
    ("expanded_to_permuted", "counts", "sorted_ids", "input_weights", "output_weights")
)
"""Arrays and addresses that some calls have not: null then."""


class _Prepared(NamedTuple):
    """A launch whose constants are set, and the fields that are not: pairs of a field and the name of its value."""

    step: Step
    launch: Launch
    args: Structure
    fields: list[tuple[str, str]]


class PreparedCall:
    """The launches of a layer's calls in one configuration.

    The constructor prepares everything that does not depend on the call, :meth:`resize` everything that depends on the
    number of tokens, and :meth:`run` sets what the call has of its own. An instance must not be used by two threads at
    once.

    Args:
        layer: the packed experts.
        family: the kernels.
        tiles: which of their tiles run.
    """

    def __init__(self, layer: Layer, family: KernelFamily, tiles: Tiles) -> None:
        self.layer, self.family, self.tiles = layer, family, tiles
        self.shape = (0, 0, False)
        self.bytes = 0
        inputs = dict.fromkeys((*family.x, BY_TOKEN) if family.quantized_x else family.x)
        steps = {x: [step for step in steps_of(family, x) if tiles.narrow_m or not step.narrow] for x in inputs}
        self._constants = layer_numbers(layer, family, tiles)
        prepared = {step: self._prepare(step) for step in dict.fromkeys(chain.from_iterable(steps.values()))}
        self._steps = {x: [prepared[step] for step in those] for x, those in steps.items()}
        self._launches: tuple[Launch, ...] = ()
        self._values = _NOT_SET
        self._set_by: list[list[tuple[Structure, str, int, int]]] = []

    def _prepare(self, step: Step) -> _Prepared:
        constants = self._constants
        if step.unit:
            args, threads = step.args(), constants[step.threads] if isinstance(step.threads, str) else step.threads
            assert threads
            launch = modules.kernel(step.unit, step.kernel, self.layer.target).prepare(args, threads)
        else:
            args, launch = self._prepare_gemm(step)
        for field, name in step.fields.items():
            if name in constants:
                setattr(args, field, constants[name])
        return _Prepared(step, launch, args, [f for f in step.fields.items() if f[1] not in constants])

    def _prepare_gemm(self, step: Step) -> tuple[GemmArgs, Launch]:
        layer, family, tiles = self.layer, self.family, self.tiles
        down = step.kernel == "down"
        matrix, part = layer.down if down else layer.up, step.kernel if layer.gated or down else "up"
        block_m = tiles.narrow_m if step.narrow else (down and tiles.down_block_m) or tiles.block_m
        pipeline = family.pipeline(layer.budget, matrix.format, part, block_m, matrix.k)
        name = family.kernel(part, block_m, pipeline.variant)
        args = matrix.args(family.args, pipeline, block_m, layer.activation)
        args.second_launch = step.narrow
        kernel = modules.kernel(family.unit(matrix.format), name, layer.target)
        launch = kernel.prepare(args, family.threads(block_m), pipeline.shared_bytes)
        launch.set_grid(layer.sms)
        return args, launch

    def resize(self, tokens: int, top_k: int, *, quantized: bool = False) -> None:
        """Prepare for calls of ``tokens`` tokens with ``top_k`` experts each. ``quantized``: x is as
        the first GEMM reads it."""
        shape = CallShape(self.layer, self.family, self.tiles, tokens, top_k)
        (offsets, self.bytes), numbers = shape.workspace(), _ABSENT | self._constants | shape.numbers()
        # Which value of the call a field has, and what is added to it.
        sources = _OF_CALL | {name: (0, 0, offset) for name, offset in offsets.items()}
        sources["input_weights" if self.layer.router_weight_on_input else "output_weights"] = _OF_CALL["router_weights"]
        if shape.gemms_sort:
            sources["sorted_ids"] = _OF_CALL["ids"]
        launches: list[Launch] = []
        self._set_by = [[] for _ in CALL_VALUES]
        for step, launch, args, fields in self._steps[BY_TOKEN if quantized else shape.planned_input]:
            if not numbers[step.when]:
                continue
            launches.append(launch)
            if step.grid:
                launch.set_grid(*(numbers[name] for name in step.grid))
            for field, name in fields:
                if name in sources:
                    group, i, offset = sources[name]
                    self._set_by[group].append((args, field, i, offset))
                else:
                    setattr(args, field, numbers[name])
        self._launches, self._values = tuple(launches), _NOT_SET
        self.shape = (tokens, top_k, quantized)

    def run(self, stream: int, values: tuple[tuple[int, ...], ...]) -> None:
        """Launch the kernels of a call on the stream of this handle. ``values``: those of :data:`CALL_VALUES`; the
        workspace has at least :attr:`bytes` bytes."""
        if values != self._values:
            for group, before, fields in zip(values, self._values, self._set_by, strict=True):
                if group != before:
                    for args, field, i, offset in fields:
                        setattr(args, field, group[i] + offset)
            self._values = values
        for launch in self._launches:
            launch(stream)


def add_rows(
    layer: Layer,
    first_expert: int,
    y_RH: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor | None,
    out_TH: Tensor,
    stream: int,
) -> None:
    """Launch the weighted sum of float32 rows by expanded row, as calls do.

    Args:
        layer: the packed experts.
        first_expert: the first id on this rank.
        y_RH: [tokens * top_k, columns].
        ids_TA, weights_TA: contiguous; without weights they are 1.
        out_TH: where the sum is written.
        stream: handle of the CUDA stream.
    """
    args = FinalizeArgs(
        y=y_RH.data_ptr(),
        ids=ids_TA.data_ptr(),
        weights=None if weights_TA is None else weights_TA.data_ptr(),
        out=out_TH.data_ptr(),
        top_k=ids_TA.shape[1],
        columns=layer.down.n,
        first_expert=first_expert,
        experts=layer.experts,
        long_ids=ids_TA.element_size() == 8,
        out_dtype=dtype_number(out_TH.dtype),
    )
    (step,) = FINALIZE["float32_rows"]
    launch = modules.kernel(step.unit, step.kernel, layer.target).prepare(args, int(step.threads))
    launch.set_grid(len(ids_TA), -(-layer.down.n // FINALIZE_COLUMNS))
    launch(stream)
