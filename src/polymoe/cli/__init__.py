"""The ``polymoe`` command: one module for each verb, which parses, calls and prints. ``--help`` does not import
torch."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated

import typer

from polymoe.cli import (
    bench,
    bench_decode,
    bench_serve,
    bench_slots,
    chat,
    doctor,
    explain,
    models,
    quantize,
    run,
    serve,
    tune,
    verify,
)
from polymoe.cli.commands import Group, add, group
from polymoe.cli.memory import out_of_memory
from polymoe.cli.output import drop_output
from polymoe.errors import ArgumentError, PolymoeError, printable

__all__ = ["app", "main"]

app = group(
    "polymoe",
    "Run the packed experts of quantized mixture-of-experts checkpoints, and explain how they run.",
    epilog="Data goes to stdout, everything else to stderr. Exit codes: 0 success, 1 refused, 2 wrong usage. "
    "Lists are separated by commas. For examples of a command: polymoe COMMAND -h",
)
"""The command line, one command for each verb."""


class _Bench(Group):
    default = "kernels"


_bench = group(
    "bench",
    "Measure expert layers, whole models and servers.",
    cls=_Bench,
    epilog="polymoe bench --case ... is short for polymoe bench kernels --case ...",
)

add(app, "explain", "Show whether a model fits a GPU, how fast, and on which kernels.", explain.command,
    "polymoe explain demo --device h200",
    "polymoe explain openai/gpt-oss-120b --device 'RTX 4090' --tp 8",
    "polymoe explain demo --device sm_100 --backend triton --json",
    "polymoe explain openai/gpt-oss-120b --engine vllm --tensor-parallel-size 8 --enable-expert-parallel "
    "--device h200")  # fmt: skip
add(app, "models", "Show which well-known models fit a GPU, and how fast.", models.command,
    "polymoe models --device rtx4090",
    "polymoe models --device h200 --context 131072 --json")  # fmt: skip
add(app, "verify", "Check a checkpoint's experts: bytes, reference, every backend.", verify.command,
    "polymoe verify demo", "polymoe verify demo --layer 1 --tokens 1,64",
    "polymoe verify demo --out record.jsonl")  # fmt: skip
add(app, "run", "Answer prompts.", run.command, 'polymoe run demo "123+456="', "polymoe run demo < prompts.txt",
    "polymoe run openai/gpt-oss-120b --device-map auto --max-tokens 512 'Why is the sky blue?'",
    "polymoe run demo --record-routing routing.safetensors < prompts.txt")  # fmt: skip
add(app, "chat", "Chat with a checkpoint in the terminal.", chat.command,
    "polymoe chat demo", "polymoe chat openai/gpt-oss-20b --system 'Answer briefly.'",
    "polymoe chat demo --json < messages.txt")  # fmt: skip
add(app, "serve", "Serve a checkpoint with OpenAI's API.", serve.command, "polymoe serve demo",
    "POLYMOE_API_KEY=secret polymoe serve openai/gpt-oss-20b --host 0.0.0.0 --continuous-batching")  # fmt: skip
add(app, "quantize", "Write a checkpoint with its experts in another format.", quantize.command,
    "polymoe quantize path/to/checkpoint --format mxfp4 --out path/to/new")  # fmt: skip
app.add_typer(_bench)
add(app, "tune", "Find the fastest kernel configurations on this GPU.", tune.command,
    "polymoe tune --case deepseek-v4-flash --tokens 1,4,16",
    "polymoe tune --checkpoint demo --seconds 60")  # fmt: skip
add(app, "doctor", "Show this machine, and each backend's verdict on it.", doctor.command,
    "polymoe doctor",
    "polymoe doctor --json",
    "polymoe doctor --link")  # fmt: skip
add(_bench, "kernels", "Time each backend on the experts of one layer.", bench.command,
    "polymoe bench kernels --case deepseek-v4-flash --tokens 1,16,64",
    "polymoe bench kernels --checkpoint demo --backends cuda,triton --out results.jsonl",
    "polymoe bench kernels --case gpt-oss-120b --routing zipf:1.2")  # fmt: skip
add(_bench, "decode", "Time whole models in Transformers, packed and dequantized.", bench_decode.command,
    "polymoe bench decode demo --batch-size 1,16")  # fmt: skip
add(_bench, "serve", "Time any OpenAI-compatible server.", bench_serve.command,
    "polymoe bench serve --server http://127.0.0.1:8000 --input-len 1024 --output-len 128",
    "polymoe bench serve --server http://127.0.0.1:8000 --batch-size 1,8,64 --out serve.jsonl")  # fmt: skip
add(_bench, "slots", "Replay recorded routing: which experts would be on the GPU.", bench_slots.command,
    "polymoe bench slots --trace routing.safetensors --slots 8,16,25%",
    "polymoe bench slots --trace routing.safetensors --link 26 --json")  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        from polymoe import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _warn(message: Warning | str, *_: object) -> None:
    """Print a warning without its line of source, for users of a command."""
    print(f"warning: {printable(str(message))}", file=sys.stderr)


def main() -> None:
    """Entry point: run the command line; polymoe's own errors become messages with exit code 1."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # closed by the caller; in this order each gets its own descriptor back
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as for stderr: names of files need not be text
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # prompts need not be text either
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            try:
                app(prog_name="polymoe")
            finally:
                sys.stdout.flush()  # here, where an error has a handler: a short output is still in the buffer
    except PolymoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ArgumentError) else 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has closed it, as with `| head`.
        drop_output()
        sys.exit(0)
    except (MemoryError, RuntimeError, OSError) as error:
        # Neither memory that is exhausted is a bug, nor a missing or unreadable file, or a full disk.
        said = printable(str(error)) if isinstance(error, OSError) else out_of_memory(error)
        if said is None:
            raise
        drop_output()
        print(f"error: {said}", file=sys.stderr)
        sys.exit(1)
