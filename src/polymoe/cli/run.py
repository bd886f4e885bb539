"""``polymoe run``: answer prompts with a checkpoint whose experts stay packed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from polymoe.cli.output import Backend, Checkpoint, Json, OnDevice, Role, print_json, status
from polymoe.units import format_bytes

__all__ = ["command"]


def command(
    checkpoint: Checkpoint,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts to answer. Default: the lines of stdin.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 256,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts that are answered together.")] = 32,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs/--no-graphs",
            help="Decode with CUDA graphs: a minute or more to compile each batch size, then faster.",
        ),
    ] = False,
    backend: Backend = "auto",
    role: Role = "mixed",
    device: OnDevice = "auto",
    json: Json = False,
) -> None:
    """Answer prompts; report the speed and the size of the experts, packed and dequantized."""
    from polymoe.errors import ArgumentError

    prompts = list(prompt or [])
    if not prompts:
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ArgumentError("run", expected="a prompt", got="none on the command line or on stdin")
    from polymoe.engines.transformers.generator import Generator

    err = status()
    with err.status("loading"):
        generator = Generator.load(checkpoint, device=device, backend=backend, role=role, graphs=graphs)
    answers = []
    for start in range(0, len(prompts), batch_size):
        for answer in generator.answer(prompts[start : start + batch_size], max_tokens=max_tokens, raw=raw):
            answers.append(answer)
            if not json:
                print(answer.text if len(prompts) == 1 else f"{answer.prompt} {answer.text}", flush=True)
    speed = generator.speed()
    if json:
        print_json({"answers": [{"prompt": a.prompt, "text": a.text, "tokens": a.tokens} for a in answers], **speed})
        return
    # Nothing is packed if the checkpoint has its experts in 16 bit.
    experts = (
        f"{format_bytes(speed['packed_bytes'])} packed, {format_bytes(speed['dequantized_bytes'])} as 16 bit, "
        f"backend {', '.join(speed['backends'])}"
        if speed["packed_bytes"]
        else "not quantized"
    )
    err.print(
        f"{speed['new_tokens']} tokens in {speed['seconds']:.2f} s, {speed['tokens_per_second']:.1f} tokens/s "
        f"on {speed['device']}; experts {experts}",
        highlight=False,
        soft_wrap=True,
    )
