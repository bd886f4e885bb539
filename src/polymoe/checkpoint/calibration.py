"""Calibration: how large the inputs of experts are, column by column, for the search of scales."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polymoe.common.json_input import parse_json
from polymoe.errors import ArgumentError, quoted

if TYPE_CHECKING:
    from torch import Tensor

LEAST_TOKENS = 32
"""Fewest tokens from which a mean square is used. That of n normally distributed inputs has a standard error of
sqrt(2 / n), a quarter at 32."""

_LEAST_SHARE = 0.01
"""What a column counts at least, as a share of the mean: texts may leave it at zero, and others may not."""


_EXPECTED = "JSON objects in lines, with text, or with prompt and answer"


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts for calibration.

    Attributes:
        file, digest: where they are from, and the SHA-256 of this file.
        lines: the texts.
    """

    file: Path
    digest: str
    lines: tuple[str, ...]

    @classmethod
    def read(cls, file: Path) -> Texts:
        """Read JSON lines with ``text``, or with ``prompt`` and ``answer``.

        Raises:
            ArgumentError: for a file that cannot be read or has no text; the line is named.
        """
        where = f"calibrate: {file}"
        try:
            content = file.read_bytes()
            lines = content.decode().splitlines()
        except OSError as error:
            raise ArgumentError(where, expected="a file that can be read", got=str(error.strerror)) from error
        except UnicodeDecodeError as error:
            raise ArgumentError(where, expected=_EXPECTED, got=str(error)) from error
        texts = tuple(_text(line, f"{where}, line {n}") for n, line in enumerate(lines, 1) if line.strip())
        if not texts:
            raise ArgumentError(where, expected=_EXPECTED, got="no line")
        return cls(file, hashlib.sha256(content).hexdigest(), texts)


def _text(line: str, where: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ArgumentError(where, expected=_EXPECTED, got=quoted(line)) from error
    fields = [row.get(key, "") for key in ("text", "prompt", "answer")] if isinstance(row, Mapping) else []
    text = "".join(field for field in fields if isinstance(field, str))
    if not text.strip():
        raise ArgumentError(where, expected=_EXPECTED, got=quoted(line))
    return text


@dataclass(frozen=True, slots=True, eq=False)
class InputSquares:
    """Sums of squares of the inputs of one layer's experts.

    Attributes:
        tokens_E: how many tokens each expert was given.
        gate_up_EH: of its inputs, by column.
        down_EF: of the inputs of its down projection.
    """

    tokens_E: Tensor
    gate_up_EH: Tensor
    down_EF: Tensor

    def importance(self, expert: int) -> dict[str, Tensor] | None:
        """How much the squared error of each column counts, as
        :func:`~polymoe.checkpoint.quantized.quantize_expert` takes it; None if too few tokens reached the expert."""
        if self.tokens_E[expert] < LEAST_TOKENS:
            return None
        means = {name: s[expert] / self.tokens_E[expert] for name, s in self.sums().items()}
        return {name: (mean + _LEAST_SHARE * mean.mean()).float() for name, mean in means.items()}

    def sums(self) -> dict[str, Tensor]:
        """The sums by the names of the inputs."""
        return {"gate_up": self.gate_up_EH, "down": self.down_EF}


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Inputs of all experts of a model, from one pass over texts.

    Attributes:
        texts: which they were.
        tokens: how many there were.
        layers: by layer, and the number of the group of experts.
    """

    texts: Texts
    tokens: int
    layers: Mapping[tuple[int, int], InputSquares]
