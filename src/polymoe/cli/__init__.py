"""The ``polymoe`` command: one module for each verb, which parses, calls and prints. ``--help`` does not import
torch."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from polymoe.cli import bench, bench_decode, bench_serve, chat, doctor, eval, explain, run, serve, tune, verify
from polymoe.cli.output import fail
from polymoe.errors import PolymoeError, printable

__all__ = ["app", "main"]


class _Verbs(TyperGroup):
    """Verbs of one or two words; of ``eval`` and ``eval compare``, the longer one is used if both fit."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)


app = typer.Typer(
    name="polymoe",
    cls=_Verbs,
    help="Run the experts of quantized mixture-of-experts checkpoints, packed, and say why they run so.",
    epilog="Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 refused, 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
"""The command line, one command for each verb."""

for _name, _verb in {
    "explain": explain,
    "verify": verify,
    "bench": bench,
    "tune": tune,
    "run": run,
    "chat": chat,
    "serve": serve,
    "doctor": doctor,
}.items():
    app.command(_name)(_verb.command)
app.command("bench decode")(bench_decode.command)
app.command("bench serve", cls=bench_serve.Command)(bench_serve.command)
app.command("eval")(eval.command)
app.command("eval compare")(eval.compare)


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


def _drop_output() -> None:
    """Lose what stdout cannot write: at exit it would be tried again, and fail with a status of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point: run the command line; polymoe's own errors become messages with exit code 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as for stderr: names of files need not be text
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            try:
                app(prog_name="polymoe")
            finally:
                sys.stdout.flush()  # here, where an error has a handler: a short output is still in the buffer
    except PolymoeError as error:
        fail(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has closed it, as with `| head`.
        _drop_output()
        sys.exit(0)
    except OSError as error:  # a missing or unreadable file, or a full disk: not a bug
        _drop_output()
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
