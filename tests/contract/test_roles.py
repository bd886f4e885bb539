"""Roles from the command line down to the packed tensors: prefill and decode workers take different layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import polymoe.backends
import polymoe.layer.experts
import polymoe.layer.load
from polymoe.backends.base import Prediction
from polymoe.backends.cost import cost
from polymoe.backends.reference import run_experts
from polymoe.engines import transformers as engine
from polymoe.engines.transformers.generator import Generator
from polymoe.errors import ArgumentError, CheckpointError
from polymoe.machine import Machine
from polymoe.problem import Problem
from support.toys import LAYOUTS, Toy

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"
LAYOUT_OF = {"decode": "natural", "prefill": "flipped", "mixed": "flipped"}

Cli = Callable[..., tuple[int, str, str]]


class Decoder(Toy):
    """Reads the natural layout; near the floor to 256 tokens, far from it above."""

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        times = 1.1 if tokens <= 256 else 40.0
        return Prediction(times * cost(problem, machine.device, tokens).floor_us, "measured")

    def run(self, problem, packed, x_TH, routing, config, out_TH) -> None:  # type: ignore[no-untyped-def]
        out_TH.copy_(run_experts(problem, LAYOUTS["natural"].unpack(packed), x_TH, routing))


@pytest.fixture(autouse=True)
def two_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of polymoe's tables: ``decoder`` on one layout, ``any`` on another, and no third backend."""
    table = {"decoder": Decoder("decoder", layouts=("natural",)), "any": Toy("any", times_floor=3.0)}
    for module in (polymoe.backends, polymoe.layer.experts, polymoe.layer.load):
        monkeypatch.setattr(module, "BACKENDS", table)
    for module in (polymoe.layer.experts, polymoe.layer.load):
        monkeypatch.setattr(module, "LAYOUTS", LAYOUTS)


def layouts(generator: Generator) -> set[str]:
    return {experts.packed.layout for experts in generator.experts()}


@pytest.mark.parametrize("role", list(LAYOUT_OF))
def test_a_model_is_packed_for_its_role_and_answers_in_each(role: str) -> None:
    generator = Generator.load(str(SUMS), device="cpu", role=role)
    assert layouts(generator) == {LAYOUT_OF[role]}
    assert {experts.explain().role for experts in generator.experts()} == {role}
    # A decode worker must still take long prompts, a prefill worker single tokens.
    (answer,) = generator.answer(["512+499="], max_tokens=8)
    assert answer.text == "1011"


def test_installed_models_take_the_role_too() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine.install(role="decode")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(SUMS, trust_remote_code=False)
    finally:
        engine.uninstall()
    assert layouts(Generator(model, AutoTokenizer.from_pretrained(SUMS, trust_remote_code=False))) == {"natural"}


@pytest.mark.parametrize("role", list(LAYOUT_OF))
def test_explain_and_run_say_the_role(cli: Cli, role: str) -> None:
    code, out, _ = cli("explain", SUMS, "--device", "cpu", "--role", role, "--json")
    plans = [row["plan"]["layout"] for row in json.loads(out)["rows"]]
    assert (code, set(plans)) == (0, {LAYOUT_OF[role]})
    code, out, _ = cli("run", SUMS, "1+2=", "--device", "cpu", "--role", role, "--json")
    found = json.loads(out)
    assert (code, found["answers"][0]["text"]) == (0, "3")
    assert found["backends"] == {"decode": ["decoder"], "prefill": ["any"], "mixed": ["any"]}[role]


def test_serve_loads_for_its_role(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = []

    pytest.importorskip("uvicorn")

    def load(path: Any, **kwargs: Any) -> None:
        roles.append(kwargs["role"])
        raise CheckpointError("far enough")

    monkeypatch.setattr(engine, "load", load)
    assert cli("serve", SUMS, "--port", "0", "--role", "prefill")[0] == 1
    assert cli("serve", SUMS, "--port", "0")[0] == 1
    assert roles == ["prefill", "mixed"]


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ArgumentError, match="role"):
        engine.load(SUMS, device="cpu", role="decoder")
