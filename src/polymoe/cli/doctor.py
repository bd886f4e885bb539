"""``polymoe doctor``: what this machine has and each backend's verdict on it, as one block to paste."""

from __future__ import annotations

from dataclasses import asdict

from polymoe.cli.options import Options, Output, option
from polymoe.cli.output import print_json, say


class _Measured(Options, heading="What is measured"):
    link: bool = option(
        False, "Instead, measure how fast this GPU gets experts from host memory (--expert-memory). explain uses it."
    )


def command(measured: _Measured, output: Output) -> None:
    """Show what this machine has, each backend's verdict on it and which engines are installed, as a block to paste
    into a bug report.

    Needs no GPU and no network. Keys are not shown. If something is broken, its line says so.
    """
    if measured.link:
        _link(output)
        return
    from polymoe.doctor.diagnosis import diagnose

    diagnosis = diagnose()
    if output.json:
        print_json(diagnosis.to_dict())
    else:
        print(diagnosis)


def _link(output: Output) -> None:
    from polymoe.bench.link import measure_link

    link = measure_link()
    path = link.save()
    if output.json:
        print_json(asdict(link))
    else:
        print(link)
    if path is not None:
        say(f"recorded in {path}")
