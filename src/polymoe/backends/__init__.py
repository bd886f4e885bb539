"""Backends: what runs a packed layer. :data:`BACKENDS` names them; :mod:`polymoe.planning.select` chooses."""

from __future__ import annotations

from polymoe.backends.base import Backend
from polymoe.backends.cuda.backend import Cuda
from polymoe.backends.flashinfer import FlashInfer
from polymoe.backends.reference import Reference
from polymoe.backends.torch_cpu import Torch
from polymoe.backends.triton import Triton
from polymoe.common.plugins import PluginTable

__all__ = ["BACKENDS", "Backend"]

_OURS: tuple[Backend, ...] = (Reference(), Torch(), Triton(), Cuda(), FlashInfer())

BACKENDS: PluginTable[Backend] = PluginTable(_OURS, "backends")
"""Backends by name, in the order in which explanations list them; those of other packages come last. Checking one
loads no kernel."""
