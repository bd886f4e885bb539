"""Sizes of well-known models, which ship with the package: facts of their releases, no weights.

``known_models.json`` has one object for each Hub id:

.. code-block:: text

    like           another id, whose facts hold here too where this object has none
    config         what polymoe, and Transformers to count parameters, need of config.json; defaults are left out
    dense_bytes    of all tensors outside the routed experts, with quantized matrices in 16 bit
    unread_bytes   of those that a decode step does not read: the input embedding and the vision tower
    parameters     of the whole model as an independent source has it; left out where none was found
    source         where the facts are from

A test builds each model in Transformers without memory and compares its parameters with these numbers.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polymoe.checkpoint.dense_size import DenseSize, dense_size
from polymoe.checkpoint.files import CheckpointFiles
from polymoe.checkpoint.hub import in_cache
from polymoe.checkpoint.load import Checkpoint
from polymoe.common.json_input import parse_json
from polymoe.errors import CheckpointError, CheckpointNotFound

_NAMED = 4
"""How many known models a hint names at most."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose sizes are known without any of its files.

    Attributes:
        name: its Hub id.
        config: part of its ``config.json``.
        dense: size of everything outside the routed experts.
        parameters: of the whole model, None where no independent source was found.
        source: where the facts are from.
    """

    name: str
    config: Mapping[str, Any]
    dense: DenseSize
    parameters: int | None
    source: str

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint without tensors that has this config."""
        return Checkpoint(self.name, CheckpointFiles(Path(self.name), dict(self.config), None, {}))

    def describes(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint of this name still has these sizes."""
        return checkpoint.name == self.name and checkpoint.moe == checkpoint.family.moe(self.config)


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Return the models by Hub id."""
    rows = parse_json(Path(__file__).with_suffix(".json").read_bytes(), unique_keys=True)

    def facts(name: str) -> dict[str, Any]:
        row = rows[name]
        other = facts(row["like"]) if "like" in row else {"config": {}}
        return {**other, **row, "config": {**other["config"], **row.get("config", {})}}

    found = {}
    for name in rows:
        row = facts(name)
        dense = DenseSize(row["dense_bytes"], row["unread_bytes"])
        found[name] = KnownModel(name, row["config"], dense, row.get("parameters"), row["source"])
    return MappingProxyType(found)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return a checkpoint of which sizes are asked, with as little as possible from the network: local files with
    their tensors, else files in the Hub's cache, else a known model, else the config files in the Hub.

    Raises:
        CheckpointNotFound: if there is none of these; the hint names known models.
        CheckpointError: if a file cannot be read.
    """
    if os.path.exists(path):
        return Checkpoint.open(path, config_only=not os.path.isdir(path))
    known = known_models()
    by_case = {name.lower(): model for name, model in known.items()}
    model = known.get(str(path)) or by_case.get(str(path).lower())
    if model and not in_cache(str(path)):  # without what would import the Hub's client, for a short answer
        return model.checkpoint()
    try:
        return _cached(path)
    except CheckpointNotFound:
        if model:
            return model.checkpoint()
    try:
        return Checkpoint.open(path, config_only=True)
    except CheckpointNotFound as error:
        asked = str(path).lower()
        spelled = {text.lower(): name for name in known for text in (name, name.split("/")[1])}
        alike = [spelled[text] for text in difflib.get_close_matches(asked, spelled, n=3)]
        names = list(dict.fromkeys([*alike, *(name for name in known if asked in name.lower())]))[:_NAMED]
        such_as = ", ".join(names or ["openai/gpt-oss-20b"])
        hint = f"explain knows the sizes of {len(known)} models without files, such as {such_as}"
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
        raise


def _cached(path: str | Path) -> Checkpoint:
    """A repository in the Hub's cache: with its tensors if all are there, else its config.

    Raises:
        CheckpointNotFound: if it has no config there.
    """
    described = Checkpoint.open(path, config_only=True, local_files_only=True)
    try:
        stored = Checkpoint.open(path, local_files_only=True)
    except CheckpointError:
        return described
    return stored if stored.files.is_whole else described


def dense_size_of(checkpoint: Checkpoint) -> DenseSize | None:
    """Return the size of everything outside the experts, from headers, or as it is known for the model."""
    known = known_models().get(checkpoint.name)
    return dense_size(checkpoint) or (known.dense if known is not None and known.describes(checkpoint) else None)
