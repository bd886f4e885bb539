"""``polymoe bench serve``: a table of a server's performance with batches of requests."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from polymoe.cli.options import Options, RecordOutput, json_object, numbers, option
from polymoe.cli.output import command_line, print_json, print_table, say
from polymoe.cli.progress import Progress
from polymoe.errors import ArgumentError, MissingDependency, printable

if TYPE_CHECKING:
    from polymoe.bench.energy import EnergyMeter
    from polymoe.bench.serving.record import ServingRecord

_counts = numbers(1, 10**9)


class _Load(Options, heading="Load"):
    batch_size: tuple[int, ...] = option("1,4,8,16,32,64,128,256", "Batch sizes, each sent at once.", parse=_counts)
    input_len: tuple[int, ...] = option("8192", "Tokens in a prompt.", parse=_counts)
    output_len: tuple[int, ...] = option("1024", "Tokens in an answer.", parse=_counts)
    warmup: bool = option(True, "Send a small batch before each row, without measuring it.")
    seed: int | None = option(None, "Seed of prompts. Default: random.")


class _Access(Options, heading="Server"):
    server: str = option(
        ..., "The server's URL, such as http://127.0.0.1:8000, with or without /v1.", "--server", "--base-url",
        show_default=False,
    )  # fmt: skip
    model: str | None = option(None, "The model's name on the server. Default: its only model.")
    api_key: str | None = option(
        None, "The server's key, a bearer token.", envvar=["POLYMOE_API_KEY", "OPENAI_API_KEY"], show_default=False
    )
    chat: bool = option(False, "Use /v1/chat/completions instead of /v1/completions.")
    extra: dict[str, Any] | None = option(
        None, "Further fields of each request, as a JSON object.", "--extra-body", parse=json_object
    )
    timeout_s: float = option(600.0, "Longest silence of the server, in seconds.", "--timeout", min=1)


class _Gpus(Options, heading="Costs and energy"):
    gpu_price: float | None = option(None, "US dollars per hour for one GPU, for costs.", min=0)
    gpus: int = option(1, "GPUs that the server runs on.", min=1)
    gpu_ids: str | None = option(
        None, "Their numbers in nvidia-smi, for tokens per watt. Default: the first ones, if the server is local."
    )


class _Output(RecordOutput):
    label: str | None = option(None, "The server's name in tables. Default: its own name.")


def command(access: _Access, load: _Load, gpus: _Gpus, output: _Output) -> None:
    """Measure any OpenAI-compatible server from a client, batch by batch.

    For steady load, guidellm asks the same server: docs/serving-benchmarks.md has the command.
    Ctrl-C keeps finished rows. The exit code is 1 if a row has no answer at all.
    """
    from polymoe.bench.records import source
    from polymoe.bench.serving.client import Client, Server
    from polymoe.bench.serving.prompts import Prompts
    from polymoe.bench.serving.record import Origin
    from polymoe.bench.serving.run import ServingBench, rows

    # Errors that would appear after minutes of measuring are found here.
    server = Server(url=access.server, api_key=access.api_key or "none", timeout_s=access.timeout_s)
    planned = rows(load.batch_size, load.input_len, load.output_len)
    append = output.appender()
    meter = _meter(gpus.gpu_ids, gpus.gpus, server.host)
    found: list[ServingRecord] = []

    def keep(record: ServingRecord) -> None:
        found.append(record)
        progress.advance()
        append(record)

    async def measure() -> None:
        async with Client(server, model=access.model, chat=access.chat, extra=access.extra) as client:
            await client.settle()
            if not client.ignores_eos:
                say("the server refuses ignore_eos: answers may end early")
            seed = random.SystemRandom().randrange(2**31) if load.seed is None else load.seed
            prompts = Prompts(client.count, seed=seed)
            await prompts.calibrate()
            origin = Origin(
                label=output.label or client.owner or server.host, server=server.base_url.removesuffix("/v1"),
                model=client.model, engine=client.owner, gpu_price=gpus.gpu_price, gpus=gpus.gpus, seed=seed,
                device=", ".join(dict.fromkeys(meter.names())) if meter else None,
                commit=output.commit or source(), command=command_line(),
            )  # fmt: skip
            bench = ServingBench(
                client=client, prompts=prompts, origin=origin, meter=meter, warm=load.warmup, say=progress.update
            )
            await bench.run(planned, keep)

    try:
        with Progress("bench serve", len(planned)) as progress:
            asyncio.run(measure())
    finally:  # after an interruption too, print finished rows
        _report(found, output)
    if not all(record.answered for record in found):
        raise typer.Exit(1)


def _report(found: list[ServingRecord], output: _Output) -> None:
    from polymoe.bench.serving import report

    if output.json and found:
        print_json([asdict(record) for record in found])
    elif found:
        shown = report.columns(found)
        rows = zip(*(column for _, column in shown), strict=True)
        print_table([heading for heading, _ in shown], rows, report.title(found[0]))
    for line in report.remarks(found):
        say(printable(line))


def _meter(gpu_ids: str | None, gpus: int, host: str) -> EnergyMeter | None:
    """Return a meter of the named GPUs, or else of the first ones if server and NVML are on this machine."""
    from polymoe.bench.energy import EnergyMeter

    if gpu_ids is not None:
        try:
            indices = [int(part) for part in gpu_ids.split(",")]
        except ValueError:
            raise ArgumentError("--gpu-ids", expected="numbers such as 0,1", got=repr(gpu_ids)) from None
        return EnergyMeter.of_indices(indices)
    if host not in ("127.0.0.1", "localhost", "::1"):
        return None
    try:
        return EnergyMeter.of_indices(range(gpus))
    except (ArgumentError, MissingDependency):
        return None  # optional
