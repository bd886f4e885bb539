"""Config: a backend's choices for a given token count, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from polymoe.common.json_input import read_fields
from polymoe.errors import FormatError, PlanError

_C = TypeVar("_C", bound="Config")


@dataclass(frozen=True, slots=True)
class Config:
    """Base class of the backends' configurations. Equal choices compare equal.

    Fields are numbers, strings, booleans, None, or frozen dataclasses of these, so that every configuration can be
    written as JSON and read back.
    """

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self)) or "-"

    @property
    def kernel_family(self) -> str:
        """Name of the kernel family that runs, or "" for a backend with one. Each family has its own proof status."""
        return ""

    @property
    def check_tokens(self) -> int:
        """Tokens of the call that checks a layer at load; enough that a single token does not decide the result."""
        return 8

    @property
    def keeps_16_bits(self) -> bool:
        """Whether x and h stay in 16 bits where the problem quantizes them: NVFP4 inputs of calls with few tokens."""
        return False

    @property
    def fast_accumulation(self) -> bool:
        """Whether the tensor cores add up all columns, as the problem allows: not in calls with few tokens."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[_C], data: object, where: str = "config") -> _C:
        """Return the configuration that :meth:`to_dict` wrote; missing fields have their defaults.

        Raises:
            PlanError: if a field is unknown, missing or of another type; the error names it.
        """
        try:
            return read_fields(cls, data, where)
        except FormatError as error:
            raise PlanError(error.where, expected=error.expected, got=error.got, hint=error.hint) from None
