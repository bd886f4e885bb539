"""``polymoe run``: answer prompts with a checkpoint whose experts stay packed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polymoe.cli.output import (
    Backend,
    Checkpoint,
    DeviceMap,
    Json,
    OnDevice,
    Role,
    TensorParallel,
    no_tensor_parallel,
    print_json,
    say,
    speed_line,
    terminal_text,
)

if TYPE_CHECKING:
    from polymoe.engines.transformers.generator import Answer

__all__ = ["command"]


def command(
    checkpoint: Checkpoint,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Prompts to answer. Default: the lines of stdin.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--max-new-tokens", min=1, help="Maximum number of tokens in an answer.")
    ] = 256,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts in a batch.")] = 32,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs/--no-graphs",
            help="Decode with CUDA graphs: faster, after a minute or more to compile each batch size.",
        ),
    ] = False,
    backend: Backend = "auto",
    role: Role = "mixed",
    device: OnDevice = "auto",
    device_map: DeviceMap = None,
    tp: TensorParallel = 1,
    json: Json = False,
) -> None:
    """Answer prompts; report the speed and the size of the experts, packed and dequantized."""
    from polymoe import checkpoint as files
    from polymoe.errors import ArgumentError

    no_tensor_parallel(tp)
    prompts = list(prompt or [])
    if not prompts:
        files.Checkpoint.open(checkpoint, config_only=True).close()  # a typo in it is said before anybody types
        if sys.stdin.isatty():
            say("reading prompts from the terminal, one per line, until Ctrl-D (polymoe chat is a dialogue)")
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ArgumentError("run", expected="a prompt", got="none on the command line or on stdin")
    say(f"loading {checkpoint}")  # PyTorch and Transformers first, which takes seconds
    from polymoe.engines.transformers.generator import Generator

    generator = Generator.load(
        checkpoint, device=device, device_map=device_map, backend=backend, role=role, graphs=graphs
    )
    answers = []
    for start in range(0, len(prompts), batch_size):
        for answer in generator.answer(prompts[start : start + batch_size], max_tokens=max_tokens, raw=raw):
            answers.append(answer)
            if not json:
                text = "\n".join([*filter(None, [answer.text]), *(f"[calls {call}]" for call in answer.tool_calls)])
                text = terminal_text(text, sys.stdout)
                print(text if len(prompts) == 1 else f"{answer.prompt} {text}", flush=True)
                if not text and answer.reasoning:
                    say(f"(cut off after {answer.tokens} tokens of reasoning, before its answer: raise --max-tokens)")
    speed = generator.speed()
    if json:
        print_json({"answers": [_plain(answer) for answer in answers], **speed})
    else:
        say(speed_line(speed))


def _plain(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt": answer.prompt, "text": answer.text, "tokens": answer.tokens}
    if answer.reasoning:
        found["reasoning"] = answer.reasoning
    if answer.tool_calls:
        found["tool_calls"] = list(answer.tool_calls)
    return found
