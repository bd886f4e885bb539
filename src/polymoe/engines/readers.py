"""readers: which engines read experts as a checkpoint stores them, by what was run or read in their source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polymoe.checkpoint.arrangement import PerExpert
from polymoe.checkpoint.layer import StoredLayer
from polymoe.engines.serving.preview import ENGINES

TRANSFORMERS = "Transformers 5.23.0"

_TRANSFORMERS: Mapping[str, str] = {
    "ct_int4": "expands the experts to 16 bits",
    "ct_mxfp4": "expands the experts to 16 bits",
    "deepseek": "keeps the experts packed on GPUs from SM89 on",
    "gpt_oss": "keeps the experts packed on GPUs from SM75 on",
}
"""What Transformers alone does, by dialect. It reads no other one."""

_STACKED = (
    "no engine but polymoe is known to read this: releases of this model stack their experts, and here each has "
    "tensors of its own"
)


def readers(layers: Iterable[StoredLayer], *, stacked: bool) -> tuple[str, ...]:
    """Sentences about the engines that read these layers; if none is known, the first one says so.

    Args:
        layers: as they are stored.
        stacked: whether releases of the model stack experts, so that an engine may not know names of single ones.
    """
    layers = list(layers)
    dialects = {part.dialect.name for layer in layers for part in layer.parts.values()}
    apart = any(isinstance(layer.arrangement, PerExpert) for layer in layers)
    if stacked and apart:
        return (_STACKED,)
    found = []
    for engine in ENGINES.values():
        if dialects <= engine.methods.keys() - engine.unread:
            where = next((f", {engine.limits[name]}" for name in dialects if name in engine.limits), "")
            if engine.single_group and (group := _single_group(layers)) is not None:
                where = f", {engine.single_group.format(group=group)}"
            found.append(f"{engine.name} {engine.tested} reads this format{where}, for models that it has")
    if dialects <= _TRANSFORMERS.keys():
        does = " and ".join(sorted({_TRANSFORMERS[name] for name in dialects}))
        found.append(f"{TRANSFORMERS} alone reads it, and {does}")
    return tuple(found) or (f"no engine but polymoe is known to read {', '.join(sorted(dialects))}",)


def _single_group(layers: Iterable[StoredLayer]) -> int | None:
    """Return the group size of the first INT4 layer whose rows of ``down`` are one group, and of the others several."""
    for layer in layers:
        down = layer.parts["down"]
        columns = [part.shape[1] for part in layer.parts.values() if part is not down]
        group = down.encoding.group_columns
        if down.dialect.name == "ct_int4" and down.shape[1] == group < max(columns, default=0):
            return group
    return None
