"""Names and arrangements of expert tensors in files, by Transformers' own conversions.

A conversion is not interpreted but carried out: small tensors of distinct numbers, one for each projection of each
expert, are stored as a candidate says, loaded as Transformers loads, and compared. So a container of another module,
gate and up exchanged, or rows in another order are no candidates: they do not come out equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from polymoe.checkpoint.architectures.experts import ExpertsGroup
from polymoe.checkpoint.architectures.interface import first_parameter, projections
from polymoe.checkpoint.arrangement import BIAS, UNFUSED, UNFUSED_NO_GATE, Arrangement, Fused, PerExpert
from polymoe.checkpoint.moe_config import MoeConfig
from polymoe.errors import UnsupportedProblem

Numbers = dict[str, Tensor]
"""Projections and biases of all experts, by name; and parameters or tensors of files by theirs."""


def stored_names(
    model: Any, groups: Sequence[ExpertsGroup], names: Iterable[str] = ()
) -> list[tuple[tuple[str, Arrangement], ...]]:
    """Where the tensors of each group may be: containers, with ``{layer}``, and arrangements, the usual one first.

    Args:
        model: on ``meta``.
        groups: all groups of its experts modules.
        names: of tensors in files, which may have other prefixes.

    Raises:
        UnsupportedProblem: if Transformers would load tensors of no known arrangement into the modules of a group.
    """
    conversions, names, found = _Conversions(model), list(names), []
    for group in groups:
        # Two layers: what holds for both is not a rule for one of them.
        first, last = (_Trial(conversions, groups, group, layer) for layer in (min(group.modules), max(group.modules)))
        others = set(last.places())
        places = [place for place in first.places() if place in others]
        if not places:
            raise UnsupportedProblem(
                group.name(first.layer),
                expected="experts in files one by one, or stacked in an order that is known",
                got="another conversion of tensors in Transformers",
            )
        found.append(tuple(dict.fromkeys([*places, *first.elsewhere(places, names)])))
    return found


class _Conversions:
    """A model's conversions of tensors in files to parameters, and back."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known = dict.fromkeys(model.state_dict(), True)
        loading = get_model_conversion_mapping(model)
        self._renamings = [t for t in loading if isinstance(t, WeightRenaming)]
        self._converters = [t for t in loading if isinstance(t, WeightConverter)]
        # As save_pretrained does. A changed prefix is in some files and not in others.
        saving = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
        backward = [t.reverse_transform() for t in saving[::-1]]
        self._back_renamings = [t for t in backward if isinstance(t, WeightRenaming)]
        self._back_converters = [t for t in backward if isinstance(t, WeightConverter)]

    def parameter(self, name: str) -> tuple[str, str | None]:
        """The parameter that a tensor of a file becomes, or becomes part of, and the pattern of its converter."""
        prefix = self.model.base_model_prefix
        found, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self.known)
        return (name, None) if found not in self.known and name in self.known else (found, pattern)

    def name(self, parameter: str) -> str:
        """The name of a parameter in a file, where nothing but names is converted."""
        return apply_renamings(parameter, self._back_renamings)

    def load(self, files: Numbers, shapes: Any) -> Numbers:
        """The parameters that tensors of files become."""
        moved = {name: self.parameter(name) for name in files}
        return self._convert(files, moved, self._converters, shapes)

    def save(self, parameters: Numbers, shapes: Any) -> Numbers:
        """The tensors that parameters become in files."""
        moved: dict[str, tuple[str, str | None]] = {}
        for name in parameters:
            found, pattern = apply_converters(name, self._back_converters)
            moved[name] = (found, pattern) if pattern else (self.name(name), None)
        saved = self._convert(parameters, moved, self._back_converters, shapes)
        converted = {name for name, pattern in moved.values() if pattern is None}
        return {name if name in converted else self.name(name): tensor for name, tensor in saved.items()}

    def _convert(
        self, tensors: Numbers, moved: Mapping[str, tuple[str, str | None]], converters: Any, shapes: Any
    ) -> Numbers:
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        planned: dict[str, Any] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = moved[name]
            transform = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, target)
            transform = planned.setdefault(target, transform)
            transform.add_tensor(target, name, pattern or name, tensors[name])
        done: Numbers = {}
        for target, transform in planned.items():
            for name, tensor in transform.convert(target, model=shapes, config=self.model.config).items():
                done[name] = tensor[0] if isinstance(tensor, list) else tensor
        return done


