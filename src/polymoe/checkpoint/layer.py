"""StoredLayer: the tensors of one layer's experts in the files, their dialects, and how to read one expert.

Everything is a view of mapped files, so an expert costs memory only where its dialect must be rearranged (GPTQ, AWQ).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from polymoe.checkpoint.arrangement import Arrangement, Fused, PerExpert
from polymoe.checkpoint.config import QuantizationConfig
from polymoe.checkpoint.dialects import DIALECTS, Dialect, choose, require
from polymoe.checkpoint.expert_tensors import (
    check_bias,
    describe_header,
    expert_header,
    expert_tensor,
    full_names,
    present_tensors,
)
from polymoe.checkpoint.families import ModelFamily, MoeConfig
from polymoe.checkpoint.files import CheckpointFiles, Header
from polymoe.checkpoint.naming import BIAS, module_name, part_shape, parts, tensor_name
from polymoe.checkpoint.scheme import Scheme
from polymoe.errors import CheckpointError, CheckpointNotFound, FormatError
from polymoe.formats import Encoding, QuantTensor
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.tensors import Expert, ExpertsSpec

if TYPE_CHECKING:
    from torch import Tensor


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
    def described(
        cls, family: ModelFamily, moe: MoeConfig, quantization: QuantizationConfig, layer: int
    ) -> StoredLayer:
        """Describe a layer from the config alone."""
        found: dict[str, Part] = {}
        first = family.places[0][0]
        # Without tensors nothing says which container is used; a row's first one is the usual one of all arrangements.
        places = [(c, a) for c, a in family.places if c == first] if family.containers else family.places
        for template, arrangement in places:
            container = template.format(layer=layer)
            found = {
                part: _configured(container, arrangement, moe, quantization, part)
                for part in parts(arrangement, gated=moe.gated)
            }
            if all(_admits(arrangement, p.dialect.name) for p in found.values()):
                return cls(container, arrangement, moe, found, moe.bias)
        dialects = sorted({p.dialect.name for p in found.values()})
        raise CheckpointError(
            f"config.json: {family.name} experts of layer {layer}",
            expected="a quantization that this model family is stored in",
            got=", ".join(dialects),
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
            names = parts(arrangement, gated=moe.gated)
            tried.append(tensor_name(container, arrangement, names[0], 0, "*"))
            if not any(present_tensors(files, container, arrangement, part, 0) for part in names):
                continue
            try:
                return cls._fit(files, container, arrangement, moe, quantization)
            except (CheckpointError, FormatError) as error:
                scheme = quantization.scheme(module_name(container, arrangement, names[-1], 0))
                failures.append((not _admits(arrangement, scheme.dialect), error))
        if failures:
            raise min(failures, key=lambda f: f[0])[1]
        raise CheckpointNotFound(
            f"{files.path}: experts of layer {layer}",
            expected="tensors named " + " or ".join(dict.fromkeys(tried)),
            got="none",
            hint="the files may hold other layers only" if files.has_tensors else "name a directory that holds tensors",
        )

    @classmethod
    def _fit(
        cls,
        files: CheckpointFiles,
        container: str,
        arrangement: Arrangement,
        moe: MoeConfig,
        quantization: QuantizationConfig,
    ) -> StoredLayer:
        found, biases = {}, {}
        for part in parts(arrangement, gated=moe.gated):
            plan = _configured(container, arrangement, moe, quantization, part)
            names = present_tensors(files, container, arrangement, part, 0)
            biases[part] = BIAS in names
            headers = {s: expert_header(files, n, arrangement, moe) for s, n in names.items()}
            with full_names(partial(tensor_name, container, arrangement, part, 0)):
                check_bias(headers, plan.shape, BIAS in headers)
                headers.pop(BIAS, None)
                allowed = getattr(arrangement, "dialects", None)
                dialect, encoding = choose(headers, plan.shape, plan.scheme.dialect, plan.encoding, allowed)
            calibrated = "input_scale" in headers and all(
                tensor_name(container, arrangement, part, e, "input_scale") in files for e in range(moe.experts)
            )
            found[part] = replace(plan, dialect=dialect, encoding=encoding, calibrated=calibrated)
        if any(biases.values()) or moe.bias:
            for part, there in biases.items():
                if not there:
                    raise CheckpointError(
                        tensor_name(container, arrangement, part, 0, BIAS),
                        expected="this bias, as the model or its other projections have one",
                        got="no such tensor",
                    )
        return cls(container, arrangement, moe, found, any(biases.values()))

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
            name = partial(tensor_name, self.container, self.arrangement, part.name, expert)
            if not all(name(suffix) in files for suffix in part.dialect.required):
                found = present_tensors(files, self.container, self.arrangement, part.name, expert)
                with full_names(name):
                    require(part.dialect, list(found))

    def check_experts(self, files: CheckpointFiles, experts: Iterable[int]) -> None:
        """Check from their headers that these experts are stored as the first one, which :meth:`find` has examined;
        reads no weight.

        Raises:
            CheckpointError: for the first tensor that is missing.
            FormatError: for the first one with another dtype or shape.
        """
        firsts = {part.name: self._headers(files, part, 0) for _, part in self._stored_apart([0])}
        for expert, part in self._stored_apart(experts):
            headers, first = self._headers(files, part, expert), firsts[part.name]
            if headers != first:
                with full_names(partial(tensor_name, self.container, self.arrangement, part.name, expert)):
                    require(part.dialect, headers)
                    check_bias(headers, part.shape, self.bias)
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
        expected = f"{describe_header(first.get(suffix))}, as in the first expert"
        raise kind(suffix, expected=expected, got=describe_header(headers.get(suffix)))

    def _stored_apart(self, experts: Iterable[int]) -> Iterator[tuple[int, Part]]:
        """Yield the parts of experts with tensors of their own; of stacked experts :meth:`find` has seen everything."""
        if isinstance(self.arrangement, PerExpert):
            yield from product(experts, self.parts.values())

    def _headers(self, files: CheckpointFiles, part: Part, expert: int) -> dict[str, Header]:
        """Return the headers of the existing tensors of one expert's part, by suffix."""
        suffixes = (*part.dialect.suffixes, BIAS)
        names = {s: tensor_name(self.container, self.arrangement, part.name, expert, s) for s in suffixes}
        return {suffix: files.header(name) for suffix, name in names.items() if name in files}

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
        def name(suffix: str) -> str:
            return tensor_name(self.container, self.arrangement, part.name, expert, suffix)

        suffixes = [s for s in part.dialect.suffixes if name(s) in files]
        module = module_name(self.container, self.arrangement, part.name, expert)
        with full_names(name, module, expert if isinstance(self.arrangement, Fused) else None):
            require(part.dialect, suffixes)
            tensors = {s: expert_tensor(files, name(s), self.arrangement, self.moe, expert) for s in suffixes}
            matrix = part.dialect.read(tensors, part.shape, part.encoding)
            input_scale = part.dialect.input_scale(tensors)
        if not self.bias:
            return _Piece(matrix, input_scale)
        bias = expert_tensor(files, name(BIAS), self.arrangement, self.moe, expert)
        if check and not bool(torch.isfinite(bias).all()):
            raise FormatError(name(BIAS), expected="finite numbers", got="NaN or infinity")
        return _Piece(matrix, input_scale, bias)

    def where(self, projection: str, expert: int) -> str:
        """Return the name of one expert's projection, for messages."""
        part = projection if projection in self.parts else "gate_up"
        where = module_name(self.container, self.arrangement, part, expert)
        where += f"[{expert}]" if isinstance(self.arrangement, Fused) else ""
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


def _configured(
    container: str, arrangement: Arrangement, moe: MoeConfig, quantization: QuantizationConfig, part: str
) -> Part:
    scheme = quantization.scheme(module_name(container, arrangement, part, 0))
    shape = part_shape(part, moe.hidden, moe.intermediate, gated=moe.gated)
    return Part(part, shape, DIALECTS[scheme.dialect], scheme.encoding, scheme)


def _admits(arrangement: Arrangement, dialect: str) -> bool:
    return arrangement.dialects is None or dialect in arrangement.dialects


def _largest(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the larger input scale: gate and up share their input, and the larger scale clips neither."""
    if first is None or second is None:
        return second if first is None else first
    return torch.maximum(first, second)
