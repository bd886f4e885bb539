"""Scheme and QuantizationConfig: how the weights of each module are stored; and how configs match module names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from polymoe.checkpoint.patterns import compile_regexes
from polymoe.errors import CheckpointError
from polymoe.formats import Encoding
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization

ROOTS = ("model", "backbone", "language_model")  # prefixes of module names that tools add, drop and exchange
_EXPERTS = ".experts."

MOST_GLOBS, MOST_STARS = 200, 8
"""Entries of one list with a star that is not at their end, and stars of one: a few dozen, and two, in use."""


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

    def __str__(self) -> str:
        return f"{self.encoding.name}, {self.dialect}"

    def describes(self, dialect: str, encoding: Encoding) -> bool:
        """Whether a weight is stored so, apart from the dtype of scales."""
        return self.dialect == dialect and self.encoding.name == encoding.name


class NamedSchemes:
    """Schemes of named modules and of everything below them, made on request.

    Where a map names the modules of single experts, the first of a layer also describes its stacked experts.

    Args:
        names: the modules' names; there may be one for each matrix of each expert.
        make: called with one of the names for its scheme.
    """

    def __init__(self, names: Iterable[str] = (), make: Callable[[str], Scheme] | None = None) -> None:
        self._make = make
        self._named: dict[str, str] = {}
        self._stacked: dict[str, str] = {}
        for name in names:
            bare = without_root(name)
            self._named[bare] = name
            container, experts, _ = bare.partition(_EXPERTS)
            if experts:
                self._stacked.setdefault(container, name)

    def __bool__(self) -> bool:
        return bool(self._named)

    def find(self, module: str) -> Callable[[], Scheme] | None:
        """Return a function that makes the scheme of a module, or None if the map does not name it."""
        bare = without_root(module)
        name = next((self._named[above] for above in _above(bare) if above in self._named), None)
        if name is None:
            container, experts, part = bare.partition(_EXPERTS)
            name = self._stacked.get(container) if experts and "." not in part else None
        return None if name is None or self._make is None else partial(self._make, name)


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
    layers: NamedSchemes
    ignored: Callable[[str], bool]
    targets: tuple[tuple[Callable[[str], bool], Callable[[], Scheme]], ...]
    default: Callable[[], Scheme]
    plain: Scheme

    @property
    def quantized(self) -> bool:
        """Whether the config quantizes anything."""
        return self.method != "none"

    def scheme(self, module: str) -> Scheme:
        """Return the scheme of ``module``, named as in the checkpoint: ``model.layers.3.mlp.experts.0.up_proj``, or for
        stacked experts ``model.layers.3.mlp.experts.gate_up_proj``.

        Raises:
            CheckpointError: if the module's scheme is not supported or its description is wrong.
        """
        make = self.layers.find(module)
        if make is None and self.ignored(module):
            return self.plain
        if make is None:
            make = next((make for matches, make in self.targets if matches(module)), self.default)
        return make()


def without_root(module: str) -> str:
    """Strip prefixes: ``layers.3.mlp`` for ``model.layers.3.mlp`` and for ``language_model.model.layers.3.mlp``."""
    head, _, rest = module.partition(".")
    return without_root(rest) if head in ROOTS and rest else module


def matcher(patterns: Iterable[str], where: str) -> Callable[[str], bool]:
    """Return a matcher for names and globs: of the whole name, any run of its components, or a module above it.

    Components match as a whole: ``layers.1`` does not match ``layers.10``, nor ``mlp.gate`` ``mlp.gate_proj``, nor does
    ``foo*``, which ModelOpt writes for ``foo`` and everything below it. ``re:`` starts a regular expression, as in
    :func:`exact_or_regex`.

    Args:
        patterns: the entries of a list of modules.
        where: the file and key of the list, for messages.

    Raises:
        CheckpointError: for too many globs, or regular expressions that
            :func:`~polymoe.checkpoint.patterns.compile_regexes` refuses.
    """
    regexes, names = split_regexes(patterns, where)
    names = [without_root(p[:-1] if len(p) > 1 and p.endswith("*") and p[-2] != "." else p) for p in names if p]
    whole = {name for name in names if "*" not in name}
    # A run of components is a part of the name between dots, if the name has a dot before and after it. A star stands
    # for anything, so that the parts between the stars only have to occur one after the other.
    globs = [f".{name}.".split("*") for name in names if "*" in name]
    most = max((len(parts) - 1 for parts in globs), default=0)
    if len(globs) > MOST_GLOBS or most > MOST_STARS:
        raise CheckpointError(
            where,
            expected=f"at most {MOST_GLOBS} patterns with stars, of at most {MOST_STARS} each",
            got=f"{len(globs)}, of up to {most}",
        )

    def matches(module: str) -> bool:
        bare = without_root(module)
        return (
            any(run in whole for run in _runs(bare))
            or any(_in_order(parts, f".{bare}.") for parts in globs)
            or any(fits(module) for fits in regexes)
        )

    return matches


def exact_or_regex(patterns: Iterable[str], where: str) -> Callable[[str], bool]:
    """Return a matcher by the rule of compressed-tensors: ``re:X`` is a regular expression that matches from the start
    of the name; any other entry is a whole name. Arguments and errors are those of :func:`matcher`."""
    regexes, names = split_regexes(patterns, where)
    bare = {without_root(name) for name in names}
    return lambda module: without_root(module) in bare or any(fits(module) for fits in regexes)


def split_regexes(patterns: Iterable[str], where: str) -> tuple[tuple[Callable[[str], bool], ...], list[str]]:
    """Return what matches each regular expression of a list (entries with ``re:``), and the other entries."""
    patterns = list(patterns)
    regexes = compile_regexes([p[3:] for p in patterns if p.startswith("re:")], where)
    return regexes, [p for p in patterns if not p.startswith("re:")]


def _in_order(parts: list[str], text: str) -> bool:
    """Whether all parts occur in a text, each after the end of the one before. The first occurrence of each leaves the
    most for the others, so no other one needs to be tried."""
    end = 0
    for part in parts:
        found = text.find(part, end)
        if found < 0:
            return False
        end = found + len(part)
    return True


def _above(module: str) -> Iterator[str]:
    """Yield a name and the names of the modules that contain it, the innermost first: ``a.b`` and ``a``."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _runs(module: str) -> Iterator[str]:
    """Yield every run of a name's components: ``a``, ``a.b`` and ``b`` of ``a.b``."""
    parts = module.split(".")
    return (".".join(parts[i:j]) for i, j in combinations(range(len(parts) + 1), 2))