class _Trial:
    """The experts modules of one layer with small distinct numbers instead of weights."""

    def __init__(
        self, conversions: _Conversions, groups: Sequence[ExpertsGroup], group: ExpertsGroup, layer: int
    ) -> None:
        self.conversions, self.layer, self.module = conversions, layer, group.modules[layer]
        self.container = group.name(layer)
        self.numbers: dict[str, Numbers] = {}
        self.parameters: Numbers = {}
        # All of them at once: some conversions distribute the experts of a file over two modules.
        for other in groups:
            if layer in other.modules:
                self.numbers[other.name(layer)] = self._fill(other.name(layer), other.modules[layer], other.moe)
        self.shapes = SimpleNamespace(get_parameter=lambda name: self.parameters[name])
        self.saved = conversions.save(self.parameters, self.shapes)

    def _fill(self, name: str, module: Any, moe: MoeConfig) -> Numbers:
        """Set the parameters of a module and return its projections and biases as views of them."""
        rows = moe.intermediate * (2 if moe.gated else 1)
        # Axes are as equal as the module's: some conversions look at shapes.
        f, h = 2, {rows: 4 if moe.gated else 2, moe.intermediate: 2}.get(moe.hidden, 3)
        small = {rows: 2 * f if moe.gated else f, moe.hidden: h, moe.intermediate: f}
        own: Numbers = {}
        for key, parameter in module.named_parameters(recurse=False):
            axes = [small[n] for n in parameter.shape[1:]]
            own[key] = torch.zeros(parameter.shape[0], *axes, device="cpu")
        found = projections(module, own)
        count = sum(t.numel() for t in self.parameters.values()) + 1.0
        for tensor in found.values():
            tensor.copy_(torch.arange(tensor.numel(), device="cpu").view(tensor.shape) + count)
            count += tensor.numel()
        self.parameters |= {f"{name}.{key}": tensor for key, tensor in own.items()}
        return found

    def places(self) -> Iterator[tuple[str, Arrangement]]:
        """Containers, with ``{layer}``, and arrangements that Transformers loads as the model has them; and those of
        tools that store each expert's projections as modules, whose names are their meaning."""
        own = Fused(gate_up=first_parameter(self.module), dialects=("plain",))
        for container, arrangement in (*self._seen(), (self.container, own)):
            for variant in self._variants(arrangement):
                if self._loads(container, variant):
                    yield self._marked(container), variant
        unfused = UNFUSED if self.module.has_gate else UNFUSED_NO_GATE
        renamed = self.conversions.name(f"{self.container}.0.down_proj.weight").removesuffix(".0.down_proj.weight")
        for container in dict.fromkeys((renamed, self.container)):
            if self._becomes(container, unfused) == f"{self.container}.0.down_proj.weight":
                yield self._marked(container), unfused

    def elsewhere(
        self, places: Sequence[tuple[str, Arrangement]], names: Sequence[str]
    ) -> Iterator[tuple[str, Arrangement]]:
        """The same places under other prefixes that tensors in files have."""
        for template, arrangement in places:
            container = template.format(layer=self.layer)
            components = template.split(".")
            tail = ".".join(components[components.index("{layer}") - 1 :]).format(layer=self.layer)
            inside = f".{tail}."
            heads = {name[: f".{name}".index(inside)] for name in names if inside in f".{name}"}
            for head in sorted(heads):
                if self._becomes(head + tail, arrangement) == self._becomes(container, arrangement):
                    yield self._marked(head + tail), arrangement

    def _becomes(self, container: str, arrangement: Arrangement) -> str:
        known = self.conversions.known
        module = f"{self.container}.0.down_proj.weight"
        known[module] = True  # with which Transformers adds and removes prefixes
        found, _ = self.conversions.parameter(arrangement.tensor(container, "down", 0, "weight"))
        del known[module]
        return found

    def _marked(self, container: str) -> str:
        return re.sub(rf"(^|\.){self.layer}(?=\.|$)(?!.*\.{self.layer}(\.|$))", r"\1{layer}", container)

    def _seen(self) -> Iterator[tuple[str, Arrangement]]:
        """The container and the arrangement of tensors that hold the numbers of this module's projections."""
        numbers = self.numbers[self.container]
        wanted = {name: set(t[0].flatten().tolist()) for name, t in numbers.items() if not name.endswith(BIAS)}
        names: dict[str, str] = {}
        for name, tensor in self.saved.items():
            values = set(tensor.flatten().tolist())
            names |= {part: name for part, some in wanted.items() if some <= values}
        if names.keys() != wanted.keys():
            return
        each = {part: re.fullmatch(r"(.+)\.(\d+)\.([^.]+)\.weight", name) for part, name in names.items()}
        if len(set(names.values())) == len(names) and all(each.values()):
            stems = {part: match[3] for part, match in each.items() if match}
            found = {(match[1], int(match[2])) for match in each.values() if match}
            if len(found) == 1:
                ((container, first),) = found
                yield container, PerExpert(gate=stems.get("gate"), up=stems["up"], down=stems["down"], first=first)
        elif names.get("gate", names["up"]) == names["up"] != names["down"]:
            up, down = names["up"].split("."), names["down"].split(".")
            same = next((i for i, (a, b) in enumerate(zip(up, down, strict=False)) if a != b), 0)
            stem_up, stem_down = ".".join(up[same:]), ".".join(down[same:])
            yield ".".join(up[:same]), Fused(gate_up=stem_up, down=stem_down, dialects=("plain",))

    def _variants(self, arrangement: Arrangement) -> Iterator[Arrangement]:
        if isinstance(arrangement, PerExpert):
            yield arrangement
            return
        for k_first in (False, True):
            yield replace(arrangement, k_first=k_first)
            if self.module.has_gate:
                yield replace(arrangement, k_first=k_first, order="interleaved")

    def _loads(self, container: str, arrangement: Arrangement) -> bool:
        """Whether tensors of this arrangement become this module's parameters."""
        numbers = self.numbers[self.container]
        own = {value for tensor in numbers.values() for value in tensor.flatten().tolist()}
        files = {name: t for name, t in self.saved.items() if own.isdisjoint(t.flatten().tolist())}
        files |= _stored(container, arrangement, numbers)
        try:
            loaded = self.conversions.load(files, self.shapes)
            names = {key: f"{self.container}.{key}" for key, _ in self.module.named_parameters(recurse=False)}
            found = projections(self.module, {key: loaded[name] for key, name in names.items()})
        except (AttributeError, IndexError, KeyError, RuntimeError, ValueError):  # the conversion takes no such tensors
            return False
        return all(torch.equal(found[name], tensor) for name, tensor in numbers.items())


def _stored(container: str, arrangement: Arrangement, numbers: Numbers) -> Numbers:
    """Projections and biases as tensors of files."""
    files: Numbers = {}
    for part in arrangement.parts(gated="gate" in numbers):
        for suffix, ending in (("weight", ""), (BIAS, f"_{BIAS}")):
            if f"down{ending}" not in numbers:
                continue
            if isinstance(arrangement, PerExpert):
                for e, tensor in enumerate(numbers[part + ending]):
                    files[arrangement.tensor(container, part, e, suffix)] = tensor
                continue
            halves = [numbers[n + ending] for n in ("gate", "up") if n + ending in numbers]
            tensor = numbers[f"down{ending}"] if part == "down" else torch.cat(halves, 1)
            if part != "down" and arrangement.order == "interleaved":
                tensor = torch.stack(halves, 2).flatten(1, 2)
            if arrangement.k_first and not ending:
                tensor = tensor.mT
            files[arrangement.tensor(container, part, 0, suffix)] = tensor.contiguous()
    return files
