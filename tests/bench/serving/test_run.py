"""Rows against a stand-in with known delays: the numbers, faults, what is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import asdict, replace
from typing import Any

import pytest

pytest.importorskip("httpx_aiohttp")

from polymoe.bench.serving.prompts import Prompts
from polymoe.bench.serving.record import Load, Origin, ServingRecord
from polymoe.bench.serving.run import ServingBench, rows
from polymoe.errors import ArgumentError, ServerError
from support.standin import Standin, client_of

ORIGIN = Origin(
    label="standin", server="http://127.0.0.1:1", model="words", engine="standin", device=None, gpu_price=3.6, gpus=2,
    seed=5, commit="abc", command="polymoe bench serve",
)  # fmt: skip
BATCH = Load(batch_size=4, input_len=50, output_len=20)


class Counter:
    """An energy meter: 30 J more at each reading."""

    def __init__(self) -> None:
        self.read = itertools.count(100, 30)

    def joules(self) -> float:
        return float(next(self.read))


def measured(standin: Standin, *loads: Load, **kwargs: Any) -> list[ServingRecord]:
    """Records of these rows, not warmed up unless asked for."""
    found: list[ServingRecord] = []

    async def run() -> None:
        async with client_of(standin.url) as client:
            await client.settle()
            prompts = Prompts(client.count, seed=ORIGIN.seed)
            await prompts.calibrate()
            bench = ServingBench(client=client, prompts=prompts, origin=ORIGIN, **{"warm": False, **kwargs})
            await bench.run(loads, found.append)

    asyncio.run(run())
    return found


# --- The numbers ----------------------------------------------------------------------------------------------------


def test_a_batch_with_known_delays() -> None:
    """0.2 s to the first token, then 20 ms a token: bounds leave room for a busy machine on one side."""
    with Standin(first_s=0.2, gap_s=0.02).running() as standin:
        (r,) = measured(standin, BATCH, meter=Counter())
    assert (r.answered, r.refused, r.failed, r.errors, r.notes) == (4, 0, 0, {}, ())
    assert (r.input_tokens, r.output_tokens, r.tokens_per_chunk) == (200, 80, 1.0)
    assert r.duration_us is not None
    assert r.latency_us is not None
    assert r.ttft_us is not None
    assert r.itl_us is not None
    assert 0.58e6 <= r.duration_us < 1.2e6
    assert 0.58e6 <= r.latency_us.p50 <= r.latency_us.max <= r.duration_us
    assert 0.2e6 <= r.ttft_us.p50 <= r.ttft_us.max < 0.5e6
    assert r.itl_us.mean == pytest.approx(20e3, rel=0.3)
    assert r.itl_us.p50 == pytest.approx(20e3, rel=0.3)
    assert r.input_tps == pytest.approx(200 / (r.ttft_us.max / 1e6), rel=0.05)
    assert r.output_tps == pytest.approx(4 / 0.02, rel=0.3)
    assert r.at_once == standin.most == 4
    # Two GPUs at $3.60 an hour are $0.002 a second.
    assert r.input_cost == pytest.approx(0.002 / r.input_tps * 1e6)
    assert r.output_cost == pytest.approx(0.002 / r.output_tps * 1e6)
    assert (r.joules, r.tokens_per_joule) == (30.0, 80 / 30)
    assert 0 < r.client_load < 1.5


# --- What a reader must know ----------------------------------------------------------------------------------------


def notes_of(r: ServingRecord) -> str:
    return "\n".join(r.notes)


def test_answers_one_by_one_are_no_batch() -> None:
    with Standin(first_s=0.02, gap_s=0.005, one_by_one=True).running() as standin:
        (r,) = measured(standin, BATCH)
    assert r.at_once == 1
    assert "at most 1 of 4 answers ran at once" in notes_of(r)


def test_answers_that_end_early_are_counted_as_they_are() -> None:
    with Standin(gap_s=0.01, stops_after=12, refuses=("ignore_eos",)).running() as standin:
        (r,) = measured(standin, BATCH)
    assert r.output_tokens == 48
    assert notes_of(r) == "answers had 12 tokens, not 20"
    with Standin(gap_s=0.01, stops_after=12).running() as standin:
        assert measured(standin, BATCH)[0].output_tokens == 80  # it takes ignore_eos


# --- Faults ---------------------------------------------------------------------------------------------------------


def test_what_fails_in_the_middle_takes_nothing_with_it() -> None:
    with Standin(gap_s=0.005, breaks={0: "cut", 1: "error"}).running() as standin:
        first, second = measured(standin, BATCH, replace(BATCH, output_len=21))
    assert (first.answered, first.refused, first.failed) == (2, 0, 2)
    assert first.output_tokens == 40
    assert first.itl_us is not None
    assert first.errors["out of memory"] == 1
    assert any("payload is not completed" in message for message in first.errors)
    assert second.answered == 4


def test_refusals_are_counted_by_themselves() -> None:
    with Standin(first_s=0.2, room=3).running() as standin:
        (r,) = measured(standin, replace(BATCH, batch_size=8))
    assert (r.answered, r.refused, r.failed, r.errors) == (3, 5, 0, {"HTTP 429: no room": 5})


def test_the_first_400_ends_the_run() -> None:
    """Also in the middle of a row, whose other requests are not sent."""
    with Standin(context=500).running() as standin, pytest.raises(ServerError, match="context holds 500 tokens"):
        measured(standin, replace(BATCH, input_len=600), BATCH)
    with Standin(first_s=0.5, breaks={3: "400"}).running() as standin:
        with pytest.raises(ServerError, match="expected answers, got HTTP 400: a fault"):
            measured(standin, BATCH, BATCH)
        assert len(standin.measured) <= 4


def test_rows_longer_than_the_model_takes_are_refused_before_any_is_measured() -> None:
    with Standin(max_model_len=500).running() as standin:
        with pytest.raises(ArgumentError, match=r"at most 500 tokens, the server's limit, got 481 and --output-len 20"):
            measured(standin, BATCH, replace(BATCH, input_len=481))
        assert standin.measured == []
        assert len(measured(standin, replace(BATCH, input_len=480))) == 1


def test_a_server_that_is_gone_ends_the_run_with_its_rows_kept() -> None:
    found: list[ServingRecord] = []

    async def until_it_ends() -> None:
        with Standin().running() as standin:
            async with client_of(standin.url) as client:
                await client.settle()
                prompts = Prompts(client.count, seed=1)
                await prompts.calibrate()
                bench = ServingBench(client=client, prompts=prompts, origin=ORIGIN, warm=False)
                await bench.run([BATCH], found.append)
                client.server = replace(client.server, url="http://127.0.0.1:9")  # nobody listens there
                await bench.run([replace(BATCH, output_len=21)] * 3, found.append)

    with pytest.raises(ServerError, match="expected answers"):
        asyncio.run(until_it_ends())
    assert [(r.answered, r.failed) for r in found] == [(4, 0), (0, 4)]


# --- What servers say of themselves ---------------------------------------------------------------------------------


def test_cached_tokens_in_the_answers_usage() -> None:
    with Standin(cached_tokens=10).running() as standin:
        (r,) = measured(standin, BATCH)
    assert r.cache_hit_rate == pytest.approx(40 / 200)
    with Standin().running() as standin:
        assert measured(standin, BATCH)[0].cache_hit_rate is None


# --- Order, warm-up, records ----------------------------------------------------------------------------------------


def test_rows_in_order() -> None:
    found = rows((1, 4), (64, 128), (8,))
    assert [(r.batch_size, r.input_len) for r in found] == [(1, 64), (4, 64), (1, 128), (4, 128)]


def test_each_batch_size_is_warmed_up_once_and_with_other_prompts() -> None:
    with Standin().running() as standin:
        measured(standin, BATCH, replace(BATCH, output_len=30), replace(BATCH, batch_size=2), warm=True)
    warm = [body for body in standin.asked if body["stream"] and body["max_tokens"] == 8]
    assert len(warm) == 4 + 2
    prompts = [body["prompt"] for body in standin.asked]
    assert len(set(prompts)) == len(prompts)


def test_a_record_is_a_line() -> None:
    with Standin(breaks={0: "500"}).running() as standin:
        failed, whole = measured(standin, replace(BATCH, batch_size=1), BATCH)
    values = json.loads(json.dumps(asdict(whole)))
    assert values["itl_us"].keys() == {"mean", "p50", "p90", "p99", "max"}
    assert (failed.itl_us, failed.output_tps, failed.errors) == (None, None, {"HTTP 500: a fault": 1})
