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
        typer.Option(envvar="POLYMOE_API_KEY", help="What clients must send as a bearer token.", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: the path's last part.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens an answer. Default: what fits.")] = None,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Larger requests are refused.")] = 4 * 2**20,
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Requests that run or wait; more are answered 429.")
    ] = 128,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that answers may go on after SIGTERM.")] = 2.0,
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Requests share forward passes (CUDA only).")
    ] = False,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Small steps of continuous batching from CUDA graphs. Default: where the backend can be captured.",
        ),
    ] = None,
    cache_memory: Annotated[
        float | None,
        typer.Option(min=0.01, max=0.95, help="Share of free GPU memory for keys and values. Default: Transformers'."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Directory for profiler traces: adds /start_profile and /stop_profile.")
    ] = None,
    backend: Backend = "auto",
    role: Role = "mixed",
    device: OnDevice = "auto",
) -> None:
    """Serve /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics until stopped."""
    if not continuous_batching and (graphs is not None or cache_memory is not None):
        raise typer.BadParameter("--graphs and --cache-memory go with --continuous-batching")
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
