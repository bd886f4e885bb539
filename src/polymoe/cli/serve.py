"""``polymoe serve``: an OpenAI-compatible server for one checkpoint."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from polymoe.cli.output import (
    Backend,
    Checkpoint,
    DeviceMap,
    MaxTokens,
    OnDevice,
    Role,
    TensorParallel,
    listed,
    no_tensor_parallel,
    say,
)

__all__ = ["command"]


def command(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Bearer token that clients must send. Default: $POLYMOE_API_KEY.", show_default=False),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", "--served-model-name", help="The model's name for clients. Default: the last part of the path."
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    max_request_bytes: Annotated[
        int, typer.Option(min=1, help="Maximum size of a request; larger ones are refused with 413.")
    ] = 4 * 2**20,
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Maximum number of requests that run or wait; more are refused with 429.")
    ] = 128,
    max_connections: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of connections; beyond it, the one that has waited longest for a complete request "
            "is closed. Default: 1024, or fewer if the limit on file descriptors is lower.",
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for which running answers may continue after SIGTERM.")
    ] = 2.0,
    cors_origins: Annotated[
        str | None,
        typer.Option(
            help="Origins of web pages that may call the server, separated by commas; '*' allows all. Default: none."
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="Log each request on stderr.")
    ] = True,
    continuous_batching: Annotated[
        bool | None,
        typer.Option(
            "--continuous-batching/--no-continuous-batching",
            help="Let requests share forward passes (CUDA only). Default: where the model allows it.",
        ),
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Replay small steps of continuous batching from CUDA graphs. Default: if the backend can be captured.",
        ),
    ] = None,
    cache_memory: Annotated[
        float | None,
        typer.Option(min=0.01, max=0.95, help="Share of free GPU memory for keys and values. Default: Transformers'."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, help="Sampling temperature of requests without one; 0 is greedy. Default: the checkpoint's."
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Directory for profiler traces; enables /start_profile and /stop_profile.")
    ] = None,
    backend: Backend = "auto",
    role: Role = "mixed",
    device: OnDevice = "auto",
    device_map: DeviceMap = None,
    tp: TensorParallel = 1,
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models, /docs, /health and /metrics until stopped."""
    no_tensor_parallel(tp)
    if continuous_batching is False and {graphs, cache_memory} != {None}:
        raise typer.BadParameter("--graphs and --cache-memory need --continuous-batching")
    origins = () if cors_origins is None else listed(cors_origins, "--cors-origins")
    if api_key is None:  # read here: Typer takes an empty variable for one that is not set, and would admit everybody
        api_key = os.environ.get("POLYMOE_API_KEY")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from polymoe.serve import serve

    _log_to_stderr(access_log)
    say(f"loading {checkpoint}")
    ended = serve(
        checkpoint,
        host=host,
        port=port,
        api_key=api_key,
        name=name,
        backend=backend,
        role=role,
        device=device,
        device_map=device_map,
        max_tokens=max_tokens,
        max_request_bytes=max_request_bytes,
        max_concurrent_requests=max_concurrent_requests,
        max_connections=max_connections,
        grace_s=grace,
        continuous_batching=continuous_batching,
        graphs=graphs,
        cache_memory=cache_memory,
        temperature=temperature,
        cors_origins=origins,
        profile=profile,
        on_loaded=say,
        on_ready=lambda url: say(f"{url}/docs describes the API\nserving on {url}"),
    )
    if not ended:
        sys.stdout.flush()
        os._exit(0)


def _log_to_stderr(requests: bool) -> None:
    """Show what the server logs of its throughput, and of requests."""
    log = logging.getLogger("polymoe.serve")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    log.handlers = [handler]
    for name in ("access", "other"):
        log.getChild(name).disabled = not requests
