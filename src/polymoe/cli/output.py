"""Shared by the verbs: output streams, the format of sizes and errors, common options."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from polymoe.common.units import format_bytes
from polymoe.errors import ArgumentError, PolymoeError, printable

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from polymoe.machine import Machine

__all__ = [
    "Activations",
    "Backend",
    "Backends",
    "BatchInvariant",
    "Case",
    "Checkpoint",
    "ClientKey",
    "DeviceMap",
    "Format",
    "Json",
    "MaxTokens",
    "OnDevice",
    "Role",
    "Server",
    "TensorParallel",
    "console",
    "fail",
    "listed",
    "measured_on",
    "no_tensor_parallel",
    "print_json",
    "print_table",
    "say",
    "speed_line",
    "status",
    "terminal_text",
    "token_counts",
]

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="Directory of a checkpoint, or a Hub id.", show_default=False),
]
"""The argument of the verbs that read weights."""
Backend = Annotated[str, typer.Option(help="Backend for the experts: auto, or a name such as cuda or triton.")]
"""``--backend``."""
Role = Annotated[
    Literal["mixed", "decode", "prefill"],
    typer.Option(help="Token counts to plan for: decode (1 to 256), prefill (from 1024) or mixed (both)."),
]
"""``--role`` of workers that prefill, decode or do both."""
OnDevice = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: the GPU if there is one.")]
"""``--device`` of the verbs that compute."""
DeviceMap = Annotated[
    Literal["auto", "balanced", "balanced_low_0", "sequential"] | None,
    typer.Option(help="Distribute whole layers over all GPUs, like Transformers' device_map; replaces --device."),
]
"""``--device-map`` of the verbs that run whole models."""
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp",
        "--tensor-parallel-size",
        min=1,
        help="Must be 1: this command is a single process. For more, see the error.",
    ),
]
"""``--tp`` of the verbs that run whole models in this process."""
Server = Annotated[
    str,
    typer.Option(
        "--server",
        "--base-url",
        help="The server's URL, such as http://127.0.0.1:8000, with or without /v1.",
        show_default=False,
    ),
]
"""``--server`` of the verbs that ask servers."""
ClientKey = Annotated[
    str | None,
    typer.Option(
        envvar=["POLYMOE_API_KEY", "OPENAI_API_KEY"], help="The server's key, a bearer token.", show_default=False
    ),
]
"""``--api-key`` of the verbs that ask servers."""
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "--max-new-tokens",
        min=1,
        help="Maximum number of tokens in a reply. Default: what fits into the context.",
    ),
]
"""``--max-tokens``."""
Case = Annotated[
    Literal[
        "deepseek-v3", "deepseek-v3-ep8", "deepseek-v3-tp8", "deepseek-v4-flash", "glm-4.7", "gpt-oss-120b",
        "gpt-oss-20b", "kimi-k2", "kimi-k2-tp8", "mixtral-8x7b", "nemotron-3-super", "qwen3-235b",
        "qwen3-235b-tp4-bf16",
    ] | None,
    typer.Option(help="Expert layer of a known model, with random weights."),
]  # fmt: skip
"""``--case``. The command line names them without importing torch; a test compares them with the table."""
Format = Annotated[
    Literal[
        "bf16", "fp16", "fp8_tensor", "fp8_channel", "fp8_block128", "mxfp8", "mxfp4", "nvfp4", "int4_g32",
        "int4_g128",
    ] | None,
    typer.Option(help="Weight format of a case. Default: its own."),
]  # fmt: skip
"""``--format`` of a case."""
Activations = Annotated[
    Literal["16bit", "fp8_token", "fp8_group128", "fp8_group128_ue8m0", "fp8_static", "mxfp8", "nvfp4"] | None,
    typer.Option(help="How the experts' inputs are quantized. Default: E4M3 for FP8 weights, else 16bit."),
]
"""``--activations`` of the verbs that measure."""
Backends = Annotated[
    str | None,
    typer.Option("--backends", "--backend", help="Backends, separated by commas. Default: all that auto may choose."),
]
"""``--backends`` of the verbs that measure."""
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

    # No markup: names of files and models may have brackets.
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return Console(markup=False)  # as wide as the terminal, or as COLUMNS says
    return Console(markup=False, width=160, soft_wrap=True)  # a pipe has no width: do not wrap tables at 80 columns


def print_table(table: Table) -> None:
    """Print a table on stdout. Nothing is cut: where a terminal is too narrow for it, lines between columns are left
    out, and where it still is, words are broken."""
    from rich import box
    from rich.measure import Measurement

    out = console()
    for column in table.columns:
        column.overflow = "fold"
    if Measurement.get(out, out.options.update(width=10_000), table).minimum > out.width:
        table.box, table.padding, table.show_edge = box.SIMPLE_HEAD, 0, False
    out.print(table)


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
        f"{format_bytes(speed['packed_bytes'])} in layout {', '.join(speed['layouts'])}, "
        f"{format_bytes(speed['dequantized_bytes'])} in 16 bits, backend {', '.join(speed['backends'])}"
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
            hint=f"--device-map auto distributes whole layers over the GPUs; for tensor parallelism, "
            f"vllm serve MODEL --tensor-parallel-size {tp} runs polymoe's experts, with polymoe installed next to vLLM",
        )


def print_json(value: Any) -> None:
    """Print one indented JSON object on stdout."""
    print(json.dumps(value, indent=2))


def fail(error: PolymoeError) -> NoReturn:
    """Print the error's message on stderr and exit: with code 2 for a wrong argument, else with 1."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, ArgumentError) else 1)


def listed(text: str, option: str) -> list[str]:
    """Parse names of an option that are separated by commas: ``"cuda, triton"``. Each counts once.

    Raises:
        ArgumentError: for an empty list or name.
    """
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise ArgumentError(option, expected="names separated by commas", got=repr(text))
    return list(dict.fromkeys(names))


def token_counts(text: str, option: str = "--tokens") -> tuple[int, ...]:
    """Parse numbers of an option, from 1 to 1,048,576: ``"1,16,256"``.

    Raises:
        ArgumentError: for anything else.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or max(counts) > 2**20:
        raise ArgumentError(option, expected="numbers such as 1,16,256, at most 1048576", got=repr(text))
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
