"""Mutators of safetensors files: headers, and the bytes of tensors."""

from __future__ import annotations

import random
import struct

from attacks.json_mutators import HOSTILE, Raw, damage, dumps, mutate_tree
from attacks.source import Edit, Expect, Mutation, Source, build, header_bytes, layer_of

__all__ = ["TENSOR_MUTATORS"]

DTYPES = (
    "BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64", "F8_E4M3", "F8_E5M2",
    "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "C64", "X", "",
)  # fmt: skip
WIDTH = {"F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}
NAN = {"F8_E4M3": b"\x7f", "F8_E8M0": b"\xff", "BF16": b"\xc0\x7f", "F16": b"\x00\x7e", "F32": b"\x00\x00\xc0\x7f"}
NAN_SCALE = {**NAN, "U8": b"\xff"}  # gpt-oss stores E8M0 scales as U8
INFINITY = {"BF16": b"\x80\x7f", "F16": b"\x00\x7c", "F32": b"\x00\x00\x80\x7f"}


def header_value(source: Source, rng: random.Random) -> Mutation:
    """One value of a header is replaced, removed or renamed."""
    shard = rng.choice(source.shards)
    text, tree = mutate_tree(source.header(shard), rng)
    return Mutation("header_value", f"{shard}: header: {text}", (Edit(shard, build(dumps(tree), source.data(shard))),))


def header_text(source: Source, rng: random.Random) -> Mutation:
    """The text of a header is damaged."""
    shard = rng.choice(source.shards)
    content = source.files[shard]
    kind, header = damage(content[8 : 8 + header_bytes(content)], rng)
    return Mutation("header_text", f"{shard}: header: {kind}", (Edit(shard, build(header, source.data(shard))),))


def header_length(source: Source, rng: random.Random) -> Mutation:
    """The length of a header is wrong."""
    shard = rng.choice(source.shards)
    content = source.files[shard]
    n = header_bytes(content)
    length = rng.choice(
        (0, 1, n - 1, n + 1, n + 8, len(content), 2**20, 10**8, 10**8 + 1, 2**31, 2**40, 2**63, 2**64 - 1)
    )
    return Mutation(
        "header_length", f"{shard}: header of {length} bytes", (Edit(shard, struct.pack("<Q", length) + content[8:]),)
    )


def header_entry(source: Source, rng: random.Random) -> Mutation:
    """An entry of a header, mostly of an expert's tensor, has another dtype, shape or place."""
    name = _tensor(source, rng)
    shard = source.tensors[name].shard
    header = source.header(shard)
    entry = header[name]
    start, stop = entry["data_offsets"]
    shape = entry["shape"]
    kind = rng.choice(("dtype", "shape", "offsets", "remove", "rename", "double"))
    text = f"{shard}: {name}: "
    raw = b""
    if kind == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
        text += f"dtype {entry['dtype']}"
    elif kind == "shape":
        count = 1
        for size in shape:
            count *= size
        entry["shape"] = rng.choice(
            ([], [count], [1, *shape], [*shape, 1], shape[::-1], [0], [-1], [2**63], [2**32, 2**32], [2**64],
             [size + 1 for size in shape], [1] * 10_000, [1.5], ["1"], None, [2**31, 0], [count // 2, 2])
        )  # fmt: skip
        text += f"shape {str(entry['shape'])[:40]}"
    elif kind == "offsets":
        entry["data_offsets"] = rng.choice(
            ([stop, start], [start, stop + 8], [start - 8, stop], [0, stop - start], [start, start], [2**63, 2**63 + 8],
             [-1, stop], [start], [start, stop, stop], [start, 2**40], "x", None, [1e3, 1e4], [start + 1, stop + 1])
        )  # fmt: skip
        text += f"offsets {entry['data_offsets']}"
    elif kind == "remove":
        del header[name]
        text += "not in the header"
    elif kind == "rename":
        new = rng.choice(
            (name + "x", name[:-1], name.upper(), "\ud800", "", "a" * 100_000, "__metadata__", "../" + name)
        )
        header[new] = header.pop(name)
        text += f"renamed {new[:40]!r}"
    else:
        raw = dumps({name: entry})[1:-1] + b","
        text += "twice in the header"
    content = dumps(header)
    return Mutation("header_entry", text, (Edit(shard, build(content[:1] + raw + content[1:], source.data(shard))),))


def many_entries(source: Source, rng: random.Random) -> Mutation:
    """A header has a great many tensors."""
    shard = rng.choice(source.shards)
    end = len(source.data(shard))
    entry = f'{{"dtype":"U8","shape":[0],"data_offsets":[{end},{end}]}}'
    more = ",".join(f'"{rng.choice(("x", "model.layers.1.x"))}.{i}":{entry}' for i in range(rng.choice((1000, 50_000))))
    content = dumps(source.header(shard))[:-1] + b"," + more.encode() + b"}"
    return Mutation(
        "many_entries", f"{shard}: header of {len(content)} bytes", (Edit(shard, build(content, source.data(shard))),)
    )


def metadata(source: Source, rng: random.Random) -> Mutation:
    """A header's ``__metadata__`` is not what it should be."""
    shard = rng.choice(source.shards)
    header = source.header(shard)
    text = rng.choice(HOSTILE)
    header["__metadata__"] = Raw(text) if rng.random() < 0.5 else {"format": Raw(text)}
    return Mutation("metadata", f"{shard}: __metadata__ = {text[:40]}",
                    (Edit(shard, build(dumps(header), source.data(shard))),), Expect.SAME_OR_REFUSED)  # fmt: skip


def shard_size(source: Source, rng: random.Random) -> Mutation:
    """A shard is cut or has bytes too many."""
    shard = rng.choice(source.shards)
    content = source.files[shard]
    size = rng.choice((0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1, rng.randrange(len(content)), -1))
    changed = content[:size] if size >= 0 else content + b"\x00" * 64
    return Mutation("shard_size", f"{shard}: {len(changed)} of {len(content)} bytes", (Edit(shard, changed),),
                    Expect.SAME_OR_REFUSED)  # fmt: skip


def bad_scale(source: Source, rng: random.Random) -> Mutation:
    """A scale of an expert, or a weight in 16 bits, is not a number, or infinite: it must never be accepted."""
    layer = rng.choice(source.layers)
    name = rng.choice(source.expert_tensors(layer, "scale") or source.expert_tensors(layer, "codes"))
    place = source.tensors[name]
    values = {"NaN": NAN_SCALE} | ({"infinity": INFINITY} if place.dtype in INFINITY else {})
    kind = rng.choice(sorted(values))
    return _values("bad_scale", source, name, values[kind][place.dtype], 1, kind, rng)


def zero_scales(source: Source, rng: random.Random) -> Mutation:
    """All scales of one expert's matrix, or all its weights in 16 bits, are zero, so that nothing of it is left."""
    layer = rng.choice(source.layers)
    scales = source.expert_tensors(layer, "scale")
    name = rng.choice(scales or source.expert_tensors(layer, "codes"))
    place = source.tensors[name]
    count = (place.stop - place.start) // WIDTH[place.dtype]
    if place.dtype in ("U8", "F8_E8M0"):  # E8M0 has no zero: its least value
        return _values("zero_scales", source, name, b"\x00", count, "the least value", rng, Expect.ANYTHING)
    expect = Expect.REFUSED if scales else Expect.ANYTHING
    return _values("zero_scales", source, name, b"\x00" * WIDTH[place.dtype], count, "zero", rng, expect)


def nan_codes(source: Source, rng: random.Random) -> Mutation:
    """A weight or a bias of an expert is not a number."""
    layer = rng.choice(source.layers)
    names = source.expert_tensors(layer, "codes") + source.expert_tensors(layer, "bias")
    named = [n for n in names if source.tensors[n].dtype in NAN]
    if not named:
        return bad_scale(source, rng)
    name = rng.choice(named)
    return _values("nan_codes", source, name, NAN[source.tensors[name].dtype], 1, "NaN", rng)


def odd_numbers(source: Source, rng: random.Random) -> Mutation:
    """Bytes of any tensor are others; answers change, and nothing else may happen."""
    name = _tensor(source, rng)
    place = source.tensors[name]
    content = bytearray(source.files[place.shard])
    size = place.stop - place.start
    kind = rng.choice(("random", "0x00", "0xff", "0x7f", "0x80", "flipped"))
    count = rng.choice((1, 16, size))
    start = place.start + rng.randrange(max(1, size - count + 1))
    stop = min(place.stop, start + count)
    if kind == "random":
        content[start:stop] = rng.randbytes(stop - start)
    elif kind == "flipped":
        content[start] ^= 1 << rng.randrange(8)
    else:
        content[start:stop] = bytes([int(kind, 16)]) * (stop - start)
    return Mutation("odd_numbers", f"{name}: {stop - start} bytes {kind}", (Edit(place.shard, bytes(content)),))


def exchanged(source: Source, rng: random.Random) -> Mutation:
    """Two shards under each other's name."""
    first, second = rng.sample(source.shards, 2)
    edits = (Edit(first, source.files[second]), Edit(second, source.files[first]))
    return Mutation("exchanged", f"{first} and {second} exchanged", edits, Expect.SAME_OR_REFUSED)


def _values(
    kind: str,
    source: Source,
    name: str,
    value: bytes,
    count: int,
    text: str,
    rng: random.Random,
    expect: Expect = Expect.REFUSED,
) -> Mutation:
    place = source.tensors[name]
    content = bytearray(source.files[place.shard])
    last = (place.stop - place.start) // len(value) - count
    start = place.start + len(value) * rng.randrange(last + 1)
    content[start : start + len(value) * count] = value * count
    said = f"{name}: {count} of {last + count} values {text}"
    return Mutation(kind, said, (Edit(place.shard, bytes(content)),), expect, layer_of(name))


def _tensor(source: Source, rng: random.Random) -> str:
    """A tensor, two of three times of an expert."""
    layer = rng.choice(source.layers)
    roles = [
        names
        for role in ("codes", "scale", "zeros", "bias", "input_scale")
        if (names := source.expert_tensors(layer, role))
    ]
    return rng.choice(rng.choice(roles)) if rng.random() < 2 / 3 else rng.choice(sorted(source.tensors))


TENSOR_MUTATORS = (
    (4, header_value),
    (2, header_text),
    (1, header_length),
    (6, header_entry),
    (1, many_entries),
    (1, metadata),
    (2, shard_size),
    (3, bad_scale),
    (2, zero_scales),
    (2, nan_codes),
    (4, odd_numbers),
    (1, exchanged),
)
"""Each with its weight."""
