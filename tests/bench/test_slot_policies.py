"""Replays of recorded routing: hits as layers have them, no policy above the clairvoyant one, the command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch

from polymoe.bench.slot_policies import POLICIES, Replay, replays, slots_of_layers
from polymoe.errors import ArgumentError
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.routing_trace import RoutingTrace, TracedCall, TracedLayer
from support.problems import GPT_OSS, random_experts
from support.traces import trace_of

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"

Cli = Callable[..., tuple[int, str, str]]


def replayed(trace: RoutingTrace, slots: tuple[int, ...]) -> dict[str, Replay]:
    return {result.policy: result for result in replays(list(trace.calls()), trace, slots)}


def layer(experts: int, top_k: int, name: str = "layer") -> TracedLayer:
    return TracedLayer(name, experts, 1000, top_k)


@pytest.mark.parametrize("slots", [2, 3, 5, 7])
def test_least_recently_used_counts_what_a_layer_counts(slots: int) -> None:
    """Also where calls between need more experts than there are slots."""
    weights = random_experts("mxfp4", bias=True, experts=8)
    resident = FusedExperts.from_weights(weights, GPT_OSS, top_k=2, device="cpu", backend="reference")
    offloaded, rng, calls = OffloadedExperts(resident, slots), random.Random(slots), []
    for number in range(60):
        tokens = 8 if number % 10 == 9 else 1 + (number % 7 == 0)
        calls.append((0, [rng.sample(range(8), 2) for _ in range(tokens)]))
        ids = torch.tensor(calls[-1][1])
        offloaded(torch.randn(tokens, 64), ids, torch.ones(ids.shape))
    found = replayed(trace_of(calls, layer(8, 2)), (slots,))["least recently used"]
    stats, swept = offloaded.cache_stats(), offloaded._swept
    assert swept.sweeps
    assert (found.hits, found.misses) == (stats["hits"] - swept.hits, stats["misses"] - swept.misses)


def random_calls(count: int) -> Iterator[tuple[int, int, list[list[int]]]]:
    """Experts, slots, and the experts that each of nine calls needs, of a few that are needed often."""
    rng = random.Random(0)
    for _ in range(count):
        experts = rng.randrange(3, 7)
        slots = rng.randrange(1, experts)
        rows = [sorted(rng.sample(range(experts), rng.randrange(1, slots + 1))) for _ in range(9)]
        yield experts, slots, rows


def fewest_misses(rows: list[list[int]], experts: int, slots: int) -> int:
    """By trying every content that the slots can have after each call."""

    @cache
    def after(at: int, held: frozenset[int]) -> int:
        if at == len(rows):
            return 0
        needed = frozenset(rows[at])
        could = held | needed
        keep = slots if len(could) > slots else len(could)
        contents = (needed | set(more) for more in combinations(sorted(could - needed), keep - len(needed)))
        return len(needed - held) + min(after(at + 1, frozenset(content)) for content in contents)

    return after(0, frozenset())


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_the_clairvoyant_one_has_the_fewest_misses(count: int) -> None:
    for experts, slots, rows in random_calls(count):
        calls = [TracedCall(0, 1, row) for row in rows]
        trace = trace_of([], layer(experts, 1))
        misses = {result.policy: result.misses for result in replays(calls, trace, (slots,))}
        assert misses["clairvoyant"] == fewest_misses(rows, experts, slots) <= min(misses.values())


def test_what_is_used_often_stays_by_frequency() -> None:
    """Expert 0 is needed in every third call, and others in turn between them."""
    calls = [(0, [[0]] if at % 3 == 0 else [[1 + at % 7]]) for at in range(84)]
    found = replayed(trace_of(calls, layer(8, 1)), (2,))
    assert found["least recently used"].hits == 0
    for name in POLICIES:
        assert (found[name].hits == 26) == name.startswith("frequency"), name


def test_a_pool_gives_slots_to_the_layers_that_need_them() -> None:
    """One layer always needs the same expert, the other three in turn."""
    layers = layer(4, 1, "same"), layer(4, 1, "turns")
    calls = [call for at in range(30) for call in ((0, [[1]]), (1, [[at % 3]]))]
    found = replayed(trace_of(calls, *layers), (2, 2))
    assert (found["least recently used"].hits, found["least recently used"].misses) == (29, 31)
    assert (found["one pool"].hits, found["one pool"].misses) == (56, 4)


def test_misses_of_a_token_are_those_of_all_layers() -> None:
    """Of calls that fit into the slots, whatever their tokens."""
    layers = layer(8, 2, "first"), TracedLayer("second", 8, 10, 1)
    calls = [(0, [[0, 1], [1, 0]]), (1, [[3], [3]]), (0, [[0, 1], [2, 3]]), (1, [[3], [4]]), (0, [[5, 6]])]
    found = replayed(trace_of(calls, *layers), (2, 2))["least recently used"]
    assert (found.hits, found.misses) == (1, 6)
    assert found.misses_per_token == 4 / 3 + 2 / 4
    assert found.bytes_per_token == 4000 / 3 + 20 / 4
    assert found.hit_rate == 1 / 7


def test_layers_whose_calls_are_not_counted_have_no_misses_of_a_token(cli: Cli, tmp_path: Path) -> None:
    layers = layer(8, 1, "first"), layer(8, 2, "second")
    calls = [(0, [[0]]), (1, [[0, 1], [2, 3]])]
    for counted, rate in ((calls, 0.0), (calls[1:], None)):
        trace_of(counted, *layers).save(tmp_path / "trace")
        command = "bench", "slots", "--trace", tmp_path / "trace", "--slots", "2", "--link", "1"
        found = json.loads(cli(*command, "--json")[1])["replays"][0]
        names = "hit_rate", "misses_per_token", "bytes_per_token", "link_seconds_per_token"
        assert [found[name] for name in names] == [rate, None, None, [None]]
        [row] = [line for line in cli(*command)[1].splitlines() if "least recently" in line]
        assert row.count(" - ") == (2 if rate is not None else 3)


@pytest.mark.parametrize(
    ("wanted", "slots"), [(2, (2, 2)), (3, (3, 3)), (0.5, (4, 2)), (0.25, (2, 2)), (0.01, (1, 2)), (0.99, (7, 3))]
)
def test_numbers_and_shares(wanted: float, slots: tuple[int, int]) -> None:
    assert slots_of_layers(wanted, trace_of([], layer(8, 1), layer(4, 2))) == slots


@pytest.mark.parametrize("wanted", [1, 4, 8])
def test_slots_that_a_layer_cannot_have(wanted: int) -> None:
    with pytest.raises(ArgumentError, match=f"slots: expected 2 .* to 3, for small, got {wanted}"):
        slots_of_layers(wanted, trace_of([], layer(16, 1), layer(4, 2, "small")))


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    calls = [(0, [[0, 1]]), (0, [[0, 1]]), (0, [[0, 1], [2, 3]]), (0, [[0, 4]])]
    trace_of(calls, layer(8, 2)).save(tmp_path / "trace")
    code, out, err = cli("bench", "slots", "--trace", tmp_path / "trace", "--slots", "2,50%", "--link", 0.5)
    assert (code, "ms/token, 0.5 GB/s" in out, "50%: 4" in out) == (0, True, True)
    assert all(name in out for name in POLICIES)
    assert "2 slots: 1 of 4 calls need more experts" in err
    code, out, _ = cli("bench", "slots", "--trace", tmp_path / "trace", "--slots", "2", "--link", 0.5, "--json")
    found = json.loads(out)
    first = found["replays"][0]
    assert (found["links"], len(found["replays"])) == ([{"name": "0.5 GB/s", "bytes_per_s": 5e8}], len(POLICIES))
    assert (first["hits"], first["misses"], first["calls_not_counted"], first["slots_of_layers"]) == (3, 3, 1, [2])
    assert first["link_seconds_per_token"] == [first["bytes_per_token"] / 5e8] == [1000 / 5e8]
    found = json.loads(cli("bench", "slots", "--trace", tmp_path / "trace", "--json")[1])
    assert [link["bytes_per_s"] for link in found["links"]] == [26e9, 55e9]  # where nothing was measured


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--slots", "9"), "--slots: expected 2"),
        *((("--slots", text), "shares such as") for text in ("x", "0", "-2", "2.5", "0%", "100%", "%", "99999", "²")),
        *((("--link", text), "--link") for text in ("0", "inf", "nan")),
    ],
)
def test_the_command_refuses(cli: Cli, tmp_path: Path, given: tuple[str, str], says: str) -> None:
    trace_of([(0, [[0, 1]])], layer(8, 2)).save(tmp_path / "trace")
    code, out, err = cli("bench", "slots", "--trace", tmp_path / "trace", *given)
    assert (code, out, says in err) == (2, "", True), err


def test_what_run_records_is_replayed(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    recorded = tmp_path / "routing"
    code, out, err = cli("run", SUMS, "--device", "cpu", "1+1=", "20+30=", "--record-routing", recorded)
    assert (code, out) == (0, "1+1= 2\n20+30= 50\n"), err
    assert RoutingTrace.load(recorded).model == SUMS.name
    code, out, _ = cli("bench", "slots", "--trace", recorded, "--slots", "4")
    assert (code, "sums-gpt-oss-mxfp4: 4 layers, 2 of 8 experts" in out) == (0, True)
    before = recorded.read_bytes()
    code, out, err = cli("run", SUMS, "--device", "cpu", "1+1=", "--record-routing", recorded)
    assert (code, out, "--record-routing: expected a new file" in err) == (2, "", True)
    assert recorded.read_bytes() == before
