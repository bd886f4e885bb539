"""``polymoe serve``: one model behind an OpenAI-compatible address.

:func:`serve` runs until it is told to stop. The model and its endpoints are
:class:`~polymoe.serve.app.ModelServer`'s; here is what stands between it and the network: the
listening socket, the :class:`~polymoe.serve.gate.Gate`, and a clean end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polymoe.errors import ArgumentError, MissingDependency

__all__ = ["bind", "serve"]

log = logging.getLogger("polymoe")

_END_S = 0.5
"""How long answers have to reach their next token once they must end; then to be broken off; then the model to rest."""


def serve(
    path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    name: str | None = None,
    backend: str = "auto",
    role: str = "mixed",
    device: str = "auto",
    max_tokens: int | None = None,
    max_request_bytes: int = 4 * 2**20,
    max_concurrent_requests: int = 128,
    grace_s: float = 2.0,
    continuous_batching: bool = False,
    graphs: bool | None = None,
    cache_memory: float | None = None,
    profile: str | Path | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the checkpoint at ``path`` until SIGTERM or Ctrl-C, which refuses new requests and ends those under way.

    Args:
        path: a checkpoint's directory or a Hub id.
        host, port: where to listen; port 0 takes a free one.
        api_key: what clients must send as a bearer token; None lets everybody in. ``/health`` needs none.
        name: what clients call the model; by default the last part of ``path``.
        backend, role, device: as in :func:`polymoe.engines.transformers.load`.
        max_tokens: most tokens of one answer; None is what fits in the model's context.
        max_request_bytes: larger requests are refused with 413.
        max_concurrent_requests: generations that run or wait; more are refused with 429.
        grace_s: how long answers under way may go on after SIGTERM before they are cut short.
        continuous_batching: let requests share forward passes (CUDA only); otherwise they run one after the other.
        graphs, cache_memory: of continuous batching, as in :class:`~polymoe.serve.app.ModelServer`.
        profile: a directory for profiler traces, and with it ``/start_profile`` and ``/stop_profile``.
        on_ready: called with the server's URL once it answers.

    Raises:
        ArgumentError: for an address that cannot be listened on, as when the port is in use. Found before loading.
        MissingDependency: if the serving packages are not installed.
        CheckpointError, UnsupportedProblem: as for loading.
    """
    try:
        import uvicorn
        from transformers.utils.logging import set_verbosity_error
    except ImportError as error:
        raise MissingDependency("polymoe serve", got=str(error), hint="pip install 'polymoe[serve]'") from error
    from polymoe.engines.transformers import load
    from polymoe.serve.app import ModelServer
    from polymoe.serve.gate import Gate
    from polymoe.serve.profiling import add_profiler, check_directory

    limits = (max_request_bytes, max_concurrent_requests, 1 if max_tokens is None else max_tokens)
    if api_key == "" or min(limits) < 1 or grace_s < 0:
        raise ArgumentError(
            "serve", expected="a key that is not empty, limits of at least 1", got="an empty key or limit"
        )
    if profile is not None:
        check_directory(Path(profile))
    with bind(host, port) as listener:
        if api_key is None and not _is_loopback(listener):
            log.warning("%s can be reached from other machines, and there is no API key", host)
        model, tokenizer = load(path, device=device, backend=backend, role=role)
        set_verbosity_error()  # Transformers' server warns of every request
        served = ModelServer(
            model,
            tokenizer,
            name=name or Path(path).resolve().name,
            max_tokens=max_tokens,
            continuous_batching=continuous_batching,
            graphs=graphs,
            cache_memory=cache_memory,
        )
        if profile is not None:
            add_profiler(served.app, Path(profile))
        gate = Gate(
            served.app,
            metrics=served.metrics,
            api_key=api_key,
            max_request_bytes=max_request_bytes,
            max_concurrent_requests=max_concurrent_requests,
        )

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started and on_ready:
                    on_ready(_url(listener))

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                gate.close()
                loop = asyncio.get_running_loop()
                loop.call_later(grace_s, served.end)
                loop.call_later(grace_s + _END_S, gate.cut)
                await super().shutdown(sockets)

        config = uvicorn.Config(
            gate,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,  # longer than clients keep a connection: who closes first may not be answering
            timeout_graceful_shutdown=grace_s + 2 * _END_S,  # type: ignore[arg-type]
        )
        gc.freeze()  # what is loaded stays: collecting garbage need not look at it, nor the end of the process
        with _signals_end_here():
            Server(config).run(sockets=[listener])
            served.close(_END_S)


@contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A TCP socket that listens on the address; closed at the end.

    Raises:
        ArgumentError: if the host is unknown, or the port in use or not allowed.
    """
    where = f"{host}:{port}"
    if not 0 <= port < 2**16:
        raise ArgumentError(where, expected="a port from 0 to 65535", got=str(port))
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ArgumentError(where, expected="an address of this machine", got=str(error)) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            # Two sockets may be bound to one address while neither listens. Listening takes it for good, before the
            # model is loaded; who connects early waits.
            listener.listen()
        except OSError as error:
            raise ArgumentError(
                where,
                expected="an address that is free to listen on",
                got=str(error),
                hint="--port 0 takes any free port",
            ) from error
        yield listener


@contextmanager
def _signals_end_here() -> Iterator[None]:
    """uvicorn raises a signal that stopped it once more when it has stopped; here that must not end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_loopback(listener: socket.socket) -> bool:
    host = listener.getsockname()[0]
    return host.startswith("127.") or host == "::1"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
