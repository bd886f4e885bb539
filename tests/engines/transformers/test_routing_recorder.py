"""recorded_routing: every call of every layer, or an error that says why not; a whole file or none."""

from __future__ import annotations

import signal
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from polymoe.engines.transformers import load, routing_recorder
from polymoe.engines.transformers.families import PackedExperts
from polymoe.engines.transformers.routing_recorder import recorded_routing
from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.layer.experts import FusedExperts
from polymoe.layer.routing_trace import RoutingTrace
from support.packed_model import CHECKPOINT
from support.small_models import build

IDS = torch.tensor([[3, 4, 5]])


def forward(model: Any, ids: torch.Tensor = IDS) -> None:
    with torch.inference_mode():
        model(input_ids=ids)


def record_until(error: BaseException, path: Path, model: Any, calls: int) -> None:
    with recorded_routing(model, path):
        for _ in range(calls):
            forward(model)
        raise error


def test_the_ids_are_those_that_the_experts_get(
    packed: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = packed[0], []
    run = PackedExperts.forward
    monkeypatch.setattr(
        PackedExperts, "forward", lambda self, *args: (seen.append(args[1].tolist()), run(self, *args))[1]
    )
    with recorded_routing(model, tmp_path / "trace"):
        forward(model)
        forward(model, IDS[:, :1])
    trace = RoutingTrace.load(tmp_path / "trace")
    assert trace.model == CHECKPOINT.name
    assert [(row.name, row.experts, row.top_k) for row in trace.layers] == [
        (f"model.layers.{n}.mlp.experts", 8, 2) for n in range(4)
    ]
    assert {row.expert_bytes for row in trace.layers} == {
        m.problem.spec.expert_bytes for m in model.modules() if isinstance(m, FusedExperts)
    }
    assert trace.tokens_C.tolist() == [3] * 4 + [1] * 4
    assert trace.ids_N.tolist() == [e for call in seen for row in call for e in row]
    forward(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_experts_in_16_bit(tmp_path: Path) -> None:
    model, experts = build("qwen3_moe")
    with recorded_routing(model, tmp_path / "trace"):
        forward(model)
    [layer] = RoutingTrace.load(tmp_path / "trace").layers
    assert model.get_submodule(layer.name) is experts
    assert (layer.experts, layer.top_k) == (5, 3)
    assert 5 * layer.expert_bytes == sum(p.nbytes for p in experts.parameters())


def test_an_existing_file_and_a_model_without_experts_are_refused(packed: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("mine")
    with (
        pytest.raises(ArgumentError, match=r"a new file .*, got .*trace', which exists"),
        recorded_routing(packed[0], tmp_path / "trace"),
    ):
        pass
    assert (tmp_path / "trace").read_text() == "mine"
    with (
        pytest.raises(UnsupportedProblem, match="experts that polymoe runs, got none in Linear"),
        recorded_routing(nn.Linear(1, 1), tmp_path / "new"),
    ):
        pass


def test_ctrl_c_leaves_what_came_before(packed: tuple[Any, Any], tmp_path: Path) -> None:
    model = packed[0]
    with pytest.raises(KeyboardInterrupt):
        record_until(KeyboardInterrupt(), tmp_path / "trace", model, calls=1)
    assert RoutingTrace.load(tmp_path / "trace").tokens_C.tolist() == [3] * 4
    with pytest.raises(KeyboardInterrupt):
        record_until(KeyboardInterrupt(), tmp_path / "none", model, calls=0)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
@pytest.mark.parametrize("while_saved", [False, True])
def test_signals_leave_what_came_before(
    packed: tuple[Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    raised: type[BaseException],
    while_saved: bool,
) -> None:
    save, before = RoutingTrace.save, [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]

    def interrupted(*args: Any) -> None:
        signal.raise_signal(number)
        save(*args)

    monkeypatch.setattr(RoutingTrace, "save", interrupted)

    def record() -> None:
        with recorded_routing(packed[0], tmp_path / "trace"):
            forward(packed[0])
            if not while_saved:
                signal.raise_signal(number)

    with pytest.raises(raised) as error:
        record()
    assert raised is KeyboardInterrupt or error.value.args == (143,)
    assert RoutingTrace.load(tmp_path / "trace").tokens_C.tolist() == [3] * 4
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("kind", ["h", "i"])
def test_ctrl_c_while_a_call_is_written_down(
    packed: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Interrupted(array):
        def append(self, value: Any) -> None:
            if self.typecode == kind and len(self) == 2:
                raise KeyboardInterrupt
            super().append(value)

    monkeypatch.setattr(routing_recorder, "array", Interrupted)
    with pytest.raises(KeyboardInterrupt), recorded_routing(packed[0], tmp_path / "trace"):
        forward(packed[0])
    trace = RoutingTrace.load(tmp_path / "trace")
    assert (trace.tokens_C.tolist(), len(trace.ids_N)) == ([3, 3], 12)


def test_another_error_leaves_no_file(packed: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        record_until(ZeroDivisionError(), tmp_path / "trace", packed[0], calls=1)
    assert not list(tmp_path.iterdir())
    assert not any(module._forward_pre_hooks for module in packed[0].modules())


def test_calls_on_two_threads(packed: tuple[Any, Any], tmp_path: Path) -> None:
    model = packed[0]

    def several() -> None:
        for tokens in (1, 2, 3):
            forward(model, IDS[:, :tokens])

    with recorded_routing(model, tmp_path / "trace"):
        threads = [threading.Thread(target=several) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = RoutingTrace.load(tmp_path / "trace")
    for number in range(4):
        assert sorted(trace.tokens_C[trace.layers_C == number].tolist()) == [1, 1, 2, 2, 3, 3]


def test_compiled_calls_are_recorded_or_refused(tmp_path: Path) -> None:
    """Of the first layer: others take as long to compile."""
    model, _ = load(CHECKPOINT, device="cpu")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    model.config.layer_types = model.config.layer_types[:1]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with recorded_routing(model, tmp_path / "trace"):
        forward(compiled)
        forward(compiled)
    assert RoutingTrace.load(tmp_path / "trace").tokens_C.tolist() == [3] * 2
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="routing is recorded"), recorded_routing(model, tmp_path / "whole"):
        forward(whole)
    torch._dynamo.reset()
    forward(whole)
    with (
        pytest.raises(UnsupportedProblem, match=r"calls of the experts, got none(?s:.*)compiled"),
        recorded_routing(model, tmp_path / "late"),
    ):
        forward(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_capture_is_refused(packed: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_recorder, "capturing", lambda x: True)
    with (
        pytest.raises(UnsupportedProblem, match="a call that a CUDA graph captures"),
        recorded_routing(packed[0], tmp_path / "trace"),
    ):
        forward(packed[0])
    assert not list(tmp_path.iterdir())
