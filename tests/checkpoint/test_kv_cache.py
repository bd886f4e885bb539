"""Bytes of the KV cache for each token of context."""

from __future__ import annotations

from typing import Any

import pytest

from polymoe.checkpoint.known_models import known_models
from polymoe.checkpoint.kv_cache import KvCache, kv_cache
from polymoe.errors import CheckpointError
from support.configs import config

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai/gpt-oss-20b", KvCache(12, 8, 2 * 2 * 64, 131072)),
        ("deepseek-ai/DeepSeek-V3", KvCache(61, 1, 2 * (512 + 64), 163840)),
        ("deepseek-ai/DeepSeek-V3.2", KvCache(61, 1, 2 * (512 + 64 + 128), 163840)),
        ("deepseek-ai/DeepSeek-V4-Flash", None),
        ("moonshotai/Kimi-K2.5", KvCache(61, 1, 2 * (512 + 64), 262144)),
        ("Qwen/Qwen3-30B-A3B", KvCache(48, 4, 2 * 2 * 128, 40960)),
        ("Qwen/Qwen3.5-35B-A3B", KvCache(10, 2, 2 * 2 * 256, 262144)),
        ("mistralai/Mixtral-8x7B-v0.1", KvCache(32, 8, 2 * 2 * 128, 32768)),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", KvCache(12, 8, 2 * 2 * 128, 10485760)),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", KvCache(8, 2, 2 * 2 * 128, 262144)),
        ("zai-org/GLM-4.7-Flash", KvCache(47, 1, 2 * (512 + 64), 202752)),
    ],
)
def test_each_kind_of_attention(name: str, expected: KvCache | None) -> None:
    assert kv_cache(known_models()[name].config) == expected


def test_ranks_have_whole_heads() -> None:
    cache = KvCache(layers=10, heads=4, head_bytes=512)
    assert [cache.token_bytes(tp) for tp in (1, 2, 3, 4, 8)] == [20480, 10240, 10240, 5120, 5120]
    assert KvCache(layers=10, heads=1, head_bytes=512).token_bytes(8) == 5120


def test_kinds_of_layers_by_name() -> None:
    kinds = ["full_attention", "sliding_attention", "linear_attention", "full_attention"]
    found = kv_cache(config("qwen3-bf16") | HEADS | {"layer_types": kinds})
    assert found == KvCache(2, 2, 2 * 2 * 32)  # H / 8 heads


def test_a_config_without_attention_says_nothing() -> None:
    assert kv_cache(config("qwen3-bf16")) is None


@pytest.mark.parametrize("wrong", [{"num_key_value_heads": "2"}, {"head_dim": 0}, {"layer_types": [1]}])
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        kv_cache(config("qwen3-bf16") | HEADS | wrong)
