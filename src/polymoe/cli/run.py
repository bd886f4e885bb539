"""``polymoe run``: answer prompts with a checkpoint whose experts stay packed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polymoe.checkpoint.hub import require_name
from polymoe.cli.options import CheckpointName, Options, Output, Placement, RecordedRouting, option
from polymoe.cli.output import print_json, say, speed_line, terminal_text
from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    from polymoe.engines.transformers.generator import Answer


class _Answers(Options, heading="Answers"):
    max_tokens: int = option(256, "Maximum number of tokens in an answer.", "--max-tokens", "--max-new-tokens", min=1)
    raw: bool = option(False, "Do not apply the chat template.")
    batch_size: int = option(32, "Number of prompts in a batch.", min=1)


class _Placement(Placement):
    graphs: bool = option(
        False,
        "Decode with CUDA graphs: faster, after a minute or more to compile each batch size.",
        "--graphs/--no-graphs",
    )


class _Output(RecordedRouting, Output):
    pass


def command(
    checkpoint: CheckpointName,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Prompts to answer. Default: the lines of stdin.", show_default=False),
    ] = None,
    *,
    asked: _Answers,
    placement: _Placement,
    output: _Output,
) -> None:
    """Answer prompts; report the speed and the size of the experts, packed and dequantized."""
    if placement.graphs and output.record_routing is not None:
        raise typer.BadParameter("--record-routing sees no call that a CUDA graph replays: leave --graphs out")
    require_name(checkpoint)
    prompts = list(prompt or []) or _from_stdin(checkpoint)
    if not prompts:
        raise ArgumentError("run", expected="a prompt", got="none on the command line or on stdin")
    say(f"loading {checkpoint}")  # PyTorch and Transformers first, which takes seconds
    from polymoe.engines.transformers.generator import Generator
    from polymoe.engines.transformers.routing_recorder import recorded_routing

    generator = Generator.load(checkpoint, **placement.load)
    file, answers = output.record_routing, []
    with nullcontext() if file is None else recorded_routing(generator.model, file):
        for start in range(0, len(prompts), asked.batch_size):
            batch = prompts[start : start + asked.batch_size]
            for answer in generator.answer(batch, max_tokens=asked.max_tokens, raw=asked.raw):
                answers.append(answer)
                if not output.json:
                    _print(answer, alone=len(prompts) == 1)
    speed = generator.speed()
    if output.json:
        print_json({"answers": [_plain(answer) for answer in answers], **speed})
    else:
        say(speed_line(speed))


def _from_stdin(checkpoint: str) -> list[str]:
    from polymoe.checkpoint import Checkpoint

    Checkpoint.open(checkpoint, config_only=True).close()  # a typo in it is said before anybody types
    if sys.stdin.isatty():
        say("reading prompts from the terminal, one per line, until Ctrl-D (polymoe chat is a dialogue)")
    return [line.rstrip("\n") for line in sys.stdin if line.strip()]


def _print(answer: Answer, *, alone: bool) -> None:
    text = "\n".join([*filter(None, [answer.text]), *(f"[calls {call}]" for call in answer.tool_calls)])
    text = terminal_text(text, sys.stdout)
    print(text if alone else f"{answer.prompt} {text}", flush=True)
    if not text and answer.reasoning:
        say(f"(cut off after {answer.tokens} tokens of reasoning, before its answer: raise --max-tokens)")


def _plain(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt": answer.prompt, "text": answer.text, "tokens": answer.tokens}
    if answer.reasoning:
        found["reasoning"] = answer.reasoning
    if answer.tool_calls:
        found["tool_calls"] = list(answer.tool_calls)
    return found
