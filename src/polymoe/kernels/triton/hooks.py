"""Hooks that others set on Triton's compiler, and kernels with functions among their constants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import triton

__all__ = ["hooks_without_functions"]

_DESCRIBES_FUNCTIONS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether Triton can describe a kernel to a hook if one of its constants is a function: older versions raise a
TypeError."""
_NOTHING = nullcontext()


def hooks_without_functions() -> AbstractContextManager[None]:
    """Return a context in which kernels may have functions among their constants, whatever hooks are set.

    vLLM sets a hook that reports what is compiled while it serves. Where Triton cannot describe such a kernel, no hook
    is called for it.
    """
    knobs = triton.knobs.runtime
    if _DESCRIBES_FUNCTIONS or (knobs.jit_cache_hook is None and knobs.jit_post_compile_hook is None):
        return _NOTHING
    return _no_hooks()


@contextmanager
def _no_hooks() -> Iterator[None]:
    knobs = triton.knobs.runtime
    before = knobs.jit_cache_hook, knobs.jit_post_compile_hook
    knobs.jit_cache_hook = knobs.jit_post_compile_hook = None
    try:
        yield
    finally:
        knobs.jit_cache_hook, knobs.jit_post_compile_hook = before
