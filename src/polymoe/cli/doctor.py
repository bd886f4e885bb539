"""``polymoe doctor``: what this machine has and what each backend says of it, in one block to paste."""

from __future__ import annotations

from polymoe.cli.output import Json, print_json

__all__ = ["command"]


def command(json: Json = False) -> None:
    """Show what this machine has, what each backend says of it and which engines are found, in one block to paste.

    Needs no GPU and no network. Keys are not shown. A piece that is broken is a line that says so.
    """
    from polymoe.diagnosis import diagnose

    diagnosis = diagnose()
    if json:
        print_json(diagnosis.to_dict())
    else:
        print(diagnosis)
