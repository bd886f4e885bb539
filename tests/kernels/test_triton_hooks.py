"""Hooks on Triton's compiler, as vLLM sets them."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from polymoe.kernels.triton import hooks  # noqa: E402


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    def hook(**_: Any) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    return hook


def test_hooks_stay_where_triton_describes_functions(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_DESCRIBES_FUNCTIONS", True)
    with hooks.hooks_without_functions():
        assert triton.knobs.runtime.jit_post_compile_hook is called


def test_hooks_are_off_where_it_does_not(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And come back, also after an error."""
    monkeypatch.setattr(hooks, "_DESCRIBES_FUNCTIONS", False)
    with pytest.raises(ValueError, match="in the launch"), hooks.hooks_without_functions():  # noqa: PT012
        assert triton.knobs.runtime.jit_post_compile_hook is None
        raise ValueError("in the launch")
    assert triton.knobs.runtime.jit_post_compile_hook is called
