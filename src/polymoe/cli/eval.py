"""``polymoe eval compare``: the difference of two runs of lm-eval."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from polymoe.cli.options import Output, option
from polymoe.cli.output import cells, print_json, print_table, say

__all__ = ["compare"]


@dataclass(frozen=True)
class _Compared:
    """What is compared."""

    metric: str | None = option(None, "Metric of lm-eval, such as exact_match. Default: the only one.")
    filter: str | None = option(None, "Filter of lm-eval, such as strict-match. Default: the only one.")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Samples of one run.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Samples of the other run.", show_default=False)],
    compared: _Compared,
    output: Output,
) -> None:
    """Compute the difference A - B between two runs of lm-eval with its 95 % interval, paired by question.

    A and B are files that lm_eval writes with --log_samples, or its --output_path. Several files of one run are
    repeats.
    """
    from polymoe.evaluate import compare as difference_of
    from polymoe.evaluate import read_samples

    first, second = (read_samples(path, **vars(compared)) for path in (a, b))
    found = difference_of(first.values, second.values)
    notes = []
    if first.task != second.task:
        notes.append(f"the runs differ in their task: {first.task}, {second.task}")
    if left_out := len(first.values.keys() ^ second.values.keys()):
        asked = len(first.values.keys() | second.values.keys())
        notes.append(f"{left_out} of {asked} questions were answered in one run only: left out")
    for note in notes:
        say(f"note: {note}")
    if output.json:
        print_json(
            {"metric": first.metric, "a_runs": first.runs, "b_runs": second.runs, **asdict(found), "notes": notes}
        )
        return
    rows = [
        ("A", _percent(found.a, found.a_error), first.runs, str(a)),
        ("B", _percent(found.b, found.b_error), second.runs, str(b)),
        ("A - B", f"{100 * found.difference:+.2f} points", None, _interval(found.low, found.high)),
        ("questions", found.questions, None, f"A better on {found.better}, B on {found.worse}"),
    ]
    print_table(cells(("", first.metric, "runs", ""), rows))


def _percent(share: float, error: float | None) -> str:
    return f"{100 * share:.2f} %" + ("" if error is None else f" ± {100 * error:.2f}")


def _interval(low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return None
    return f"95 % interval {100 * low:+.2f} to {100 * high:+.2f} points"
