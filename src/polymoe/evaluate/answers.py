r"""Extract the answer from a model's response, normalized for comparison.

Each function takes the text of one response and returns a short string to compare with the expected answer, or None if
the text contains no answer: such a response is *invalid* and counts as wrong. ``finished`` is False for a text that was
truncated at its token limit.
"""

from __future__ import annotations

import re

__all__ = ["final_number", "number", "visible", "whole_text"]

# A response may have any text of any length, so each of these takes linear time: a repeat stops at a character that it
# does not match, and what follows it does not begin with one that it matches. Shorter repeats then fail at once.
_NUMBER = r"(?:(?<![\w)])[-+−])?(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)"
_ALONE = re.compile(rf"(?:[A-Za-z]\w*\s*=\s*)?({_NUMBER})(?:\s+[A-Za-z][A-Za-z ]*)?")
_MARKUP = re.compile(r"\\(?:text|mathrm|mathbf|textbf|left|right)\b|\\[,;!% ]|\^\{?\\?circ\}?|\^?°|[${}%]")
_BRACE = re.compile(r"\\boxed\s*\{|[{}]")


def visible(text: str) -> str:
    """Return the text after ``<think>...</think>``, if a server leaves it in; nothing if the reasoning never ends."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return "" if text.lstrip().startswith("<think>") else text


def whole_text(text: str, *, finished: bool = True) -> str | None:
    """Return the whole text without surrounding white space."""
    return visible(text).strip() or None


def final_number(text: str, *, finished: bool = True) -> str | None:
    r"""Return the result: after the last ``####``, else in the last ``\boxed{}``, else the last number.

    The last number counts only if the text was not truncated. Boxed text that is not a number is returned unchanged and
    differs from any number.

    >>> final_number("2 and 2 are 4\n#### 1,234.50 dollars")
    '1234.5'
    >>> final_number(r"so $x = \boxed{\frac{1}{2}}$")
    '\\frac12'
    """
    text = visible(text).replace("{,}", ",")
    _, mark, after = text.rpartition("####")
    if mark and (found := re.search(_NUMBER, after.lstrip().partition("\n")[0])):
        return _canonical(found[0])
    inside = _boxed(text)
    if inside is not None:
        return number(inside) or _plain(inside) or None
    numbers = re.findall(_NUMBER, text) if finished else []
    return _canonical(numbers[-1]) if numbers else None


def number(text: str) -> str | None:
    r"""Normalize a number, ignoring markup, name and unit; None for anything else.

    >>> number("073"), number("$1,200.00"), number(r"336^\circ"), number("n = -.5"), number("two"), number(r"2\pi")
    ('73', '1200', '336', '-0.5', None, None)
    """
    found = _ALONE.fullmatch(_plain(text))
    return _canonical(found[1]) if found else None


def _boxed(text: str) -> str | None:
    r"""Return the content of the ``\boxed{}`` that begins last, of those that are closed."""
    last = None
    opened: list[tuple[bool, int]] = []  # braces that are open: whether of a box, and where their content begins
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace[0] != "{", brace.end()))
        elif opened:
            boxed, start = opened.pop()
            if boxed and (last is None or start > last[0]):
                last = start, brace.start()
    return None if last is None else text[slice(*last)]


def _plain(text: str) -> str:
    return _MARKUP.sub("", text).strip().rstrip(".")


def _canonical(digits: str) -> str:
    sign = "-" if digits[0] in "-−" else ""
    whole, _, fraction = digits.lstrip("-+−").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    unsigned = f"{whole}.{fraction}" if fraction else whole
    return unsigned if unsigned == "0" else sign + unsigned
