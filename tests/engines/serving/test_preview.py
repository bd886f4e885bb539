"""What a plug-in would decide, from a checkpoint alone: as it decides from the tensors that the engine creates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.dialects import DIALECTS
from polymoe.checkpoint.shard import Shard
from polymoe.engines.serving.preview import ENGINES, LayerPreview, preview
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerPlan, judge_layer
from polymoe.machine import Machine
from polymoe.problem.verdict import Rejected
from support.configs import CONFIGS, config
from support.stacked import BUNDLED, CPU, MODELS, SGLANG_METHODS, experts_of, facts_of, local_experts, sglang_experts_of

CASES = [
    (model, tp, ep)
    for model, about in BUNDLED.items()
    for tp, ep in [((0, 1), (0, 1)), ((1, 2), (0, 1)), ((0, 1), (1, 2))]
    if tp[1] in about.tp  # others would split a group
]


def previews(
    path: Path, engine: str, tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1), **settings: Any
) -> tuple[LayerPreview, ...]:
    return preview(Checkpoint.open(path), ENGINES[engine], CPU, EngineSettings(**settings), Shard.of(tp, ep))


def reasons(row: LayerPreview) -> list[str]:
    assert isinstance(row.verdict, Rejected)
    return [str(reason) for reason in row.verdict.reasons]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("model", "tp", "ep"), CASES)
def test_it_is_the_decision_about_the_engines_own_tensors(
    model: str, tp: tuple[int, int], ep: tuple[int, int], engine: str
) -> None:
    about = BUNDLED[model]
    if engine == "sglang" and about.method == "Fp8MoEMethod" and tp[1] > 1:
        (row,) = previews(MODELS / model, engine, tp, ep)
        assert reasons(row) == ["intermediate size on a rank: expects whole blocks of 128, got 64"]
        return
    theirs = (experts_of if engine == "vllm" else sglang_experts_of)(model, tp, ep)
    problem = Checkpoint.open(MODELS / model).problem(about.layer)
    facts = facts_of(
        model,
        method=about.method if engine == "vllm" else SGLANG_METHODS[about.method],
        sources=ENGINES[engine].sources,
        tensors=theirs.tensors,
        k_first=theirs.k_first,
        intermediate=theirs.intermediate,
        first_expert=None if engine == "sglang" and ep[1] > 1 else local_experts(about.experts, ep)[0],
        activation=problem.activation,
        weight_on=problem.weight_on,
        top_k=problem.top_k,
        tp=tp[1],
        ep=ep[1],
    )
    expected = judge_layer(facts, CPU, EngineSettings())
    (row,) = previews(MODELS / model, engine, tp, ep)
    assert isinstance(expected, LayerPlan)
    assert isinstance(row.verdict, LayerPlan)
    assert row.method == facts.method
    assert row.verdict.experts.intermediate >= theirs.intermediate  # SGLang may pad
    spec = replace(row.verdict.problem.spec, intermediate=theirs.intermediate)
    assert replace(row.verdict.problem, spec=spec) == expected.problem
    assert row.verdict.mapped == expected.mapped


@pytest.mark.parametrize("engine", ENGINES)
def test_a_config_is_enough(engine: str) -> None:
    for model in BUNDLED:
        rows = previews(MODELS / model / "config.json", engine)
        whole = previews(MODELS / model, engine)
        assert [(row.layers, row.method) for row in rows] == [(row.layers, row.method) for row in whole]
        assert all(isinstance(row.verdict, LayerPlan) for row in rows)


def test_every_dialect_has_a_method_that_the_plug_in_knows() -> None:
    for engine in ENGINES.values():
        lacks = {name for name in DIALECTS if engine.name == "SGLang" and name.endswith("mxfp8")}
        lacks |= {"gptq_v2", "quark_fp8", "quark_mxfp4"}
        assert {name.split(" ")[0] for name in engine.methods} == set(DIALECTS) - lacks
        assert set(engine.methods.values()) <= set(engine.sources)


@pytest.mark.parametrize(("size", "widths"), [(1, [2880, 2880]), (4, [736, 768]), (8, [384, 384])])
def test_ranks_get_whole_groups_and_padding(tmp_path: Path, size: int, widths: list[int]) -> None:
    """The last rank too, which has fewer of gpt-oss's 90 groups of 32 columns."""
    config = json.loads((MODELS / "sums-gpt-oss-mxfp4" / "config.json").read_text()) | {"intermediate_size": 2880}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = []
    for engine in ENGINES:
        (row,) = previews(tmp_path / "config.json", engine, (size - 1, size))
        assert isinstance(row.verdict, LayerPlan)
        found.append(row.verdict.problem.spec.intermediate)
    assert found == widths


def test_why_a_layer_stays_with_the_engine(tmp_path: Path) -> None:
    (row,) = previews(MODELS / "sums-kimi-k2-int4", "vllm", (0, 3))
    assert row.layers == (1, 2, 3)
    assert reasons(row)[0].startswith("tp=3: expects slices of whole groups")
    plain = json.loads((MODELS / "sums-gpt-oss-mxfp4" / "config.json").read_text())
    del plain["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    (row,) = previews(tmp_path / "config.json", "vllm")
    assert reasons(row) == ["rows of w13: expects all of gate, then all of up, got alternating"]


def test_layers_that_the_user_leaves_to_the_engine() -> None:
    kept, ours = previews(MODELS / "sums-qwen3-fp8", "vllm", layers="!0-1")
    assert (kept.layers, ours.layers) == ((0, 1), (2, 3))
    assert reasons(kept) == ["POLYMOE_LAYERS: expects !0-1, got model.layers.0.mlp.experts"]
    assert isinstance(ours.verdict, LayerPlan)


def test_no_backend_gives_the_reasons_of_all() -> None:
    request = replace(CPU, machine=Machine.of("a100"), backend="cuda")
    checkpoint = Checkpoint.open(MODELS / "sums-qwen3-fp8")
    (row,) = preview(checkpoint, ENGINES["vllm"], request, EngineSettings(), Shard.of())
    assert reasons(row)
    assert all(reason.startswith("cuda: ") for reason in reasons(row))


def test_batch_invariance_is_part_of_the_question() -> None:
    checkpoint = Checkpoint.open(MODELS / "sums-qwen3-fp8")
    (row,) = preview(checkpoint, ENGINES["sglang"], CPU, EngineSettings(), Shard.of(), batch_invariant=True)
    assert "reference: batch-invariant results: not supported" in reasons(row)


KEPT = {
    *((engine, "gpt-oss-bf16") for engine in ENGINES),  # rows of gate and up alternate
    ("sglang", "qwen3-mxfp8"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_config_is_planned_or_has_a_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(name)))
    layers = Checkpoint.open(tmp_path / "config.json").layers
    for engine in ENGINES:
        rows = previews(tmp_path / "config.json", engine)
        assert sorted(layer for row in rows for layer in row.layers) == list(layers)
        for row in rows:
            assert isinstance(row.verdict, LayerPlan) or reasons(row)
            assert isinstance(row.verdict, LayerPlan) == ((engine, name) not in KEPT), (engine, row.verdict)
