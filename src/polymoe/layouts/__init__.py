"""How a packed layer lies in memory. :data:`LAYOUTS` names the layouts; each packs and unpacks exactly."""

from __future__ import annotations

from polymoe.layouts.base import Layout, Packed
from polymoe.layouts.hopper import Hopper
from polymoe.layouts.natural import Natural

__all__ = ["LAYOUTS", "Hopper", "Layout", "Natural", "Packed"]

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Natural(), Hopper(), Hopper("hopper_e4m3", e4m3=True))}
"""Layouts by name."""
