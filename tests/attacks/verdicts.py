"""judge: whether what a verb did with a mutated checkpoint is what it has to do."""

from __future__ import annotations

import re
from collections.abc import Iterable

from attacks.sandbox import Outcome
from attacks.source import Expect, Mutation
from attacks.verbs import READS_NO_WEIGHTS

__all__ = ["FAILURES", "VERDICTS", "clear", "judge"]

FAILURES = ("raised", "hung", "crashed", "vague", "changed", "accepted", "forbidden")
VERDICTS = ("same", "answered", "refused", *FAILURES)
"""Good ones first. ``same``: the original's answer. ``answered``: another answer, which the mutation allows.
``refused``: one clear error. ``vague``: an error that is not clear. ``changed``: another answer than the original's
where none is allowed, or a refusal of a neutral edit. ``accepted``: an answer where there must be an error.
``forbidden``: code of the checkpoint ran, or the like."""

MOST_LINES, MOST_CHARACTERS = 20, 3000
_PLACE = re.compile(r"layers?[. ]\d|config\.json|\.safetensors|tokenizer|chat template|generation|index\.json|prompt: ")


def clear(text: str, names: Iterable[str]) -> bool:
    """Whether ``text``, what a refusal says on stderr, is one message of bounded length that names its object."""
    *_, message = re.split(r"^error: ", text, flags=re.MULTILINE)
    short = len(message) <= MOST_CHARACTERS and message.count("\n") <= MOST_LINES
    named = _PLACE.search(message) is not None or any(name in message for name in names)
    return message != text and short and named and "Traceback (most recent call last)" not in text


def judge(mutation: Mutation, verb: str, outcome: Outcome, original: Outcome, names: Iterable[str]) -> str:
    """The verdict of ``VERDICTS``. ``original`` is what the verb does without the mutation; a message may name its
    object by any of ``names``."""
    if set(outcome.did) - set(original.did):
        return "forbidden"
    if outcome.ended == "refused" and original.ended == "refused":
        return "refused"
    if outcome.ended == "refused":
        if mutation.expect is Expect.SAME:
            return "changed"
        # verify and bench say on stdout what is wrong.
        return "refused" if clear(outcome.message, names) or "error: " not in outcome.message else "vague"
    if outcome.ended != "answer":
        return outcome.ended
    if original.ended != "answer":
        return "changed"
    if outcome.answer == original.answer:
        must_fail = mutation.expect is Expect.REFUSED and verb not in READS_NO_WEIGHTS
        return "accepted" if must_fail else "same"
    if mutation.expect is Expect.REFUSED and verb not in READS_NO_WEIGHTS:
        return "accepted"
    return "answered" if mutation.expect is Expect.ANYTHING or verb in READS_NO_WEIGHTS else "changed"
