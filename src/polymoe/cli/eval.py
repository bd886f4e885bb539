"""``polymoe eval``: accuracy of an OpenAI-compatible server; ``polymoe eval compare``: the difference of two runs."""

from __future__ import annotations

import contextlib
import json as jsonlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from polymoe.cli.output import ClientKey, Json, console, listed, print_json, print_table, say
from polymoe.cli.output import Server as ServerUrl
from polymoe.cli.progress import Progress
from polymoe.errors import ArgumentError, PolymoeError

if TYPE_CHECKING:
    from rich.table import Table

    from polymoe.evaluate import AnswerRecord, Run, Score

__all__ = ["command", "compare"]


def command(
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Questions: JSONL with prompt and answer, or GSM8K, AIME or GPQA as published."
        ),
    ] = None,
    server: ServerUrl = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="The model's name on the server. Default: its only model.")] = None,
    api_key: ClientKey = None,
    task: Annotated[
        Literal["auto", "exact", "gsm8k", "aime", "gpqa"],
        typer.Option(help="Kind of questions; auto detects it from the fields in the file."),
    ] = "auto",
    repeats: Annotated[int, typer.Option("--repeats", "-n", min=1, help="How often each question is asked.")] = 1,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "--threads", min=1, help="Number of simultaneous requests.")
    ] = 16,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature. Default: the server's.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling. Default: the server's.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--max-new-tokens",
            min=1,
            help="Maximum number of tokens in an answer. Default: the server's.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed for the order of options; also sent with each request.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="chat, or completions without a chat template.")
    ] = "chat",
    extra: Annotated[
        str | None, typer.Option(help="""Further fields of each request, as JSON: '{"reasoning_effort": "high"}'.""")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first questions.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest duration of a request, in seconds.")] = 1800.0,
    retries: Annotated[int, typer.Option(min=0, help="Retries after 429, 5xx, timeouts and broken connections.")] = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the answers. Default: in this directory, named after questions, model and settings."
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over and replace the answers in the file.")] = False,
    tasks: Annotated[str | None, typer.Option(help="Instead of a file: tasks of lm-eval, separated by commas.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="A directory with further lm-eval tasks.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question (lm-eval).")] = None,
    json: Json = False,
) -> None:
    """Ask a server questions and count the right answers, with error bars. Repeat the command to continue after an
    interruption.
    """
    if (data is None) == (tasks is None):
        raise ArgumentError("eval", expected="a file of questions, or --tasks", got="both" if data else "neither")
    of_files = {"--task": task != "auto", "--repeats": repeats != 1, "--seed": seed is not None,
                "--out": out is not None, "--fresh": fresh}  # fmt: skip
    of_tasks = {"--include-path": include_path is not None, "--num-fewshot": num_fewshot is not None}
    lost = [name for name, given in (of_tasks if tasks is None else of_files).items() if given]
    if lost:
        what = "lm-eval's tasks" if tasks is not None else "a file of questions"
        raise ArgumentError("eval", expected=f"options for {what}", got=", ".join(lost))
    if out is not None and not out.parent.is_dir():
        raise ArgumentError("--out", expected="a file in an existing directory", got=repr(str(out)))
    from polymoe.evaluate.server import Server

    to = Server(url=server, api_key=api_key or "none", concurrency=concurrency, timeout_s=timeout, retries=retries)
    fields = _object(extra)
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    if tasks is not None:
        from polymoe.evaluate.harness import run_tasks

        given = {name: value for name, value in {**sampling, **fields}.items() if value is not None}
        results, table = run_tasks(
            listed(tasks, "--tasks"),
            server=to,
            model=model,
            endpoint=endpoint,
            include_path=include_path,
            num_fewshot=num_fewshot,
            limit=limit,
            system=system,
            sampling=given,
        )
        print_json(results) if json else print(table)
        return
    assert data is not None
    from polymoe.evaluate import evaluate

    with _progress() as (on_start, on_record):
        run = evaluate(
            data, server=to, model=model, task=task, repeats=repeats, limit=limit, endpoint=endpoint, seed=seed,
            system=system, extra=fields, out=out, fresh=fresh, on_start=on_start, on_record=on_record, **sampling,
        )  # fmt: skip
    if json:
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
        raise _incomplete(run)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Answers of one run.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Answers of the other run.", show_default=False)],
    json: Json = False,
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
    if json:
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
    found = {"right": 0, "invalid": 0, "new": 0, "done": 0, "total": 0}
    where: list[Path] = []
    bar = Progress("answered")

    def on_start(path: Path, done: int, total: int) -> None:
        where.append(path)
        found.update(done=done, total=total)
        kept = f", which has {done} of {total}; --fresh starts over" if done else ""
        say(f"answers: {path}{kept}")
        bar.__enter__()
        bar.start(done, total)

    def on_record(record: AnswerRecord) -> None:
        found["new"] += 1
        found["right"] += record.correct
        found["invalid"] += record.answer is None
        bar.advance()
        bar.update(f"{_percent(found['right'] / found['new'])} right, {found['invalid']} invalid")

    try:
        yield on_start, on_record
    except (KeyboardInterrupt, PolymoeError):
        bar.close()
        if found["new"]:
            done = f"{found['done'] + found['new']} of {found['total']} answers are in {where[0]}"
            say(f"{done}; the same command continues there")
        raise
    finally:
        bar.close()


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
        ("questions", f"{run.settings.data} ({run.settings.task}): {score.questions}, answers {score.answers}"),
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
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = jsonlib.loads(text or "{}")
    except ValueError as error:
        raise ArgumentError("--extra", expected="a JSON object", got=f"{text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentError("--extra", expected="a JSON object", got=repr(text))
    return value


def _incomplete(run: Run) -> PolymoeError:
    from polymoe.errors import ServerError

    return ServerError(
        "eval",
        expected="an answer to every question",
        got=f"{len(run.failures)} without an answer, the first: {run.failures[0]}",
        hint="the same command asks them again",
    )
