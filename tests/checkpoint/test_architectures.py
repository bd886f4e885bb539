"""Names and arrangements of expert tensors by Transformers' own conversions: what is not right is no candidate."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

from polymoe.checkpoint.architectures.config import empty_model
from polymoe.checkpoint.architectures.experts import expert_groups
from polymoe.checkpoint.architectures.families import groups_of
from polymoe.checkpoint.architectures.names import _Conversions, _Trial, stored_names
from polymoe.checkpoint.arrangement import STACKED, UNFUSED, Fused, PerExpert
from polymoe.checkpoint.families import MODEL_FAMILIES, families_of
from polymoe.errors import CheckpointError, UnsupportedProblem
from support.tiny_models import architectures, tiny_config


def fields(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads(tiny_config(model_type).to_json_string(use_diff=False)), **changes}


def trial(model_type: str) -> _Trial:
    model = empty_model(fields(model_type), "config.json")
    groups = expert_groups(model)
    return _Trial(_Conversions(model), groups, groups[0], 1)


MLP = "model.layers.1.mlp.experts"
W123 = PerExpert(gate="w1", up="w3", down="w2")
LINEAR = Fused(gate_up="input_linear.weight", down="output_linear.weight", dialects=("plain",))


@pytest.mark.parametrize(
    ("model_type", "container", "right", "wrong"),
    [
        ("olmoe", MLP, UNFUSED, replace(UNFUSED, gate="up_proj", up="gate_proj")),
        ("olmoe", MLP, STACKED, replace(STACKED, order="interleaved")),
        ("olmoe", MLP, STACKED, replace(STACKED, k_first=True)),  # 2 F = H: the shapes are the same
        ("mixtral", "model.layers.1.block_sparse_moe.experts", W123, replace(W123, gate="w3", up="w1")),
        ("mixtral", "model.layers.1.block_sparse_moe.experts", W123, replace(W123, up="w2", down="w3")),
        ("granitemoe", "model.layers.1.block_sparse_moe", LINEAR, replace(LINEAR, order="interleaved")),
        ("granitemoe", "model.layers.1.block_sparse_moe", LINEAR, STACKED),
        ("gpt_oss", MLP, replace(STACKED, order="interleaved", k_first=True), STACKED),
    ],
)
def test_what_transformers_would_load_otherwise_is_no_candidate(
    model_type: str, container: str, right: Any, wrong: Any
) -> None:
    tried = trial(model_type)
    assert tried._loads(container, right)
    assert not tried._loads(container, wrong)
    assert (container.replace(".1.", ".{layer}."), wrong) not in list(tried.places())


@pytest.mark.parametrize(
    "container", ["model.layers.0.mlp.experts", "model.layers.1.mlp.shared_experts", "layers.1.mlp"]
)
def test_the_container_of_another_module_is_no_candidate(container: str) -> None:
    assert not trial("olmoe")._loads(container, UNFUSED)


def test_two_modules_of_a_layer_share_a_container_in_files() -> None:
    (_, text, (first, *_)), (_, vision, (second, *_)) = groups_of(fields("ernie4_5_vl_moe"))
    assert first == ("model.layers.{layer}.mlp.experts", UNFUSED)
    assert second == ("model.layers.{layer}.mlp.experts", replace(UNFUSED, first=4))
    assert (text.intermediate, vision.intermediate) == (32, 96)


def test_shared_experts_that_are_stacked_are_not_taken_for_routed_ones() -> None:
    pytest.importorskip("scipy")  # of this model's vision tower
    ((_, moe, places),) = groups_of(fields("inkling_mm_model"))
    assert moe.experts == 4
    assert not [container for container, _ in places if "shared" in container]


def test_other_prefixes_in_files_are_found() -> None:
    model = empty_model(fields("olmoe"), "config.json")
    names = [
        "layers.0.mlp.experts.0.down_proj.weight",
        "other.layers.0.mlp.experts.0.down_proj.weight",  # which Transformers would not load
        "mtp.layers.0.mlp.experts.0.down_proj.weight",
    ]
    (places,) = stored_names(model, expert_groups(model), names)
    assert {container for container, _ in places} == {"model.layers.{layer}.mlp.experts", "layers.{layer}.mlp.experts"}


TABLE = [name for name in architectures() if name in MODEL_FAMILIES]


@pytest.mark.parametrize("model_type", TABLE)
def test_the_table_says_the_same_as_transformers(model_type: str) -> None:
    config = fields(model_type)
    ((_, moe, places),) = groups_of(config)
    row = MODEL_FAMILIES[model_type]
    described = row.moe(config)
    assert replace(described, routers=()) == moe
    if model_type != "gpt_oss":  # whose own dialect Transformers reads in code of its own
        assert set(places) <= set(row.places) | {(c, UNFUSED) for c, _ in places}


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"model_type": "nothing"}, CheckpointError, "expected a known family, or a model of Transformers"),
        ({"model_type": "llama"}, UnsupportedProblem, "llama in Transformers: expected experts with"),
        ({"num_hidden_layers": 10**6}, CheckpointError, "num_hidden_layers: expected at most 500"),
        ({"num_experts": "4"}, CheckpointError, "expected a config that Transformers accepts"),
        ({"hidden_act": "tanh"}, UnsupportedProblem, "expected an activation equal to one of"),
    ],
)
def test_what_is_refused_and_why(config: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        families_of({"model_type": "olmoe", "num_experts": 4, **config})


def test_without_transformers_the_error_says_that_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="With Transformers, polymoe knows all models"):
        families_of(fields("olmoe"))
    assert families_of(fields("qwen3_moe"))[0].name == "qwen3"
