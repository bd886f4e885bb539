"""A checkpoint's ``config.json`` and ``generation_config.json`` as Transformers' objects, without anything that names
code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.architectures.config import neutral, require_layers
from polymoe.checkpoint.files import CONFIG, GENERATION
from polymoe.common.untrusted import reading
from polymoe.errors import CheckpointError, quoted


def model_config(checkpoint: Checkpoint) -> Any:
    """A checkpoint's config in Transformers.

    Raises:
        CheckpointError: if Transformers does not accept it, or if it has more layers than there are tensors.
    """
    where = f"{checkpoint.name}: {CONFIG}"
    fields = neutral(checkpoint.config, where)
    # Transformers builds as many modules as the config says, which may take for ever.
    require_layers(fields, len(checkpoint.files.names), "the number of tensors", where)
    with reading(where, "a config that Transformers accepts"):
        config: Any = CONFIG_MAPPING[checkpoint.model_type].from_dict(fields)
        config.name_or_path = checkpoint.name
    return config


def context_length(model: Any) -> int | None:
    """Most tokens of a prompt and its answer in a model of Transformers; None if its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """A checkpoint's generation config, or None if it has none: the model then takes tokens from its own config.

    Raises:
        CheckpointError: if a field has a wrong type or value, or chooses another way to generate than beams or samples.
    """
    stored = checkpoint.files.json(GENERATION)
    if stored is None:
        return None
    where = f"{checkpoint.name}: {GENERATION}"
    known = vars(GenerationConfig())
    kept: dict[str, Any] = {}
    for name, value in stored.items():
        if name not in known or name.startswith("_") or name == "transformers_version" or value is None:
            continue  # Transformers does not use it
        if name not in _FIELDS:
            if value not in (False, 0, "", [], {}):
                hint = "remove it; generate() takes it as an argument"
                raise CheckpointError(f"{where}: {name}", expected="no such field", got=quoted(value), hint=hint)
            continue
        expected, valid = _FIELDS[name]
        if not valid(value):
            raise CheckpointError(f"{where}: {name}", expected=expected, got=quoted(value))
        kept[name] = float(value) if name in _NUMBERS else value  # Transformers refuses 2 where it expects 2.0
    if kept.get("do_sample") and kept.get("temperature") == 0:
        raise CheckpointError(f"{where}: temperature", expected="a number above 0, since do_sample is true", got="0")
    with reading(where, "a generation config that Transformers accepts"):
        return GenerationConfig(**kept)


def check_tokens(model: Any, vocabulary: int, where: str) -> None:
    """Check that every token that may be fed to a model has a row in its embedding.

    Args:
        vocabulary: one more than the largest id of its tokenizer.
        where: names the checkpoint in errors.

    Raises:
        CheckpointError: if one has none.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if vocabulary > rows:
        raise CheckpointError(
            f"{where}: tokenizer",
            expected=f"ids below {rows}, the number of rows of the embedding",
            got=f"ids up to {vocabulary - 1}",
            hint="tokenizer and model are of different checkpoints",
        )
    for name in _TOKENS:
        value = getattr(model.generation_config, name, None)
        for token in value if isinstance(value, (list, tuple)) else (value,):
            if token is not None and not (_is_integer(token) and 0 <= token < rows):
                raise CheckpointError(f"{where}: {name}", expected=f"a token from 0 to {rows - 1}", got=quoted(value))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(least: int, most: int = 2**31 - 1) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer from {least} to {most}", lambda value: _is_integer(value) and least <= value <= most


def _number(least: float, most: float) -> tuple[str, Callable[[Any], bool]]:
    def valid(value: Any) -> bool:
        return (_is_integer(value) or isinstance(value, float)) and math.isfinite(value) and least <= value <= most

    return f"a number from {least:g} to {most:g}", valid


def _are_tokens(value: Any) -> bool:
    tokens: list[Any] = value if isinstance(value, list) and value else [value]
    return all(_is_integer(token) and token >= 0 for token in tokens)


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_SOME_TOKENS = ("a token, or a list of them", _are_tokens)

_NUMBERS = {
    "temperature": _number(0, 1000),
    "top_p": _number(0, 1),
    "min_p": _number(0, 1),
    "typical_p": _number(1e-6, 1),
    "epsilon_cutoff": _number(0, 0.999999),
    "eta_cutoff": _number(0, 0.999999),
    "repetition_penalty": _number(1e-3, 1000),
    "length_penalty": _number(-1000, 1000),
}

_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "bos_token_id": _integer(0),
    "eos_token_id": _SOME_TOKENS,
    "pad_token_id": _integer(0),
    "decoder_start_token_id": _integer(0),
    "forced_eos_token_id": _SOME_TOKENS,
    "suppress_tokens": _SOME_TOKENS,
    "begin_suppress_tokens": _SOME_TOKENS,
    "max_length": _integer(1),
    "max_new_tokens": _integer(1),
    "min_length": _integer(0),
    "min_new_tokens": _integer(0),
    "do_sample": _FLAG,
    "use_cache": _FLAG,
    "early_stopping": _FLAG,
    "renormalize_logits": _FLAG,
    "remove_invalid_values": _FLAG,
    "num_beams": _integer(1, 64),
    "num_return_sequences": _integer(1, 1),
    "no_repeat_ngram_size": _integer(0),
    "top_k": _integer(0),
    **_NUMBERS,
}
"""The fields that a generation config may have: what is valid, and the check. They are lengths, tokens, and how tokens
are chosen by probability."""
