"""``polymoe bench serve``: a table of a server's performance with a batch, a number of clients or a request rate."""

from __future__ import annotations

import asyncio
import json as jsonlib
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polymoe.cli.commands import Command
from polymoe.cli.output import ClientKey, Json, Server, print_json, print_table
from polymoe.cli.progress import Progress
from polymoe.common.install_command import install_hint

if TYPE_CHECKING:
    from polymoe.bench.energy import EnergyMeter
    from polymoe.bench.serving.record import Load, ServingRecord

__all__ = ["ListCommand", "command"]

_LISTS = ("--batch-size", "--input-len", "--output-len", "--concurrency", "--request-rate", "--gpu-ids")


class ListCommand(Command):
    """A command whose numeric options accept several values: ``--batch-size 1 4 8`` or ``--batch-size 1,4,8``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the numbers after such an option to one value."""
        joined: list[str] = []
        values: list[str] | None = None
        for arg in args:
            name, given, value = arg.partition("=")
            if name in _LISTS:
                values = [value] if given else []
                joined += [name, *values]
            elif values is not None and (arg[:1].isdecimal() or not (values or arg.startswith("--"))):
                joined[len(joined) - bool(values) :] = [",".join([*values, arg])]
                values.append(arg)
            else:
                values = None
                joined.append(arg)
        return super().parse_args(ctx, joined)


def command(
    server: Server,
    batch_size: Annotated[str, typer.Option(help="Batch sizes, each sent at once.")] = "1,4,8,16,32,64,128,256",
    concurrency: Annotated[
        str | None,
        typer.Option(help="Instead of batches: so many requests at a time; each finished one starts the next."),
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="Instead of batches: requests per second on average (Poisson).")
    ] = None,
    input_len: Annotated[str, typer.Option(help="Tokens in a prompt.")] = "8192",
    output_len: Annotated[str, typer.Option(help="Tokens in an answer.")] = "1024",
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "--num-prompts",
            min=1,
            help="Requests of each concurrency or rate. Default: 5 x concurrency, a minute of a rate, 20.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name on the server. Default: its only model.")] = None,
    api_key: ClientKey = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions instead of /v1/completions.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The model's tokenizer, a directory or Hub id, to count tokens. Default: the server counts."),
    ] = None,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Number of tokens that all prompts share, for the server's cache.")
    ] = 0,
    extra_body: Annotated[str | None, typer.Option(help="Further fields of each request, as a JSON object.")] = None,
    gpu_price: Annotated[float | None, typer.Option(min=0, help="US dollars per hour for one GPU, for costs.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that the server runs on.")] = 1,
    gpu_ids: Annotated[
        str | None,
        typer.Option(
            help="Their numbers in nvidia-smi, for tokens per watt. Default: the first ones, if the server is local."
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The server's name in tables. Default: its own name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append each row to this file as one JSON line.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot rates and times over the load as a PNG, with similar rows in --out.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Repeat a short copy of each row under the server's profiler.")
    ] = False,
    warmup: Annotated[bool, typer.Option(help="Send a small row before each row, without measuring it.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Longest silence of the server, in seconds.")] = 600.0,
    request_timeout: Annotated[float, typer.Option(min=1, help="Longest duration of a request, in seconds.")] = 3600.0,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts and arrivals. Default: random.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit for the records, if git does not know it.")] = None,
    json: Json = False,
) -> None:
    """Measure any OpenAI-compatible server from a client: batch by batch, or under load.

    Ctrl-C keeps finished rows. The exit code is 1 if a row has no answer at all.
    """
    if concurrency is not None and request_rate is not None:
        raise typer.BadParameter("give either --concurrency or --request-rate")
    if requests is not None and concurrency is None and request_rate is None:
        raise typer.BadParameter(
            "--requests needs --concurrency or --request-rate; a batch has as many requests as its size"
        )

    from polymoe.bench.plot import check_plot
    from polymoe.bench.records import append, check_writable, source
    from polymoe.bench.serving import report
    from polymoe.bench.serving.prompts import Tokenizer
    from polymoe.bench.serving.record import Origin, newest, read
    from polymoe.errors import ArgumentError, MissingDependency

    try:
        from polymoe.bench.serving.client import Client
        from polymoe.bench.serving.prompts import Prompts
        from polymoe.bench.serving.run import ServingBench, rows
    except ImportError as error:
        raise MissingDependency(
            "polymoe bench serve", expected="aiohttp", got=str(error), hint=install_hint("bench")
        ) from error

    if concurrency is not None:
        mode, loads = "concurrency", _numbers("--concurrency", concurrency, int)
    elif request_rate is not None:
        mode, loads = "rate", _numbers("--request-rate", request_rate, float)
    else:
        mode, loads = "batch", _numbers("--batch-size", batch_size, int)
    planned = rows(
        mode, loads, _numbers("--input-len", input_len, int), _numbers("--output-len", output_len, int), requests
    )
    # Errors that would appear after minutes of measuring are found here.
    client = Client(
        server, model=model, api_key=api_key, chat=chat, extra=_object("--extra-body", extra_body), timeout_s=timeout,
        request_timeout_s=request_timeout,
    )  # fmt: skip
    earlier: list[ServingRecord] = []
    if out is not None:
        check_writable(out)
        earlier = read(out) if plot is not None else []
    if plot is not None:
        check_plot(plot)
    if markdown is not None and not markdown.parent.is_dir():
        raise ArgumentError("--markdown", expected="a file in an existing directory", got=repr(str(markdown)))
    counter = None
    if tokenizer is not None:
        from polymoe.engines.transformers import load_tokenizer

        counter = Tokenizer(load_tokenizer(tokenizer), chat=chat)
    meter = _meter(gpu_ids, gpus, client.host)
    chosen = random.SystemRandom().randrange(2**31) if seed is None else seed
    found: list[ServingRecord] = []

    def keep(record: ServingRecord) -> None:
        found.append(record)
        progress.advance()
        if out is not None:
            append(out, record)

    def traced(load: Load, said: str) -> None:
        print(f"{load}: trace: {said}", file=sys.stderr)

    async def measure() -> None:
        async with client:
            await client.settle()
            if client.refused_fields:
                print(f"the server refuses {', '.join(client.refused_fields)}: left out", file=sys.stderr)

            async def count(text: str) -> int:
                return await client.count(text) if counter is None else counter.count_prompt(text)

            prompts = Prompts(count, seed=chosen, shared=shared_prefix)
            await prompts.calibrate()
            origin = Origin(
                label=label or client.owner or client.host, server=client.url, model=client.model,
                engine=client.owner, device=_names(meter), gpu_price=gpu_price, gpus=gpus, seed=chosen,
                commit=commit or source(), command=_command(),
            )  # fmt: skip
            bench = ServingBench(
                client=client,
                prompts=prompts,
                origin=origin,
                tokenizer=counter,
                meter=meter,
                warm=warmup,
                profile=profile,
                say=progress.update,
            )
            await bench.run(planned, keep, traced)

    try:
        with Progress("bench serve", len(planned)) as progress:
            asyncio.run(measure())
    finally:  # after an interruption too, print finished rows
        if json and found:
            print_json([record.to_dict() for record in found])
        elif found:
            print_table(report.table(found))
        for line in report.remarks(found):
            print(line, file=sys.stderr)
        if markdown is not None and found:
            report.write_markdown(markdown, found)
        if plot is not None and any(record.answered for record in found):
            like = {(r.mode, r.input_len, r.output_len) for r in found}
            report.plot(newest([*(r for r in earlier if (r.mode, r.input_len, r.output_len) in like), *found]), plot)
    if not all(record.answered for record in found):
        raise typer.Exit(1)


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    from polymoe.errors import ArgumentError

    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < 1e9 for value in values):
        raise ArgumentError(option, expected="numbers above 0, such as 1 4 8 or 1,4,8", got=repr(text))
    return values


