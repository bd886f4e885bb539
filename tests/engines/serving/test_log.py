"""One line for each kind of layer: a warning where the engine keeps it, none of it the user's choice."""

from __future__ import annotations

import logging

import pytest

from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.settings import EngineSettings
from polymoe.errors import UnsupportedProblem
from polymoe.problem.verdict import Reason

LORA, CHOSEN = Reason("LoRA", "none", "some"), Reason("--backend", "auto", "theirs")


def log(mode: str = "auto") -> LayerLog:
    return LayerLog("Engine", "engine.polymoe", EngineSettings(mode=mode), ("--backend",))  # type: ignore[arg-type]


def test_each_set_of_reasons_is_said_once_by_the_first_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = log()
    for where, reasons, first in (
        ("layers.0", (LORA,), False),
        ("layers.1", (LORA,), True),
        ("layers.2", (LORA,), True),
        ("layers.3", (CHOSEN,), True),
        ("layers.4", (CHOSEN, LORA), True),
    ):
        lines.stand_aside(where, reasons, first)
    found = [(record.levelname, record.name, record.getMessage().split(" leaves ")[1]) for record in caplog.records]
    assert found == [
        ("WARNING", "engine.polymoe", f"layers.1, and all layers like it, to Engine: {LORA}"),
        ("INFO", "engine.polymoe", f"layers.3, and all layers like it, to Engine: {CHOSEN}"),
        ("WARNING", "engine.polymoe", f"layers.4, and all layers like it, to Engine: {CHOSEN}; {LORA}"),
    ]


def test_require_makes_it_an_error() -> None:
    with pytest.raises(UnsupportedProblem, match=r"layers\.7: expected experts that polymoe runs.*LoRA"):
        log("require").stand_aside("layers.7", (LORA,), True)
    with pytest.raises(UnsupportedProblem, match=r"the hooks of Engine 1\.0 to 2\.0.*Engine 3\.0 lacks a\.b"):
        log("require").lacking("3.0", ("a.b",), "1.0 to 2.0")


def test_a_version_that_lacks_a_name_is_said(caplog: pytest.LogCaptureFixture) -> None:
    log().lacking("3.0", ("a.b(c)",), "1.0 to 2.0")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith("stands aside for all layers: Engine 3.0 lacks a.b(c)")
