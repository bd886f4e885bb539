"""Bytes of the KV cache for each token of context, from a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polymoe.checkpoint.config_reader import MOST_LAYERS, MOST_WIDTH, ConfigReader
from polymoe.checkpoint.families import text_reader
from polymoe.common.shapes import ceil_div

_BYTES = 2  # of one 16-bit number
_LLAMA4_FULL = 4
"""Of Llama-4's layers, each fourth attends to the whole context, the others to chunks."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """What attention keeps of each token in 16 bit.

    Layers with sliding windows, chunks, linear attention or Mamba are not counted: what they keep does not grow with
    the context.

    Attributes:
        layers: that attend to the whole context.
        heads: KV heads of a layer; 1 for multi-head latent attention, whose latent vector all heads share.
        head_bytes: bytes of one head's entry for one token in one layer: keys and values, or the latent vector.
        max_tokens: longest context of the model; None where the config does not say it.
    """

    layers: int
    heads: int
    head_bytes: int
    max_tokens: int | None = None

    def token_bytes(self, tp: int = 1) -> int:
        """Bytes for one token on one of ``tp`` ranks, each of which has whole heads."""
        return self.layers * ceil_div(self.heads, tp) * self.head_bytes


def kv_cache(config: Mapping[str, Any]) -> KvCache | None:
    """Return what the attention of a config keeps of each token, or None where the config does not say it, or for
    DeepSeek V4, whose attention compresses what it keeps.

    Raises:
        CheckpointError: for a key with a wrong value.
    """
    keys = text_reader(config)
    if _given(keys, "compress_ratios", "o_lora_rank") or not _given(keys, "num_attention_heads"):
        return None
    layers = _layers(keys)
    context = keys.integer("max_position_embeddings", most=2**40) if _given(keys, "max_position_embeddings") else None
    if _given(keys, "kv_lora_rank"):
        numbers = keys.width("kv_lora_rank") + keys.integer("qk_rope_head_dim", least=0, most=MOST_WIDTH)
        numbers += keys.width("index_head_dim") if _given(keys, "index_head_dim") else 0  # keys of DeepSeek's indexer
        return KvCache(layers, 1, _BYTES * numbers, context)
    attention_heads = keys.width("num_attention_heads")
    heads = keys.width("num_key_value_heads", default=attention_heads)
    width = keys.width("head_dim") if _given(keys, "head_dim") else keys.width("hidden_size") // attention_heads
    return KvCache(layers, heads, 2 * _BYTES * width, context)


def attention_heads(config: Mapping[str, Any]) -> int | None:
    """Return the number of a config's attention heads, or None where it does not say it.

    Raises:
        CheckpointError: for a key with a wrong value.
    """
    keys = text_reader(config)
    return keys.width("num_attention_heads") if _given(keys, "num_attention_heads") else None


def _given(keys: ConfigReader, *names: str) -> bool:
    return any(keys.config.get(name) is not None for name in names)


def _layers(keys: ConfigReader) -> int:
    """The number of layers that attend to the whole context."""
    for name in ("layer_types", "layers_block_type"):
        kinds = keys.items(name, str, most=MOST_LAYERS)
        if kinds is not None:
            return sum(kind in ("full_attention", "attention") for kind in kinds)
    if pattern := keys.text("hybrid_override_pattern"):
        return pattern.count("*")
    layers = keys.layers()
    if _given(keys, "full_attention_interval"):
        return layers // keys.integer("full_attention_interval", most=MOST_LAYERS)
    if _given(keys, "attention_chunk_size"):
        return layers // _LLAMA4_FULL
    if _given(keys, "sliding_window") and keys.text("model_type") == "gpt_oss":
        return layers // 2  # sliding windows alternate with full attention
    return layers
