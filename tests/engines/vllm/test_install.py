"""The plug-in in a vLLM that lacks a name it needs; vLLM need not be installed."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.vllm.hooks import HOOKS
from polymoe.engines.vllm.plugin import install
from polymoe.errors import UnsupportedProblem


@pytest.fixture(autouse=True)
def another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of one module: whoever went on to patch it would fail to import."""
    found: Any = ModuleType("vllm")
    found.__version__ = "0.20.0"
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", found)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # to caplog, if the real one was imported


def test_a_vllm_that_lacks_names_keeps_all_layers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.polymoe"):
        install(EngineSettings())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert "stands aside for all layers: vLLM 0.20.0 lacks " in said
    assert all(str(hook) in said for hook in HOOKS)


def test_require_makes_it_an_error() -> None:
    with pytest.raises(UnsupportedProblem, match=r"the hooks of vLLM 0\.24 to 0\.33.*vLLM 0\.20\.0 lacks "):
        install(EngineSettings(mode="require"))
