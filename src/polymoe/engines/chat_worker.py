"""A process that renders chat templates of checkpoints, so that a template can be stopped.

A template is a program of the checkpoint. Transformers renders it in Jinja's sandbox, which keeps it from files and
from Python, but not from loops without end or from strings that fill the memory. Neither can be interrupted within a
process, so that they are rendered in one of their own, with limited memory, which can be killed.

The protocol: one line of JSON for each request on stdin, and one for its answer on stdout.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

MOST_SECONDS = 5.0
"""Longest time that a template may take for one text. Those of releases take milliseconds."""

MOST_MEMORY = 2**30
"""Bytes that a template may use."""

MOST_CHARACTERS = 2**24
"""Length of the longest text that a template may make: several times the longest context."""


class _Tokenizer:
    """What Transformers' ``apply_chat_template`` needs of a tokenizer to render text."""

    def __init__(self, template: str, special_tokens: dict[str, Any]) -> None:
        self.template, self.special_tokens_map = template, special_tokens

    def get_chat_template(self, *_: Any) -> str:
        return self.template


def main() -> None:
    """Answer requests until stdin is closed."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    render: Any = PreTrainedTokenizerBase.apply_chat_template
    _limit_memory()
    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing else that is printed is an answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        _end_after(2 * MOST_SECONDS)
        try:
            request = json.loads(line)
            tokenizer = _Tokenizer(request["template"], request["special_tokens"])
            text = render(tokenizer, tokenize=False, **request["arguments"])
            if sum(map(len, [text] if isinstance(text, str) else text)) > MOST_CHARACTERS:
                raise ValueError(f"the text has more than {MOST_CHARACTERS} characters")
            answer = json.dumps({"text": text})
        except Exception as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        _end_after(0)
        print(answer, file=answers, flush=True)


def _end_after(seconds: float) -> None:
    """End this process after ``seconds``, unless this is called again before; 0: do not end it.

    The process that started this one kills it earlier, unless it was killed itself.
    """
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory() -> None:
    """Limit what this process uses on top of what the libraries have taken, and forbid writing files."""
    if sys.platform != "linux":  # only Linux has both
        return
    try:
        import resource

        with open("/proc/self/statm") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:  # /proc is not mounted
        return
    for what, most in ((resource.RLIMIT_AS, taken + MOST_MEMORY), (resource.RLIMIT_FSIZE, 0)):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
