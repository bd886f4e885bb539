"""StoredLayer: the tensors of one layer's experts in the files, their dialects, and how to read one expert.

Everything is a view of mapped files, so an expert costs memory only where its dialect must be rearranged (GPTQ, AWQ).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from polymoe.checkpoint.arrangement import BIAS, Arrangement, Fused, part_shape
from polymoe.checkpoint.config import QuantizationConfig
from polymoe.checkpoint.dialects import DIALECTS, SUFFIXES, Dialect, choose, require
from polymoe.checkpoint.dialects.base import expect
from polymoe.checkpoint.families import ModelFamily, MoeConfig
from polymoe.checkpoint.files import CheckpointFiles, Header
from polymoe.checkpoint.scheme import Scheme
from polymoe.errors import CheckpointError, CheckpointNotFound, FormatError
from polymoe.formats import Encoding, QuantTensor
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.tensors import Expert, ExpertsSpec

if TYPE_CHECKING:
    from torch import Tensor

_ALL_SUFFIXES = (*SUFFIXES, BIAS)


@dataclass(frozen=True, slots=True)
class Part:
    """One stored matrix of each expert.

    Attributes:
        name: ``gate``, ``up``, ``down`` or ``gate_up``.
        shape: [N, K].
        dialect, encoding: according to the tensors.
        scheme: according to the config.
        calibrated: whether a static scale of its input exists.
    """

    name: str
    shape: tuple[int, int]
    dialect: Dialect
    encoding: Encoding
    scheme: Scheme
    calibrated: bool = True

    @property
    def as_configured(self) -> bool:
        """Whether tensors and config agree, apart from the dtype of scales."""
        return self.scheme.describes(self.dialect.name, self.encoding)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """One part of one expert, after reading."""

    matrix: QuantTensor
    input_scale: Tensor | None
    bias: Tensor | None = None

    def rows(self, start: int, stop: int, step: int = 1) -> _Piece:
        bias = None if self.bias is None else self.bias[start:stop:step]
        return _Piece(self.matrix.rows(start, stop, step=step), self.input_scale, bias)


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The experts of one layer as stored; :meth:`find` examines the tensors, :meth:`described` only the config.

    Attributes:
        container: full name of the module that holds the experts.
        arrangement: how their tensors are named and stacked.
        parts: the stored matrices of one expert, by name.
        bias: whether the projections have biases.
    """

    container: str
    arrangement: Arrangement
    moe: MoeConfig
    parts: dict[str, Part]
    bias: bool

    @classmethod
    def _configured(
        cls, container: str, arrangement: Arrangement, moe: MoeConfig, quantization: QuantizationConfig
    ) -> StoredLayer:
        parts = {}
        for part in arrangement.parts(gated=moe.gated):
            scheme = quantization.scheme(arrangement.module(container, part, 0))
            shape = part_shape(part, moe.hidden, moe.intermediate, gated=moe.gated)
            parts[part] = Part(part, shape, DIALECTS[scheme.dialect], scheme.encoding, scheme)
        return cls(container, arrangement, moe, parts, moe.bias)

    @classmethod
    def described(
        cls, family: ModelFamily, moe: MoeConfig, quantization: QuantizationConfig, layer: int
    ) -> StoredLayer:
        """Describe a layer from the config alone."""
        # Without tensors nothing says which container is used; a row's first one is the usual one of all arrangements.
        first, dialects = family.places[0][0], set[str]()
        places = [(c, a) for c, a in family.places if c == first] if family.containers else family.places
        for template, arrangement in places:
            found = cls._configured(template.format(layer=layer), arrangement, moe, quantization)
            dialects = {part.dialect.name for part in found.parts.values()}
            if all(_admits(arrangement, dialect) for dialect in dialects):
                return found
        raise CheckpointError(
            f"config.json: {family.name} experts of layer {layer}",
            expected="a quantization that this model family is stored in",
            got=", ".join(sorted(dialects)),
        )

    @classmethod
    def find(
        cls, files: CheckpointFiles, family: ModelFamily, moe: MoeConfig, quantization: QuantizationConfig, layer: int
    ) -> StoredLayer:
        """Find a layer's tensors: the first container and arrangement of the family that fit them.

        Raises:
            CheckpointNotFound: if there are none.
            CheckpointError, FormatError: if one of them is missing or has a wrong dtype or shape.
        """
        failures: list[tuple[bool, CheckpointError | FormatError]] = []
        tried = []
        for template, arrangement in family.places:
            container = template.format(layer=layer)
            names = arrangement.parts(gated=moe.gated)
            tried.append(arrangement.tensor(container, names[0], 0, "*"))
            if not any(arrangement.tensor(container, part, 0, s) in files for part in names for s in _ALL_SUFFIXES):
                continue
            try:
                return cls._configured(container, arrangement, moe, quantization)._fitted(files)
            except (CheckpointError, FormatError) as error:
                scheme = quantization.scheme(arrangement.module(container, names[-1], 0))
                failures.append((not _admits(arrangement, scheme.dialect), error))
        if failures:
            raise min(failures, key=lambda f: f[0])[1]
        raise CheckpointNotFound(
            f"{files.path}: experts of layer {layer}",
            expected="tensors named " + " or ".join(dict.fromkeys(tried)),
            got="none",
            hint="the files may hold other layers only" if files.has_tensors else "name a directory that holds tensors",
        )

    def _fitted(self, files: CheckpointFiles) -> StoredLayer:
        """Return the layer as the tensors of its first expert say."""
        found, biases = {}, {}
        for name, part in self.parts.items():
            headers = self._headers(files, name, 0, _ALL_SUFFIXES)
            biases[name] = BIAS in headers
            with self._full_names(name):
                _check_bias(headers, part.shape, biases[name])
                headers.pop(BIAS, None)
                allowed = self.arrangement.dialects
                dialect, encoding = choose(headers, part.shape, part.scheme.dialect, part.encoding, allowed)
            calibrated = "input_scale" in headers and all(
                self.tensor(name, e, "input_scale") in files for e in range(self.moe.experts)
            )
            found[name] = replace(part, dialect=dialect, encoding=encoding, calibrated=calibrated)
        lacking = [name for name, there in biases.items() if not there]
        if lacking and (len(lacking) < len(biases) or self.bias):
            raise CheckpointError(
                self.tensor(lacking[0], 0, BIAS),
                expected="this bias, as the model or its other projections have one",
                got="no such tensor",
            )
        return replace(self, parts=found, bias=not lacking)

    def tensor(self, part: str, expert: int, suffix: str) -> str:
        """Return the name of a tensor."""
        return self.arrangement.tensor(self.container, part, expert, suffix)

    def names(self, files: CheckpointFiles, expert: int) -> Iterator[tuple[str, str, str]]:
        """Yield ``(tensor name, part, suffix)`` of what is stored for an expert; stacked tensors hold all experts."""
        for part in self.parts.values():
            for suffix in (*part.dialect.suffixes, BIAS):
                if (name := self.tensor(part.name, expert, suffix)) in files:
                    yield name, part.name, suffix

    @contextmanager
    def _full_names(self, part: str, expert: int = 0, index: str = "") -> Iterator[None]:
        """Name the tensor in the errors of a dialect, which have its suffix; or the module before what they name."""
        try:
            yield
        except (CheckpointError, FormatError) as error:
            if error.where in _ALL_SUFFIXES:
                error.where = self.tensor(part, expert, error.where) + index
            elif isinstance(error, FormatError):
                error.where = f"{self.arrangement.module(self.container, part, expert)}: {error.where}"
            raise

    def spec(self) -> ExpertsSpec:
        """Sizes and encodings of the whole layer."""
        return ExpertsSpec(
            hidden=self.moe.hidden,
            intermediate=self.moe.intermediate,
            experts=self.moe.experts,
            gate=self._encoding("gate") if self.moe.gated else None,
            up=self._encoding("up"),
            down=self._encoding("down"),
            bias=self.bias,
        )

    def recipe(self) -> ActivationQuantization:
        """How the checkpoint's authors quantize the experts' inputs. 16 bit unless the projections agree, are stored
        as in the config, and have the static scales that the recipe needs."""
        modes: set[ActivationQuantization] = {p.scheme.activations for p in self.parts.values()}
        configured = all(p.dialect.name == p.scheme.dialect for p in self.parts.values())
        if len(modes) > 1 or not configured:
            return UNQUANTIZED
        mode = modes.pop()
        return UNQUANTIZED if mode.static and not all(p.calibrated for p in self.parts.values()) else mode

    def require_experts(self, files: CheckpointFiles, experts: Iterable[int]) -> None:
        """Check by their names that the tensors of these experts are in the files; opens no file.

        Raises:
            CheckpointError: for the first tensor that is missing; it is named.
        """
        for expert, part in self._stored_apart(experts):
            if not all(self.tensor(part.name, expert, suffix) in files for suffix in part.dialect.required):
                found = [s for s in _ALL_SUFFIXES if self.tensor(part.name, expert, s) in files]
                with self._full_names(part.name, expert):
                    require(part.dialect, found)

    def check_experts(self, files: CheckpointFiles, experts: Iterable[int]) -> None:
        """Check from their headers that these experts are stored as the first one, which :meth:`find` has examined;
        reads no weight.

        Raises:
            CheckpointError: for the first tensor that is missing.
            FormatError: for the first one with another dtype or shape.
        """
        suffixes = {part.name: (*part.dialect.suffixes, BIAS) for part in self.parts.values()}
        firsts = {name: self._headers(files, name, 0, suffixes[name]) for name in self.parts}
        for expert, part in self._stored_apart(experts):
            headers, first = self._headers(files, part.name, expert, suffixes[part.name]), firsts[part.name]
            if headers != first:
                with self._full_names(part.name, expert):
                    require(part.dialect, headers)
                    _check_bias(headers, part.shape, self.bias)
                    self._check_alike(part, headers, first)

    def _check_alike(self, part: Part, headers: Mapping[str, Header], first: Mapping[str, Header]) -> None:
        """Require the encoding of the first expert; the error names a tensor that differs from its."""
        different = [s for s in part.dialect.suffixes if headers.get(s) != first.get(s)]
        try:
            if part.dialect.detect(headers, part.shape, part.encoding) == part.encoding:
                return
        except FormatError as error:
            if error.where in different:
                raise
        suffix = different[0]
        kind = FormatError if suffix in headers else CheckpointError
        expected = f"{_describe(first.get(suffix))}, as in the first expert"
        raise kind(suffix, expected=expected, got=_describe(headers.get(suffix)))

    def _stored_apart(self, experts: Iterable[int]) -> Iterator[tuple[int, Part]]:
        """Yield the parts of experts with tensors of their own; of stacked experts :meth:`find` has seen everything."""
        if not self.arrangement.stacked:
            yield from product(experts, self.parts.values())

    def _headers(self, files: CheckpointFiles, part: str, expert: int, suffixes: Iterable[str]) -> dict[str, Header]:
        """Return the headers of one expert's existing tensors by suffix, as :meth:`_stored` returns the tensors."""
        found = {}
        for suffix in suffixes:
            if (name := self.tensor(part, expert, suffix)) in files:
                header = found[suffix] = files.header(name)
                if isinstance(self.arrangement, Fused):
                    shape = header.shape[1:] if self._is_stacked(name, header) else header.shape
                    if self.arrangement.k_first and len(shape) >= 2:
                        shape = (*shape[:-2], shape[-1], shape[-2])
                    found[suffix] = Header(header.dtype, shape)
        return found

    def _stored(self, files: CheckpointFiles, part: str, expert: int, suffix: str) -> Tensor:
        """Return one expert's tensor in natural order; a single number is shared by all experts."""
        name = self.tensor(part, expert, suffix)
        stacked = self.arrangement.stacked and self._is_stacked(name, files.header(name))
        return self.arrangement.turned(files.get(name, expert if stacked else None))

    def _is_stacked(self, name: str, header: Header) -> bool:
        if math.prod(header.shape) == 1 and len(header.shape) <= 1:
            return False
        if header.shape[0] != self.moe.experts:
            expected = f"{self.moe.experts} experts along the first axis"
            raise FormatError(name, expected=expected, got=f"shape {list(header.shape)}")
        return True

    def read(self, files: CheckpointFiles, expert: int, *, check: bool = True) -> Expert:
        """Read one expert; checks the dtype and shape of every tensor, and with ``check`` its numbers: see
        :meth:`polymoe.formats.QuantTensor.validate`.

        Raises:
            CheckpointError: if a tensor is missing or its shard is damaged.
            FormatError: if a tensor has a wrong dtype, shape or value; it is named.
        """
        pieces = {name: self._read_part(files, part, expert, check) for name, part in self.parts.items()}
        if "gate_up" in pieces:
            pieces |= self._split_rows(pieces.pop("gate_up"))
        for projection, piece in pieces.items() if check else ():
            piece.matrix.validate(self.where(projection, expert))
        gate, up, down = pieces.get("gate"), pieces["up"], pieces["down"]
        return Expert(
            gate=gate.matrix if gate else None,
            up=up.matrix,
            down=down.matrix,
            gate_bias=gate.bias if gate else None,
            up_bias=up.bias,
            down_bias=down.bias,
            gate_up_input_scale=_largest(gate.input_scale if gate else None, up.input_scale),
            down_input_scale=down.input_scale,
        )

    def _read_part(self, files: CheckpointFiles, part: Part, expert: int, check: bool) -> _Piece:
        suffixes = [s for s in part.dialect.suffixes if self.tensor(part.name, expert, s) in files]
        with self._full_names(part.name, expert, f"[{expert}]" if self.arrangement.stacked else ""):
            require(part.dialect, suffixes)
            tensors = {s: self._stored(files, part.name, expert, s) for s in suffixes}
            matrix = part.dialect.read(tensors, part.shape, part.encoding)
            input_scale = part.dialect.input_scale(tensors)
        if not self.bias:
            return _Piece(matrix, input_scale)
        bias = self._stored(files, part.name, expert, BIAS)
        if check and not bool(torch.isfinite(bias).all()):
            raise FormatError(self.tensor(part.name, expert, BIAS), expected="finite numbers", got="NaN or infinity")
        return _Piece(matrix, input_scale, bias)

    def rewritten(self, files: CheckpointFiles, expert: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield ``(tensor name, as stored, as written again)`` for an expert's matrices in natural order, to check that
        reading loses no bit.

        Tensors are read to a ``QuantTensor`` and written back by their dialect. Biases are left out, since they are not
        packed.
        """
        for part in self.parts.values():
            names = {s: n for n, p, s in self.names(files, expert) if p == part.name and s != BIAS}
            tensors = {s: self._stored(files, part.name, expert, s) for s in names}
            again = part.dialect.rewrite(part.dialect.read(tensors, part.shape, part.encoding), tensors)
            for suffix, tensor in tensors.items():
                yield names[suffix], tensor, again[suffix]

    def where(self, projection: str, expert: int) -> str:
        """Return the name of one expert's projection, for messages."""
        part = projection if projection in self.parts else "gate_up"
        where = self.arrangement.module(self.container, part, expert)
        where += f"[{expert}]" if self.arrangement.stacked else ""
        return where if part == projection else f"{where} {projection}"

    def _encoding(self, projection: str) -> Encoding:
        """Return a projection's encoding; gate and up share one where they are stored as one matrix."""
        return self.parts[projection if projection in self.parts else "gate_up"].encoding

    def _split_rows(self, both: _Piece) -> dict[str, _Piece]:
        """Split gate and up of one stored matrix."""
        f = self.moe.intermediate
        if not self.moe.gated:
            return {"up": both}
        if self.interleaved:
            return {"gate": both.rows(0, 2 * f, 2), "up": both.rows(1, 2 * f, 2)}
        return {"gate": both.rows(0, f), "up": both.rows(f, 2 * f)}

    @property
    def interleaved(self) -> bool:
        """Whether rows of gate and up alternate."""
        return isinstance(self.arrangement, Fused) and self.arrangement.order == "interleaved"


def _admits(arrangement: Arrangement, dialect: str) -> bool:
    return arrangement.dialects is None or dialect in arrangement.dialects


def _largest(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the larger input scale: gate and up share their input, and the larger scale clips neither."""
    if first is None or second is None:
        return second if first is None else first
    return torch.maximum(first, second)


def _check_bias(headers: Mapping[str, Header], shape: tuple[int, int], expected: bool) -> None:
    """Check that an ``[N, K]`` matrix has a bias exactly if one is ``expected``: floats [N].

    Raises:
        CheckpointError: if it is missing, or superfluous.
        FormatError: for another dtype or shape.
    """
    if (BIAS in headers) != expected:
        words = ("no bias, as the first expert has none", "this bias, as the first expert has one")
        raise CheckpointError(BIAS, expected=words[expected], got=_describe(headers.get(BIAS)))
    if expected:
        expect(headers, BIAS, ("BF16", "F16", "F32"), shape[:1])


def _describe(header: Header | None) -> str:
    """Return dtype and shape of a tensor for a message; None is a missing tensor."""
    return f"{header.dtype} {list(header.shape)}" if header else "no such tensor"
