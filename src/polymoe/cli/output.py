"""Shared by the verbs: output streams, the format of sizes and errors, common options."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from polymoe.errors import ArgumentError, PolymoeError, printable
from polymoe.units import format_bytes

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from polymoe.machine import Machine

__all__ = [
    "Backend",
    "BatchInvariant",
    "Checkpoint",
    "DeviceMap",
    "Json",
    "MaxTokens",
    "OnDevice",
    "Role",
    "TensorParallel",
    "console",
    "fail",
    "measured_on",
    "no_tensor_parallel",
    "print_json",
    "say",
    "speed_line",
    "status",
    "terminal_text",
    "token_counts",
]

Checkpoint = Annotated[str, typer.Argument(help="Directory of a checkpoint, or a Hub id.", show_default=False)]
"""The argument of the verbs that read weights."""
Backend = Annotated[str, typer.Option(help="Backend of the experts: auto, or a name, which is used or refused.")]
"""``--backend``."""
Role = Annotated[
    str,
    typer.Option(help="Token counts to plan for: decode (1 to 256), prefill (from 1024) or mixed (both)."),
]
"""``--role`` of workers that prefill, decode or do both."""
OnDevice = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: the GPU if there is one.")]
"""``--device`` of the verbs that compute."""
DeviceMap = Annotated[
    str | None,
    typer.Option(help="auto, balanced or sequential: spread whole layers over all GPUs. Instead of --device."),
]
"""``--device-map`` of the verbs that run whole models."""
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp", "--tensor-parallel-size", min=1, help="Only 1 here: this command is one process. Says what does more."
    ),
]
"""``--tp`` of the verbs that run whole models in this process."""
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "--max-new-tokens", min=1, help="Most tokens of a reply. Default: what fits in the context."
    ),
]
"""``--max-tokens``."""
BatchInvariant = Annotated[
    bool,
    typer.Option("--batch-invariant", help="Results must be bitwise independent of the rest of the batch."),
]
"""``--batch-invariant``."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
"""``--json``."""


def console() -> Console:
    """Return the console for tables: stdout."""
    from rich.console import Console

    # A pipe has no width: do not wrap tables at 80 columns.
    # No markup: names of files and models may have brackets.
    return Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=160, soft_wrap=True)


def status() -> Console:
    """Return the console for everything else: stderr."""
    from rich.console import Console

    return Console(stderr=True, markup=False)


def say(text: str) -> None:
    """Print lines on stderr as they are, without wrapping them."""
    print(text, file=sys.stderr, flush=True)


def terminal_text(text: str, stream: Any) -> str:
    """Text of a model for a stream: on a terminal, what would control it is escaped; tabs and line breaks stay."""
    return "\t".join(map(printable, text.split("\t"))) if stream.isatty() else text


def speed_line(speed: dict[str, Any]) -> str:
    """One line about time, tokens and experts, from :meth:`Generator.speed`'s values."""
    # Nothing is packed if the checkpoint has its experts in 16 bit.
    experts = (
        f"{format_bytes(speed['packed_bytes'])} packed, {format_bytes(speed['dequantized_bytes'])} as 16 bit, "
        f"backend {', '.join(speed['backends'])}"
        if speed["packed_bytes"]
        else "not quantized"
    )
    return (
        f"{speed['new_tokens']} tokens in {speed['seconds']:.2f} s, {speed['tokens_per_second']:.1f} tokens/s "
        f"on {speed['device']}; experts {experts}"
    )


def no_tensor_parallel(tp: int) -> None:
    """Refuse ``--tp`` above 1, and say what runs a model on several GPUs.

    Raises:
        ArgumentError: for more than one rank.
    """
    if tp > 1:
        raise ArgumentError(
            "--tp",
            expected="1, since this command is one process",
            got=str(tp),
            hint=f"--device-map auto spreads whole layers over the GPUs; for tensor parallelism, "
            f"vllm serve MODEL --tensor-parallel-size {tp} runs polymoe's experts where polymoe is installed beside it",
        )


def print_json(value: Any) -> None:
    """Print one indented JSON object on stdout."""
    print(json.dumps(value, indent=2))


def fail(error: PolymoeError) -> NoReturn:
    """Print the error's message on stderr and exit with code 1."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


def token_counts(text: str, option: str = "--tokens") -> tuple[int, ...]:
    """Parse positive numbers of an option: ``"1,16,256"``.

    Raises:
        ArgumentError: for anything but positive numbers.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ArgumentError(option, expected="numbers such as 1,16,256", got=repr(text))
    return counts


def measured_on(device: str) -> tuple[Machine, torch.device]:
    """Parse ``--device`` of verbs that measure: return the machine and torch's device. A GPU becomes torch's current
    one."""
    import torch

    from polymoe.machine import Machine

    if device not in ("auto", "cpu") and not device.startswith("cuda"):
        raise ArgumentError("--device", expected="cpu, cuda, cuda:1 or auto", got=repr(device))
    machine = Machine.of(None if device == "auto" else device)
    where = torch.device(machine.device.kind if device == "auto" else device)
    if where.index is not None and where.type == "cuda":
        torch.cuda.set_device(where)
    return machine, where
