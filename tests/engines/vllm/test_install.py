"""The plug-in in a vLLM that lacks a name it needs; vLLM need not be installed."""

from __future__ import annotations

import enum
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from polymoe.engines.hooks import Hook
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.vllm.hooks import HOOKS, SELECTORS
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
    assert all(hook.path in said for hook in HOOKS)


def test_require_makes_it_an_error() -> None:
    with pytest.raises(UnsupportedProblem, match=r"the hooks of vLLM 0\.24 to 0\.33.*vLLM 0\.20\.0 lacks "):
        install(EngineSettings(mode="require"))


def _stand_in(monkeypatch: pytest.MonkeyPatch, lacks: str = "", plain: str = "TRITON") -> Any:
    """A vLLM of all names that the plug-in uses but one, with an enumeration of backends; returns its layer class."""
    for hook in HOOKS:
        parts = hook.module.split(".")
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        owner: Any = sys.modules[hook.module]
        if ".oracle." in hook.module:
            owner.Backend = enum.Enum("Backend", [plain], module=hook.module)
        *classes, last = hook.name.split(".")
        for name in classes:
            if name not in vars(owner):
                setattr(owner, name, type(name, (), {}))
            owner = vars(owner)[name]
        if hook.path == lacks:
            continue
        if last[0].isupper():
            found: Any = vars(owner).get(last) or type(last, (), {})
            for use in hook.uses:
                setattr(found, use, vars(found).get(use))
        else:
            found = lambda: None  # noqa: E731
            parameters = [inspect.Parameter(use, inspect.Parameter.POSITIONAL_OR_KEYWORD) for use in hook.uses]
            found.__signature__ = inspect.Signature(parameters)
        setattr(owner, last, found)
    return sys.modules["vllm.model_executor.layers.fused_moe.routed_experts"].RoutedExperts  # type: ignore[attr-defined]


def test_a_vllm_with_all_names_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _stand_in(monkeypatch)
    theirs = layer._get_quant_method
    install(EngineSettings())
    assert layer._get_quant_method is not theirs


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_a_vllm_that_chooses_backends_elsewhere_keeps_all_layers(
    selector: Hook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would choose one unseen while a method is made, and pad or transpose weights for it."""
    layer = _stand_in(monkeypatch, lacks=selector.path)
    theirs = layer._get_quant_method
    with caplog.at_level(logging.INFO, "vllm.polymoe"):
        install(EngineSettings())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith(f"stands aside for all layers: vLLM 0.20.0 lacks {selector.path}")
    assert layer._get_quant_method is theirs


def test_a_vllm_without_a_plain_backend_keeps_all_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = _stand_in(monkeypatch, plain="MARLIN")
    theirs = layer._get_quant_method
    install(EngineSettings())
    assert f"lacks {SELECTORS[0].path} with EMULATION or TRITON or XPU" in caplog.text
    assert layer._get_quant_method is theirs
