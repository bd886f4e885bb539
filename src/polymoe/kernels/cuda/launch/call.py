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

_ARRAYS = frozenset(
    (
        *("work_tiles", "narrow_tiles", "expanded_to_permuted", "lists", "permuted_to_expanded", "counts"),
        *("gate_up_list", "down_list", "narrow_gate_up_list", "narrow_down_list", "x_rows", "h", "rounded_h", "y"),
    )
)
_ADDRESSES = {"x": 0, "ids": 1, "sorted_ids": 1, "input_weights": 2, "output_weights": 2, "out": 3}
_KINDS = {"x_dtype": 0, "out_dtype": 1, "long_ids": 2, "first_expert": 3}
_NO_KINDS = (-1, -1, False, -1)


class _Prepared(NamedTuple):
    """A launch whose constants are set, and by what the other fields are set: pairs of a field and a name or index."""

    launch: Launch
    args: Structure
    when: str
    grid: tuple[str, ...]
    numbers: list[tuple[str, str]]
    arrays: list[tuple[str, str]]
    addresses: list[tuple[str, str]]
    kinds: list[tuple[Structure, str, int]]


class PreparedCall:
    """The launches of a layer's calls in one configuration.

    The constructor prepares everything that does not depend on the call, :meth:`resize` everything that depends on the
    number of tokens, and :meth:`run` sets addresses. An instance must not be used by two threads at once.

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
        constants = layer_numbers(layer, family, tiles)
        prepared = {step: self._prepare(step, constants) for step in dict.fromkeys(chain.from_iterable(steps.values()))}
        self._steps = {x: [prepared[step] for step in those] for x, those in steps.items()}
        self._constants = constants
        self._launches: tuple[Launch, ...] = ()
        self._by_call: list[tuple[Structure, str, int]] = []
        self._by_kind: list[tuple[Structure, str, int]] = []
        self._in_workspace: list[tuple[Structure, str, int]] = []
        self._workspace, self._kinds, self._addresses = 0, _NO_KINDS, (0, 0, 0, 0)

    def _prepare(self, step: Step, constants: dict[str, Any]) -> _Prepared:
        if step.unit:
            args, threads = step.args(), constants[step.threads] if isinstance(step.threads, str) else step.threads
            assert threads
            launch = modules.kernel(step.unit, step.kernel, self.layer.target).prepare(args, threads)
        else:
            args, launch = self._prepare_gemm(step)
        found = _Prepared(launch, args, step.when, step.grid, [], [], [], [])
        for field, name in step.fields.items():
            if name in constants:
                setattr(args, field, constants[name])
            elif name in _KINDS:
                found.kinds.append((args, field, _KINDS[name]))
            else:
                kind = found.addresses if name in _ADDRESSES else found.arrays if name in _ARRAYS else found.numbers
                kind.append((field, name))
        return found

    def _prepare_gemm(self, step: Step) -> tuple[GemmArgs, Launch]:
        layer, family, tiles = self.layer, self.family, self.tiles
        down = step.kernel == "down"
        matrix, part = layer.down if down else layer.up, step.kernel if layer.gated or down else "up"
        block_m = tiles.narrow_m if step.narrow else (down and tiles.down_block_m) or tiles.block_m
        sizes = (layer.budget, matrix.format, part, block_m, matrix.k)
        pipeline, name = family.pipeline(*sizes), family.kernel(part, block_m, family.variant(*sizes))
        args = matrix.args(family.args, pipeline, block_m, layer.activation)
        if step.narrow:
            args.second_launch = 1
        kernel = modules.kernel(family.unit(matrix.format), name, layer.target)
        launch = kernel.prepare(args, family.threads(block_m), pipeline.shared_bytes)
        launch.set_grid(layer.sms)
        return args, launch

    def resize(self, tokens: int, top_k: int, *, quantized: bool = False) -> None:
        """Prepare for calls of ``tokens`` tokens with ``top_k`` experts each. ``quantized``: x is as
        the first GEMM reads it."""
        shape = CallShape(self.layer, self.family, self.tiles, tokens, top_k)
        (offsets, self.bytes), numbers = shape.workspace(), self._constants | shape.numbers()
        on_input = self.layer.router_weight_on_input
        null = {"output_weights" if on_input else "input_weights", *(() if shape.gemms_sort else ("sorted_ids",))}
        launches: list[Launch] = []
        self._by_call, self._by_kind, self._in_workspace = [], [], []
        for step in self._steps[BY_TOKEN if quantized else shape.planned_input]:
            if not numbers[step.when]:
                continue
            args = step.args
            launches.append(step.launch)
            if step.grid:
                step.launch.set_grid(*(numbers[name] for name in step.grid))
            for field, name in step.numbers:
                setattr(args, field, numbers[name])
            for field, name in step.arrays:
                if name in offsets:
                    self._in_workspace.append((args, field, offsets[name]))
                else:
                    setattr(args, field, None)
            for field, name in step.addresses:
                if name in null:
                    setattr(args, field, None)
                else:
                    self._by_call.append((args, field, _ADDRESSES[name]))
            self._by_kind += step.kinds
        self._launches = tuple(launches)
        self._workspace, self._kinds, self._addresses = 0, _NO_KINDS, (0, 0, 0, 0)
        self.shape = (tokens, top_k, quantized)

    def run(
        self,
        addresses: tuple[int, int, int, int],
        workspace: int,
        stream: int,
        kinds: tuple[int, int, bool, int],
    ) -> None:
        """Launch the kernels of a call. All tensors are contiguous.

        Args:
            addresses: of x, a multiple of 16, or of x as the first GEMM reads it; of the expert ids; of the router
                weights; and of the result.
            workspace: address of at least :attr:`bytes` bytes.
            stream: handle of the CUDA stream.
            kinds: numbers of the dtypes of x and the result, whether ids are 64 bits, and the first expert's id.
        """
        if workspace != self._workspace:
            for args, field, offset in self._in_workspace:
                setattr(args, field, workspace + offset)
            self._workspace = workspace
        if kinds != self._kinds:
            for args, field, kind in self._by_kind:
                setattr(args, field, kinds[kind])
            self._kinds = kinds
        if addresses != self._addresses:
            for args, field, address in self._by_call:
                setattr(args, field, addresses[address])
            self._addresses = addresses
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
