"""Out of memory, on a GPU or in the host, as one message: needed, free, what helps."""

from __future__ import annotations

import re

_SIZE = r"(\d[\d.]* ?(?:bytes|[KMGT]i?B))"
_ALLOCATED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_FREE = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_HOST = ("DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory")

_HELPS_GPU = """\
hint: use shorter prompts and answers (--max-tokens), a smaller --batch-size or fewer --tokens, --device-map auto with
  several GPUs, --expert-memory auto (experts in host memory), or end other programs on this GPU (nvidia-smi).
  polymoe explain MODEL prints what a GPU must hold."""
_HELPS_HOST = """\
hint: end other programs, or use shorter prompts or fewer --tokens. polymoe explain MODEL prints what weights take."""


def out_of_memory(error: BaseException) -> str | None:
    """The message for an error that says that memory is exhausted, of torch, which has no class of its own for the
    host's memory, or Python's MemoryError; None for any other."""
    text = str(error)
    needed = _ALLOCATED.search(text)
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        free = _FREE.search(text)
        of = f", free {free[2]} of {free[1]}" if free else ""
        return f"out of GPU memory: needed {needed[1] if needed else 'more'} for one tensor{of}\n  {_HELPS_GPU}"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(s in text for s in _HOST)):
        return f"out of memory: needed {needed[1] if needed else 'more than there is'}{_free_here()}\n  {_HELPS_HOST}"
    return None


def _free_here() -> str:
    """What the host has left, on Linux."""
    from polymoe.machine import host_memory

    memory = host_memory()
    return f", free {memory[0] / 2**30:.1f} GiB of {memory[1] / 2**30:.1f} GiB" if memory else ""
