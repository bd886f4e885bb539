"""A checkpoint of gpt-oss-20b's size and format with random weights, to measure speed and memory without a download.

    python models/random_gpt_oss.py /tmp/random-gpt-oss-20b        # 13 GB, half a minute on 16 cores

Names, dtypes, shapes and config are those of openai/gpt-oss-20b. MXFP4 codes are drawn as bytes and nothing is ever
quantized. Sizes are those of a model before training, so that two ways to compute it agree. The tokenizer takes bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from families import gpt_oss
from safetensors.torch import save_file
from torch import Tensor

GROUP = 32  # codes that share a scale in MXFP4
E2M1_RMS = 2.926  # root mean square of E2M1's sixteen values
LAYERS_A_SHARD = 2
PAD, EOS = 199999, 200002  # gpt-oss's <|endoftext|> and <|return|>

Config = dict[str, Any]
Make = Callable[[torch.Generator], Tensor]
Shards = Callable[[Mapping[str, Any]], Iterator[dict[str, Make]]]


def gpt_oss_20b(*, layers: int = 24, experts: int = 32, hidden: int = 2880) -> Config:
    """config.json of openai/gpt-oss-20b; with another hidden size the experts' own follows it."""
    kinds = ["sliding_attention", "full_attention"]
    rope = {"factor": 32.0, "original_max_position_embeddings": 4096}
    return gpt_oss().config | {
        "eos_token_id": EOS,
        "experts_per_token": min(4, experts),
        "head_dim": 64,
        "hidden_size": hidden,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": hidden,
        "layer_types": [kinds[i % 2] for i in range(layers)],
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": min(4, experts),
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "pad_token_id": PAD,
        "rope_scaling": gpt_oss().config["rope_scaling"] | rope,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "vocab_size": 201088,
    }


def write(
    directory: Path,
    config: Mapping[str, Any],
    *,
    shards: Shards | None = None,
    workers: int | None = None,
    seed: int = 0,
) -> int:
    """Write a checkpoint of such a config to a new directory, which appears when it is complete; its bytes of weights.

    Tensors are gpt-oss's, or those of ``shards``: for each shard their names, and what draws them.
    Shards are drawn and written side by side, each from a seed of its own, so that the number of workers changes
    nothing. A worker holds one shard: a gigabyte at gpt-oss-20b's size.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists; nothing was written")
    directory.parent.mkdir(parents=True, exist_ok=True)
    tensors = list((shards or _shards)(config))
    names = [f"model-{i + 1:05}-of-{len(tensors):05}.safetensors" for i in range(len(tensors))]
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
        place = Path(temporary) / directory.name
        place.mkdir()

        def shard(i: int) -> int:
            generator = torch.Generator().manual_seed(seed * len(tensors) + i)
            held = {name: make(generator) for name, make in tensors[i].items()}
            save_file(held, place / names[i], metadata={"format": "pt"})
            return sum(t.nbytes for t in held.values())

        with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
            total = sum(pool.map(shard, range(len(tensors))))
        weight_map = {name: file for file, held in zip(names, tensors, strict=True) for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        ends = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
        _write_json(place / "model.safetensors.index.json", index)
        _write_json(place / "config.json", config)
        _write_json(place / "generation_config.json", {"do_sample": False, **ends})
        _write_tokenizer(place, config)
        place.rename(directory)
    return total


def _shards(config: Mapping[str, Any]) -> Iterator[dict[str, Make]]:
    """Names of the tensors of each shard, and what draws them."""
    vocabulary, h = config["vocab_size"], config["hidden_size"]
    layers = [_layer(config, i) for i in range(config["num_hidden_layers"])]
    for start in range(0, len(layers), LAYERS_A_SHARD):
        yield {name: make for layer in layers[start : start + LAYERS_A_SHARD] for name, make in layer.items()}
    yield {"model.embed_tokens.weight": uniform(vocabulary, h)}
    yield {"model.norm.weight": ones(h), "lm_head.weight": uniform(vocabulary, h, std=h**-0.5)}


def _layer(config: Mapping[str, Any], layer: int) -> dict[str, Make]:
    h, f, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    # As in models at the start of training: what a layer adds is small beside what it gets, so that rounding, and an
    # expert chosen otherwise because of it, do not grow from layer to layer.
    added = (2 * config["num_hidden_layers"]) ** -0.5
    q, kv = (config["head_dim"] * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    made: dict[str, Make] = {
        "input_layernorm.weight": ones(h),
        "mlp.experts.down_proj_bias": uniform(experts, h, std=0.1 * added),
        "mlp.experts.down_proj_blocks": _codes(experts, h, f // GROUP, GROUP // 2),
        "mlp.experts.down_proj_scales": _scales(experts, h, f // GROUP, std=added * f**-0.5),
        "mlp.experts.gate_up_proj_bias": uniform(experts, 2 * f, std=0.1),
        "mlp.experts.gate_up_proj_blocks": _codes(experts, 2 * f, h // GROUP, GROUP // 2),
        "mlp.experts.gate_up_proj_scales": _scales(experts, 2 * f, h // GROUP, std=h**-0.5),
        "mlp.router.bias": uniform(experts, std=0.1),
        # Wide logits: the last of a token's experts weighs little, and rounding seldom chooses another.
        "mlp.router.weight": uniform(experts, h, std=4 * h**-0.5),
        "post_attention_layernorm.weight": ones(h),
        "self_attn.sinks": uniform(config["num_attention_heads"]),
    }
    for name, rows, columns, size in (("q", q, h, 1), ("k", kv, h, 1), ("v", kv, h, 1), ("o", h, q, added)):
        made[f"self_attn.{name}_proj.weight"] = uniform(rows, columns, std=size * columns**-0.5)
        made[f"self_attn.{name}_proj.bias"] = uniform(rows, std=0.1 * size)
    return {f"model.layers.{layer}.{name}": make for name, make in made.items()}


def ones(*shape: int) -> Make:
    return lambda generator: torch.ones(shape, dtype=torch.bfloat16)


def uniform(*shape: int, std: float = 1.0) -> Make:
    """bfloat16 of a mean of 0, made of 16 random bits each: much faster than torch's own distributions."""
    return lambda generator: bits(shape, 2, generator).view(torch.int16).bfloat16().mul_(std * 3**0.5 / 2**15)


