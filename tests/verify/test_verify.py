"""verify: good on every family as it is stored, and failing where a byte, a reader or a backend is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polymoe.checkpoint import Checkpoint
from polymoe.errors import ArgumentError, CheckpointNotFound
from polymoe.formats import QuantTensor
from polymoe.layouts import Natural
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights
from polymoe.verify import verify
from polymoe.verify.oracle import Oracle
from support.configs import CONFIGS
from support.problems import problem_of, random_experts
from support.written import LAYER, Library, damaged


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_as_it_is_stored(library: Library, name: str) -> None:
    report = verify(library(name), tokens=(1, 5), device="cpu")
    assert report.ok, json.dumps(report.to_dict(), indent=1)
    assert [row.layer for row in report.layers] == [LAYER]
    ran = [(row.backend, row.tokens) for row in report.backends if not row.rejected]
    assert ran[:4] == [(name, tokens) for name in ("reference", "torch") for tokens in (1, 5)]
    assert all(0 < row.error < 6e-3 for row in report.backends if not row.rejected)


@pytest.mark.parametrize("tokens", [(), (0,), (1, 10**9)])
def test_token_counts(library: Library, tokens: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="tokens: expected counts from 1 to 65536"):
        verify(library("gpt-oss-mxfp4"), tokens=tokens, device="cpu")


def test_a_config_alone_holds_no_experts(library: Library) -> None:
    with pytest.raises(CheckpointNotFound, match="name a directory that contains them"):
        verify(library("gpt-oss-mxfp4") / "config.json", device="cpu")


def test_a_wrong_decoder_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nibbles exchanged: packing and repacking agree with each other, the second reading does not."""
    from polymoe.formats import tensor

    right = tensor.decode
    monkeypatch.setattr(
        tensor, "decode", lambda codes, element, dtype: right((codes << 4) | (codes >> 4), element, dtype)
    )
    report = verify(library("gpt-oss-mxfp4"), tokens=(1,), device="cpu")
    (row,) = report.layers
    assert not report.ok
    assert (row.repacked, row.second_reading) == (8, 0)
    assert row.oracle_error > 0.1
    reference = next(row for row in report.backends if not row.rejected)  # which decodes as wrongly when it loads
    assert (reference.against, reference.ok, reference.differing) == ("oracle", False, 0)


def test_a_lossy_reader_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from polymoe.checkpoint.dialects import DIALECTS

    dialect = type(DIALECTS["gpt_oss"])
    right = dialect.read

    def lossy(self, tensors, shape, hint=None):  # type: ignore[no-untyped-def]
        q = right(self, tensors, shape, hint)
        return QuantTensor(q.codes & 0x77, q.encoding, q.scales)

    monkeypatch.setattr(dialect, "read", lossy)
    (row,) = verify(library("gpt-oss-mxfp4"), tokens=(1,), device="cpu").layers
    assert (row.repacked, row.second_reading) == (0, 0)


def changed_reading(monkeypatch: pytest.MonkeyPatch, e: int, change: Callable[[Expert, ExpertWeights], Expert]) -> None:
    """From now on, readers get expert ``e`` changed."""
    right = Checkpoint.weights

    def wrong(self: Checkpoint, layer: int, **ranks: Any) -> ExpertWeights:
        weights = right(self, layer, **ranks)
        return ExpertWeights(
            weights.spec, lambda i: change(weights.expert(i), weights) if i == e else weights.expert(i)
        )

    monkeypatch.setattr(Checkpoint, "weights", wrong)


@pytest.mark.parametrize("bias", ["gate_bias", "up_bias", "down_bias"])
def test_a_bias_of_another_expert_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch, bias: str) -> None:
    changed_reading(monkeypatch, 3, lambda x, w: replace(x, **{bias: getattr(w.expert(4), bias)}))  # type: ignore[arg-type]
    report = verify(library("gpt-oss-mxfp4"), tokens=(32,), device="cpu")
    assert report.layers[0].second_reading == 7
    assert not next(row for row in report.backends if not row.rejected).ok


