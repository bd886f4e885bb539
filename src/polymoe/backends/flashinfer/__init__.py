"""The backend of FlashInfer's fused MoE kernels (``polymoe[flashinfer]``)."""

from __future__ import annotations

from polymoe.backends.flashinfer.backend import FlashInfer

__all__ = ["FlashInfer"]
