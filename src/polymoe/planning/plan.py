"""Plan: the layout of a layer's weights, and the backend and configuration for each token count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polymoe.backends.config import Config
from polymoe.errors import ArgumentError, PlanError, nearest

Role = Literal["decode", "prefill", "mixed"]
"""The kind of calls that a plan is made for; :data:`ROLE_TOKENS` lists their token counts."""

_DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PREFILL = (1024, 2048, 4096, 8192, 16384)
ROLE_TOKENS: dict[str, tuple[int, ...]] = {"decode": _DECODE, "prefill": _PREFILL, "mixed": _DECODE + _PREFILL}
"""Token counts at which layouts are compared for each role."""


def role_tokens(role: str) -> tuple[int, ...]:
    """Return the token counts of a role.

    Raises:
        ArgumentError: for an unknown role.
    """
    if role not in ROLE_TOKENS:
        raise ArgumentError("role", expected="the name of a role", got=repr(role), hint=nearest(role, ROLE_TOKENS))
    return ROLE_TOKENS[role]


@dataclass(frozen=True, slots=True)
class PlanStep:
    """Calls of up to ``max_tokens`` tokens (None: any number) go to ``backend`` with ``config``."""

    max_tokens: int | None
    backend: str
    config: Config


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in ascending order of ``max_tokens``, all reading the one ``layout``.

    ``Plan("natural", (PlanStep(63, "small", c1), PlanStep(None, "large", c2)))`` runs 1 to 63 tokens on ``small``.
    """

    layout: str
    steps: tuple[PlanStep, ...]

    def __post_init__(self) -> None:
        bounds = [float("inf") if s.max_tokens is None else s.max_tokens for s in self.steps]
        if not bounds or bounds != sorted(set(bounds)):
            raise PlanError(f"plan for layout {self.layout}", expected="ascending token bounds", got=str(bounds))

    def step(self, tokens: int) -> PlanStep:
        """Return the step for a call of ``tokens`` tokens.

        Raises:
            PlanError: if the last step serves fewer tokens.
        """
        for step in self.steps:
            if step.max_tokens is None or tokens <= step.max_tokens:
                return step
        raise PlanError(
            f"call with {tokens} tokens",
            expected=f"at most {self.steps[-1].max_tokens} (backend {self.steps[-1].backend})",
            got=str(tokens),
            hint='use backend="auto", or split the call',
        )

    def ranges(self) -> list[tuple[str, PlanStep]]:
        """Return each step with its token range as text: ``[("1-63", ...), ("64+", ...)]``."""
        result = []
        for start, step in self.starts():
            last = step.max_tokens
            result.append((f"{start}+" if last is None else f"{start}-{last}" if last > start else str(start), step))
        return result

    def starts(self) -> list[tuple[int, PlanStep]]:
        """Return each step with its first token count."""
        ends = [step.max_tokens or 0 for step in self.steps]
        return [(end + 1, step) for end, step in zip((0, *ends), self.steps, strict=False)]
