"""Names and patterns that come from a file: bounded in length and number, and matched in linear time.

Python's ``re`` backtracks: a nested quantifier, or a few stars in one glob, takes it longer than anyone waits. Regular
expressions are matched by RE2 instead. (Lists of names with stars: see :func:`polymoe.checkpoint.scheme.matcher`.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from polymoe.errors import CheckpointError, quoted

LONGEST_NAME = 500
"""Characters of a name; the longest ones in use have about 150."""

LONGEST_PATTERN = 2_000
"""Characters of a pattern, which may list the numbers of many layers."""

MOST_REGEXES = 256
"""Regular expressions of one list: a few dozen in use."""

MOST_INSTRUCTIONS = 10_000
"""Size of all regular expressions of one list, in the instructions that RE2 translates them to: those in use have about
50 each. RE2's time for one name is at most the name's length times this size."""

_LOOKAHEAD = "(?!"
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
"""An escaped character, a class of characters, or a parenthesis or bar outside of both."""


def check_name(name: object, where: str, *, most: int = LONGEST_NAME) -> str:
    """Return ``name`` if it is printable text: not empty, not too long, without control characters and halves of
    surrogate pairs.

    Args:
        name: of a tensor, a module or a file, or a pattern of such names.
        where: the file and key that has it, for the message.
        most: the largest number of characters.

    Raises:
        CheckpointError: for any other value.
    """
    if not isinstance(name, str) or not name or len(name) > most or not name.isprintable():
        raise CheckpointError(where, expected=f"1 to {most} printable characters", got=quoted(name))
    return name


def compile_regexes(patterns: Iterable[str], where: str) -> tuple[Callable[[str], bool], ...]:
    """Return one function for each regular expression that says whether it matches a name, from its start on.

    The syntax is RE2's, which is Python's without backreferences and lookarounds. But a pattern may start with negative
    lookaheads: ``^(?!.*experts).*$`` names all modules but the experts.

    Args:
        patterns: regular expressions.
        where: the file and key that has them, for the message.

    Raises:
        CheckpointError: for a pattern that is invalid, too long or outside the syntax, or if they are too large
            together.
    """
    if not (patterns := tuple(patterns)):
        return ()
    if len(patterns) > MOST_REGEXES:
        raise CheckpointError(where, expected=f"at most {MOST_REGEXES} regular expressions", got=str(len(patterns)))
    import re2  # few checkpoints need it

    options = re2.Options()
    options.log_errors, options.never_capture = False, True
    matchers, size = [], 0
    for pattern in patterns:
        check_name(pattern, where, most=LONGEST_PATTERN)
        try:
            wanted, *unwanted = (re2.compile(part, options) for part in _without_lookaheads(pattern))
        except re2.error as error:
            raise CheckpointError(
                where,
                expected="regular expressions without backreferences and lookarounds, which RE2 can match",
                got=f"{quoted(pattern)}: {_reason(error)}",
            ) from None
        size += sum(part.programsize for part in (wanted, *unwanted))
        if size > MOST_INSTRUCTIONS:
            raise CheckpointError(
                where,
                expected=f"regular expressions of at most {MOST_INSTRUCTIONS} instructions of RE2 in all",
                got=f"{size} up to {quoted(pattern)}",
            )
        matchers.append(partial(_matches, wanted, unwanted))
    return tuple(matchers)


def _matches(wanted: Any, unwanted: list[Any], name: str) -> bool:
    return wanted.match(name) is not None and not any(other.match(name) for other in unwanted)


def _without_lookaheads(pattern: str) -> list[str]:
    """Return the pattern without the negative lookaheads at its start, then what each of these must not match.

    A pattern with an alternation outside of all groups is returned as it is, since the lookaheads are then part of its
    first branch only.
    """
    rest, unwanted = pattern.removeprefix("^"), []
    while rest.startswith(_LOOKAHEAD):
        end = next((token.end() for token, depth in _brackets(rest) if depth == 0), None)
        if end is None:
            return [pattern]
        unwanted.append(rest[len(_LOOKAHEAD) : end - 1])
        rest = rest[end:]
    alternation = any(token[0] == "|" and depth == 0 for token, depth in _brackets(rest))
    return [rest, *unwanted] if unwanted and not alternation else [pattern]


def _brackets(pattern: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the parentheses and bars of a regular expression, each with the number of groups open after it."""
    depth = 0
    for token in _TOKEN.finditer(pattern):
        if token[0] in "()|":
            depth += {"(": 1, ")": -1, "|": 0}[token[0]]
            yield token, depth


def _reason(error: Exception) -> str:
    """RE2's message, which it gives as bytes."""
    message = error.args[0] if error.args else ""
    return message.decode(errors="replace") if isinstance(message, bytes) else str(message)
