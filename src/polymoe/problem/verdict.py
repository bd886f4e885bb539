"""Verdict: whether something fits a problem, with every reason why not (leaf: imports nothing of ours)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reason:
    """One requirement that is not met.

    ``Reason("GPU", "SM90", "SM80")`` reads "GPU: expects SM90, got SM80". A feature that is not supported has no
    values to compare: ``Reason("batch-invariant results")`` reads "batch-invariant results: not supported".
    """

    what: str
    expected: str = ""
    got: str = ""

    def __str__(self) -> str:
        return f"{self.what}: " + (f"expects {self.expected}, got {self.got}" if self.expected else "not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """It fits.

    Attributes:
        max_tokens: most tokens of one call, or None for any number.
        capturable: whether a call can be captured in a CUDA graph.
        opt_in_reason: why ``auto`` passes it over, or "" if ``auto`` may take it.
        foreign: whether it runs kernels of another library. ``auto`` takes those only for token counts at which they
            were measured on this machine, by ``polymoe tune``. Backends that other packages register count as foreign.
        repeatable: whether repeated calls are bitwise identical. Where not, results are compared by tolerance alone.
        layouts: which of the backend's layouts serve the problem, or None if all do.
        notes: what else a user should know who names it, such as packages that it needs on a machine that is not this
            one.
    """

    max_tokens: int | None = None
    capturable: bool = False
    opt_in_reason: str = ""
    foreign: bool = False
    repeatable: bool = True
    layouts: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """It does not fit.

    Attributes:
        reasons: all of them.
        layouts: which of the backend's layouts would serve the problem but for these reasons; None if all would. Their
            own reasons are added: those of the one that lacks least.
    """

    reasons: tuple[Reason, ...]
    layouts: tuple[str, ...] | None = None


Verdict = Accepted | Rejected
"""What a check answers."""


@dataclass(slots=True)
class Reasons:
    """Collects what fails, so that a check reports everything and not the first thing.

    ::

        reasons = Reasons()
        reasons.need(problem.spec.hidden % 64 == 0, "H", "a multiple of 64", problem.spec.hidden)
        return reasons.verdict(Accepted(capturable=True))
    """

    found: list[Reason] = field(default_factory=list)

    def need(self, holds: bool, what: str, expected: object = "", got: object = "") -> bool:
        """Note the requirement unless it ``holds``; returns ``holds``. Without values, ``what`` is not supported."""
        if not holds:
            self.found.append(Reason(what, str(expected), str(got)))
        return holds

    def verdict(self, accepted: Accepted) -> Verdict:
        """``accepted`` if nothing failed, else the rejection."""
        return Rejected(tuple(self.found)) if self.found else accepted
