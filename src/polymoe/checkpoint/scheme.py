"""Scheme and QuantizationConfig: how the weights of each module are stored; and how configs match module names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from polymoe.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.errors import CheckpointError
from polymoe.formats import Encoding

__all__ = ["QuantizationConfig", "Scheme", "exact_or_regex", "matcher", "without_root"]

ROOTS = ("model", "backbone", "language_model")  # prefixes of module names that tools add, drop and exchange


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one module's weight is stored.

    Attributes:
        dialect: names and arrangement of its tensors, a key of ``DIALECTS``.
        encoding: of its weight; the dtype of scales is the usual one if the config does not contain it.
        activations: how the checkpoint's authors quantize the module's input. ``16bit`` for 4-bit inputs, which no mode
            describes.
    """

    dialect: str
    encoding: Encoding
    activations: ActivationQuantization = UNQUANTIZED


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """A checkpoint's scheme for every module.

    Schemes are created on request, so that an unsupported one is an error only for its own modules. The attributes are
    searched in their order.

    Attributes:
        method: the config's ``quant_method``, or "none".
        layers: schemes of named modules and of everything below them.
        ignored: whether a module name is excluded from quantization.
        targets: schemes of modules whose names match; the first match counts.
        default: the scheme of all other modules.
        plain: the scheme of modules that are not quantized.
    """

    method: str
    layers: Mapping[str, Callable[[], Scheme]]
    ignored: Callable[[str], bool]
    targets: tuple[tuple[Callable[[str], bool], Callable[[], Scheme]], ...]
    default: Callable[[], Scheme]
    plain: Scheme

    def scheme(self, module: str) -> Scheme:
        """Return the scheme of ``module``, named as in the checkpoint: ``model.layers.3.mlp.experts.0.up_proj``, or for
        stacked experts ``model.layers.3.mlp.experts.gate_up_proj``.

        Raises:
            CheckpointError: if the module's scheme is not supported or its description is wrong.
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
        # Stacked experts whose config names one module for each expert: any of them describes all.
        under = ".".join(parts[:-1]) + "."
        if not self.layers or parts[-2:-1] != ["experts"]:
            return None
        return next((make for name, make in self.layers.items() if name.startswith(under)), None)


def without_root(module: str) -> str:
    """Strip prefixes: ``layers.3.mlp`` for ``model.layers.3.mlp`` and for ``language_model.model.layers.3.mlp``."""
    head, _, rest = module.partition(".")
    return without_root(rest) if head in ROOTS and rest else module


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a matcher for names and globs: of the whole name, any run of its components, or a module above it.

    Components match as a whole: ``layers.1`` does not match ``layers.10``, nor ``mlp.gate`` ``mlp.gate_proj``, nor does
    ``foo*``, which ModelOpt writes for ``foo`` and everything below it. ``re:`` starts a regular expression, as in
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
    """Return a matcher by the rule of compressed-tensors: ``re:X`` is a regular expression that matches from the start
    of the name; any other entry is a whole name."""
    patterns = list(patterns)
    try:
        regexes = [re.compile(p[3:]) for p in patterns if p.startswith("re:")]
    except re.error as error:
        raise CheckpointError(
            "config.json: quantization: module names", expected="regular expressions after re:", got=str(error)
        ) from error
    names = {without_root(p) for p in patterns if not p.startswith("re:")}
    return lambda module: without_root(module) in names or any(r.match(module) for r in regexes)
