"""While a method is made, vLLM's functions answer a plain backend; afterwards they are vLLM's again, everywhere."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

pytest.importorskip("vllm", reason="scripts/test --engines has it")

from polymoe.engines.vllm.hooks import SELECTORS
from polymoe.engines.vllm.neutral import missing_plain_backends, neutral_choice

ORACLES = "vllm.model_executor.layers.fused_moe.oracle"


def bound() -> dict[tuple[str, str], object]:
    modules = [m for n, m in sys.modules.items() if n.startswith("vllm.model_executor.layers.")]
    names = [hook.name for hook in SELECTORS]
    return {(m.__name__, name): getattr(m, name) for m in modules for name in names if hasattr(m, name)}


def test_every_function_answers_a_plain_backend_and_notes_what_vllm_would_do() -> None:
    importlib.import_module(f"{ORACLES}.mxfp4")
    with neutral_choice() as chosen:
        for hook in SELECTORS:
            backend, experts = getattr(importlib.import_module(hook.module), hook.name)()
            assert backend.name in ("EMULATION", "TRITON")
            assert experts is None
    assert missing_plain_backends() == ()
    assert len(chosen) == len(SELECTORS)  # called without arguments, vLLM's own fail


def _import_late() -> ModuleType:
    """What a module does that is imported while a method is made: it binds the function by its name."""
    late = ModuleType("vllm.model_executor.layers.late")
    late.select_fp8_moe_backend = importlib.import_module(f"{ORACLES}.fp8").select_fp8_moe_backend  # type: ignore[attr-defined]
    sys.modules[late.__name__] = late
    return late


def _fail_inside(before: dict[tuple[str, str], object]) -> None:
    with neutral_choice():
        assert all(bound()[key] is not function for key, function in before.items())
        _import_late()
        raise KeyError  # whatever happens inside


def test_afterwards_every_module_has_vllms_functions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bound()
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.late", ModuleType("unused"))
    with pytest.raises(KeyError):
        _fail_inside(before)
    after = bound()
    assert {key: after[key] for key in before} == before
    original = importlib.import_module(f"{ORACLES}.fp8").select_fp8_moe_backend
    assert after["vllm.model_executor.layers.late", "select_fp8_moe_backend"] is original
