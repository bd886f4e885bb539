"""Threads that share the work of a process, each of which is one thread to torch."""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor

import torch


def threads_of(count: int) -> ThreadPoolExecutor:
    """Return ``count`` threads, always the same ones.

    To torch each of them is one thread: threads that share operations would wait for each other after each of hundreds.
    """
    return _threads(count, os.getpid())  # a forked process has none of its parent's


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "polymoe", initializer=_alone)


def _alone() -> None:
    # torch.set_num_threads would also set the number that threads which start later begin with, whose they are ever.
    set_own_threads = getattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", None)
    if set_own_threads is not None:
        torch.get_num_threads()  # a thread's first call sets its number
        set_own_threads(1)
