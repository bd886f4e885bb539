"""Mutators of any JSON file: one value is replaced, removed or renamed, or the text itself is damaged."""

from __future__ import annotations

import json
import random
from typing import Any

__all__ = ["HOSTILE", "Raw", "damage", "dumps", "mutate_tree", "paths"]


class Raw(str):
    """JSON text that :func:`dumps` inserts as it is."""

    __slots__ = ()


NUMBERS = (
    "0", "-1", "1", "3", "7", "2147483647", "2147483648", "4294967296", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "1e308", "1e400", "NaN", "Infinity", "-Infinity", "-0.0", "0.5",
    "1e-45", "1e-40", "9" * 5000, "1000000", "1000000000",
)  # fmt: skip
PATTERNS = (
    "re:(a+)+$", "re:(.*)*x", "re:(((((.*)*)*)*)*)*!", "re:" + ".*" * 60 + "!", "*" * 60 + "!", "*a" * 40 + "!", "re:(",
    "re:[", "re:(?P<n>x)(?P=n)", "re:" + "(" * 2000 + ")" * 2000, "re:a{65535}{65535}",
    "re:(?=.*a)(?!b)", "re:\\1", "[",
)  # fmt: skip
STRINGS = (
    "", " ", "x", "../..", "../../../../etc/passwd", "/etc/passwd", "/dev/zero", "model.safetensors", "x" * 200_000,
    "\ud800", "a\x00b", "\x1b[2J", "a\nb", "\u202eabc", "{layer}", "%s%n", "{{ 1/0 }}", "None", "null", "true", "1",
    "cuda", "float64", "int4", "auto", "polymoe", "kernels-community/flash-attn", "https://example.invalid/x",
    "__import__('os').system('touch canary')", *PATTERNS,
)  # fmt: skip
HOSTILE: tuple[str, ...] = (
    *NUMBERS,
    *(json.dumps(s) for s in STRINGS),
    *(
        "null",
        "true",
        "false",
        "[]",
        "{}",
        "[null]",
        "[[]]",
        '[""]',
        "[-1]",
        "[1e400]",
        '{"": null}',
        '{"a": {"b": 1}}',
    ),
    "[" * 100_000 + "]" * 100_000,
    "[" * 800 + "]" * 800,
    '{"a":' * 800 + "1" + "}" * 800,
    "[" + ",".join(["0"] * 300_000) + "]",
    "[" + ",".join(['"a"'] * 20_000) + "]",
)
"""JSON texts that a value is replaced by."""


def dumps(value: Any, **how: Any) -> bytes:
    """JSON of a value, with :class:`Raw` parts."""
    raw: list[str] = []

    def marked(part: Any) -> Any:
        if isinstance(part, Raw):
            raw.append(str(part))
            return f"@raw {len(raw) - 1}@"
        if isinstance(part, dict):
            return {key: marked(item) for key, item in part.items()}
        return [marked(item) for item in part] if isinstance(part, list) else part

    text = json.dumps(marked(value), **how)
    for number, part in enumerate(raw):
        text = text.replace(f'"@raw {number}@"', part)
    return text.encode("utf-8", "surrogatepass")


def paths(value: Any) -> list[tuple[Any, ...]]:
    """The path of every value inside: keys and indices."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in items for path in ((key,), *((key, *rest) for rest in paths(item)))]


def mutate_tree(value: Any, rng: random.Random, path: tuple[Any, ...] | None = None) -> tuple[str, Any]:
    """Change one value of a JSON tree in place; what was done, and the tree. ``path`` chooses the value."""
    *above, key = path or rng.choice(paths(value))
    parent = value
    for step in above:
        parent = parent[step]
    where = ".".join(map(str, (*above, key)))
    old = parent[key]
    action = rng.choice(("delete", "rename", "retype", "nudge", "repeat", *["hostile"] * 6))
    if action == "delete":
        del parent[key]
        return f"{where} deleted", value
    if action == "rename" and isinstance(parent, dict):
        new = rng.choice((str(key) + "_", str(key)[:-1], str(key).upper(), "\ud800", "", "x" * 100_000))
        parent[new] = parent.pop(key)
        return f"{where} renamed {new[:40]!r}", value
    if action == "retype":
        parent[key] = rng.choice((None, True, 1, 1.5, "text", [old], {"value": old}, str(old), [], {}))
        return f"{where} = {str(parent[key])[:60]!r}", value
    if action == "nudge" and type(old) in (int, float):
        parent[key] = rng.choice((old + 1, old - 1, old * 2, old // 2, -old, float(old), old * 1000, old + 0.5))
        return f"{where} = {parent[key]!r} instead of {old!r}", value
    if action == "repeat" and isinstance(old, list) and old:
        parent[key] = old * rng.choice((2, 3, 1000))
        return f"{where} repeated to {len(parent[key])} items", value
    text = rng.choice(HOSTILE)
    parent[key] = Raw(text)
    return f"{where} = {text[:60]}", value


def damage(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Damage the text of a JSON file."""
    n = len(content)
    at = rng.randrange(n)

    def flipped() -> bytes:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(n)] ^= 1 << rng.randrange(8)
        return bytes(changed)

    kinds = {
        "truncated": lambda: content[:at],
        "emptied": lambda: b"",
        "bytes flipped": flipped,
        "a piece removed": lambda: content[:at] + content[at + rng.randrange(1, 40) :],
        "a piece doubled": lambda: content[:at] + content[at : at + 30] + content[at:],
        "UTF-16": lambda: content.decode().encode("utf-16"),
        "UTF-8 with BOM": lambda: b"\xef\xbb\xbf" + content,
        "Latin-1 bytes": lambda: content[:at] + b"\xff\xfe\xe4" + content[at:],
        "zeros appended": lambda: content + b"\x00" * 100,
        "another value appended": lambda: content + b"{}",
        "deep nesting": lambda: b"[" * 200_000,
        "deep objects": lambda: b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        "a list": lambda: b"[]",
        "null": lambda: b"null",
        "an empty object": lambda: b"{}",
        "a number of 5,000 digits": lambda: b"9" * 5_000,
        "a doubled key": lambda: content.rstrip().removesuffix(b"}") + b',"model_type":"x","weight_map":{}}',
        "zeros": lambda: b"\x00" * n,
    }
    kind = rng.choice(sorted(kinds))
    return kind, kinds[kind]()
