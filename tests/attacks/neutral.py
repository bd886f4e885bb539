"""Neutral edits: what a checkpoint may have otherwise without a single bit of any answer changing."""

from __future__ import annotations

import json
import random
from typing import Any

from attacks.source import Edit, Expect, Mutation, Source, build

__all__ = ["NEUTRAL_MUTATORS"]

INDEX = "model.safetensors.index.json"
JSON_FILES = ("config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "generation_config.json")
EXTRA: tuple[tuple[str, bytes], ...] = (
    ("README.md", b"# a model\n"),
    (".gitattributes", b"*.safetensors filter=lfs\n"),
    ("NOTES.txt", b"\xff\xfe\x00"),
    ("LICENSE", b""),
    ("notes.json", b"{ no json"),
    ("original/model.txt", b"x"),
    ("original/consolidated.safetensors", b"\x00" * 4),
    ("onnx/model.onnx", b"\x08\x01"),
    ("consolidated.safetensors", b"broken"),
    ("training_args.bin", b"cposix\nsystem\n(S'touch canary'\ntR."),
    ("logs/events.out", b"\x00" * 100),
    ("evaluate.py", b"open('canary', 'w').close()\n"),
    ("\u00fcbung.txt", "\u00fc".encode()),
    ("config.json~", b"{"),
    (".config.json.swp", b"\x00"),
)
NOTES = ("x_note", "note_of_training", "\u00fcbung", "a.b.c", "exported_by")
VALUES: tuple[Any, ...] = (
    "text",
    3,
    -1.5,
    None,
    True,
    [],
    {},
    [1, [2]],
    {"a": {"b": []}},
    "x" * 5000,
    "\U0001f600",
    10**40,
)


def layout(source: Source, rng: random.Random) -> Mutation:
    """A JSON file is written with another white space, order of keys or escapes."""
    file = rng.choice(JSON_FILES)
    tree = source.json(file)
    how = rng.choice(("compact", "indented", "shuffled", "reversed", "escaped", "CRLF", "final blanks"))
    text = json.dumps(tree, ensure_ascii=how == "escaped")
    if how == "indented":
        text = json.dumps(tree, indent=rng.choice((1, 4, "\t")))
    elif how == "shuffled":
        text = json.dumps(_ordered(tree, lambda keys: rng.sample(keys, len(keys)), file))
    elif how == "reversed":
        text = json.dumps(_ordered(tree, lambda keys: keys[::-1], file))
    elif how == "CRLF":
        text = json.dumps(tree, indent=2).replace("\n", "\r\n")
    elif how == "final blanks":
        text += " \n\t\r\n" * 500
    return Mutation("layout", f"{file}: {how}", (Edit(file, text.encode()),), Expect.SAME)


def unknown_key(source: Source, rng: random.Random) -> Mutation:
    """A JSON file has a key that nothing reads."""
    file = rng.choice(("config.json", "config.json", INDEX, "tokenizer_config.json"))
    tree = source.json(file)
    places = [tree]
    if file == "config.json":
        places += [tree[key] for key in ("quantization_config", "text_config") if key in tree]
    key = rng.choice(NOTES)
    rng.choice(places)[key] = rng.choice(VALUES)
    return Mutation("unknown_key", f"{file}: {key}", (Edit(file, json.dumps(tree).encode()),), Expect.SAME)


def of_the_index(source: Source, rng: random.Random) -> Mutation:
    """The index has other metadata."""
    tree = source.json(INDEX)
    tree["metadata"] = rng.choice(({}, {"total_size": 0}, {"total_size": 10**15}, {"total_size": 1.5, "x": "y"}))
    if rng.random() < 0.3:
        del tree["metadata"]
    return Mutation("of_the_index", f"{INDEX}: metadata", (Edit(INDEX, json.dumps(tree).encode()),), Expect.SAME)


def of_a_header(source: Source, rng: random.Random) -> Mutation:
    """A header has other metadata, another order or white space at its end."""
    shard = rng.choice(source.shards)
    header = source.header(shard)
    how = rng.choice(("metadata", "order", "blanks"))
    if how == "metadata":
        header["__metadata__"] = {"format": "pt", "made_by": "x" * rng.choice((1, 10_000)), "\u00fc": "\U0001f600"}
    elif how == "order":
        header = dict(rng.sample(sorted(header.items()), len(header)))
    text = json.dumps(header).encode() + (b" " * 4096 if how == "blanks" else b"")
    return Mutation(
        "of_a_header", f"{shard}: header: {how}", (Edit(shard, build(text, source.data(shard))),), Expect.SAME
    )


def other_places(source: Source, rng: random.Random) -> Mutation:
    """Tensors lie in another order or in other shards, as header and index say."""
    how = rng.choice(("order", "one file", "other shards", "other names", "no index"))
    shard_of = {name: place.shard for name, place in source.tensors.items()}
    if how == "one file":
        shard_of = dict.fromkeys(shard_of, "model.safetensors")
    elif how == "other shards":
        shard_of = {name: f"model-0000{rng.randrange(1, 4)}-of-00003.safetensors" for name in shard_of}
    elif how == "other names":
        shard_of = {name: shard.replace("model", "weights") for name, shard in shard_of.items()}
    names = rng.sample(sorted(shard_of), len(shard_of)) if how == "order" else sorted(shard_of)
    edits = [Edit(shard, None) for shard in source.shards if shard not in shard_of.values()]
    for shard in sorted(set(shard_of.values())):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = bytearray()
        for name in (n for n in names if shard_of[n] == shard):
            place = source.tensors[name]
            start = len(data)
            data += source.files[place.shard][place.start : place.stop]
            header[name] = {"dtype": place.dtype, "shape": place.shape, "data_offsets": [start, len(data)]}
        edits.append(Edit(shard, build(header, bytes(data))))
    index = {"metadata": {}, "weight_map": shard_of}
    bare = how in ("one file", "no index")
    edits.append(Edit(INDEX, None if bare else json.dumps(index).encode()))
    # Transformers needs an index for several shards.
    expect = Expect.SAME_OR_REFUSED if how == "no index" else Expect.SAME
    return Mutation("other_places", f"tensors: {how}", tuple(edits), expect)


def extra_files(source: Source, rng: random.Random) -> Mutation:
    """Files that do not belong to the model."""
    chosen = rng.sample(EXTRA, rng.randrange(1, 5))
    text = ", ".join(name for name, _ in chosen)
    return Mutation("extra_files", f"added: {text}", tuple(Edit(*item) for item in chosen), Expect.SAME)


def _ordered(tree: Any, order: Any, file: str) -> Any:
    """With the keys of every object in another order; the vocabulary's stays, since ids are what counts there."""
    if isinstance(tree, dict):
        return {key: _ordered(tree[key], order, file) for key in order(list(tree))}
    return [_ordered(item, order, file) for item in tree] if isinstance(tree, list) else tree


NEUTRAL_MUTATORS = (
    (3, layout),
    (3, unknown_key),
    (1, of_the_index),
    (2, of_a_header),
    (3, other_places),
    (2, extra_files),
)
"""Each with its weight."""
