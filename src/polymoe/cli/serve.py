"""``polymoe serve``: an OpenAI-compatible server for one checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from typing import Literal, NoReturn

import typer

from polymoe.checkpoint.hub import require_name
from polymoe.cli.options import CheckpointName, Options, Placement, RecordedRouting, Sampling, listed, option
from polymoe.cli.output import say


class _Address(Options, heading="Address"):
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.", min=0, max=65535)
    api_key: str | None = option(
        None, "Bearer token that clients must send. Default: $POLYMOE_API_KEY.", show_default=False
    )
    name: str | None = option(
        None, "The model's name for clients. Default: the last part of the path.", "--name", "--served-model-name"
    )
    cors_origins: tuple[str, ...] | None = option(
        None, "Origins of web pages that may call the server, separated by commas; '*' allows all. Default: none.",
        parse=listed,
    )  # fmt: skip


class _Limits(Options, heading="Limits"):
    max_request_bytes: int = option(4 * 2**20, "Maximum size of a request; larger ones are refused with 413.", min=1)
    max_concurrent_requests: int = option(
        128, "Maximum number of requests that run or wait; more are refused with 429.", min=1
    )
    grace_s: float = option(2.0, "Seconds for which running answers may continue after SIGTERM.", "--grace", min=0)


class _Batching(Options, heading="Batching"):
    continuous_batching: bool | None = option(
        None, "Let requests share forward passes (CUDA only). Default: where the model allows it."
    )
    graphs: bool | None = option(
        None, "Replay small steps of continuous batching from CUDA graphs. Default: if the backend can be captured."
    )
    cache_memory: float | None = option(
        None, "Share of free GPU memory for keys and values. Default: Transformers'.", min=0.01, max=0.95
    )


class _Logs(RecordedRouting, heading="Logs"):
    access_log: bool = option(True, "Log each request on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Minimum level of log lines.")


def command(
    checkpoint: CheckpointName,
    address: _Address,
    sampling: Sampling,
    limits: _Limits,
    batching: _Batching,
    logs: _Logs,
    placement: Placement,
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models, /docs, /health and /metrics until stopped."""
    if batching.continuous_batching is False and {batching.graphs, batching.cache_memory} != {None}:
        raise typer.BadParameter("--graphs and --cache-memory need --continuous-batching")
    if batching.graphs and logs.record_routing is not None:
        raise typer.BadParameter("--record-routing sees no call that a CUDA graph replays: leave --graphs out")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    require_name(checkpoint)
    from polymoe.serve import serve
    from polymoe.serve.logs import logging_to_stderr

    asked = {**vars(address), **vars(sampling), **vars(limits), **vars(batching), **placement.load}
    if address.api_key is None:  # read here: Typer takes an empty variable for one that is not set, and would admit all
        asked["api_key"] = os.environ.get("POLYMOE_API_KEY")
    say(f"loading {checkpoint}")
    with logging_to_stderr(logs.log_level, requests=logs.access_log) as written:
        stopped_by = serve(
            checkpoint,
            **{**asked, "cors_origins": address.cors_origins or ()},
            record_routing=logs.record_routing,
            on_loaded=say,
            on_ready=lambda url: say(f"{url}/docs describes the API\nserving on {url}"),
        )
        if written():  # otherwise nobody reads stderr, and a line more would wait for ever
            say("stopped")
    _exit(128 + signal.SIGTERM if stopped_by == signal.SIGTERM else 0)


def _exit(code: int) -> NoReturn:
    """End the process now. Python's own end waits for threads that still compute, and extensions such as RE2's report
    what was not freed, which is everything that such a thread holds."""
    sys.stdout.flush()
    os._exit(code)
