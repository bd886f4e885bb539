"""Scheme and Quantization: how each module's weights are stored, as values; and what module names in configs mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from polymoe.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.errors import CheckpointError
from polymoe.formats import Encoding

__all__ = ["Quantization", "Scheme", "exact_or_regex", "matcher", "without_root"]

ROOTS = ("model", "backbone", "language_model")  # heads of module names that tools add, drop and exchange


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one module's weight is stored.

    Attributes:
        dialect: names and arrangement of its tensors, a key of ``DIALECTS``.
        encoding: what they mean; the scales' dtype is the usual one where the config does not say.
        activations: how the checkpoint's authors meant the module's input to be quantized. ``16bit`` for inputs in
            4 bits, which no mode stands for.
    """

    dialect: str
    encoding: Encoding
    activations: ActivationQuantization = UNQUANTIZED


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A checkpoint's scheme for every module.

    Schemes are made when asked for: one that is not supported matters only to those who meet it. What is said of a
    module is looked for in the order of the attributes.

    Attributes:
        method: the config's ``quant_method``, or "none".
        layers: schemes of named modules and of all that lie under them.
        ignored: matches the names of modules that are not quantized.
        targets: schemes of modules whose names match, first match first.
        default: the scheme of all others.
        plain: the scheme of modules that are not quantized.
    """

    method: str
    layers: Mapping[str, Callable[[], Scheme]]
    ignored: Callable[[str], bool]
    targets: tuple[tuple[Callable[[str], bool], Callable[[], Scheme]], ...]
    default: Callable[[], Scheme]
    plain: Scheme

    def scheme(self, module: str) -> Scheme:
        """The scheme of ``module``, named as in the checkpoint: ``model.layers.3.mlp.experts.0.up_proj``, or of
        stacked experts ``model.layers.3.mlp.experts.gate_up_proj``.

        Raises:
            CheckpointError: the module's scheme is not supported, or its description is wrong.
        """
        make = self._named(without_root(module))
        if make is None and self.ignored(module):
            return self.plain
        if make is None:
            make = next((make for matches, make in self.targets if matches(module)), self.default)
        return make()

    def _named(self, module: str) -> Callable[[], Scheme] | None:
        parts = module.split(".")
        for end in range(len(parts), 0, -1):
            if make := self.layers.get(".".join(parts[:end])):
                return make
        # Stacked experts whose config was written for one module an expert: any of them speaks for all.
        under = ".".join(parts[:-1]) + "."
        if not self.layers or parts[-2:-1] != ["experts"]:
            return None
        return next((make for name, make in self.layers.items() if name.startswith(under)), None)


def without_root(module: str) -> str:
    """``layers.3.mlp`` for ``model.layers.3.mlp``, ``backbone.layers.3.mlp``, ``language_model.model.layers.3.mlp``."""
    head, _, rest = module.partition(".")
    return without_root(rest) if head in ROOTS and rest else module


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module is meant by names and globs: the whole name, any run of its components, or a module above it.

    Components are matched whole, so that ``layers.1`` does not mean ``layers.10``, nor ``mlp.gate`` ``mlp.gate_proj``;
    nor does ``foo*``, which ModelOpt writes for ``foo`` and all under it. ``re:`` starts a regular expression, as in
    :func:`exact_or_regex`.
    """
    patterns = list(patterns)
    regex = exact_or_regex([p for p in patterns if p.startswith("re:")])
    names = [p for p in patterns if p and not p.startswith("re:")]
    globs = [without_root(p[:-1] if len(p) > 1 and p.endswith("*") and p[-2] != "." else p) for p in names]
    alternatives = "|".join(".*".join(re.escape(part) for part in glob.split("*")) for glob in globs)
    runs = re.compile(rf"(?:.*\.)?(?:{alternatives})(?:\..*)?") if globs else None
    return lambda module: regex(module) or (runs is not None and runs.fullmatch(without_root(module)) is not None)


def exact_or_regex(patterns: Iterable[str]) -> Callable[[str], bool]:
    """compressed-tensors' own rule: ``re:X`` is a regular expression that matches from the name's start; any other
    entry is a whole name."""
    patterns = list(patterns)
    try:
        regexes = [re.compile(p[3:]) for p in patterns if p.startswith("re:")]
    except re.error as error:
        raise CheckpointError(
            "config.json: quantization: module names", expected="regular expressions after re:", got=str(error)
        ) from error
    names = {without_root(p) for p in patterns if not p.startswith("re:")}
    return lambda module: without_root(module) in names or any(r.match(module) for r in regexes)
