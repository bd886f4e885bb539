"""Mutators of whole files: removed, replaced by something that is no file, or joined by files that carry code."""

from __future__ import annotations

import json
import random

from attacks.source import Edit, Expect, Fifo, Folder, Link, Long, Mutation, Source

__all__ = ["CANARY", "FILE_MUTATORS"]

CANARY = "canary"
"""Code of a checkpoint that runs creates a file of this name in the working directory."""
RUNS = f"open({CANARY!r}, 'w').close()\n"
CODE = (
    RUNS
    + """
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, GenerationConfig
class Config(PretrainedConfig):
    model_type = "evil"
class Model(PreTrainedModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
def generate(*args, **kwargs):
    raise SystemExit
"""
).encode()
# Protocol 0: "posix.system('touch canary')" when it is opened.
PICKLE = b"cposix\nsystem\n(S'touch canary'\ntR."
MODULES = ("evil", "modeling_evil", "org/repo--evil", "../other/evil")


def removed(source: Source, rng: random.Random) -> Mutation:
    """A file is missing."""
    file = rng.choice(sorted(source.files))
    return Mutation("removed", f"{file} removed", (Edit(file, None),))


def no_file(source: Source, rng: random.Random) -> Mutation:
    """A pipe, a directory, a device or a broken link in place of a file."""
    file = rng.choice(sorted(source.files))
    instead = rng.choice((
        Fifo(), Fifo(), Folder(), Link("/dev/zero"), Link("/dev/null"), Link("/dev/full"), Link("/dev/tty"),
        Link("/dev/stdin"), Link(file), Link("nothing"), Link("."), Link("/proc/self/mem"), Link("/proc/self/environ"),
        Link("/etc/passwd"),
    ))  # fmt: skip
    return Mutation("no_file", f"{file}: {instead}", (Edit(file, instead),))


def long_file(source: Source, rng: random.Random) -> Mutation:
    """A file has gigabytes."""
    file = rng.choice(sorted(source.files))
    # A shard is mapped, which takes address space and nothing else.
    size = 2 * 10**8 if file in source.shards else rng.choice((2 * 10**8, 3 * 2**30, 2**40))
    content = rng.choice((b"", b'{"a": "', source.files[file]))
    text = f"{file}: {size:.0e} bytes after {content[:10]!r}"
    return Mutation("long_file", text, (Edit(file, Long(content, size)),), Expect.SAME_OR_REFUSED)


def linked(source: Source, rng: random.Random) -> Mutation:
    """A file is a link to its content outside of the directory."""
    file = rng.choice(sorted(source.files))
    edits = (Edit("../other/" + file, source.files[file]), Edit(file, Link("../other/" + file)))
    return Mutation("linked", f"{file} is a link to ../other", edits, Expect.SAME)


def odd_extra(source: Source, rng: random.Random) -> Mutation:
    """A file is added that Transformers or polymoe may read."""
    file, content = rng.choice((
        ("adapter_config.json", b'{"base_model_name_or_path": "../other", "peft_type": "LORA"}'),
        ("adapter_config.json", b"{"),
        ("adapter_model.safetensors", b"\x00" * 8),
        ("model.safetensors", source.files[source.shards[0]]),
        ("model.safetensors", b""),
        ("model-00003-of-00002.safetensors", source.files[source.shards[0]]),
        ("model.safetensors.index.json.bak", b"{"),
        ("x.safetensors.index.json", b"{"),
        ("hf_quant_config.json", b"{"),
        ("hf_quant_config.json", b'{"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["*"]}}'),
        ("hf_quant_config.json", b'{"quantization": 3}'),
        ("quantize_config.json", b'{"bits": 3}'),
        ("quant_config.json", b"{"),
        ("special_tokens_map.json", b'{"eos_token": 3}'),
        ("special_tokens_map.json", b"["),
        ("added_tokens.json", b'{"1": 99999999999}'),
        ("added_tokens.json", b"[[["),
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\xff"),
        ("vocab.json", b'{"a": "b"}'),
        ("merges.txt", b"\xff\xfe"),
        ("chat_template.json", b'{"chat_template": 3}'),
        ("chat_template.json", b"{"),
        ("additional_chat_templates/x.jinja", b"{% if"),
        ("preprocessor_config.json", b"{"),
        ("processor_config.json", b'{"processor_class": "X", "auto_map": {"AutoProcessor": "evil.Tokenizer"}}'),
        ("tekken.json", b"{"),
        ("params.json", b"{}"),
        ("pytorch_model.bin", PICKLE),
        ("pytorch_model.bin.index.json", b'{"weight_map": {"lm_head.weight": "pytorch_model.bin"}}'),
        ("tokenizer.pkl", PICKLE),
        ("model.gguf", b"GGUF" + b"\xff" * 100),
        ("original/params.json", b"{"),
    ))  # fmt: skip
    return Mutation("odd_extra", f"{file} added: {content[:40]!r}", (Edit(file, content),), Expect.SAME_OR_REFUSED)


