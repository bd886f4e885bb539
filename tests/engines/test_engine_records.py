"""Benchmarks of engines: what they take from a profiler's trace and from logs, and the tables of their records."""

from __future__ import annotations

import itertools
import json
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import engines_document
import pytest
import torch
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


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_times_stand_beside_the_fastest_other(tmp_path: Path) -> None:
    common = {"case": "c", "eager": True}
    rows = [
        common | {"experts": "polymoe", "moe_us_1": 10.0, "moe_us_16": 20.0},
        common | {"experts": "auto", "moe_us_1": 30.0, "moe_us_16": 19.0, "log": ["Using 'TRITON' Mxfp4 MoE backend."]},
        common | {"experts": "marlin", "moe_us_1": 15.0, "moe_us_16": 40.0},
        common | {"experts": "humming", "error": "exit status 1: [rank0]: KeyError: a|b"},
        common | {"experts": "auto", "eager": False, "step_us_1": 1.0},
    ]
    table = engines_document.speed(written(tmp_path / "r", *rows), "vLLM").splitlines()
    assert table[2:] == [
        "| `c` | polymoe | 10 | 20 |  |  |  |",
        "|  | vLLM's choice, Triton | 30 | 19 |  |  |  |",
        "|  | Marlin | 15 | 40 |  |  |  |",
        "|  | Humming | does not start: `KeyError: a/b` |  |  |  |  |",
        "|  | fastest other / polymoe | **1.50** | **0.95** |  |  |  |",
    ]


def test_tokens_per_second_stand_beside_the_fastest_other(tmp_path: Path) -> None:
    common = {"case": "c", "eager": False}
    rows = [
        common | {"experts": "polymoe", "decode_tokens_per_s_1": 120.0, "step_us_1": 8000.0},
        common | {"experts": "auto", "decode_tokens_per_s_1": 100.0, "step_us_1": 10000.0},
        common | {"experts": "marlin", "error": "exit status 1: KeyError: a"},
        common | {"experts": "polymoe", "eager": True, "moe_us_1": 1.0},
    ]
    table = engines_document.steps(written(tmp_path / "r", *rows), "vLLM").splitlines()
    assert table[2:] == [
        "| `c` | polymoe | 120 (8000) |  |  |  |",
        "|  | vLLM's choice | 100 (10000) |  |  |  |",
        "|  | Marlin | does not start: `KeyError: a` |  |  |  |",
        "|  | polymoe / fastest other | **1.20** (1.25) |  |  |  |",
    ]


def test_answers_stand_side_by_side(tmp_path: Path) -> None:
    one = {"model": "m", "tp": 1, "ep": False, "of": 100}
    rows = [
        one | {"experts": "vllm", "error": "exit status 1: ValueError: no"},
        one | {"experts": "polymoe", "right": 99},
        one | {"experts": "polymoe", "right": 100, "layer_errors": {"0": 0.00123, "1": 0.004}},  # newer
        one | {"dp": 2, "experts": "polymoe", "right": 97, "layer_errors": {"error": "OutOfMemoryError: 1"}},
        one | {"tp": 2, "ep": True, "experts": "polymoe", "right": 98},
        one | {"experts": "polymoe", "right": 96, "batch_invariant": True},
        one | {"dp": 2, "ep": True, "experts": "polymoe", "right": 95},
        one | {"experts": "polymoe", "right": 1, "reload": True},
    ]
    table = engines_document.answers(written(tmp_path / "r", *rows), "vLLM").splitlines()
    assert table[2:] == [
        "| `m` | one GPU | 100 of 100 | does not start: `ValueError: no` | 4.0e-03 |",
        "| `m` | one GPU, batch-invariant | 96 of 100 | not run |  |",
        "| `m` | DP 2 | 97 of 100 | not run |  |",
        "| `m` | DP 2, EP 2 | 95 of 100 | not run |  |",
        "| `m` | EP 2 | 98 of 100 | not run |  |",
    ]


def test_sglangs_tables_have_its_names(tmp_path: Path) -> None:
    rows = [
        {"case": "c", "eager": True, "experts": "polymoe", "error": "exit status -9: KeyError: a"},
        {
            "case": "c",
            "eager": True,
            "experts": "auto",
            "moe_us_1": 30.0,
            "log": ["enabling triton_kernels MOE kernel."],
        },
        {"model": "m", "tp": 1, "ep": False, "of": 100, "experts": "sglang", "right": 99},
    ]
    path = written(tmp_path / "r", *rows)
    assert engines_document.speed(path, "SGLang").splitlines()[2:] == [
        "| `c` | polymoe | does not start: `KeyError: a` |  |  |  |  |",
        "|  | SGLang's choice, Triton_kernels | 30 |  |  |  |  |",
        "|  | fastest other / polymoe |  |  |  |  |  |",
    ]
    head, _, row = engines_document.answers(path, "SGLang").splitlines()
    assert "right with SGLang's own |" in head
    assert row == "| `m` | one GPU | not run | 99 of 100 |  |"


def test_times_stand_above_the_floor(tmp_path: Path) -> None:
    """One token reads four experts of three MXFP4 matrices; an H200 reads 4 to 5 TB a second."""
    rows = [{"case": "gpt-oss-120b", "eager": True, "experts": "polymoe", "moe_us_1": 32.0}]
    _, floor, _ = engines_document.speed(written(tmp_path / "r", *rows), "vLLM").splitlines()[2:]
    name, least = floor.split("|")[2:4]
    megabytes = 4 * 3 * 2880 * 2880 * (0.5 + 1 / 32) / 1e6
    assert name.strip() == "floor"
    assert megabytes / 5 < float(least) < megabytes / 4


def test_loading_stands_beside_the_others(tmp_path: Path) -> None:
    common = {"case": "c", "layers": 4, "eager": True}
    loaded = {"load_s": 5.91, "ready_s": 29.0, "load_peak_bytes": 9.28e9, "loaded_bytes": 7.48e9}
    rows = [common | loaded | {"experts": "polymoe"}, common | {"experts": "auto", "error": "KeyError: a"}]
    table = engines_document.loading(written(tmp_path / "r", *rows), "SGLang").splitlines()
    assert table[2:] == ["| `c`, 4 layers | polymoe | 5.9 | 29.0 | 9.3 | 7.5 |"]


def test_no_records_are_no_table(tmp_path: Path) -> None:
    document = engines_document
    tables = (document.answers, document.speed, document.steps, document.loading)
    assert {table(tmp_path / "none", "SGLang") for table in tables} == {"Not run yet.\n"}


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
