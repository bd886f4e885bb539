"""Benchmarks of engines: what they take from a profiler's trace, from logs and from captured calls."""

from __future__ import annotations

import itertools
import json
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_document import served
from torch import nn

from engines import common, sglang_plugin, sglang_run


def event(category: str, start: float, duration: float, *, thread: int = 1, **args: Any) -> dict[str, Any]:
    name = args.pop("name", "x")
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": args}


def test_kernels_of_the_experts_operation_are_those_that_it_launched() -> None:
    trace = [
        event("cpu_op", 0, 10, name="vllm::moe_forward_shared"),
        event("cpu_op", 2, 3, name="aten::add"),
        event("cuda_runtime", 1, 1, correlation=5),
        event("cuda_runtime", 4, 1, correlation=6),
        event("cuda_runtime", 5, 1, correlation=7, thread=2),  # another thread's
        event("cuda_runtime", 11, 1, correlation=8),  # after it
        *(event("kernel", 20 + 5 * i, 10, correlation=5 + i) for i in range(4)),
        {"ph": "M", "name": "process_name"},
    ]
    (call,), kernels = common.intervals({"traceEvents": trace}, "vllm::moe_forward")
    assert call == [(20, 30), (25, 35)]
    assert kernels == [(20, 30), (25, 35), (30, 40), (35, 45)]
    trace.append(event("gpu_memset", 60, 2000, name="y" * 90))
    assert common.busy_ms_by_kernel({"traceEvents": trace}) == {"y" * 80: 2, "x": 0.04}


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([], 0),
        ([(0, 10), (20, 25)], 15),
        ([(5, 20), (0, 10)], 20),  # overlap
        ([(0, 30), (5, 10), (29, 31)], 31),  # one inside another
    ],
)
def test_overlapping_kernels_count_once(kernels: list[tuple[float, float]], expected: float) -> None:
    assert common.busy_us(kernels) == expected


def test_random_weights_differ_and_do_not_favor_an_expert() -> None:
    module = nn.Module()
    module.norm = nn.Parameter(torch.empty(64))
    module.gate = nn.Parameter(torch.empty(16, 64))
    module.bias = nn.Parameter(torch.empty(16))
    module.packed = nn.Parameter(torch.empty(2, 64, 32, dtype=torch.int32), requires_grad=False)
    module.weight_scale = nn.Parameter(torch.empty(2, 64, dtype=torch.uint8), requires_grad=False)
    module.codes = nn.Parameter(torch.empty(2, 64, 32).to(torch.float8_e4m3fn), requires_grad=False)
    common.random_weights(module)
    assert (module.norm == 1).all()
    assert (module.bias == 0).all()
    assert (module.weight_scale == 120).all()
    assert module.codes.float().isfinite().all()
    assert module.packed.unique().numel() > 4000
    chosen = (torch.randn(4096, 64) @ module.gate.detach().T).topk(2).indices
    counts = torch.bincount(chosen.flatten(), minlength=16)
    assert counts.max() < 3 * counts.min()


def test_the_cause_of_an_end_is_the_first_error_of_a_worker() -> None:
    worker = "(Worker_TP0 pid=1) ERROR [x.py:1] ValueError: width 18"
    log = ["INFO", worker, "(Worker_TP1 pid=2) ERROR [x.py:1] ValueError: later", "RuntimeError: Engine core: {}"]
    assert common.cause(log, r"^\(Worker\S* .*Error: ") == worker
    assert common.cause(["INFO", "ValueError: first", "KeyError: last", "bye"]) == "KeyError: last"
    sglang = ["OSError: early", "[1] Scheduler hit an exception: Traceback", "KeyError: root", "RuntimeError: later"]
    assert common.cause(sglang, "hit an exception") == "KeyError: root"
    assert common.cause(["Killed"]) == "Killed"
    assert common.cause([]) == "no output"


