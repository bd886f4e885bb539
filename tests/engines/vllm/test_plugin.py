"""What the plug-in reads of the installed vLLM when it chooses a layer's method."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="scripts/test --engines has it")

from polymoe.engines.vllm.plugin import _batch_invariant


@pytest.mark.parametrize("value", ["0", "1"])
def test_vllms_promise_of_batch_invariance_is_ours(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert _batch_invariant() is (value == "1")
