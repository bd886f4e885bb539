"""The files of a checkpoint's tokenizer and chat templates, checked; what they mean is a matter of their library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from polymoe.checkpoint.opener import parse_object, read_bytes
from polymoe.errors import CheckpointError, quoted

TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tekken.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "*.model.v*", "*.tiktoken", "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Patterns of the files that a tokenizer consists of."""

MOST_TEMPLATE_BYTES = 2**20
"""Size of the largest chat template. Those of releases have fewer than 50,000."""
LARGEST_ID = 2**24
"""Of a token. Transformers fills the ids between the vocabulary and the largest added token."""
LONGEST_TOKEN = 2**10
"""Characters of a token. Transformers splits tokens at every place where a vocabulary has no merges."""

_CONFIG = "tokenizer_config.json"
_ELSEWHERE = re.compile(r"(.*_)?(files?|path|dir|folder|object)|name_or_path|auto_map|init_inputs|vocab|merges")
"""Keys of ``tokenizer_config.json`` that name code or files. A tokenizer gets the files of its own directory."""


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files by name, relative to its directory.

    ``tokenizer_config.json`` comes without the keys that name code or files.

    Raises:
        CheckpointError: if a file is invalid, or if the tokenizer is code of the checkpoint.
    """
    found: dict[str, bytes] = {}
    for pattern in TOKENIZER_FILES:
        for path in sorted(directory.glob(pattern)):
            limit = {"most": MOST_TEMPLATE_BYTES} if path.suffix == ".jinja" else {}
            name = path.relative_to(directory).as_posix()
            found[name] = read_bytes(path, **limit)
            if path.suffix == ".json":
                value = parse_object(found[name], str(path))
                _check_tokens(value, str(path))
                if name == _CONFIG:
                    _require_no_code(value, directory)
                    found[name] = json.dumps(_own(value)).encode()
    return found


def _require_no_code(config: dict[str, Any], directory: Path) -> None:
    named = config.get("auto_map")
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    if named and not (directory / "tokenizer.json").exists():
        raise CheckpointError(
            str(directory / _CONFIG),
            expected="a tokenizer.json",
            got=f"a tokenizer that is code of the checkpoint, {named}",
            hint="polymoe runs no code from a checkpoint; put the same tokenizer as tokenizer.json beside it",
        )


def _check_tokens(value: dict[str, Any], where: str) -> None:
    """Check the lengths of tokens and the ids of added tokens, where a file has them."""
    model = value.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else value  # of tokenizer.json, else of vocab.json
    for token in vocabulary if isinstance(vocabulary, (dict, list)) else ():
        text = token[0] if isinstance(token, list) and token else token
        if isinstance(text, str) and len(text) > LONGEST_TOKEN:
            limit = f"tokens of at most {LONGEST_TOKEN} characters"
            raise CheckpointError(where, expected=limit, got=f"one of {len(text)}, {quoted(text)}")
    added = value if where.endswith("added_tokens.json") else value.get("added_tokens_decoder")
    for names in added.items() if isinstance(added, dict) else ():
        for name in map(str, names):
            if name.isdecimal() and (len(name) > len(str(LARGEST_ID)) or int(name) > LARGEST_ID):
                raise CheckpointError(f"{where}: added tokens", expected=f"ids up to {LARGEST_ID}", got=quoted(name))


def _own(value: Any) -> Any:
    """The value without what names code or files, at any depth."""
    if isinstance(value, dict):
        return {name: _own(item) for name, item in value.items() if not _ELSEWHERE.fullmatch(name)}
    return [_own(item) for item in value] if isinstance(value, list) else value
