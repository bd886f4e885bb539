"""``polymoe chat``: a conversation with a checkpoint whose experts stay packed."""

from __future__ import annotations

import contextlib
import json as jsonlib
import re
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from polymoe.checkpoint.hub import require_name
from polymoe.cli.options import CheckpointName, Options, Placement, Sampling, option
from polymoe.cli.output import say, speed_line, terminal_text
from polymoe.errors import PolymoeError

if TYPE_CHECKING:
    from polymoe.engines.transformers.chat import Chat, Turn
    from polymoe.engines.transformers.replies import ReplyPart

_HELP = """\
/help     this list
/clear    forget the conversation, but not the system message
/exit     leave; Ctrl-D does the same
A space before a slash makes it part of a message. Ctrl-C stops a reply.
A backslash at the end of a line continues the message on the next one."""
_COMMAND = re.compile(r"/[A-Za-z?]+(?:[ \t].*)?\s*")


class _Replies(Sampling):
    system: str | None = option(None, "A system message.")


class _Output(Options, heading="Output"):
    reasoning: bool | None = option(None, "Show reasoning on stderr. Default: only on a terminal.")
    json: bool = option(False, "Print each reply as one line of JSON on stdout.")


def command(checkpoint: CheckpointName, replies: _Replies, placement: Placement, output: _Output) -> None:
    """Chat with a checkpoint: replies are streamed, and the model sees the conversation so far.

    Answers go to stdout, reasoning to stderr. Without a terminal each line of stdin is a message.
    """
    require_name(checkpoint)
    interactive = sys.stdin.isatty()
    from polymoe.engines.transformers.chat import Chat
    from polymoe.engines.transformers.generator import Generator

    say(f"loading {checkpoint}")
    generator = Generator.load(checkpoint, **placement.load)
    chat = Chat(generator, **vars(replies))
    shown = sys.stderr.isatty() if output.reasoning is None else output.reasoning
    if interactive:
        say(f"{checkpoint} on {generator.model.device}. /help lists the commands; Ctrl-D leaves.")
    for message in _messages(interactive):
        if _COMMAND.fullmatch(message):
            if not _obey(message.strip(), chat):
                break
            continue
        _answer(chat, message, interactive=interactive, shown=shown, json=output.json)
    if generator.new_tokens:
        say(speed_line(generator.speed()))


def _messages(interactive: bool) -> Iterator[str]:
    """What the user types, without empty messages, until the end of the input."""
    if not interactive:
        for line in sys.stdin:
            if line.strip():
                yield line.strip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() uses it: history and arrow keys
    while True:
        try:
            message = _read(">>> ")
            while message.endswith("\\"):
                message = f"{message[:-1]}\n{_read('... ')}"
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        if message.strip():
            yield message


def _read(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # stdout has the answers
    return input()


def _obey(command: str, chat: Chat) -> bool:
    """Carry out a command; whether the chat continues."""
    if command in ("/exit", "/quit", "/bye"):
        return False
    if command == "/clear":
        chat.clear()
        say("the conversation starts over")
    elif command in ("/help", "/?"):
        say(_HELP)
    elif command.startswith("/system"):
        say("the system message is set at the start: polymoe chat ... --system 'Answer briefly.'")
    else:
        say(f"unknown command {command.split()[0]}; /help lists them")
    return True


def _answer(chat: Chat, message: str, *, interactive: bool, shown: bool, json: bool) -> None:
    """Print one reply as it is generated."""
    printer = _Printer(shown=shown, silent=json)
    try:
        with _interrupt_stops(chat) if interactive else contextlib.nullcontext():
            turn = chat.ask(message, printer.part)
    except PolymoeError as error:
        if not interactive:
            raise
        printer.end()
        say(f"error: {error}\n(/clear starts the conversation over)")
        return
    printer.end()
    if not interactive and turn.ended == "interrupted":
        raise KeyboardInterrupt
    if json:
        reply = turn.reply
        said: dict[str, Any] = {"prompt": message, "text": reply.content, "reasoning": reply.reasoning}
        print(jsonlib.dumps({**said, "tool_calls": reply.tool_calls, "tokens": turn.tokens, "ended": turn.ended}))
        sys.stdout.flush()
    if note := _note(turn, chat):
        say(f"({note})")


def _note(turn: Turn, chat: Chat) -> str:
    if turn.ended == "interrupted":
        return "stopped" if turn.kept else "stopped before the answer; this message is not part of the conversation"
    if turn.ended == "length":
        what = "before its answer " if not turn.reply.content else ""
        limit = "the context is full; /clear starts over" if chat.max_tokens is None else "--max-tokens"
        return f"cut off {what}after {turn.tokens} tokens: {limit}"
    return ""


class _Printer:
    """Prints parts: content and tool calls on stdout, reasoning on stderr."""

    def __init__(self, *, shown: bool, silent: bool) -> None:
        self._shown, self._silent = shown, silent
        self._open: Any = None  # the stream whose line has no end yet
        self._dim = sys.stderr.isatty()

    def part(self, part: ReplyPart) -> None:
        """Print a part."""
        if self._silent or (part.kind == "reasoning" and not self._shown):
            return
        stream = sys.stderr if part.kind == "reasoning" else sys.stdout
        text = terminal_text(part.text, stream)
        if part.kind == "tool_call":
            text = f"[calls {text}]\n"
        if part.kind == "tool_call" or self._open is not stream:
            self.end()
            text = text.lstrip()
        if part.kind == "reasoning" and self._dim and text:
            text = f"\x1b[2m{text}\x1b[0m"
        print(text, end="", file=stream, flush=True)
        if text:
            self._open = None if text.endswith("\n") else stream

    def end(self) -> None:
        """End the line."""
        if self._open is not None:
            print(file=self._open, flush=True)
        self._open = None


@contextlib.contextmanager
def _interrupt_stops(chat: Chat) -> Iterator[None]:
    """Make the first Ctrl-C end the reply at its next token; a second one ends it at once."""

    def stop(*_: object) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(True)
        chat.stop()

    stopped: list[bool] = []
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
