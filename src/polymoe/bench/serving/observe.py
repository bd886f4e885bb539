"""Optional information from a server: cache hits, speculative decoding, profiler traces.

Metrics: https://docs.vllm.ai/en/stable/usage/metrics/ and https://docs.sglang.io/references/production_metrics.html
Profiler: https://docs.vllm.ai/en/stable/contributing/profiling/ and
https://docs.sglang.io/developer_guide/benchmark_and_profiling.html
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from polymoe.bench.serving.client import Client
from polymoe.bench.serving.measures import Counted
from polymoe.common.json_input import parse_json
from polymoe.common.openai_client import one_line
from polymoe.errors import ServerError

__all__ = ["Metrics", "acceptance_length", "cache_hit_rate", "metrics", "profiled"]

Metrics = Mapping[str, Sequence[float]]
"""Values of each metric, one for each set of labels."""

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})? +(\S+)", re.MULTILINE)

_CACHE = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
)
"""Counters of tokens found in a prefix cache, and of tokens looked up."""
_DRAFTS = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total")
_ACCEPT_LENGTH = "sglang:spec_accept_length"


async def metrics(client: Client) -> Metrics:
    """Read ``/metrics`` in Prometheus' text format; empty if the server has none."""
    status, text = await _look(client, "/metrics")
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text) if status == 200 else ():
        if (number := _finite(value)) is not None:
            found.setdefault(name, []).append(number)
    return found


def _finite(value: Any) -> float | None:
    """Return a number; None for anything else, infinity included."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def cache_hit_rate(answers: Sequence[Counted], before: Metrics, after: Metrics) -> float | None:
    """Share of input tokens found in the prefix cache: ``cached_tokens`` in the usage of the answers over all input
    tokens, else from the server's counters over the same time. None if neither is available."""
    cached = [a.answer.cached_tokens for a in answers if a.answer.cached_tokens is not None]
    total = sum(a.input_tokens for a in answers)
    if cached and total:
        return sum(cached) / total
    for hits, looked_up in _CACHE:
        found, tokens = _increase(hits, before, after), _increase(looked_up, before, after)
        if 0 <= found <= tokens and tokens > 0:
            return found / tokens
    return None


async def acceptance_length(client: Client, before: Metrics, after: Metrics) -> float | None:
    """Tokens per step of speculative decoding, including the step's own. None without speculative decoding.

    From vLLM's counters it is ``1 + accepted / drafts`` over the time between the two readings; SGLang's gauge or
    server information give a recent mean, or the mean since the start.
    """
    accepted, drafts = _DRAFTS
    taken, steps = _increase(accepted, before, after), _increase(drafts, before, after)
    if taken >= 0 and steps > 0:
        return 1 + taken / steps
    if gauge := [value for value in after.get(_ACCEPT_LENGTH, ()) if value > 0]:
        return sum(gauge) / len(gauge)
    if client.model.owner != "sglang":
        return None
    for path in ("/server_info", "/get_server_info"):
        status, body = await _look(client, path)
        if status == 200:
            return _of_server_info(body)
    return None


async def _look(client: Client, path: str) -> tuple[int, str]:
    """Status and text; never raises: answers are kept even if the server has gone."""
    try:
        reply = await client.look("GET", path)
        return reply.status, reply.whole().decode(errors="replace")
    except (ServerError, ValueError):
        return 0, ""


def _of_server_info(body: str) -> float | None:
    try:
        lengths = [_finite(s.get("avg_spec_accept_length")) for s in parse_json(body)["internal_states"]]
        found = [length for length in lengths if length is not None and length > 0]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return sum(found) / len(found) if found else None


def _increase(name: str, before: Metrics, after: Metrics) -> float:
    return sum(after.get(name, ())) - sum(before.get(name, ()))


async def profiled(client: Client, work: Callable[[], Awaitable[Any]]) -> str:
    """Run ``work`` between ``/start_profile`` and ``/stop_profile``, and return the server's message about its trace.

    The directory for traces is set when the server starts: vLLM ``--profiler-config``, SGLang
    ``SGLANG_TORCH_PROFILER_DIR``, polymoe ``--profile``.

    Raises:
        ServerError: if it has no profiler or fails to start or stop it.
    """
    await _switch(client, "/start_profile")
    try:
        await work()
    finally:
        said = await _switch(client, "/stop_profile")
    return one_line(said, 500) or "written to the server's trace directory"


async def _switch(client: Client, path: str) -> str:
    reply = await client.look("POST", path)
    if reply.status != 200:
        raise ServerError(
            client.server.root + path,
            expected="a server started with its profiler",
            got=reply.reason(),
            hint="polymoe serve --profile DIR; vllm serve --profiler-config ...; SGLang always has it",
        )
    return reply.body.decode(errors="replace")
