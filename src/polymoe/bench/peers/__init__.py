"""Other libraries' layers of experts, called as their own users call them: what a benchmark compares with.

A peer is not a backend: only ``polymoe bench kernels --peers`` runs it. Each takes the checkpoint's own
bytes, so that its result can be compared with the reference before it is timed. Importing this package imports none of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from polymoe.bench.peers.base import Peer, PeerCall, Stacks, peer_problem, version_of
from polymoe.bench.peers.finegrained import FinegrainedFp8
from polymoe.bench.peers.flashinfer import FlashInferLayers, MonoMoe
from polymoe.bench.peers.humming import HummingLayers
from polymoe.bench.peers.quack import Quack
from polymoe.bench.peers.vllm import DeepGemm, TritonKernels, Vllm

__all__ = ["PEERS", "Peer", "PeerCall", "Stacks", "peer_problem", "version_of"]

_ALL: tuple[Peer, ...] = (
    HummingLayers(), Vllm(), DeepGemm(), TritonKernels(), FlashInferLayers(), MonoMoe(), Quack(), FinegrainedFp8(),
)  # fmt: skip

PEERS: Mapping[str, Peer] = MappingProxyType({peer.name: peer for peer in _ALL})
"""Peers by name, as ``--peers`` takes them."""
