"""Other libraries' layers of experts, called as their own users call them: what a benchmark compares with.

A peer is not a backend: only ``polymoe bench kernels --peers`` runs it. Each takes the checkpoint's own
bytes, so that its result can be compared with the reference before it is timed. Importing this package imports none of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from polymoe.bench.peers import finegrained, flashinfer, humming, quack, vllm
from polymoe.bench.peers.base import Peer, PeerCall, Stacks, version_of
from polymoe.problem.activation_quantization import FP8_GROUP128, FP8_TOKEN, MXFP8, UNQUANTIZED

__all__ = ["PEERS", "Peer", "PeerCall", "Stacks", "version_of"]

_PLAIN, _BLOCKS = (UNQUANTIZED,), {"fp8_block128": (FP8_GROUP128,)}
_WEIGHTS_ONLY = dict.fromkeys(("nvfp4", "int4_g32", "int4_g128"), _PLAIN)

_ALL = (
    Peer("humming", "humming-kernels", {"mxfp4": (UNQUANTIZED, FP8_TOKEN), **_WEIGHTS_ONLY,
                                        "fp8_block128": (FP8_GROUP128, UNQUANTIZED)}, humming.prepare,
         compiles_at_once=True),
    Peer("vllm", "vllm", {"mxfp4": _PLAIN, **_WEIGHTS_ONLY, "bf16": _PLAIN, **_BLOCKS}, vllm.own_kernels),
    Peer("deepgemm", "vllm", _BLOCKS, vllm.deepgemm),
    Peer("triton_kernels", "vllm", {"mxfp4": _PLAIN}, vllm.triton_kernels, vllm.gpt_oss_only, bias=True),
    Peer("flashinfer", "flashinfer-python", {"mxfp4": _PLAIN}, flashinfer.cutlass_fused_moe),
    Peer("monomoe", "flashinfer-python", _BLOCKS, flashinfer.mono_moe, more=flashinfer.need_sizes_of_mono_moe),
    Peer("quack", "quack-kernels", {"bf16": _PLAIN}, quack.prepare),
    Peer("finegrained", "kernels", {**_BLOCKS, "mxfp4": (MXFP8,), "mxfp8": (MXFP8,)}, finegrained.prepare),
)  # fmt: skip

PEERS: Mapping[str, Peer] = MappingProxyType({peer.name: peer for peer in _ALL})
"""Peers by name, as ``--peers`` takes them."""