def test_dummy_weights_of_sglang_leave_experts_on_the_cpu_to_polymoe(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang fills them when the default device is the CPU again, whichever device its model is on."""
    filled: list[nn.Module] = []
    monkeypatch.setattr(common, "random_weights", filled.append)
    embeddings, router = nn.Embedding(2, 4, device="meta"), nn.Linear(4, 2, device="meta")
    sglang_plugin._fill(nn.ModuleList([embeddings, router, nn.Linear(4, 4)]))
    assert embeddings in filled
    assert router in filled
    assert all(parameter.is_meta for module in filled for parameter in module.parameters(recurse=False))


def test_engines_get_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_run, "_ports", itertools.count(20000))
    first = sglang_run.free_port()
    with socket.socket() as taken:
        taken.bind(("", first + 1))
        assert sglang_run.free_port() > first + 1


def test_an_engine_without_time_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common, "_until", 0.0)
    result = common.one("no such script", {}, {}, said="", first_error="")
    assert result == {"error": common.NOT_STARTED}
    common.recorder(Namespace(commit="c", tp=1, dp=1, ep=False, settings={}, out=tmp_path / "r"))(result)
    assert not (tmp_path / "r").exists()


def test_captured_calls_are_compared_with_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of layers in a stand-in for an engine's module: one call is right, one has a row of zeros."""
    from polymoe import load_experts
    from polymoe.layer import packed_layer

    model, (folder, other) = common.MODELS / "sums-qwen3-fp8", (tmp_path / "a", tmp_path / "b")
    experts = {number: load_experts(model, number, device="cpu", check=False) for number in (0, 1)}

    class Layer:
        def __init__(self, number: int) -> None:
            self.where = f"model.layers.{number}.mlp.experts"
            self.number = number

        def __call__(self, module: Any, x: Any, ids: Any, weights: Any) -> torch.Tensor:
            out = experts[self.number](x, ids, weights)
            return torch.cat([out[:-1], torch.zeros_like(out[-1:])]) if self.number else out

    monkeypatch.setattr(packed_layer, "PackedLayer", Layer)
    monkeypatch.delenv(common.CAPTURED, raising=False)
    common.capture_calls()
    assert common.layer_errors(model) == {}
    folder.mkdir()
    monkeypatch.setenv(common.CAPTURED, str(folder))
    common.capture_calls()
    generator = torch.Generator().manual_seed(0)
    for tokens in (4, 3, 1):  # the last is a decode step of one prompt, which is not kept
        x = torch.randn(tokens, 256, generator=generator).bfloat16()
        for number in experts:
            Layer(number)(None, x, torch.tensor([[0, 1]] * tokens).int(), torch.rand(tokens, 2, generator=generator))
    found = common.layer_errors(model)
    assert found["0"] == 0
    assert 0.3 < float(found["1"]) < 0.9
    monkeypatch.setenv(common.CAPTURED, str(other))
    assert common.layer_errors(tmp_path) == {}


@pytest.mark.parametrize("wrong", [False, True])
def test_reloaded_weights_are_compared_with_a_fresh_start(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """An engine that does not take the second reload gives the first one's answers."""
    monkeypatch.setattr(common, "changed", lambda _, target: target)

    def tokens(path: Path | str) -> list[list[int]]:
        return [[1], [2]] if str(path).startswith(str(common.MODELS)) else [[1], [3]]

    def ask(_: str, path: Path, then: list[str]) -> dict[str, Any]:
        reloaded = [tokens(p) for p in then]
        if wrong and then:
            reloaded[1] = reloaded[0]
        return {"tokens": tokens(path), "reloaded": reloaded} if then else {"tokens": tokens(path)}

    records: list[dict[str, Any]] = []
    common.compare_reloads(["sums-qwen3-fp8"], ask, Namespace(jobs=2), records.append)
    assert records == [
        {
            "model": "sums-qwen3-fp8",
            "experts": "polymoe",
            "reload": True,
            "tokens": [[1], [2]],
            "same_after_reload": [2, 1 if wrong else 2, 2],
            "changed_answers": 1,
        }
    ]


def test_servers_that_were_warm_come_before_new_ones(tmp_path: Path) -> None:
    rows = [
        {"rate": "inf", "experts": "polymoe", "output_throughput": 1.0, "compiled": 0},
        {"rate": "4", "experts": "polymoe", "output_throughput": 2.0},
        {"rate": "inf", "experts": "polymoe", "output_throughput": 3.0},
        {"rate": "inf", "experts": "auto", "output_throughput": 4.0},
        {"experts": "auto", "serve": True},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {(r, name): row["output_throughput"] for r, by in served(path).items() for name, row in by.items()}
    assert found == {("4", "polymoe"): 2.0, ("inf", "polymoe"): 1.0, ("inf", "auto"): 4.0}
