"""Backends: what runs a packed layer. :data:`BACKENDS` names them; :mod:`polymoe.planning.select` chooses."""

from __future__ import annotations

from polymoe.backends.base import Backend
from polymoe.backends.cuda.backend import Cuda
from polymoe.backends.reference import Reference
from polymoe.backends.triton import Triton

__all__ = ["BACKENDS", "Backend"]

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Reference(), Triton(), Cuda())}
"""Backends by name, in the order in which explanations list them. Checking one loads no kernel."""
