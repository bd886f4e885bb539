"""ConfigReader: reads a config, checks every value's type and range, and names the key in the error for a wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polymoe.checkpoint.patterns import LONGEST_PATTERN, check_name
from polymoe.errors import ArgumentError, CheckpointError, quoted
from polymoe.problem.activations import Activation, parse_activation

# The largest numbers that a config may give: far above those of any model, and small enough that what is computed from
# them ends and fits into memory.
MOST_LAYERS = 500
"""Layers of a model."""

MOST_EXPERTS = 65_536
"""Routed experts of a layer."""

MOST_WIDTH = 2**20
"""Hidden sizes, and rows and columns of the blocks and groups that share a scale."""

MOST_ITEMS = 1_000_000
"""Entries of a list or an object: a map of layers has one for each matrix of each expert."""

LEAST_NUMBER, MOST_NUMBER = 2.0**-126, 2.0**127
"""Normal float32 numbers, since constants are used in float32."""


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A config. A null counts as missing. A missing key takes its default; without a default it is an error.

    Every method raises CheckpointError with the key, the expected value and the actual one.
    """

    config: Mapping[str, Any]
    where: str = "config.json"

    def integer(self, *names: str, most: int, least: int = 1, default: int | None = None) -> int:
        """Return the first existing key: an integer from ``least`` to ``most``. True, false and 8.0 are none."""
        name, value = self._find(names, default)
        if type(value) is not int or not least <= value <= most:
            raise self.error(name, f"an integer from {least} to {most}", value)
        return value

    def layers(self) -> int:
        """Return ``num_hidden_layers``."""
        return self.integer("num_hidden_layers", most=MOST_LAYERS)

    def experts(self, *names: str) -> int:
        """Return the number of routed experts, under one of several names."""
        return self.integer(*names, most=MOST_EXPERTS)

    def width(self, *names: str, default: int | None = None) -> int:
        """Return the size of an axis of a weight matrix, or of a group of weights along it."""
        return self.integer(*names, most=MOST_WIDTH, default=default)

    def top_k(self, *names: str, default: int | None = None) -> int:
        """Return the number of experts active per token; :class:`MoeConfig` compares it with the number of experts."""
        return self.integer(*names, most=MOST_EXPERTS, default=default)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number that float32 can hold."""
        name, value = self._find((name,), default)
        if type(value) not in (int, float) or not LEAST_NUMBER <= value <= MOST_NUMBER:
            raise self.error(name, f"a number from {LEAST_NUMBER:.1e} to {MOST_NUMBER:.1e}", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        name, value = self._find((name,), default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def word(self, name: str, *known: str, default: str | None = None) -> str:
        """Return a string that is one of ``known``."""
        name, value = self._find((name,), default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, f"one of {', '.join(known)}", value)
        return value

    def text(self, name: str) -> str:
        """Return a printable string, empty if the key is missing."""
        value = self.config.get(name)
        if value is None or value == "":
            return ""
        if not isinstance(value, str):
            raise self.error(name, "a string", value)
        return check_name(value, self.place(name), most=LONGEST_PATTERN)

    def items(self, name: str, kind: type, *, most: int = MOST_ITEMS) -> tuple[Any, ...] | None:
        """Return a list of at most ``most`` values of one type as a tuple, or None if the key is missing. Strings are
        names or patterns of names, or empty."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or any(type(item) is not kind for item in value):
            raise self.error(name, f"a list of {kind.__name__}", value)
        self._check_length(name, value, most)
        if kind is str:
            self._check_names(name, (item for item in value if item))
        return tuple(value)

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block of weights, or None if the key is missing."""
        value = self.items(name, int)
        if value is None:
            return None
        if len(value) != 2 or not all(1 <= size <= MOST_WIDTH for size in value):
            raise self.error(name, f"two integers from 1 to {MOST_WIDTH}", list(value))
        return value[0], value[1]

    def mapping(self, name: str, *, most: int = MOST_ITEMS) -> Mapping[str, Any]:
        """Return an object of at most ``most`` keys, names or patterns of names; empty if the key is missing."""
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, "an object", value)
        self._check_length(name, value, most)
        self._check_names(name, value)
        return value

    def part(self, name: str, *, most: int = MOST_ITEMS) -> ConfigReader:
        """Return a reader of the object under a key, empty if the key is missing."""
        return ConfigReader(self.mapping(name, most=most), self.place(name))

    def parts(self) -> Iterator[ConfigReader]:
        """Yield a reader of each value, which must be objects."""
        for name, value in self.config.items():
            if not isinstance(value, Mapping):
                raise self.error(name, "an object", value)
            yield ConfigReader(value, self.place(name))

    def activation(
        self, name: str = "hidden_act", *, gated: bool = True, default: str = "silu", **constants: float
    ) -> Activation:
        """Return the activation that a key names, with the constants of the model family."""
        value = self._find((name,), default)[1]
        try:
            return parse_activation(value, gated=gated, **constants)
        except ArgumentError as error:
            raise self.error(name, str(error.expected), value, hint=error.hint) from None

    def error(self, name: str, expected: str, value: Any, hint: str | None = None) -> CheckpointError:
        """Return the error for a key with an unexpected value."""
        return CheckpointError(self.place(name), expected=expected, got=quoted(value), hint=hint)

    def place(self, name: str) -> str:
        """Return where a key is: ``config.json: text_config.hidden_size``."""
        return self.where + (".", ": ")[": " not in self.where] + name

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        found = ((name, self.config[name]) for name in names if self.config.get(name) is not None)
        name, value = next(found, (names[0], default))
        if value is None:
            raise CheckpointError(self.place(" or ".join(names)), expected="this key", got="nothing")
        return name, value

    def _check_length(self, name: str, value: Any, most: int) -> None:
        if len(value) > most:
            raise CheckpointError(self.place(name), expected=f"at most {most} entries", got=str(len(value)))

    def _check_names(self, name: str, names: Iterable[str]) -> None:
        for item in names:
            check_name(item, self.place(name), most=LONGEST_PATTERN)