def _codes(*shape: int) -> Make:
    """Two E2M1 codes a byte: every byte is two valid ones."""
    return lambda generator: bits(shape, 1, generator)


def _scales(*shape: int, std: float) -> Make:
    """E8M0 bytes: the two powers of two around what gives weights this standard deviation."""
    below = 127 + math.floor(math.log2(std / E2M1_RMS))
    return lambda generator: bits(shape, 1, generator).bitwise_and_(1).add_(below)


def bits(shape: tuple[int, ...], itemsize: int, generator: torch.Generator) -> Tensor:
    """Random bytes, ``itemsize`` for each element along the last dimension."""
    size = math.prod(shape) * itemsize
    words = torch.empty(-(-size // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:size].view(*shape[:-1], shape[-1] * itemsize)


def _write_tokenizer(directory: Path, config: Mapping[str, Any]) -> None:
    """One token a byte and the two that the config names; any other is its number, which a model of random weights says
    all the time and no text becomes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<|endoftext|>": config["pad_token_id"], "<|return|>": config["eos_token_id"]}
    count = max(config["vocab_size"], len(alphabet) + len(special))
    free = [i for i in range(count) if i not in special.values()]
    # A space begins each number, as ByteLevel writes it.
    others = {f"\u0120{i}": i for i in free[len(alphabet) :]}
    vocabulary = dict(zip(alphabet, free, strict=False)) | special | others
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    core.add_special_tokens([AddedToken(symbol, special=True) for symbol in special])
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|return|>",
        padding_side="left",
        model_max_length=config["max_position_embeddings"],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    stored = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    # The name that every version of Transformers knows.
    _write_json(directory / "tokenizer_config.json", stored | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_and_tell(directory: Path, config: Config, *, shards: Shards | None = None, workers: int | None) -> None:
    """Write a checkpoint, and print how large it is and how long it took."""
    start = time.perf_counter()
    size = write(directory, config, shards=shards, workers=workers)
    print(f"{directory}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="to be created")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2880, help="a multiple of 32")
    parser.add_argument("--workers", type=int, help="shards written at a time; default: one a core, at most 8")
    args = parser.parse_args()
    if min(args.layers, args.experts, args.hidden) < 1 or args.hidden % GROUP:
        parser.error(f"sizes must be positive, and --hidden a multiple of {GROUP}")
    config = gpt_oss_20b(layers=args.layers, experts=args.experts, hidden=args.hidden)
    write_and_tell(args.directory, config, workers=args.workers)


if __name__ == "__main__":
    main()
