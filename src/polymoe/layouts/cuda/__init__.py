"""Layouts of the CUDA kernels."""

from __future__ import annotations

from polymoe.layouts.cuda.layout import Fragments

__all__ = ["Fragments"]
