"""Measured times of configurations on a GPU, as plain values. :mod:`polymoe.planning.table_files` reads and writes the
files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from polymoe.errors import FormatError
from polymoe.problem import Problem

_MOST_TOKENS, _LONGEST_US = 2**24, 1e9
"""No call has more tokens, and none that is measured lasts longer."""


def problem_key(problem: Problem) -> str:
    """Return the parts of a problem that affect speed, as text that is the same in every process and version.

    The key leaves out x's dtype (operands have 16 bits in any case), ``tp`` and ``ep`` (the sizes are those after
    sharding) and the ids of this rank's experts (it contains their number).
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
    # Only kernels for quantized rows depend on the spread of scales within a row.
    wide = scales is not None and (scales.outside_bfloat16 or problem.activations.quantized)
    parts += ["wide scales"] * wide
    parts += ["batch invariant"] * problem.batch_invariant
    return ", ".join(parts)


def minor_version(version: str | None) -> str | None:
    """Return the major and minor version: ``"3.6"`` for ``"3.6.0"``, None for None."""
    return None if version is None else ".".join(version.split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One backend's fastest configuration for one problem at one token count on one GPU: a row of a table.

    Attributes:
        device: the GPU's name, as in :attr:`polymoe.machine.Device.name`.
        backend, tokens: the backend that ran, and the tokens of each call.
        problem: the key of the problem, from :func:`problem_key`.
        config: the configuration, from :meth:`polymoe.backends.config.Config.to_dict`.
        median_us: median time of one call, in microseconds.
        torch, triton, polymoe: versions of the packages.
        driver: the newest CUDA version that the driver supports.
        date, command: the time of the measurement (UTC), and the command that made it.
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
        if not 0 < self.tokens <= _MOST_TOKENS:
            raise FormatError("tokens", expected=f"a whole number from 1 to {_MOST_TOKENS}", got=str(self.tokens))
        if not 0 < self.median_us <= _LONGEST_US:
            expected = f"a number above 0, at most {_LONGEST_US:g}"
            raise FormatError("median_us", expected=expected, got=str(self.median_us))

    @property
    def key(self) -> tuple[str, str, str, int, str | None]:
        """Identifies the measurement. Of several rows with the same key in a file, the newest is used."""
        return (self.device, self.backend, self.problem, self.tokens, self.triton)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Table:
    """Measured rows. Earlier ``sources`` (the user's own) take precedence over later ones (shipped)."""

    sources: tuple[tuple[Measured, ...], ...] = ()

    def points(self, device: str, backend: str, problem: Problem, triton: str | None) -> tuple[Measured, ...]:
        """Return one row for each measured token count, in ascending order.

        Rows measured with the same minor version of Triton are preferred, then the earliest source, then the newest.
        """
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


def newest(rows: Iterable[Any]) -> list[Any]:
    """Return the newest row of each ``key``, in the order in which keys appear; of equal dates, the last one."""
    best: dict[Any, Any] = {}
    for row in rows:
        if row.key not in best or row.date >= best[row.key].date:
            best[row.key] = row
    return list(best.values())
