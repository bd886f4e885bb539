"""Config: a backend's choices for a given token count, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from polymoe.errors import PlanError, nearest

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
        return _from_data(cls, data, where)


def _from_data(kind: type[Any], data: object, where: str) -> Any:
    if not isinstance(data, dict):
        raise PlanError(where, expected=f"the fields of {kind.__name__}", got=repr(data)[:80])
    known = {f.name: f for f in fields(kind)}
    if unknown := [name for name in data if name not in known]:
        raise PlanError(
            f"{where}.{unknown[0]}", expected=f"a field of {kind.__name__}", hint=nearest(unknown[0], known)
        )
    needed = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING and n not in data]
    if needed:
        raise PlanError(f"{where}.{needed[0]}", expected="a value", got="none")
    types = get_type_hints(kind)
    return kind(**{name: _from_value(types[name], value, f"{where}.{name}") for name, value in data.items()})


def _from_value(kind: Any, value: object, where: str) -> object:
    choices: Sequence[Any] = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for choice in choices:
        if get_origin(choice) is Literal:
            if any(value == name and type(value) is type(name) for name in get_args(choice)):
                return value
        elif is_dataclass(choice):
            if isinstance(value, dict) or len(choices) == 1:
                return _from_data(choice, value, where)  # type: ignore[arg-type]
        elif choice is float and type(value) is int:
            return float(value)
        elif type(value) is (NoneType if choice is None else choice):  # a bool does not count as a number here
            return value
    names = " or ".join(getattr(c, "__name__", str(c)) for c in choices)
    raise PlanError(where, expected=names, got=repr(value)[:80])
