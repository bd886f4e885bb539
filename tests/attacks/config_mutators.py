"""Mutators of config.json, the index, the tokenizer's files, the generation config and the chat template."""

from __future__ import annotations

import random
from typing import Any

from attacks.json_mutators import NUMBERS, PATTERNS, Raw, damage, dumps, mutate_tree, paths
from attacks.source import Edit, Expect, Mutation, Source

__all__ = ["CONFIG_MUTATORS"]

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX = "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
JSON_FILES = (CONFIG, CONFIG, INDEX, TOKENIZER, TOKENIZER_CONFIG, GENERATION)

OF_SIZES = (
    "num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok", "hidden_size",
    "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "first_k_dense_replace", "layer_types", "n_group", "topk_group",
    "rope_scaling", "rope_parameters", "sliding_window", "max_position_embeddings",
    "quantization_config", "weight_block_size", "group_size", "modules_to_not_convert",
    "ignore", "config_groups", "targets", "num_bits", "bits", "strategy", "quant_algo", "scale_fmt", "hidden_act",
    "decoder_sparse_step", "moe_layer_freq", "layers_block_type", "hybrid_override_pattern", "kv_lora_rank",
    "q_lora_rank", "interleave_moe_layer_step", "attention_chunk_size", "text_config", "vision_config", "model_type",
    "dtype",
)  # fmt: skip
ADDED: tuple[tuple[str, str], ...] = (
    ("attn_implementation", '"kernels-community/flash-attn"'),
    ("_attn_implementation", '"kernels-community/flash-attn"'),
    ("_attn_implementation", '"sdpa|flash"'),
    ("experts_implementation", '"kernels-community/megablocks"'),
    ("_experts_implementation", '"eager2"'),
    ("use_kernels", "true"),
    ("tp_plan", '"auto"'),
    ("base_model_tp_plan", '{"layers.*": "colwise"}'),
    ("torch_dtype", '"float8_e4m3fn"'),
    ("dtype", '"os.system"'),
    ("dtype", '{"": "float64"}'),
    ("_name_or_path", '"/etc"'),
    ("pruned_heads", '{"0": [0]}'),
    ("num_labels", "1000000000"),
    ("id2label", '{"a": 1}'),
    ("is_encoder_decoder", "true"),
    ("problem_type", '"x"'),
    ("return_dict", "false"),
    ("output_attentions", "true"),
    ("chunk_size_feed_forward", "7"),
    ("tie_word_embeddings", "true"),
    ("sub_configs", "{}"),
    ("__class__", '"x"'),
    ("to_dict", "1"),
    ("get_text_config", '"x"'),
    ("quantization_config", '{"quant_method": "bitsandbytes", "load_in_4bit": true}'),
    ("quantization_config", '{"quant_method": "gptq", "bits": 4, "group_size": 0, "desc_act": true}'),
    ("quantization_config", '{"quant_method": "polymoe", "source": {}}'),
    ("compression_config", '{"quant_method": "compressed-tensors", "config_groups": {}}'),
    ("architectures", '["GPT2LMHeadModel"]'),
    ("architectures", "[]"),
    ("architectures", '["../evil.Model"]'),
    ("model_type", '"bert"'),
    ("model_type", '"gpt_oss"'),
    ("model_type", '"deepseek_v4"'),
    ("model_type", '"mixtral"'),
)


def any_value(source: Source, rng: random.Random) -> Mutation:
    """One value of one JSON file is replaced, removed or renamed."""
    file = rng.choice(JSON_FILES)
    text, tree = mutate_tree(source.json(file), rng)
    return Mutation("any_value", f"{file}: {text}", (Edit(file, dumps(tree)),))


def any_text(source: Source, rng: random.Random) -> Mutation:
    """The text of one JSON file is damaged."""
    file = rng.choice(JSON_FILES)
    kind, content = damage(source.files[file], rng)
    return Mutation("any_text", f"{file}: {kind}", (Edit(file, content),))


def important_key(source: Source, rng: random.Random) -> Mutation:
    """A key of config.json that polymoe reads, wherever it is."""
    tree = source.json(CONFIG)
    found = [path for path in paths(tree) if path[-1] in OF_SIZES or "quantization_config" in path]
    text, tree = mutate_tree(tree, rng, rng.choice(found))
    return Mutation("important_key", f"{CONFIG}: {text}", (Edit(CONFIG, dumps(tree)),))


