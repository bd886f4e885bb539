"""``polymoe quantize``: a checkpoint with its experts in another format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polymoe.cli.options import Checkpoint, Output, option, require_checkpoint
from polymoe.cli.output import cells, print_json, print_table, say
from polymoe.errors import PolymoeError

__all__ = ["command"]


@dataclass(frozen=True)
class _Written:
    """What is written."""

    format: Literal["mxfp4", "nvfp4", "int4_g32", "int4_g128", "fp8_block128"] = option(
        ..., "Format of the experts.", "--format", show_default=False
    )
    out: Path = option(..., "The directory to create.", "--out", show_default=False)
    dialect: Literal["compressed-tensors", "modelopt", "gpt-oss", "deepseek"] | None = option(
        None, "How tensors are named and described. Default: as most engines read this format."
    )


def command(checkpoint: Checkpoint, written: _Written, output: Output) -> None:
    """Write a checkpoint with its experts in another format. All other tensors and files are copied unchanged.

    A run that was killed continues. report.json in the new directory has the error of each layer and projection.
    """
    require_checkpoint(checkpoint)
    from polymoe.checkpoint.quantize import quantize_checkpoint

    try:
        report = quantize_checkpoint(checkpoint, written.format, written.out, dialect=written.dialect, progress=say)
    except (OSError, KeyboardInterrupt) as error:
        if isinstance(error, PolymoeError):  # such as a checkpoint that was not found: there is nothing to continue
            raise
        say("not finished; the same command continues with what is complete")
        raise
    if output.json:
        print_json(report)
        return
    rows = [
        (f"{row['layer']}{group}", part, f"{found['error']:.4f}", found["worst_expert"], f"{found['worst_error']:.4f}")
        for row in report["layers"]
        for group in [f", group {row['group']}" if row["group"] else ""]
        for part, found in row.items()
        if part not in ("layer", "group")
    ]
    columns = ("layer", "projection", "relative error", "worst expert", "its error")
    print_table(cells(columns, rows, f"{written.out}: {report['format']}, {report['dialect']}"))
