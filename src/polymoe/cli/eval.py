"""``polymoe eval``: accuracy of an OpenAI-compatible server; ``polymoe eval compare``: the difference of two runs."""

from __future__ import annotations

import contextlib
import json as jsonlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from polymoe.cli.options import Output, ServerAccess, file_to_write, json_object, option
from polymoe.cli.output import cells, console, print_json, print_table, say
from polymoe.cli.progress import Progress
from polymoe.common.openai_client import Server
from polymoe.errors import PolymoeError, ServerError

if TYPE_CHECKING:
    from rich.table import Table

    from polymoe.evaluate import AnswerRecord, Run, Score

__all__ = ["command", "compare"]


@dataclass(frozen=True)
class _Questions:
    """Questions."""

    limit: int | None = option(None, "Only the first questions.", min=1)
    repeats: int = option(1, "How often each question is asked.", "--repeats", "-n", min=1)
    seed: int | None = option(None, "Seed from which that of each request follows.")


@dataclass(frozen=True)
class _Access(ServerAccess):
    """Server."""

    server: str = option("http://127.0.0.1:8000", "The server's URL, with or without /v1.", "--server", "--base-url")
    endpoint: Literal["chat", "completions"] = option("chat", "chat, or completions without a chat template.")
    concurrency: int = option(16, "Number of simultaneous requests.", "--concurrency", "--threads", min=1)
    timeout_s: float = option(1800.0, "Longest duration of a request, in seconds.", "--timeout", min=0.1)
    retries: int = option(8, "Retries after 429, 5xx, timeouts and broken connections.", min=0)


@dataclass(frozen=True)
class _Fields:
    """Answers."""

    system: str | None = option(None, "A system message.")
    temperature: float | None = option(None, "Sampling temperature. Default: the server's.", min=0)
    top_p: float | None = option(None, "Nucleus sampling. Default: the server's.", min=0, max=1)
    max_tokens: int | None = option(
        None, "Maximum number of tokens in an answer. Default: the server's.", "--max-tokens", "--max-new-tokens", min=1
    )
    extra: dict[str, Any] | None = option(
        None, """Further fields of each request, as JSON: '{"reasoning_effort": "high"}'.""", "--extra",
        parse=json_object,
    )  # fmt: skip


@dataclass(frozen=True)
class _Output(Output):
    """Output."""

    out: Path | None = option(
        None, "File for the answers. Default: in this directory, named after questions, model and settings.", "--out",
        parse=file_to_write,
    )  # fmt: skip
    fresh: bool = option(False, "Start over and replace the answers in the file.", "--fresh")


def command(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Questions: JSONL with prompt and answer.",
            show_default=False,
        ),
    ],
    access: _Access,
    questions: _Questions,
    answers: _Fields,
    output: _Output,
) -> None:
    """Ask a server questions and count the right answers, with error bars. Repeat the command to continue after an
    interruption.

    For public tasks, lm-eval asks the same server: docs/evaluation.md has the command.
    """
    server = Server(
        url=access.server, api_key=access.api_key or "none", concurrency=access.concurrency,
        timeout_s=access.timeout_s, retries=access.retries,
    )  # fmt: skip
    fields: dict[str, Any] = {**vars(answers), "extra": answers.extra or {}}
    from polymoe.evaluate import evaluate

    with _progress() as (on_start, on_record):
        run = evaluate(
            data, server=server, model=access.model, endpoint=access.endpoint, **vars(questions), **fields,
            out=output.out, fresh=output.fresh, on_start=on_start, on_record=on_record,
        )  # fmt: skip
    if output.json:
        score = asdict(run.score) if run.score else None
        settings = {**asdict(run.settings), "extra": jsonlib.loads(run.settings.extra)}
        lists = {"failures": list(run.failures), "malformed": list(run.malformed)}
        print_json({"records": str(run.path), "settings": settings, "score": score, **lists})
    elif run.score:
        print_table(_table(run, run.score))
    if run.malformed:
        said = f"replies that are not responses of the API, counted as wrong: {len(run.malformed)}, the first: "
        say(f"note: {said}{run.malformed[0]}")
    if run.failures:
        got = f"{len(run.failures)} without an answer, the first: {run.failures[0]}"
        hint = "the same command asks them again"
        raise ServerError("eval", expected="an answer to every question", got=got, hint=hint)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Answers of one run.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Answers of the other run.", show_default=False)],
    output: Output,
) -> None:
    """Compute the difference A - B between two runs with its 95 % interval, paired by question."""
    from polymoe.evaluate import compare as difference_of
    from polymoe.evaluate import read_records

    (settings_a, records_a), (settings_b, records_b) = read_records(a), read_records(b)
    found = difference_of(records_a, records_b)
    notes = [f"the runs differ in {difference}" for difference in settings_a.differences(settings_b)]
    asked = {record.id for record in (*records_a, *records_b)}
    if len(asked) > found.questions:
        notes.append(
            f"{len(asked) - found.questions} of {len(asked)} questions were answered in one run only: left out"
        )
    for note in notes:
        say(f"note: {note}")
    if output.json:
        print_json({"a_records": str(a), "b_records": str(b), **asdict(found), "notes": notes})
        return
    rows = [
        ("A", f"{_percent(found.a)}  {a}"),
        ("B", f"{_percent(found.b)}  {b}"),
        ("A - B", f"{100 * found.difference:+.2f} points"),
    ]
    if found.low is not None and found.high is not None:
        rows.append(("95 % interval", f"{100 * found.low:+.2f} to {100 * found.high:+.2f} points"))
    rows.append(("questions", f"{found.questions}: A better on {found.better}, B on {found.worse}"))
    console().print(_rows(rows))