def with_input_scales(tensors: dict[str, Tensor], suffix: str, number: Callable[[int], float]) -> None:
    """Give every matrix an input scale; expert 2 was never calibrated."""
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        e = int(name.split(".experts.")[1].split(".")[0])
        up = 2.0 if ".up_proj" in name or ".w3" in name else 1.0
        tensors[name.replace("weight_scale", suffix)] = torch.tensor([0.0 if e == 2 else up * number(e)])


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("glm-4.5-air-nvfp4-ct", "input_global_scale"),
        ("glm-4.7-nvfp4", "input_scale"),
        ("mixtral-fp8-static", "input_scale"),
    ],
)
def test_input_scales_of_every_expert_are_compared(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    path = damaged(library(name), tmp_path / name, lambda t: with_input_scales(t, suffix, lambda e: 0.3 + e))
    with Checkpoint.open(path) as checkpoint:
        experts = list(checkpoint.weights(LAYER))
    assert [x.down_input_scale is None for x in experts] == [e == 2 for e in range(8)]
    assert experts[1].gate_up_input_scale is not None
    assert verify(path, tokens=(1,), device="cpu").layers[0].second_reading == 8
    for field in ("gate_up_input_scale", "down_input_scale"):
        with monkeypatch.context() as m:
            changed_reading(m, 3, lambda x, w, field=field: replace(x, **{field: getattr(w.expert(4), field)}))
            assert verify(path, tokens=(1,), device="cpu").layers[0].second_reading == 7
    with monkeypatch.context() as m:
        changed_reading(m, 3, lambda x, _: replace(x, down_input_scale=None))
        assert verify(path, tokens=(1,), device="cpu").layers[0].second_reading == 7


def test_experts_that_are_packed_wrongly_are_counted(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not a token was routed to them."""
    right = Natural.pack
    swapped = {2: 3, 3: 2}
    monkeypatch.setattr(
        Natural,
        "pack",
        lambda self, w, *a: right(self, ExpertWeights(w.spec, lambda e: w.expert(swapped.get(e, e))), *a),
    )
    found = verify(library("qwen3-bf16"), tokens=(1,), device="cpu", backend="reference").backends
    (row,) = [r for r in found if not r.rejected]
    assert (row.differing, row.ok) == (2, False)


def test_quantized_inputs_are_compared_with_the_reference_that_quantizes_too(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the oracle rounds nothing."""
    monkeypatch.setattr("polymoe.verify.resolve_activations", lambda *_: ActivationQuantization.of("fp8_token"))
    found = [r for r in verify(library("qwen3-bf16"), tokens=(5,), device="cpu").backends if not r.rejected]
    assert [(r.against, r.ok) for r in found] == [("reference", True)]


def test_the_oracle_by_hand() -> None:
    """Two tokens and two experts of one hidden unit; one of them twice in a token."""
    problem = problem_of(random_experts("bf16", experts=2, hidden=2, intermediate=2, gated=False))
    w = {"up": np.eye(2), "down": 3 * np.eye(2), "down_bias": np.ones(2)}
    x, ids = torch.tensor([[1.0, -1.0], [2.0, 0.0]]), torch.tensor([[0, 0], [1, 5]])
    for on in ("output", "input"):  # relu2, times 3, plus 1
        oracle = Oracle(replace(problem, weight_on=on), x, Routing(ids, torch.tensor([[1.0, 1.0], [0.5, 9.0]])))
        for e in (0, 1):
            oracle.add(e, w)
        assert oracle.total_TH[0].tolist() == [8.0, 2.0]
        assert oracle.total_TH[1].tolist() == ([6.5, 0.5] if on == "output" else [4.0, 1.0])


def test_a_wrong_activation_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from polymoe.problem.activations import SwiGLU

    monkeypatch.setattr(SwiGLU, "__call__", lambda self, gate, up: torch.nn.functional.silu(gate) * up)
    report = verify(library("gpt-oss-mxfp4"), tokens=(1,), device="cpu")
    assert not report.ok
    assert report.layers[0].second_reading == 8
    assert report.layers[0].oracle_error > 1e-3


def test_a_config_alone_has_nothing_to_verify(library: Library, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((library("gpt-oss-mxfp4") / "config.json").read_text())
    with pytest.raises(CheckpointNotFound, match="at least one layer"):
        verify(tmp_path)
