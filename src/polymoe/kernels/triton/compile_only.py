"""Compile the kernels of a call without launching them, into Triton's cache on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton


@contextmanager
def compile_only() -> Iterator[None]:
    """In this context, launches of Triton kernels compile and do not run.

    Tensors may be on the meta device. Their addresses count as aligned, like those of fresh tensors.
    """
    launch = triton.JITFunction.run

    def compile(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, warmup=True, **kwargs)

    triton.JITFunction.run = compile  # type: ignore[method-assign]
    try:
        yield
    finally:
        triton.JITFunction.run = launch  # type: ignore[method-assign]
