"""load_tokenizer: a checkpoint's tokenizer, read by Transformers from copies of the files that were checked.

Transformers gets a directory with nothing but these files, so that it finds neither code nor paths to elsewhere.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from polymoe.checkpoint.architectures.config import neutral
from polymoe.checkpoint.files import CONFIG
from polymoe.checkpoint.hub import locate
from polymoe.checkpoint.opener import exists, read_json
from polymoe.checkpoint.tokenizer_files import TOKENIZER_FILES, read_tokenizer_files
from polymoe.common.untrusted import reading
from polymoe.engines.transformers.chat_template import BoundedChatTemplate
from polymoe.engines.transformers.replies import set_response_template
from polymoe.errors import CheckpointError

_INPUTS = ("input_ids", "attention_mask")


def load_tokenizer(path: str | os.PathLike[str], *, config: Any = None, **hub: Any) -> Any:
    """A tokenizer of Transformers that has encoded and decoded a text, and whose chat template is bounded.

    Its ``response_template`` says how replies are read; the checkpoint's own is not used.

    Args:
        path: a directory or a Hub id.
        config: the model's config in Transformers; None reads that of the directory.
        hub: of a Hub repository: ``revision``, ``cache_dir``, ``token``, ``local_files_only``.

    Raises:
        CheckpointNotFound: if there is no such directory or repository.
        CheckpointError: if a file is invalid, if Transformers cannot read them, or if the tokenizer is code.
    """
    directory = locate(os.fspath(path), (CONFIG, *TOKENIZER_FILES), **hub)
    files = read_tokenizer_files(directory)
    if exists(directory / CONFIG):
        files[CONFIG] = json.dumps(neutral(read_json(directory / CONFIG))).encode()
    with tempfile.TemporaryDirectory(prefix="polymoe-") as copies:
        for name, content in files.items():
            file = Path(copies, name)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
        try:
            with reading(f"{path}: tokenizer", "one that Transformers reads", renamed=(copies, str(path))):
                tokenizer: Any = AutoTokenizer.from_pretrained(
                    copies, config=config, trust_remote_code=False, local_files_only=True
                )
        except CheckpointError as error:
            if any(_holds_tokens(name) for name in files):
                raise
            raise CheckpointError(
                f"{path}: tokenizer",
                expected="tokenizer.json, or the vocabulary files of another tokenizer",
                got="none of them",
                hint="copy tokenizer.json and tokenizer_config.json of the same model into this directory",
            ) from error
        for known in (vars(tokenizer), tokenizer.init_kwargs):
            known.update({k: v.replace(copies, str(path)) for k, v in known.items() if isinstance(v, str)})
    with reading(f"{path}: tokenizer", "one that encodes and decodes a text"):
        encoded = tokenizer("1 + 1 = 2", verbose=False)
        tokenizer.decode(encoded["input_ids"])
    if not all(name in encoded for name in _INPUTS):
        raise CheckpointError(
            f"{path}: tokenizer", expected=" and ".join(_INPUTS), got=", ".join(map(str, encoded)) or "nothing"
        )
    if getattr(tokenizer, "chat_template", None) is not None:
        tokenizer.apply_chat_template = BoundedChatTemplate(tokenizer)
    set_response_template(tokenizer, config)
    return tokenizer


def _holds_tokens(name: str) -> bool:
    """Whether a tokenizer's file can hold its vocabulary; the others hold settings and templates."""
    settings = (CONFIG, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    return name not in settings and not name.endswith(".jinja")


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest id that a tokenizer gives."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)
