"""Base class of calls: a workspace, the permutation, two grouped GEMMs, and the weighted sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from ctypes import Structure
from typing import TYPE_CHECKING, Any, NamedTuple

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.driver import Launch
from polymoe.kernels.cuda.launch.args import FinalizeArgs, GemmArgs, dtype_number
from polymoe.kernels.cuda.launch.layer import Layer, Matrix
from polymoe.kernels.cuda.launch.permutation import LIST_BYTES, Permutation
from polymoe.kernels.cuda.sizes import FamilySizes, round_up

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALIGNMENT", "ByTokenCall", "Call", "Regions", "add_rows"]

ALIGNMENT = 256
"""Alignment of the workspace's regions in bytes; more than any copy needs."""

_SECOND_LAUNCH = 2
"""``x_buffers`` of the launches for narrow work tiles, which tells them so."""

_FINALIZE_THREADS, _FINALIZE_COLUMNS = 128, 1024  # per CTA
_FINALIZE_CTAS = 8  # that run on an SM at a time
_FINALIZE_MANY_TOP_K = 2
"""Most experts of a token for which several tokens a CTA are faster: with more, a CTA has loads enough in flight."""


def tokens_per_cta(tokens: int, top_k: int, columns: int, sms: int) -> int:
    """Return how many tokens a CTA of the weighted sum has.

    One where a token has several experts, or where all CTAs run at a time; else as many tokens as fill the GPU once,
    with at most 32 expanded rows: those of finalize_many_bf16.
    """
    if top_k > _FINALIZE_MANY_TOP_K:
        return 1
    ctas = tokens * -(-columns // _FINALIZE_COLUMNS)
    return max(1, min(-(-ctas // (sms * _FINALIZE_CTAS)), 32 // top_k))


class Regions(NamedTuple):
    """Bytes of the workspace's regions: the permutation, x, h and y."""

    permutation: int
    x: int
    h: int
    y: int

    def offsets(self) -> tuple[Regions, int]:
        """Return the offset of each region, and the bytes of all regions together."""
        found, end = [], 0
        for size in self:
            found.append(end)
            end += round_up(size, ALIGNMENT)
        return Regions(*found), end


class Call(ABC):
    """The launches of a layer's calls in one configuration.

    The constructor prepares everything that does not depend on the call, :meth:`resize` everything that depends on the
    number of tokens, and :meth:`run` sets addresses. An instance must not be used by two threads at once.

    Args:
        layer: the packed experts.
        family: sizes of the kernel family.
        block_m: most rows of x in a work tile.
        block_n: as in a configuration. Which tiles there are follows from K.
        down_block_m: ``block_m`` of the kernel for the down projection, which may be larger; 0 if it is the same. Work
            tiles are the same.
        narrow_m: ``block_m`` of further launches, one for each GEMM, for the work tiles of at most so many rows; 0 if
            there are none.
    """

    with_inverse = True
    """Whether y is indexed by permuted row, so that the permutation's inverse is needed."""
    even_tiles = False
    """Whether an expert's work tiles have about as many rows each."""
    y_bytes = 2
    """Bytes of an element of y."""
    gemm_args: type[GemmArgs] = GemmArgs
    """Arguments of the grouped GEMMs."""
    x_by_permuted_row = False
    """Whether the launch for x writes a row for each expert of a token, so that it needs the permutation's inverse."""
    takes_quantized_x = False
    """Whether x may come quantized, by token."""
    quantized_x_dtype: int | None = None
    """Number of the dtype of quantized x, where the first GEMM reads it as it does any x; None where quantized x takes
    the place of what the launch for x writes."""

    def __init__(
        self,
        layer: Layer,
        family: FamilySizes,
        block_m: int,
        block_n: int = 0,
        down_block_m: int = 0,
        narrow_m: int = 0,
    ) -> None:
        self.layer, self.family = layer, family
        self.shape = (0, 0)
        self.bytes = 0
        self.permutation = Permutation(
            layer.first_expert,
            layer.experts,
            block_m,
            self.with_inverse,
            narrow_m=narrow_m,
            ctas=layer.sms,
            even=self.even_tiles,
            target=layer.target,
        )
        part = "gate_up" if layer.gated else "up"
        self.gate_up, up = self._gemm(part, layer.up, block_m)
        self.down, down = self._gemm("down", layer.down, down_block_m or block_m)
        self._gemms: tuple[Launch, ...] = (up, down)
        self._narrow: tuple[GemmArgs, ...] = ()
        if narrow_m:
            gate_up_args, narrow_up = self._gemm(part, layer.up, narrow_m)
            down_args, narrow_down = self._gemm("down", layer.down, narrow_m)
            gate_up_args.x_buffers = down_args.x_buffers = _SECOND_LAUNCH
            self._gemms, self._narrow = (up, narrow_up, down, narrow_down), (gate_up_args, down_args)
        self.finalize = FinalizeArgs(columns=layer.down.n, first_expert=layer.first_expert, experts=layer.experts)
        names = ("finalize_bf16", "finalize_many_bf16") if self.y_bytes == 2 else ("finalize_f32",)
        kernels = [modules.kernel("finalize", name, layer.target) for name in names]
        self._finalizes = [kernel.prepare(self.finalize, _FINALIZE_THREADS) for kernel in kernels]
        self._prepare_x()
        self._launches: tuple[Launch, ...] = ()
        self._after_x: tuple[Launch, ...] = ()
        self._in_workspace: list[tuple[Structure, str, int]] = []
        self._workspace, self._kinds = 0, (-1, -1, False, -1)

    @staticmethod
    @abstractmethod
    def regions(layer: Layer, block_m: int, tokens: int, top_k: int) -> Regions:
        """Return the bytes of the workspace's regions for a call of ``tokens`` tokens."""

    @property
    @abstractmethod
    def x_args(self) -> Any:
        """The arguments whose field ``x`` is the address of the call's x."""

    @abstractmethod
    def _prepare_x(self) -> None:
        """Prepare the launch for x if there is one. The arguments of the GEMMs are there."""

    def _set_ids(self, ids: int) -> None:
        """Set the address of the expert ids."""
        self.permutation.args.ids = self.finalize.ids = ids

    def x_launch(self, tokens: int, top_k: int) -> Launch | None:
        """Return the launch that copies or rounds x for the first GEMM; None if there is none."""
        return None

    def h_launch(self, rows: int) -> Launch | None:
        """Return the launch between the GEMMs, which rounds h; None if there is none."""
        return None

    def set_x_dtype(self, number: int) -> None:
        """Set the dtype of x, as a number of :data:`.args.DTYPES`."""
        assert number == 0, "x is bfloat16 unless it is quantized"

    def set_x(self, x: int) -> None:
        """Set the address of the call's x."""
        self.x_args.x = x

    def resize(self, tokens: int, top_k: int) -> None:
        """Prepare for calls of ``tokens`` tokens with ``top_k`` experts each."""
        rows = tokens * top_k
        block_m = self.permutation.args.block_m
        offsets, self.bytes = self.regions(self.layer, block_m, tokens, top_k).offsets()
        self.permutation.resize(rows)
        gate_up, down, finalize = self.gate_up, self.down, self.finalize
        each = tokens_per_cta(tokens, top_k, finalize.columns, self.layer.sms) if self.y_bytes == 2 else 1
        finalize.top_k, finalize.tokens, finalize.tokens_per_cta = top_k, tokens, each
        finalize_launch = self._finalizes[each > 1]
        x_launch = self.x_launch(tokens, top_k)
        finalize_launch.set_grid(-(-tokens // each), -(-finalize.columns // _FINALIZE_COLUMNS))
        h_launch, of_each = self.h_launch(rows), len(self._gemms) // 2
        between = () if h_launch is None else (h_launch,)
        self._after_x = (*self._gemms[:of_each], *between, *self._gemms[of_each:], finalize_launch)
        self._launches = (*self.permutation.launches, *(() if x_launch is None else (x_launch,)), *self._after_x)
        arrays = self.permutation.offsets
        placed: list[tuple[Structure, str, int]] = [(self.permutation.args, n, at) for n, at in arrays.items()]
        gemms = (gate_up, down, *self._narrow)
        for i, gemm in enumerate(gemms):
            tiles = "work_tiles" if i < 2 else "narrow_tiles"
            placed += [(gemm, "num_tiles", arrays["lists"] + i * LIST_BYTES), (gemm, "work_tiles", arrays[tiles])]
            placed += [(gemm, "permuted_to_expanded", arrays["permuted_to_expanded"])]
        for up in gemms[::2]:
            placed += [(up, "out", offsets.h)]
            placed += [(up, "x", offsets.x)] if x_launch is not None else []
        for gemm in gemms[1::2]:
            placed += [(gemm, "x", offsets.h), (gemm, "out", offsets.y)]
        placed += [(finalize, "y", offsets.y)]
        if x_launch is not None:
            placed += [(self.x_args, "out", offsets.x)]
        if self.with_inverse:
            placed.append((finalize, "expanded_to_permuted", arrays["expanded_to_permuted"]))
            if self.x_by_permuted_row:
                placed.append((self.x_args, "expanded_to_permuted", arrays["expanded_to_permuted"]))
        self._in_workspace, self._workspace, self.shape = placed, 0, (tokens, top_k)

    def run(
        self,
        x: int,
        ids: int,
        router_weights: int,
        out: int,
        workspace: int,
        stream: int,
        kinds: tuple[int, int, bool, int],
        *,
        quantized_x: bool = False,
    ) -> None:
        """Launch the kernels of a call. All tensors are contiguous.

        Args:
            x: address of x, a multiple of 16.
            ids, router_weights: addresses of the expert ids and of the router weights.
            out: address of the result.
            workspace: address of at least :attr:`bytes` bytes.
            stream: handle of the CUDA stream.
            kinds: numbers of the dtypes of x and the result, whether ids are 64 bits, and the first expert's id.
            quantized_x: whether x already is as the first GEMM reads it, so that the launch for x is skipped.
        """
        if workspace != self._workspace:
            for args, name, offset in self._in_workspace:
                setattr(args, name, workspace + offset)
            self._workspace = workspace
        if quantized_x and self.quantized_x_dtype is not None:
            kinds, quantized_x = (self.quantized_x_dtype, *kinds[1:]), False
        if kinds != self._kinds:
            self._set_kinds(*kinds)
        self._set_ids(ids)
        if self.layer.router_weight_on_input:
            for gate_up in (self.gate_up, *self._narrow[:1]):
                gate_up.router_weights = router_weights
        else:
            self.finalize.weights = router_weights
        self.finalize.out = out
        if quantized_x:
            self.gate_up.x, self._workspace = x, 0
            for launch in (*self.permutation.launches, *self._after_x):
                launch(stream)
            return
        self.set_x(x)
        for launch in self._launches:
            launch(stream)

    def _set_kinds(self, x: int, out: int, long_ids: bool, first_expert: int) -> None:
        permutation, finalize = self.permutation.args, self.finalize
        if x >= 0:
            self.set_x_dtype(x)
        finalize.out_dtype = out
        permutation.long_ids = finalize.long_ids = long_ids
        permutation.first_expert = finalize.first_expert = first_expert
        self._kinds = (x, out, long_ids, first_expert)

    def _gemm(self, part: str, matrix: Matrix, block_m: int, args: GemmArgs | None = None) -> tuple[GemmArgs, Launch]:
        layer, family = self.layer, self.family
        sizes = (layer.budget, matrix.format, part, block_m, matrix.k)
        pipeline = family.pipeline(*sizes)
        args = args or matrix.args(self.gemm_args, pipeline, block_m, layer.activation)
        name = family.kernel(part, block_m, family.variant(*sizes))
        kernel = modules.kernel(family.unit(matrix.format), name, layer.target)
        launch = kernel.prepare(args, family.threads(block_m) + layer.target.more_threads, pipeline.shared_bytes)
        launch.set_grid(layer.sms)
        return args, launch


def add_rows(
    layer: Layer, y_RH: Tensor, ids_TA: Tensor, weights_TA: Tensor | None, out_TH: Tensor, stream: int
) -> None:
    """Launch the weighted sum of float32 rows by expanded row, as calls do.

    Args:
        layer: the packed experts.
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
        first_expert=layer.first_expert,
        experts=layer.experts,
        long_ids=ids_TA.element_size() == 8,
        out_dtype=dtype_number(out_TH.dtype),
    )
    launch = modules.kernel("finalize", "finalize_f32", layer.target).prepare(args, _FINALIZE_THREADS)
    launch.set_grid(len(ids_TA), -(-layer.down.n // _FINALIZE_COLUMNS))
    launch(stream)


class ByTokenCall(Call):
    """Calls whose first GEMM reads rows of x by token. There is no launch for x."""

    @property
    def x_args(self) -> GemmArgs:
        """Arguments of the first GEMM."""
        return self.gate_up

    def _prepare_x(self) -> None:
        """There is nothing to prepare."""

    def resize(self, tokens: int, top_k: int) -> None:
        """See :meth:`Call.resize`."""
        super().resize(tokens, top_k)
        self.gate_up.top_k = top_k  # x is indexed by token
