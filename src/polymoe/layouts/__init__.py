"""Layouts of packed layers in memory. :data:`LAYOUTS` holds them by name."""

from __future__ import annotations

from polymoe.common.plugins import PluginTable
from polymoe.layouts.base import Layout, Packed
from polymoe.layouts.cuda import W4A8Fragments, W4A16Fragments, W8A16Fragments, W8Swizzle128, W16Swizzle128
from polymoe.layouts.dequantized import DequantizedMatrices
from polymoe.layouts.flashinfer import FlashInferSM90
from polymoe.layouts.flashinfer_blackwell import FlashInferSM12x, FlashInferTrtllm
from polymoe.layouts.natural import Natural

__all__ = ["LAYOUTS", "Layout", "Natural", "Packed"]

_ALL: tuple[Layout, ...] = (
    Natural(), DequantizedMatrices(), W4A16Fragments(),
    W4A16Fragments("w4a16_fragments_cvt", cvt=True), W4A8Fragments(), W8Swizzle128(), W8A16Fragments(), W16Swizzle128(),
    FlashInferSM90("flashinfer_sm90"), FlashInferSM90("flashinfer_sm90_folded", folded=True),
    FlashInferTrtllm("flashinfer_trtllm_int4", "int4_g32"), FlashInferTrtllm("flashinfer_trtllm_mxfp4", "mxfp4"),
    FlashInferTrtllm("flashinfer_trtllm_nvfp4", "nvfp4"), FlashInferSM12x("flashinfer_sm12x_nvfp4", "nvfp4"),
)  # fmt: skip

LAYOUTS: PluginTable[Layout] = PluginTable(_ALL, "layouts")
"""Layouts by name. Layouts from plugins come last."""
