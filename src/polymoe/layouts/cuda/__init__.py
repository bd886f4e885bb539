"""Layouts of the CUDA kernels: weights in the order in which MMA instructions read them."""

from __future__ import annotations

from polymoe.layouts.cuda.w4a8_fragments import W4A8Fragments
from polymoe.layouts.cuda.w4a16_fragments import W4A16Fragments
from polymoe.layouts.cuda.w8_swizzle128 import W8Swizzle128
from polymoe.layouts.cuda.w8a16_fragments import W8A16Fragments
from polymoe.layouts.cuda.w16_swizzle128 import W16Swizzle128

__all__ = ["W4A8Fragments", "W4A16Fragments", "W8A16Fragments", "W8Swizzle128", "W16Swizzle128"]