def _object(option: str, text: str | None) -> dict[str, Any]:
    from polymoe.errors import ArgumentError

    try:
        value = {} if text is None else jsonlib.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentError(option, expected="a JSON object", got=repr(text))
    return value


def _meter(gpu_ids: str | None, gpus: int, host: str) -> EnergyMeter | None:
    """Return a meter of the named GPUs, or else of the first ones if server and NVML are on this machine."""
    from polymoe.bench.energy import EnergyMeter
    from polymoe.errors import ArgumentError, MissingDependency

    if gpu_ids is not None:
        try:
            return EnergyMeter.of_indices([int(part) for part in gpu_ids.split(",")])
        except ValueError as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError("--gpu-ids", expected="numbers such as 0,1", got=repr(gpu_ids)) from None
    if host not in ("127.0.0.1", "localhost", "::1"):
        return None
    try:
        return EnergyMeter.of_indices(range(gpus))
    except (ArgumentError, MissingDependency):
        return None  # optional


def _names(meter: EnergyMeter | None) -> str | None:
    names: Sequence[str] = () if meter is None else list(dict.fromkeys(meter.names()))
    return ", ".join(names) or None


def _command() -> str:
    """Return this command line without the key."""
    words = ["polymoe", *sys.argv[1:]]
    for i, word in enumerate(words):
        if word.startswith("--api-key="):
            words[i] = "--api-key=..."
        elif i and words[i - 1] == "--api-key":
            words[i] = "..."
    return shlex.join(words)