def huge_number(source: Source, rng: random.Random) -> Mutation:
    """A number of config.json becomes another one."""
    tree = source.json(CONFIG)
    *above, key = rng.choice([path for path in paths(tree) if type(_at(tree, path)) in (int, float)])
    number = rng.choice(NUMBERS)
    _at(tree, above)[key] = Raw(number)
    return Mutation("huge_number", f"{CONFIG}: {'.'.join(map(str, [*above, key]))} = {number[:40]}",
                    (Edit(CONFIG, dumps(tree)),))  # fmt: skip


def added_key(source: Source, rng: random.Random) -> Mutation:
    """config.json gets a key that Transformers or polymoe reads."""
    tree = source.json(CONFIG)
    key, value = rng.choice(ADDED)
    tree[key] = Raw(value)
    return Mutation("added_key", f"{CONFIG}: {key} = {value}", (Edit(CONFIG, dumps(tree)),))


def ignore_patterns(source: Source, rng: random.Random) -> Mutation:
    """Patterns of modules that are hard to match."""
    tree = source.json(CONFIG)
    lists = [
        path for path in paths(tree) if path[-1] in ("ignore", "modules_to_not_convert", "exclude_modules", "targets")
    ]
    pattern = rng.choice(PATTERNS)
    patterns = rng.choice(([pattern], [pattern] * 50, [*PATTERNS], [pattern * 200]))
    *above, key = rng.choice(lists) if lists else ("quantization_config", "modules_to_not_convert")
    _at(tree, above)[key] = patterns
    return Mutation("ignore_patterns", f"{CONFIG}: {key} = {len(patterns)} x {patterns[0][:40]!r}",
                    (Edit(CONFIG, dumps(tree)),))  # fmt: skip


def index_entry(source: Source, rng: random.Random) -> Mutation:
    """An entry of the index names another file."""
    tree = source.json(INDEX)
    entries = tree["weight_map"]
    names = rng.sample(sorted(entries), rng.choice((1, 1, 5, len(entries))))
    shard = rng.choice((
        *source.shards, "model-00003-of-00002.safetensors", "../other/model.safetensors", "/etc/passwd", "/dev/zero",
        "config.json", "", ".", "..", "a/b.safetensors", "./" + source.shards[0], "C:\\x.safetensors",
        "\x00.safetensors",
        "\ud800.safetensors", "x" * 5000 + ".safetensors", "../" + source.name + "/" + source.shards[0],
    ))  # fmt: skip
    for name in names:
        entries[name] = shard
    edits = [Edit(INDEX, dumps(tree))]
    outside = "../other" in shard
    if outside:
        shards = [source.files[s] for s in source.shards]
        edits.append(Edit(shard, max(shards, key=len)))
    text = f"{INDEX}: {len(names)} tensors, as {names[0]}, in {shard[:60]!r}"
    return Mutation("index_entry", text, tuple(edits), Expect.REFUSED if ".." in shard else Expect.SAME_OR_REFUSED)


def index_outside(source: Source, rng: random.Random) -> Mutation:
    """The whole index leads out of the directory, to shards that would load."""
    tree = source.json(INDEX)
    way = rng.choice(("../other/", "sub/../../other/", "@/other/"))
    entries = {name: way + shard for name, shard in tree["weight_map"].items()}
    tree["weight_map"] = entries
    moved = [
        edit for shard in source.shards for edit in (Edit(shard, None), Edit("../other/" + shard, source.files[shard]))
    ]
    edits = (Edit(INDEX, dumps(tree)), *moved)
    return Mutation("index_outside", f"{INDEX}: every shard in {way}", edits, Expect.REFUSED)


def other_file(source: Source, rng: random.Random) -> Mutation:
    """A file of another checkpoint in place of this one's."""
    others = [name for name in sorted(p.name for p in _models()) if name != source.name]
    other = Source.of(rng.choice(others))
    file = rng.choice((CONFIG, INDEX, TOKENIZER, GENERATION, *source.shards))
    return Mutation("other_file", f"{file} of {other.name}", (Edit(file, other.files[file]),))


def _models() -> list[Any]:
    from attacks.source import MODELS

    return [path for path in MODELS.iterdir() if (path / CONFIG).exists()]


def _at(tree: Any, path: Any) -> Any:
    for step in path:
        tree = tree.setdefault(step, {}) if isinstance(tree, dict) else tree[step]
    return tree


CONFIG_MUTATORS = (
    (12, any_value),
    (4, any_text),
    (12, important_key),
    (8, huge_number),
    (4, added_key),
    (4, ignore_patterns),
    (4, index_entry),
    (1, index_outside),
    (3, other_file),
)
"""Each with its weight."""
