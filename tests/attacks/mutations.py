"""mutation: from a checkpoint and a seed to a change of the checkpoint, always the same one."""

from __future__ import annotations

import random
from collections.abc import Callable

from attacks.config_mutators import CONFIG_MUTATORS
from attacks.file_mutators import FILE_MUTATORS
from attacks.neutral import NEUTRAL_MUTATORS
from attacks.source import MODELS, Mutation, Source
from attacks.tensor_mutators import TENSOR_MUTATORS
from attacks.tokenizer_mutators import TOKENIZER_MUTATORS

__all__ = ["CHECKPOINTS", "MUTATORS", "mutation"]

Mutator = Callable[[Source, random.Random], Mutation]

CHECKPOINTS = tuple(sorted(path.name for path in MODELS.iterdir() if (path / "config.json").exists()))
"""The bundled checkpoints, one of each model family."""

MUTATORS: dict[str, tuple[int, Mutator]] = {
    mutator.__name__: (weight, mutator)
    for table in (CONFIG_MUTATORS, TOKENIZER_MUTATORS, TENSOR_MUTATORS, FILE_MUTATORS, NEUTRAL_MUTATORS)
    for weight, mutator in table
}
"""Every mutator by name, with its weight."""


def several(source: Source, rng: random.Random) -> Mutation:
    """Two or three changes at once."""
    single = [kind for kind in MUTATORS if kind != "several"]
    made = [MUTATORS[kind][1](source, rng) for kind in rng.sample(single, rng.choice((2, 3)))]
    edits = {edit.file: edit for one in made for edit in one.edits}
    return Mutation("several", "; ".join(one.text for one in made), tuple(edits.values()))


MUTATORS["several"] = (8, several)


def mutation(source: Source, seed: int, kinds: tuple[str, ...] = tuple(MUTATORS)) -> Mutation:
    """The change number ``seed`` of a checkpoint, by one of the mutators ``kinds``."""
    weights = [MUTATORS[kind][0] for kind in kinds]
    kind = random.Random(f"{source.name} {seed}").choices(kinds, weights)[0]
    # A generator of its own, so that the kind and the seed alone repeat it.
    return MUTATORS[kind][1](source, random.Random(f"{source.name} {seed} {kind}"))