@contextlib.contextmanager
def _progress() -> Iterator[tuple[Any, Any]]:
    """Show a progress bar on stderr, as callbacks of :func:`polymoe.evaluate.evaluate`, and name the file of
    answers."""
    new = right = invalid = 0
    begun = ""  # where the answers are, and how many there will be

    def on_start(path: Path, done: int, total: int) -> None:
        nonlocal begun
        begun = f"of {total} answers are in {path}"
        kept = f", which has {done} of {total}; --fresh starts over" if done else ""
        bar.say(f"answers: {path}{kept}")
        bar.start(done, total)

    def on_record(record: AnswerRecord) -> None:
        nonlocal new, right, invalid
        new, right, invalid = new + 1, right + record.correct, invalid + (record.answer is None)
        bar.advance()
        bar.update(f"{_percent(right / new)} right, {invalid} invalid")

    with Progress("answered") as bar:
        try:
            yield on_start, on_record
        except (KeyboardInterrupt, PolymoeError):
            bar.close()
            if new:
                say(f"{bar.done} {begun}; the same command continues there")
            raise


def _table(run: Run, score: Score) -> Table:
    from polymoe.evaluate.scores import unseen_share

    if score.standard_error is None:
        interval = ""
    elif score.standard_error > 0:
        between = f"95 % interval {100 * score.low:.2f} to {100 * score.high:.2f} %"
        interval = f" ± {100 * score.standard_error:.2f} (standard error; {between})"
    else:
        share = _percent(unseen_share(score.questions))
        interval = f" (all questions alike: no variance seen; at 95 % up to {share} of others may differ)"
    rows = [
        ("model", run.settings.model),
        ("questions", f"{run.settings.data}: {score.questions}, answers {score.answers}"),
        ("pass@1", _percent(score.pass_at_1) + interval),
    ]
    if score.repeat_std is not None and score.repeat_standard_error is not None:
        spread = (
            f"standard deviation {100 * score.repeat_std:.2f}, standard error {100 * score.repeat_standard_error:.2f}"
        )
        rows.append((f"over {score.repeats} repeats", spread))
    malformed = f", {len(run.malformed)} of them malformed" if run.malformed else ""
    rows.append(("invalid", f"{score.invalid} without an answer{malformed}, {score.cut_off} cut off"))
    latency = (score.latency_p50_us, score.latency_p90_us, score.latency_p99_us)
    rows.append(("latency", " / ".join(f"{us / 1e6:.2f}" for us in latency) + " s (p50 / p90 / p99)"))
    if score.output_tokens_per_s is not None:
        rows.append(("output", f"{score.output_tokens} tokens, {score.output_tokens_per_s:.1f} tok/s"))
    return _rows(rows)


def _rows(rows: list[tuple[str, str]]) -> Table:
    table = cells(("", ""), rows)
    table.show_header, table.box, table.pad_edge = False, None, False
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
