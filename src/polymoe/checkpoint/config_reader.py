"""ConfigReader: reads a config, and names the key in the error for a wrong or missing value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polymoe.activations import Activation, parse_activation
from polymoe.errors import ArgumentError, CheckpointError

__all__ = ["ConfigReader"]


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A config. A null counts as missing. A missing key takes its default; without a default it is an error.

    Every method raises CheckpointError with the key, the expected value and the actual one.
    """

    config: Mapping[str, Any]
    where: str = "config.json"

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        """Return the first existing key: an integer from ``least`` to ``most``."""
        name, value = self._find(names, default)
        if type(value) is not int or not least <= value <= most:
            limit = f"at least {least}" if type(value) is not int or value < least else f"at most {most}"
            raise self.error(name, f"an integer of {limit}", value)
        return value

    def layers(self) -> int:
        """Return ``num_hidden_layers``. It is bounded, because a wrong number must not fill the memory."""
        return self.integer("num_hidden_layers", most=10_000)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        name, value = self._find((name,), default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(name, "a finite number above 0", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        name, value = self._find((name,), default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def word(self, name: str, *known: str, default: str | None = None) -> str:
        """A string that is one of ``known``."""
        name, value = self._find((name,), default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, f"one of {', '.join(known)}", value)
        return value

    def items(self, name: str, kind: type) -> tuple[Any, ...] | None:
        """A list of ``kind`` as a tuple, or None if the key is missing."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or any(type(item) is not kind for item in value):
            raise self.error(name, f"a list of {kind.__name__}", value)
        return tuple(value)

    def block(self, name: str) -> tuple[int, int] | None:
        """Two positive integers, or None if the key is missing."""
        value = self.items(name, int)
        if value is not None and (len(value) != 2 or min(value) < 1):
            raise self.error(name, "two positive integers", list(value))
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty if the key is missing."""
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, "an object", value)
        return value

    def activation(
        self, name: str = "hidden_act", *, gated: bool = True, default: str = "silu", **constants: float
    ) -> Activation:
        """Return the activation that a key names, with the constants of the model family."""
        try:
            return parse_activation(self._find((name,), default)[1], gated=gated, **constants)
        except ArgumentError as error:
            where = f"{self.where}: {name}"
            raise CheckpointError(where, expected=error.expected, got=error.got, hint=error.hint) from None

    def error(self, name: str, expected: str, value: Any) -> CheckpointError:
        """Return the error for a key with an unexpected value."""
        text = repr(value)
        return CheckpointError(
            f"{self.where}: {name}", expected=expected, got=text if len(text) <= 80 else text[:77] + "..."
        )

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        found = ((name, self.config[name]) for name in names if self.config.get(name) is not None)
        name, value = next(found, (names[0], default))
        if value is None:
            raise CheckpointError(f"{self.where}: {' or '.join(names)}", expected="this key", got="nothing")
        return name, value
