"""BoundedChatTemplate: a tokenizer's ``apply_chat_template`` with a limit on time, memory and length.

The template is rendered by :mod:`polymoe.engines.chat_worker` in a process of its own, which is started once for all
tokenizers and killed when a template takes too long. Everything else is the tokenizer's own method.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import subprocess
import sys
import threading
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import get_json_schema

from polymoe.engines.chat_worker import MOST_CHARACTERS, MOST_SECONDS
from polymoe.errors import ArgumentError, CheckpointError, UnsupportedProblem

_START_SECONDS = 120.0
_RENDERED = ("conversation", "tools", "documents", "add_generation_prompt", "continue_final_message")
_REFUSED = ("return_assistant_tokens_mask", "sanitize_control_tokens")
_AS_IT_IS = "{{ messages[0]['content'] }}"
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TMPDIR", "TZ")
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from polymoe.engines.chat_worker import main; main()"


class ChatTemplateError(CheckpointError, TemplateError):
    """A chat template failed; also the exception that callers of Transformers' method expect."""

    def __init__(self, got: str) -> None:
        super().__init__("chat template", expected="a template that renders the messages", got=got)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.got,)

    @property
    def message(self) -> str:
        """The whole message, where Jinja's exceptions have theirs."""
        return str(self)


class BoundedChatTemplate:
    """Replaces the method ``apply_chat_template`` of one tokenizer; its parameters and results are the same.

    Raises:
        ChatTemplateError: if the template fails, takes more than :data:`MOST_SECONDS`, or too much memory.
        ArgumentError: for messages that JSON cannot hold.
        UnsupportedProblem: for arguments that need the template in this process.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        _renderer(os.getpid()).start()

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(type(self._tokenizer).apply_chat_template)
        return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.__signature__.bind(*args, **kwargs).arguments
        for name in _REFUSED:
            if given.pop(name, False):
                raise UnsupportedProblem(f"apply_chat_template({name}=True)", expected="the text or its tokens alone")
        template = self._tokenizer.get_chat_template(given.pop("chat_template", None), given.get("tools"))
        if given.get("tools"):
            given["tools"] = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in given["tools"]]
        arguments = {name: given.pop(name) for name in _RENDERED if name in given} | given.pop("kwargs", {})
        text = _renderer(os.getpid()).render(template, self._tokenizer.special_tokens_map, arguments)
        if not given.get("tokenize", True):
            return text
        chats = [[{"role": "user", "content": each}] for each in ([text] if isinstance(text, str) else text)]
        method = type(self._tokenizer).apply_chat_template
        return method(self._tokenizer, chats[0] if isinstance(text, str) else chats, chat_template=_AS_IT_IS, **given)


@functools.cache
def _renderer(process_id: int) -> _Renderer:
    """The renderer of this process: a forked one must not share its pipes."""
    renderer = _Renderer()
    atexit.register(renderer.stop)
    return renderer


class _Renderer:
    """One worker, which renders one text at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the worker without waiting for it."""
        with self._lock:
            self._started()

    def stop(self) -> None:
        """Kill the worker."""
        with self._lock:
            self._kill()

    def render(self, template: str, special_tokens: dict[str, Any], arguments: dict[str, Any]) -> Any:
        """Return the text of one conversation, or those of several."""
        try:
            request = {"template": template, "special_tokens": special_tokens, "arguments": arguments}
            line = json.dumps(request, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError("apply_chat_template", expected="values that JSON can hold", got=str(error)) from error
        with self._lock:
            if not self._ready:
                self._ready = self._exchange(None, _START_SECONDS) == "ready\n"
            answer = self._exchange(line, MOST_SECONDS) if self._ready else ""
            if not answer.endswith("\n"):
                self._kill()
                raise ChatTemplateError(f"one that takes more than {MOST_SECONDS:g} s, or too much memory")
        found = json.loads(answer)
        if "error" in found:
            raise ChatTemplateError(found["error"])
        return found["text"]

    def _exchange(self, line: str | None, seconds: float) -> str:
        """Send a line and return the answer, or what there is of it when the worker dies or the time is up."""
        worker = self._started()
        assert worker.stdin is not None
        assert worker.stdout is not None
        timer = threading.Timer(seconds, worker.kill)
        timer.start()
        try:
            if line is not None:
                print(line, file=worker.stdin, flush=True)
            return worker.stdout.readline(12 * MOST_CHARACTERS)  # a character of JSON has up to 12
        except OSError:  # the worker is dead
            return ""
        finally:
            timer.cancel()

    def _started(self) -> subprocess.Popen[str]:
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, "-I", "-c", _CODE, *filter(None, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C is for this process
            )
        return self._worker

    def _kill(self) -> None:
        worker, self._worker, self._ready = self._worker, None, False
        if worker is not None:
            worker.kill()
            worker.communicate()


def _plain(value: Any) -> Any:
    """Convert what JSON lacks: special tokens, numbers of numpy and torch, and models of pydantic."""
    if type(value).__name__ == "AddedToken":
        return str(value)
    for method in ("item", "model_dump"):
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__}")