def code(source: Source, rng: random.Random) -> Mutation:
    """The checkpoint brings Python, and every config names it."""
    module = rng.choice(MODULES)
    entries = {
        "AutoConfig": f"{module}.Config",
        "AutoModel": f"{module}.Model",
        "AutoModelForCausalLM": f"{module}.Model",
        "AutoModelForImageTextToText": f"{module}.Model",
        "AutoTokenizer": rng.choice(
            ([None, f"{module}.Tokenizer"], f"{module}.Tokenizer", [f"{module}.Tokenizer"] * 2)
        ),
        "AutoProcessor": f"{module}.Tokenizer",
        "AutoGenerationConfig": f"{module}.Config",
    }
    files = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
    chosen = [file for file in files if rng.random() < 0.6] or ["tokenizer_config.json"]
    edits = [
        Edit(f"{name}.py", CODE) for name in ("evil", "modeling_evil", "../other/evil", "custom_generate/generate")
    ]
    known_class = rng.random() < 0.5
    for file in chosen:
        tree = source.json(file) if file in source.files else {}
        tree |= {"auto_map": entries, "trust_remote_code": True}
        if file == "tokenizer_config.json" and not known_class:
            tree["tokenizer_class"] = "Tokenizer"
        if file == "config.json" and rng.random() < 0.3:
            tree["model_type"] = "evil"
        edits.append(Edit(file, json.dumps(tree).encode()))
    return Mutation("code", f"auto_map to {module} in {', '.join(chosen)}", tuple(edits), Expect.SAME_OR_REFUSED)


def pickled(source: Source, rng: random.Random) -> Mutation:
    """Weights are a pickle, with or without the index."""
    edits = [Edit(shard, None) for shard in source.shards]
    name = rng.choice(("pytorch_model.bin", "model.pt", "model.ckpt", "model.pth", source.shards[0]))
    edits = [edit for edit in edits if edit.file != name] + [Edit(name, PICKLE)]
    if rng.random() < 0.5:
        edits.append(Edit("model.safetensors.index.json", None))
    return Mutation("pickled", f"weights in {name}, a pickle", tuple(edits), Expect.REFUSED)


def one_shard_gone(source: Source, rng: random.Random) -> Mutation:
    """A shard is missing, with or without the index."""
    edits = [Edit(rng.choice(source.shards), None)]
    if rng.random() < 0.5:
        edits.append(Edit("model.safetensors.index.json", None))
    text = " and ".join(edit.file for edit in edits) + " removed"
    return Mutation("one_shard_gone", text, tuple(edits), Expect.SAME_OR_REFUSED)


FILE_MUTATORS = (
    (4, removed),
    (4, no_file),
    (2, long_file),
    (1, linked),
    (4, odd_extra),
    (4, code),
    (1, pickled),
    (1, one_shard_gone),
)
"""Each with its weight."""
