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

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polymoe.checkpoint.dense_size import DenseSize
from polymoe.checkpoint.files import CheckpointFiles
from polymoe.checkpoint.load import Checkpoint
from polymoe.json_input import parse_json

__all__ = ["KnownModel", "known_models"]


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
