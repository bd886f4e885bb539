"""The life of a server: it listens, loads the model, answers, and ends cleanly after a signal.

The end has three steps. The gate refuses new requests at once; ``grace_s`` seconds later, generations end at their
next token; half a second later, answers that have not ended are broken off.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from polymoe.common.install_command import install_hint
from polymoe.common.units import format_bytes
from polymoe.errors import ArgumentError, MissingDependency

if TYPE_CHECKING:
    from polymoe.serve.app import ModelServer
    from polymoe.serve.gate import Gate
    from polymoe.serve.http_server import HttpServer

__all__ = ["serve"]

log = logging.getLogger("polymoe")

_STEP_S = 0.5
"""Seconds for each step of the end: for generations to reach their next token, for broken-off answers to be sent, and
for the model to finish."""


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
    device_map: str | None = None,
    expert_memory: str | None = None,
    max_tokens: int | None = None,
    max_request_bytes: int = 4 * 2**20,
    max_concurrent_requests: int = 128,
    max_connections: int | None = None,
    grace_s: float = 2.0,
    continuous_batching: bool | None = None,
    graphs: bool | None = None,
    cache_memory: float | None = None,
    temperature: float | None = None,
    cors_origins: Sequence[str] = (),
    page: bool = True,
    profile: str | Path | None = None,
    on_loaded: Callable[[str], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int | None:
    """Serve the checkpoint at ``path`` until SIGTERM or Ctrl-C; then refuse new requests and end those that run.

    Args:
        path: a checkpoint's directory or a Hub id.
        host, port: the address to listen on; port 0 takes a free one.
        api_key: the bearer token that clients must send, in printable ASCII; None admits everybody. ``/health`` never
            needs it.
        name: the model's name in requests and answers; by default the last part of ``path``.
        backend, role, device, device_map, expert_memory: as in :func:`polymoe.engines.transformers.load`.
        max_tokens: maximum number of tokens in an answer; None if only the context limits it.
        max_request_bytes: larger requests are refused with 413.
        max_concurrent_requests: maximum number of generations that run or wait; more are refused with 429.
        max_connections: maximum number of connections, above which requests are answered with 503; None is what the
            limit on file descriptors allows, which is raised as far as it may be.
        grace_s: seconds for which running answers may continue after SIGTERM.
        continuous_batching: whether requests share forward passes (CUDA only); otherwise they run one after the other.
            None is wherever that is faster.
        graphs, cache_memory: of continuous batching, as in :class:`~polymoe.serve.app.ModelServer`.
        temperature: of requests that name none; None is the checkpoint's own.
        cors_origins: origins of web pages that may ask the server, such as ``https://example.com``; ``*`` is all.
        page: answer ``/`` with a page to chat in.
        profile: a directory for profiler traces; enables ``/start_profile`` and ``/stop_profile``.
        on_loaded: called with lines about the model, its memory and the limits, once it is loaded.
        on_ready: called with the server's URL once it answers.

    Requests and throughput are logged at level INFO by loggers below ``polymoe.serve``.

    Returns:
        The number of the signal that ended it; None if none did. A thread may still compute a step of the model or a
        prompt, neither of which can be interrupted. Python's own end may then take seconds, or crash in that thread's
        code; :func:`os._exit` does not.

    Raises:
        ArgumentError: for an address that cannot be listened on, such as a port in use, a key that no client can send,
            invalid origins, and limits that do not fit together or the limit on file descriptors; raised before
            loading.
        MissingDependency: if the serving packages are not installed.
        CheckpointError, UnsupportedProblem: as for loading.
    """
    try:
        from transformers.utils.logging import set_verbosity_error

        from polymoe.serve.http_server import HttpServer, bind, connection_limit, is_loopback, url
    except ImportError as error:
        raise MissingDependency("polymoe serve", got=str(error), hint=install_hint("serve")) from error
    from polymoe.engines.transformers import load
    from polymoe.serve.app import ModelServer
    from polymoe.serve.gate import Gate, cors
    from polymoe.serve.logs import access_log
    from polymoe.serve.profiling import add_profiler, check_directory
    from polymoe.serve.summary import summary

    _check_key(api_key)
    limits = (max_request_bytes, max_concurrent_requests, 1 if max_tokens is None else max_tokens)
    if min(limits) < 1 or grace_s < 0:
        raise ArgumentError("serve", expected="limits of at least 1, and no negative grace", got="a limit below that")
    _check_origins(cors_origins)
    connections = connection_limit(max_connections, max_concurrent_requests)
    if profile is not None:
        check_directory(Path(profile))
    with bind(host, port) as listener:
        if api_key is None and not is_loopback(listener):
            log.warning("%s can be reached from other machines, and there is no API key", host)
        placed = {} if device_map is None else {"device_map": device_map}
        model, tokenizer = load(path, device=device, backend=backend, role=role, expert_memory=expert_memory, **placed)
        set_verbosity_error()  # Transformers warns at requests
        served = ModelServer(
            model,
            tokenizer,
            name=name or Path(path).resolve().name,
            max_tokens=max_tokens,
            continuous_batching=continuous_batching,
            graphs=graphs,
            cache_memory=cache_memory,
            temperature=temperature,
            page=page,
        )
        if profile is not None:
            add_profiler(served.app, Path(profile))
        gate = Gate(
            served.app,
            metrics=served.metrics,
            api_key=api_key,
            max_request_bytes=max_request_bytes,
            max_concurrent_requests=max_concurrent_requests,
            on_answer=access_log,
        )
        if on_loaded:
            longest = "the context" if max_tokens is None else f"{max_tokens:,} tokens"
            key = "no API key" if api_key is None else "an API key is required"
            limit = (
                f"{max_concurrent_requests} requests of at most {format_bytes(max_request_bytes)}, {connections} "
                f"connections, answers up to {longest}; {key}"
            )
            on_loaded(summary(served, model, limits=limit))
        gc.freeze()  # what is loaded stays: neither the garbage collector nor the end of the process has to visit it
        server = HttpServer(cors(gate, cors_origins), listener, most=connections, stop_s=grace_s + 2 * _STEP_S)
        return _run_until_signal(server, gate, served, grace_s, lambda: on_ready and on_ready(url(listener)))


def _check_key(key: str | None) -> None:
    if key is None:
        return
    if not key.strip():
        expected, got = "a key that is not empty", "an empty one" if not key else "nothing but white space"
    elif key != key.strip():
        expected, got = "a key without white space around it", "white space before or after the key"
    elif not (key.isascii() and key.isprintable()):
        expected, got = "a key in printable ASCII, which clients can send in a header", "other characters"
    else:
        return
    raise ArgumentError(
        "--api-key or POLYMOE_API_KEY", expected=expected, got=got, hint="unset it to accept requests without a key"
    )


def _check_origins(origins: Sequence[str]) -> None:
    for origin in origins:
        try:
            parts = urlsplit(origin)
            valid = (
                parts.scheme in ("http", "https") and f"{parts.scheme}://{parts.netloc}" == origin and parts.hostname
            )
        except ValueError:
            valid = False
        if not valid and origin != "*":
            raise ArgumentError("cors_origins", expected="* or origins such as https://example.com", got=repr(origin))


def _run_until_signal(
    server: HttpServer, gate: Gate, served: ModelServer, grace_s: float, on_ready: Callable[[], Any]
) -> int | None:
    from polymoe.serve.logs import log_throughput

    tasks: list[asyncio.Task[None]] = []  # the event loop keeps no reference of its own

    def ready() -> None:
        tasks.append(asyncio.get_running_loop().create_task(log_throughput(served.metrics)))
        on_ready()

    def stop() -> None:
        for task in tasks:
            task.cancel()
        gate.close()
        loop = asyncio.get_running_loop()
        loop.call_later(grace_s, served.end)
        loop.call_later(grace_s + _STEP_S, gate.cut)

    server.on_ready, server.on_stop = ready, stop
    with _signals_only_stop() as stopped_by:
        server.run()
        served.close(_STEP_S)
    return next(iter(stopped_by), None)


@contextmanager
def _signals_only_stop() -> Iterator[list[int]]:
    """The signals that uvicorn raises again once they have stopped it, which do not end the process."""
    raised: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield raised
        return
    previous = {
        number: signal.signal(number, lambda number, _: raised.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield raised
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
