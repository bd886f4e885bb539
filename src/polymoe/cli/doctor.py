"""``polymoe doctor``: what this machine has and each backend's verdict on it, as one block to paste."""

from __future__ import annotations

from polymoe.cli.options import Output
from polymoe.cli.output import print_json

__all__ = ["command"]


def command(output: Output) -> None:
    """Show what this machine has, each backend's verdict on it and which engines are installed, as a block to paste
    into a bug report.

    Needs no GPU and no network. Keys are not shown. If something is broken, its line says so.
    """
    from polymoe.doctor.diagnosis import diagnose

    diagnosis = diagnose()
    if output.json:
        print_json(diagnosis.to_dict())
    else:
        print(diagnosis)
