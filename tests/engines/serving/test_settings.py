"""The environment variables that steer polymoe in a serving engine."""

from __future__ import annotations

import pytest

from polymoe.common.environment import VARIABLES
from polymoe.engines.serving.settings import EngineSettings, layer_index
from polymoe.errors import ArgumentError


def test_nothing_set_means_everything_that_works_in_16_bit() -> None:
    assert EngineSettings.read({}) == EngineSettings(
        mode="auto", layers=None, backend="auto", activations="auto", role=None
    )


@pytest.mark.parametrize(
    ("value", "mode"),
    [("", "auto"), ("1", "auto"), ("0", "off"), ("off", "off"), ("require", "require"), ("REQUIRE", "require")],
)
def test_modes(value: str, mode: str) -> None:
    assert EngineSettings.read({"POLYMOE": value}).mode == mode


def test_a_mode_that_says_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="POLYMOE: got 'requires'\n  hint: did you mean 'require'"):
        EngineSettings.read({"POLYMOE": "requires"})


@pytest.mark.parametrize("memory", ["auto", "16GB", "slots", "-4slots"])
def test_memory_for_experts_that_says_nothing_is_refused(memory: str) -> None:
    with pytest.raises(ArgumentError, match=r"POLYMOE_EXPERT_MEMORY: expected 32slots, 16GiB or 512MiB"):
        EngineSettings.read({"POLYMOE_EXPERT_MEMORY": memory}).check_names()


def test_every_variable_is_in_the_table() -> None:
    changed = {
        "POLYMOE_LAYERS": "3",
        "POLYMOE_BACKEND": "triton",
        "POLYMOE_ACTIVATIONS": "fp8_token",
        "POLYMOE_ROLE": "decode",
        "POLYMOE_EXPERT_MEMORY": "16GiB",
    }
    assert EngineSettings.read(changed) == EngineSettings(
        layers="3", backend="triton", activations="fp8_token", role="decode", expert_memory="16GiB"
    )
    assert set(changed) <= set(VARIABLES)


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [("2", {2}), ("0-2", {0, 1, 2}), ("1,3-9", {1, 3, 4}), ("!0", {1, 2, 3, 4}), ("!1-2,4", {0, 3})],
)
def test_layers(layers: str, wanted: set[int]) -> None:
    settings = EngineSettings(layers=layers)
    assert {i for i in range(5) if settings.includes(f"model.layers.{i}.mlp.experts")} == wanted
    assert settings.includes("model.experts")


@pytest.mark.parametrize("layers", ["all", "1-", "-1", "1;2", "!", "1,!2"])
def test_layers_that_say_nothing_are_refused(layers: str) -> None:
    with pytest.raises(ArgumentError, match="POLYMOE_LAYERS"):
        EngineSettings(layers=layers)


@pytest.mark.parametrize(
    ("where", "index"), [("model.layers.3.mlp.experts", 3), ("layers.61.mtp.2.experts", 61), ("experts", None)]
)
def test_layer_index(where: str, index: int | None) -> None:
    assert layer_index(where) == index
