"""Hooks that others set on Triton's compiler, and kernels with functions among their constants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import triton
from triton import knobs

_DESCRIBES_FUNCTIONS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether Triton can describe a kernel to a hook if one of its constants is a function: older versions raise a
TypeError."""
_NOTHING = nullcontext()


def hooks_without_functions() -> AbstractContextManager[None]:
    """Return a context in which kernels may have functions among their constants, whatever hooks are set.

    vLLM sets a hook that reports what is compiled while it serves. Where Triton cannot describe such a kernel, no hook
    is called for it.
    """
    runtime = knobs.runtime
    if _DESCRIBES_FUNCTIONS or (runtime.jit_cache_hook is None and runtime.jit_post_compile_hook is None):
        return _NOTHING
    return _no_hooks()


@contextmanager
def _no_hooks() -> Iterator[None]:
    runtime = knobs.runtime
    before = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = before
