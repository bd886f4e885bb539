"""How a packed layer lies in memory. :data:`LAYOUTS` names the layouts; each packs and unpacks exactly."""

from __future__ import annotations

from polymoe.layouts.base import Layout, Packed
from polymoe.layouts.cuda.layout import Fragments
from polymoe.layouts.natural import Natural

__all__ = ["LAYOUTS", "Fragments", "Layout", "Natural", "Packed"]

_ALL: tuple[Layout, ...] = (Natural(), Fragments(), Fragments("hopper_e4m3", e4m3=True))

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _ALL}
"""Layouts by name."""
