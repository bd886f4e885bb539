"""What commands print, and where: data on stdout, everything else on stderr."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from polymoe.common.units import format_bytes
from polymoe.errors import printable

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from polymoe.machine import Machine


def drop_output() -> None:
    """Lose what stdout cannot write: at exit it would be tried again, and fail with a status of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Return the console for tables: stdout."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # Rich's own ends the process with status 1

    # No markup: names of files and models may have brackets.
    plain = functools.partial(Plain, markup=False, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return plain()  # as wide as it says
    if sys.stdout.isatty():
        return plain(_environ={name: value for name, value in os.environ.items() if name != "COLUMNS"})  # it may be 0
    return plain(width=160, soft_wrap=True)  # a pipe has no width: do not wrap tables at 80 columns


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """Print a table of values on stdout, each as text; of None, an empty cell. Columns without any value are left out.

    Nothing is cut: where a terminal is too narrow for it, lines between columns are left out, and where it still is,
    words are broken.
    """
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    out, table = console(), Table(title=title)
    rows = list(rows)
    shown = [i for i in range(len(columns)) if not rows or any(row[i] is not None for row in rows)]
    for i in shown:
        table.add_column(columns[i], overflow="fold")
    for row in rows:
        cells = ("" if row[i] is None else row[i] for i in shown)
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in cells))
    if Measurement.get(out, out.options.update(width=10_000), table).minimum > out.width:
        table.box, table.padding, table.show_edge = box.SIMPLE_HEAD, 0, False
    out.print(table)


def say(text: str) -> None:
    """Print lines on stderr as they are, without wrapping them."""
    print(text, file=sys.stderr, flush=True)


def terminal_text(text: str, stream: Any) -> str:
    """Text of a model for a stream: on a terminal, what would control it is escaped; tabs and line breaks stay."""
    return "\t".join(map(printable, text.split("\t"))) if stream.isatty() else text


def speed_line(speed: dict[str, Any]) -> str:
    """One line about time, tokens and experts, from :meth:`Generator.speed`'s values."""
    line = f"{speed['new_tokens']} tokens in {speed['seconds']:.2f} s, {speed['tokens_per_second']:.1f} tokens/s "
    line += f"on {speed['device']}; experts "
    if speed["packed_bytes"]:
        line += f"{format_bytes(speed['packed_bytes'])} in layout {', '.join(speed['layouts'])}, "
        line += f"{format_bytes(speed['dequantized_bytes'])} in 16 bits, backend {', '.join(speed['backends'])}"
    else:
        line += "not quantized"
    if "slots" in speed:
        hits = speed["hits"] / max(speed["hits"] + speed["misses"], 1)
        line += f"; {speed['slots']} slots in each layer, {hits:.0%} hits, {format_bytes(speed['copied_bytes'])} copied"
    return line


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout."""
    print(json.dumps(value, indent=2))


def command_line() -> str:
    """Return this command line, for records, without a key."""
    words = ["polymoe", *sys.argv[1:]]
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            words[i] = "--api-key=..."
        elif i and words[i - 1] == "--api-key":
            words[i] = "..."
    return shlex.join(words)


def measured_on(device: str) -> tuple[Machine, torch.device]:
    """Parse ``--device`` of verbs that measure: return the machine and torch's device. A GPU becomes torch's current
    one."""
    import torch

    from polymoe.machine import Machine

    machine = Machine.of(None if device == "auto" else device)
    where = torch.device(machine.device.kind if device == "auto" else device)
    if where.index is not None and where.type == "cuda":
        torch.cuda.set_device(where)
    return machine, where
