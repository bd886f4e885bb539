"""What SGLang does when a layer is made and loaded, in the sources of several versions; its names have their own test.

They were parsed, not run: ``contract.json`` is what ``tests/support/engine_contract.py`` read in the wheels.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from polymoe.engines.sglang.hooks import ASKED_SERVER_ARGS, LAYER_ATTRIBUTES
from support.engine_contract import ENGINES

CONTRACT: dict[str, dict[str, Any]] = json.loads(ENGINES["sglang"].table.read_text())


@pytest.mark.parametrize("version", CONTRACT)
def test_the_layer_sets_what_we_read(version: str) -> None:
    assert set(LAYER_ATTRIBUTES) <= set(CONTRACT[version]["layer"])


@pytest.mark.parametrize("version", CONTRACT)
def test_the_server_has_the_arguments_that_keep_a_layer(version: str) -> None:
    found = CONTRACT[version]["server"]
    read = {"disaggregation_mode", "enable_deterministic_inference", "load_format", "moe_runner_backend"}
    assert {*ASKED_SERVER_ARGS, *read} <= set(found)
    assert {"enable_paged_experts", "torchao_config"} & set(found)


@pytest.mark.parametrize("version", CONTRACT)
def test_the_layer_does_in_this_order(version: str) -> None:
    """The config is there when the method is chosen; the dispatcher and the rule for scales come after it."""
    assert CONTRACT[version]["order"] == [
        "moe_runner_config", "get_quant_method", "create_weights", "create_moe_runner", "create_moe_dispatcher",
        "should_fuse_routed_scaling_factor_in_topk",
    ]  # fmt: skip


def test_only_the_newer_version_tells_a_topk_its_backend() -> None:
    assert [table["topk"] for table in CONTRACT.values()] == [False, True]


@pytest.mark.parametrize("version", CONTRACT)
def test_updates_of_weights_pass_the_loaders_of_parameters(version: str) -> None:
    """An update from disk also processes the layers, as a start does; one from tensors has no end."""
    found = CONTRACT[version]["updates"]
    assert found["load_weights_and_postprocess"] == ["update_weights_from_disk"]
    assert {"update_weights_from_tensor", "_update_weights_from_flattened_bucket"} <= set(found["load_weights"])
