"""``polymoe serve``: an OpenAI-compatible server for one checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from polymoe.cli.output import Backend, Checkpoint, OnDevice, Role, say

__all__ = ["command"]


def command(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Bearer token that clients must send. Default: $POLYMOE_API_KEY.", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients. Default: the last part of the path.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of tokens in an answer. Default: what fits in the context."),
    ] = None,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Larger requests are refused with 413.")] = 4 * 2**20,
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Maximum number of requests that run or wait; more are refused with 429.")
    ] = 128,
    max_connections: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of connections; for another one, the one that has waited longest for a whole request "
            "is closed. Default: 1024, or fewer if the limit on file descriptors is lower.",
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for which running answers may continue after SIGTERM.")
    ] = 2.0,
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Let requests share forward passes (CUDA only).")
    ] = False,
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
            min=0, max=100, help="Of all requests with continuous batching; 0 is greedy. Default: the checkpoint's."
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Directory for profiler traces; enables /start_profile and /stop_profile.")
    ] = None,
    backend: Backend = "auto",
    role: Role = "mixed",
    device: OnDevice = "auto",
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics until stopped."""
    if not continuous_batching and {graphs, cache_memory, temperature} != {None}:
        raise typer.BadParameter("--graphs, --cache-memory and --temperature need --continuous-batching")
    if api_key is None:  # read here: Typer takes an empty variable for one that is not set, and would admit everybody
        api_key = os.environ.get("POLYMOE_API_KEY")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from polymoe.serve import serve

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
        max_tokens=max_tokens,
        max_request_bytes=max_request_bytes,
        max_concurrent_requests=max_concurrent_requests,
        max_connections=max_connections,
        grace_s=grace,
        continuous_batching=continuous_batching,
        graphs=graphs,
        cache_memory=cache_memory,
        temperature=temperature,
        profile=profile,
        on_ready=lambda url: say(f"serving on {url}"),
    )
    if not ended:
        sys.stdout.flush()
        os._exit(0)
