"""The one launcher: it makes the launches of :mod:`.steps` for a layer. Prepared calls set only addresses."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import TYPE_CHECKING

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Launch
from polymoe.kernels.cuda.launch.args import FinalizeArgs, GemmArgs, dtype_number
from polymoe.kernels.cuda.launch.layer import Layer
from polymoe.kernels.cuda.launch.shape import FINALIZE_COLUMNS, CallShape, Tiles, steps_of
from polymoe.kernels.cuda.launch.steps import BY_TOKEN, FINALIZE, Step
from polymoe.kernels.cuda.spec import KernelFamily

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Call", "add_rows"]

_ADDRESSES = ("x", "ids", "router_weights", "out")
_KINDS = ("x_dtype", "out_dtype", "long_ids", "first_expert")

_SECOND_LAUNCH = 2
"""``x_buffers`` of the launches for narrow work tiles, which tells them so."""


class Call:
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
        values = CallShape(layer, family, tiles, 1, 1).values()
        inputs = (*family.x, BY_TOKEN) if family.quantized_x else family.x
        steps = dict.fromkeys(step for x in inputs for step in steps_of(family, x))
        used = [step for step in steps if tiles.narrow_m or not step.narrow]
        self._prepared = {step: self._prepare(step, values) for step in used}
        self._launches: tuple[Launch, ...] = ()
        self._set_by_call: dict[str, list[tuple[Structure, str]]] = {}
        self._of_kinds: list[tuple[Structure, str, int]] = []
        self._in_workspace: list[tuple[Structure, str, int]] = []
        self._workspace, self._kinds = 0, (-1, -1, False, -1)

    def _prepare(self, step: Step, values: dict[str, int | None]) -> tuple[Structure, Launch]:
        layer = self.layer
        if not step.unit:
            return self._prepare_gemm(step)
        args = step.args()
        threads = values[step.threads] if isinstance(step.threads, str) else step.threads
        assert threads
        return args, modules.kernel(step.unit, step.kernel, layer.target).prepare(args, threads)

    def _prepare_gemm(self, step: Step) -> tuple[GemmArgs, Launch]:
        layer, family, tiles = self.layer, self.family, self.tiles
        down = step.kernel == "down"
        matrix, part = layer.down if down else layer.up, step.kernel if layer.gated or down else "up"
        block_m = tiles.narrow_m if step.narrow else (down and tiles.down_block_m) or tiles.block_m
        sizes = (layer.budget, matrix.format, part, block_m, matrix.k)
        pipeline = family.pipeline(*sizes)
        args = matrix.args(family.args, pipeline, block_m, layer.activation)
        if step.narrow:
            args.x_buffers = _SECOND_LAUNCH
        kernel = modules.kernel(
            family.unit(matrix.format), family.kernel(part, block_m, family.variant(*sizes)), layer.target
        )
        launch = kernel.prepare(args, family.threads(block_m) + layer.target.more_threads, pipeline.shared_bytes)
        launch.set_grid(layer.sms)
        return args, launch

    def resize(self, tokens: int, top_k: int, *, quantized: bool = False) -> None:
        """Prepare for calls of ``tokens`` tokens with ``top_k`` experts each. ``quantized``: see :class:`CallShape`."""
        shape = CallShape(self.layer, self.family, self.tiles, tokens, top_k, quantized)
        values, sources, (offsets, self.bytes) = shape.values(), shape.sources(), shape.workspace()
        self._set_by_call = {name: [] for name in _ADDRESSES}
        self._of_kinds, self._in_workspace, launches = [], [], []
        for step in shape.steps():
            if not values[step.when]:
                continue
            args, launch = self._prepared[step]
            launches.append(launch)
            if step.grid:
                launch.set_grid(*(values[name] for name in step.grid))  # type: ignore[arg-type]
            for field, name in step.fields.items():
                source = sources.get(name, name)
                if source in offsets:
                    self._in_workspace.append((args, field, offsets[source]))
                elif source in _ADDRESSES:
                    self._set_by_call[source].append((args, field))
                elif source in _KINDS:
                    self._of_kinds.append((args, field, _KINDS.index(source)))
                else:
                    setattr(args, field, values[source])
        self._launches = tuple(launches)
        self._workspace, self._kinds, self.shape = 0, (-1, -1, False, -1), (tokens, top_k, quantized)

    def run(self, addresses: Sequence[int], workspace: int, stream: int, kinds: tuple[int, int, bool, int]) -> None:
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
            for args, field, kind in self._of_kinds:
                setattr(args, field, kinds[kind])
            self._kinds = kinds
        for places, address in zip(self._set_by_call.values(), addresses, strict=True):
            for args, field in places:
                setattr(args, field, address)
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
