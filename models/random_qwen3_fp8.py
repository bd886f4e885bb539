"""A checkpoint of the layers of Qwen3-30B-A3B-FP8 with random weights, to measure speed and memory without a download.

    python models/random_qwen3_fp8.py /tmp/random-qwen3-fp8 --layers 12        # 8 GB

Names, dtypes, shapes and config are those of Qwen/Qwen3-30B-A3B-FP8, with fewer layers on request. E4M3 codes are drawn
as bytes and nothing is ever quantized. Sizes are those of a model before training: two ways to compute it agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from families import qwen3
from random_gpt_oss import Config, Make, bits, ones, uniform, write_and_tell

BLOCK = 128  # rows and columns that share a scale
CODES_RMS = 1.159  # root mean square of the E4M3 numbers from 0.5 to 1.875, each as likely
PAD, EOS = 151643, 151645  # <|endoftext|> and <|im_end|>


def qwen3_30b(*, layers: int = 48, experts: int = 128) -> Config:
    """config.json of Qwen/Qwen3-30B-A3B-FP8."""
    parts = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    kept = [f"model.layers.{i}.{part}" for i in range(layers) for part in parts]
    base = qwen3().config
    return base | {
        "eos_token_id": EOS,
        "head_dim": 128,
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "pad_token_id": PAD,
        "quantization_config": base["quantization_config"] | {"modules_to_not_convert": ["lm_head", *kept]},
        "vocab_size": 151936,
    }


def shards(config: Mapping[str, Any]) -> Iterator[dict[str, Make]]:
    """Names of the tensors of each shard, and what draws them: a layer a shard."""
    vocabulary, h = config["vocab_size"], config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        yield {f"model.layers.{layer}.{name}": make for name, make in _layer(config).items()}
    yield {"model.embed_tokens.weight": uniform(vocabulary, h)}
    yield {"model.norm.weight": ones(h), "lm_head.weight": uniform(vocabulary, h, std=h**-0.5)}


def _layer(config: Mapping[str, Any]) -> dict[str, Make]:
    h, f, experts, head = (config[k] for k in ("hidden_size", "moe_intermediate_size", "num_experts", "head_dim"))
    # What a layer adds is small beside what it gets, as in random_gpt_oss.py.
    added = (2 * config["num_hidden_layers"]) ** -0.5
    q, kv = (head * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    made: dict[str, Make] = {
        "input_layernorm.weight": ones(h),
        "post_attention_layernorm.weight": ones(h),
        "self_attn.q_norm.weight": ones(head),
        "self_attn.k_norm.weight": ones(head),
        # Wide logits: the last of a token's experts weighs little, and rounding seldom chooses another.
        "mlp.gate.weight": uniform(experts, h, std=4 * h**-0.5),
    }
    matrices = [(f"self_attn.{n}_proj", r, c, s) for n, r, c, s in
                (("q", q, h, 1.0), ("k", kv, h, 1.0), ("v", kv, h, 1.0), ("o", h, q, added))]  # fmt: skip
    for e in range(experts):
        for n, r, c, s in (("gate", f, h, 1.0), ("up", f, h, 1.0), ("down", h, f, added)):
            matrices.append((f"mlp.experts.{e}.{n}_proj", r, c, s))
    for name, rows, columns, size in matrices:
        made[f"{name}.weight"] = _codes(rows, columns)
        made[f"{name}.weight_scale_inv"] = _scales(rows, columns, std=size * columns**-0.5)
    return made


def _codes(*shape: int) -> Make:
    """E4M3 of both signs from 0.5 to 1.875: the sign, two exponents and all mantissas are random."""
    return lambda generator: (
        bits(shape, 1, generator).bitwise_and_(0b1_0001_111).bitwise_or_(0b0_0110_000).view(torch.float8_e4m3fn)
    )


def _scales(rows: int, columns: int, *, std: float) -> Make:
    """bfloat16 scales of blocks that give weights this standard deviation."""
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    return lambda generator: torch.full(shape, std / CODES_RMS, dtype=torch.bfloat16)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="to be created")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--workers", type=int, help="shards written at a time; default: one a core, at most 8")
    args = parser.parse_args()
    if min(args.layers, args.experts) < 1:
        parser.error("sizes must be positive")
    config = qwen3_30b(layers=args.layers, experts=args.experts)
    write_and_tell(args.directory, config, shards=shards, workers=args.workers)


if __name__ == "__main__":
    main()
