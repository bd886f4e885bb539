"""RoutingTrace: what is written is read again, and what is not whole is refused with the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polymoe.errors import ArgumentError
from polymoe.layer.routing_trace import RoutingTrace, TracedCall, TracedLayer
from support.traces import trace_of

LAYERS = (TracedLayer("layers.0", 8, 100, 2), TracedLayer("layers.3", 300, 50, 1))
CALLS = [(0, [[3, 1]]), (1, [[299], [7], [7]]), (0, [[2, 2], [0, 7]]), (1, [[-1]]), (0, [[8, 5]])]


def trace() -> RoutingTrace:
    return trace_of(CALLS, *LAYERS)


def test_calls_are_read_as_they_were_written(tmp_path: Path) -> None:
    trace().save(tmp_path / "trace")
    found = RoutingTrace.load(tmp_path / "trace")
    assert (found.model, found.layers) == ("model", LAYERS)
    needed = [[1, 3], [7, 299], [0, 2, 7], [], [5]]  # those of no expert are left out
    expected = [TracedCall(layer, len(rows), n) for (layer, rows), n in zip(CALLS, needed, strict=True)]
    assert list(found.calls()) == expected


@pytest.mark.parametrize("keep", [0, 7, 8, 60, -40, -1])
def test_a_file_that_is_cut_short(tmp_path: Path, keep: int) -> None:
    trace().save(tmp_path / "trace")
    (tmp_path / "trace").write_bytes((tmp_path / "trace").read_bytes()[:keep])
    with pytest.raises(ArgumentError, match=r"whole file that --record-routing wrote, got .*trace: (?s:.*)cut short"):
        RoutingTrace.load(tmp_path / "trace")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: replace(t, ids_N=t.ids_N[:-1]), "11 ids, and calls with 12"),
        (lambda t: replace(t, tokens_C=t.tokens_C[:-1]), "layers of 5 calls, tokens of 4"),
        (lambda t: replace(t, tokens_C=-t.tokens_C), "fewer than 0 tokens"),
        (lambda t: replace(t, layers=LAYERS[:1]), "other than 0 to 0"),
        (lambda t: replace(t, layers=(LAYERS[0], replace(LAYERS[1], top_k=0))), "top_k=0"),
        (lambda t: replace(t, ids_N=t.ids_N.int()), "ids: torch.int32"),
        (lambda t: replace(t, ids_N=t.ids_N[None]), r"ids: torch.int16 \[1, 12\]"),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, change: Callable[[RoutingTrace], RoutingTrace], says: str) -> None:
    change(trace()).save(tmp_path / "trace")
    with pytest.raises(ArgumentError, match=f"got .*trace: .*{says}"):
        RoutingTrace.load(tmp_path / "trace")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (None, "another safetensors file"),
        ({"polymoe_routing": "2"}, "version 1, got .*version 2"),
        ({"polymoe_routing": "1"}, "layers"),
        ({"polymoe_routing": "1", "layers": "[", "model": ""}, "got "),
        ({"polymoe_routing": "1", "layers": json.dumps([{"name": 1}]), "model": ""}, "experts: expected a value"),
        ({"polymoe_routing": "1", "layers": "[]", "model": ""}, "no tensor 'layers'"),
    ],
)
def test_other_files(tmp_path: Path, metadata: dict[str, str] | None, says: str) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "trace", metadata)
    with pytest.raises(ArgumentError, match=says):
        RoutingTrace.load(tmp_path / "trace")
