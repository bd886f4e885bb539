"""``polymoe serve``: an OpenAI-compatible server for one checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from polymoe.cli.output import Backend, Checkpoint, OnDevice, Role, status

__all__ = ["command"]


def command(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="POLYMOE_API_KEY", help="Bearer token that clients must send.", show_default=False),
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
    profile: Annotated[
        Path | None, typer.Option(help="Directory for profiler traces; enables /start_profile and /stop_profile.")
    ] = None,
    backend: Backend = "auto",
    role: Role = "mixed",
    device: OnDevice = "auto",
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics until stopped."""
    if not continuous_batching and (graphs is not None or cache_memory is not None):
        raise typer.BadParameter("--graphs and --cache-memory need --continuous-batching")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from polymoe.serve import serve

    err = status()
    err.print(f"loading {checkpoint}", highlight=False)
    serve(
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
        grace_s=grace,
        continuous_batching=continuous_batching,
        graphs=graphs,
        cache_memory=cache_memory,
        profile=profile,
        on_ready=lambda url: err.print(f"serving on {url}", highlight=False),
    )
