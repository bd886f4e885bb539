"""Measured times: what ran how fast on which GPU, and the times between what was measured. Pure values; files are
:mod:`polymoe.planning.table_files`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from polymoe.backend_names import current_name
from polymoe.errors import FormatError
from polymoe.problem import Problem

__all__ = ["Measured", "Table", "minor_version", "newest", "problem_key"]


def problem_key(problem: Problem) -> str:
    """What of a problem decides how fast a configuration is, as text that is the same in every process and version.

    Left out: x's dtype (16-bit operands whatever it is), ``tp`` and ``ep`` (sizes are those after sharding), and which
    experts are this rank's (their number is in).
    """
    s = problem.spec
    parts = [f"H={s.hidden} F={s.intermediate} E={s.local_experts}/{s.experts} A={problem.top_k}"]
    for name in ("gate", "up", "down"):
        e = s.encodings.get(name)
        if e is None:
            continue
        words = [e.element] + ([str(e.granularity), str(e.scale_dtype)] if e.granularity is not None else [])
        words += ["zero points"] * e.zero_points + ["global scale"] * e.global_scale
        parts.append(f"{name} {' '.join(words)}")
    parts.append(problem.activation.name)
    parts += ["bias"] * s.bias
    parts.append(f"{problem.activations} activations")
    parts += ["weight on input"] * (problem.weight_on == "input")
    scales = problem.scales
    # The spread within a row concerns kernels for quantized rows alone.
    wide = scales is not None and (scales.outside_bfloat16 or problem.activations.quantized)
    parts += ["wide scales"] * wide
    parts += ["batch invariant"] * problem.batch_invariant
    return ", ".join(parts)


def minor_version(version: str | None) -> str | None:
    """``"3.6"`` of ``"3.6.0"``; None of None."""
    return None if version is None else ".".join(version.split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One backend's fastest configuration for one problem at one token count on one GPU: a row of a table.

    Attributes:
        device: the GPU's name, as :attr:`polymoe.machine.Device.name`.
        backend, problem, tokens: what ran; the problem as :func:`problem_key`.
        config: as :meth:`polymoe.backends.config.Config.to_dict`.
        median_us: of one call.
        torch, triton, driver, polymoe: versions it was measured with; the driver's is the newest CUDA it runs.
        date, command: when (UTC) and how.
    """

    device: str
    backend: str
    problem: str
    tokens: int
    config: Mapping[str, Any] = field(hash=False)
    median_us: float
    torch: str
    triton: str | None
    driver: str | None
    polymoe: str
    date: str
    command: str

    def __post_init__(self) -> None:
        for name in ("device", "backend", "problem", "torch", "polymoe", "date", "command"):
            self._need(name, "text", isinstance(getattr(self, name), str))
        for name in ("triton", "driver"):
            self._need(name, "text or null", isinstance(getattr(self, name), str | None))
        self._need("tokens", "a whole number above 0", type(self.tokens) is int and self.tokens > 0)
        number = type(self.median_us) in (int, float) and 0 < self.median_us < float("inf")
        self._need("median_us", "a number above 0", number)
        self._need("config", "an object", isinstance(self.config, Mapping))

    def _need(self, name: str, expected: str, holds: bool) -> None:
        if not holds:
            raise FormatError(name, expected=expected, got=repr(getattr(self, name))[:80])

    @property
    def key(self) -> tuple[str, str, str, int, str | None]:
        """Of rows with one key in one file the newest counts."""
        return (self.device, self.backend, self.problem, self.tokens, self.triton)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Measured:
        """The inverse of :meth:`to_dict`; a backend that was renamed has its new name.

        Raises:
            FormatError: if fields are missing, unknown or of another type.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or data.keys() != names:
            got = ", ".join(map(str, data)) if isinstance(data, dict) else repr(data)
            raise FormatError("row", expected=f"the fields {', '.join(sorted(names))}", got=got[:200])
        backend = data["backend"]
        return cls(**{**data, "backend": current_name(backend) if isinstance(backend, str) else backend})


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to look up. Earlier ``sources`` (the user's own) go before later ones (shipped)."""

    sources: tuple[tuple[Measured, ...], ...] = ()

    def points(self, device: str, backend: str, problem: Problem, triton: str | None) -> tuple[Measured, ...]:
        """One row for each measured token count, ascending: measured with ``triton``'s minor version where there is
        such a row, then of the earliest source, then the newest."""
        key, minor = problem_key(problem), minor_version(triton)
        best: dict[int, tuple[tuple[bool, int, str], Measured]] = {}
        for rank, rows in enumerate(self.sources):
            for row in rows:
                if (row.device, row.backend, row.problem) != (device, backend, key):
                    continue
                fitness = (minor_version(row.triton) == minor, -rank, row.date)
                if row.tokens not in best or fitness >= best[row.tokens][0]:
                    best[row.tokens] = (fitness, row)
        return tuple(best[tokens][1] for tokens in sorted(best))


def newest(rows: Iterable[Measured]) -> list[Measured]:
    """The newest row of each key, the later one where dates are the same, sorted by key."""
    best: dict[tuple[Any, ...], Measured] = {}
    for row in rows:
        if row.key not in best or row.date >= best[row.key].date:
            best[row.key] = row
    return sorted(best.values(), key=lambda row: (*row.key[:4], row.triton or ""))
