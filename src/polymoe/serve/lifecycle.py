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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from polymoe.common.atomic import require_new_file
from polymoe.common.install_command import packages_of
from polymoe.common.units import format_bytes
from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    from polymoe.serve.app import ModelServer
    from polymoe.serve.gate import Gate
    from polymoe.serve.http_server import HttpServer

log = logging.getLogger("polymoe")

_STEP_S = 0.5
"""Seconds for each step of the end: for generations to reach their next token, for broken-off answers to be sent, and
for the model to finish."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        host, port: the address to listen on; port 0 takes a free one.
        api_key: the bearer token that clients must send, in printable ASCII; None admits everybody. ``/health`` never
            needs it.
        name: the model's name in requests and answers; by default the last part of the checkpoint's path.
        backend, role, device, device_map, expert_memory, experts: as in :func:`polymoe.engines.transformers.load`.
        max_tokens: maximum number of tokens in an answer; None if only the context limits it.
        max_request_bytes: larger requests are refused with 413.
        max_concurrent_requests: maximum number of generations that run or wait; more are refused with 429.
        grace_s: seconds for which running answers may continue after SIGTERM.
        continuous_batching: whether requests share forward passes (CUDA only); otherwise they run one after the other.
            None is wherever that is faster.
        graphs: replay small steps of continuous batching from CUDA graphs; None means wherever possible.
        cache_memory: share of the GPU's free memory for keys and values of continuous batching; None is Transformers'
            default.
        temperature: of requests that name none; None is the checkpoint's own.
        cors_origins: origins of web pages that may ask the server, such as ``https://example.com``; ``*`` is all.
        record_routing: a new file for the expert ids of all calls, written at the end; without CUDA graphs.

    Raises:
        ArgumentError: for a key that no client can send, invalid origins, limits below 1, and routing that is to be
            recorded with CUDA graphs.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    name: str | None = None
    backend: str = "auto"
    role: str = "mixed"
    device: str = "auto"
    device_map: str | None = None
    expert_memory: str | None = None
    experts: str | None = None
    max_tokens: int | None = None
    max_request_bytes: int = 4 * 2**20
    max_concurrent_requests: int = 128
    grace_s: float = 2.0
    continuous_batching: bool | None = None
    graphs: bool | None = None
    cache_memory: float | None = None
    temperature: float | None = None
    cors_origins: Sequence[str] = ()
    record_routing: str | Path | None = None

    def __post_init__(self) -> None:
        _check_key(self.api_key)
        limits = (
            self.max_request_bytes,
            self.max_concurrent_requests,
            1 if self.max_tokens is None else self.max_tokens,
        )
        if min(limits) < 1 or self.grace_s < 0:
            expected, got = "limits of at least 1, and no negative grace", "a limit below that"
            raise ArgumentError("serve", expected=expected, got=got)
        _check_origins(self.cors_origins)
        if self.record_routing is not None and self.graphs:
            expected, got = "no CUDA graphs, whose replays cannot be recorded", "graphs=True"
            raise ArgumentError("record_routing", expected=expected, got=got)

    def of(self, *names: str) -> dict[str, Any]:
        """Some of them, as keywords."""
        return {name: getattr(self, name) for name in names}


def serve(
    path: str | Path,
    *,
    on_loaded: Callable[[str], None] = lambda text: None,
    on_ready: Callable[[str], None] = lambda url: None,
    **options: Any,
) -> int | None:
    """Serve the checkpoint at ``path`` until SIGTERM or Ctrl-C; then refuse new requests and end those that run.

    Args:
        path: a checkpoint's directory or a Hub id.
        on_loaded: called with lines about the model, its memory and the limits, once it is loaded.
        on_ready: called with the server's URL once it answers.
        options: of :class:`ServerOptions`.

    Requests are logged at level INFO by loggers below ``polymoe.serve``.

    Returns:
        The number of the signal that ended it; None if none did. A thread may still compute a step of the model or a
        prompt, neither of which can be interrupted. Python's own end may then take seconds, or crash in that thread's
        code; :func:`os._exit` does not.

    Raises:
        ArgumentError: for an address that cannot be listened on, such as a port in use, and for options that are wrong
            or do not fit together or the limit on file descriptors; raised before loading.
        MissingDependency: if the serving packages are not installed.
        CheckpointError, UnsupportedProblem: as for loading.
    """
    with packages_of("serve", "polymoe serve"):
        from polymoe.serve.http_server import HttpServer, bind, connection_limit, is_loopback, url

    o = ServerOptions(**options)
    recorded = None if o.record_routing is None else require_new_file(o.record_routing, "record_routing")
    connections = connection_limit(o.max_concurrent_requests)
    with bind(o.host, o.port) as listener:  # before the imports that take seconds
        with packages_of("serve", "polymoe serve"):
            from transformers.utils.logging import set_verbosity_error

            from polymoe.engines.transformers import load
            from polymoe.engines.transformers.loading import require_gpu
            from polymoe.engines.transformers.routing_recorder import recorded_routing
            from polymoe.serve.app import ModelServer
            from polymoe.serve.gate import Gate, cors
            from polymoe.serve.logs import access_log
            from polymoe.serve.summary import summary

        if o.api_key is None and not is_loopback(listener):
            log.warning("%s can be reached from other machines, and there is no API key", o.host)
        batching = o.of("continuous_batching", "graphs", "cache_memory")
        for name in filter(batching.get, batching):  # before a model is loaded for nothing
            require_gpu(name, o.device, hint=f"serve without {name}: requests then run one after the other")
        placed = {} if o.device_map is None else {"device_map": o.device_map}
        model, tokenizer = load(path, **o.of("device", "backend", "role", "expert_memory", "experts"), **placed)
        set_verbosity_error()  # Transformers warns at requests
        if recorded is not None:
            batching["graphs"] = False
        answers = o.of("max_tokens", "temperature")
        served = ModelServer(model, tokenizer, name=o.name or Path(path).resolve().name, **batching, **answers)
        admitted = o.of("api_key", "max_request_bytes", "max_concurrent_requests")
        gate = Gate(served.app, metrics=served.metrics, on_answer=access_log, **admitted)
        longest = "the context" if o.max_tokens is None else f"{o.max_tokens:,} tokens"
        key = "no API key" if o.api_key is None else "an API key is required"
        each = f"{o.max_concurrent_requests} requests of at most {format_bytes(o.max_request_bytes)}"
        limits = f"{each}, {connections} connections, answers up to {longest}; {key}"
        on_loaded(summary(served, model, limits=limits))
        gc.freeze()  # what is loaded stays: neither the garbage collector nor the end of the process has to visit it
        server = HttpServer(cors(gate, o.cors_origins), listener, most=connections, stop_s=o.grace_s + 2 * _STEP_S)
        with nullcontext() if recorded is None else recorded_routing(model, recorded, required=False):
            return _run_until_signal(server, gate, served, o.grace_s, lambda: on_ready(url(listener)))


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
    def stop() -> None:
        gate.close()
        loop = asyncio.get_running_loop()
        loop.call_later(grace_s, served.end)
        loop.call_later(grace_s + _STEP_S, gate.cut)

    server.on_ready, server.on_stop = on_ready, stop
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
