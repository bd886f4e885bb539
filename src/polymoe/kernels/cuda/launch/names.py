"""Names of compiled units and kernels."""

from __future__ import annotations

from polymoe.kernels.cuda.sizes import Family, round_up

__all__ = ["gemm_kernel", "helper_kernel"]

_FAMILIES = {
    "w4a16_mma": "decode", "w4a16_wgmma": "prefill", "w4a8": "w4a8", "bf16": "whole", "w8a8_f16": "fp8", "w8a8": "w8a8",
}  # fmt: skip
_PARTS = {"gate_up": "gated", "up": "plain", "down": "down"}


def gemm_kernel(family: Family, format: str, part: str, block_m: int, block_n: int) -> tuple[str, str]:
    """The unit and the kernel of a family's GEMM; ``part`` is ``gate_up``, ``up`` or ``down``."""
    known = _FAMILIES[family.name]
    unit = format if known == "fp8" else f"{known}_{format}"
    name = f"{known}_{_PARTS[part]}_{round_up(block_m, 8) if family.block_ns else block_m}"
    return unit, f"{name}_{block_n}" if family.block_ns else name


_HELPERS = {
    "permutation_one_warp": ("rows", "dispatch_few"), "permutation_one_cta": ("rows", "dispatch"),
    "permutation_count": ("rows", "count_many"), "permutation_many_ctas": ("rows", "dispatch_many"),
    "permute_x": ("rows", "spread"), "finalize_f32": ("rows", "combine"), "finalize_bf16": ("rows", "combine_narrow"),
    "quantize_permuted": ("rows_fp8", "quantize"), "quantize_rows": ("fp8_block128", "quantize"),
    "quantize_rows_paired": ("w8a8_fp8_block128", "quantize_in_pairs"),
}  # fmt: skip


def helper_kernel(name: str) -> tuple[str, str]:
    """The unit and the kernel of what runs around the GEMMs."""
    return _HELPERS[name]
