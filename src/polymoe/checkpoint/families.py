"""FAMILIES: one row a model family: where its experts lie in a checkpoint, and what its config means.

A row is data and one short function from the config to :class:`MoeConfig`; it says nothing of quantization, which
:mod:`polymoe.checkpoint.config` reads from the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polymoe.activations import Activation, parse_activation
from polymoe.errors import CheckpointError, CheckpointNotFound, nearest
from polymoe.problem import WeightOn
from polymoe.routing import Router, TopKSoftmax

__all__ = ["FAMILIES", "Arrangement", "Family", "Fused", "MoeConfig", "PerExpert", "family_of", "text_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerExpert:
    """A module an expert and projection: ``{container}.{e}.{name}``, tensors ``{module}.{suffix}``.

    Attributes:
        gate, up, down: the modules' names; ``gate`` is None for experts without a gate projection.
        dialects: the dialects that are stored so; None for any.
    """

    up: str
    down: str
    gate: str | None
    dialects: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """All experts stacked, gate and up in one: ``{container}.{gate_up}``, or ``{container}.{gate_up}_{suffix}``.

    Attributes:
        gate_up, down: the tensors' stems.
        order: of gate and up rows: all gate rows, then all up rows; or one of each in turn, gate first.
        k_first: whether matrices are stored transposed, ``[E, K, N]``.
        dialects: the dialects that are stored so; None for any.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    order: Literal["concatenated", "interleaved"] = "concatenated"
    k_first: bool = False
    dialects: tuple[str, ...] | None = None


Arrangement = PerExpert | Fused
"""How the tensors of one layer's experts are named and stacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """What a model's config says of its routed experts.

    Attributes:
        hidden: H, the experts' own width (Nemotron-3: the latent width).
        intermediate: F, before tensor parallelism.
        experts: E.
        top_k: A, experts active per token.
        gated: whether experts have a gate projection.
        bias: whether projections have biases.
        activation: the function between the projections, with its constants.
        layers: the layers with routed experts, ascending.
        routers: the router of each of ``layers``.
        num_layers: of the whole model, layers for multi-token prediction not counted.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    bias: bool = False
    activation: Activation
    layers: tuple[int, ...]
    routers: tuple[Router, ...]
    num_layers: int

    def __post_init__(self) -> None:
        assert len(self.layers) == len(self.routers)
        if self.top_k > self.experts:
            raise CheckpointError(
                "config.json: experts per token", expected=f"at most {self.experts} experts", got=str(self.top_k)
            )

    @property
    def gated(self) -> bool:
        """Whether experts have a gate projection."""
        return self.activation.gated

    @property
    def weight_on(self) -> WeightOn:
        """Whether the routing weight multiplies each expert's output, or its input."""
        return self.routers[0].weight_on if self.routers else "output"

    def router(self, layer: int) -> Router:
        """The router of ``layer``; CheckpointNotFound, listing the layers with experts, if it has none."""
        if layer not in self.layers:
            what = "a dense layer" if 0 <= layer < self.num_layers else "no such layer"
            raise CheckpointNotFound(
                f"layer {layer}", expected=f"a layer with routed experts: {ranges(self.layers)}", got=what
            )
        return self.routers[self.layers.index(layer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row of :data:`FAMILIES`.

    Attributes:
        name: of the row.
        model_types: every ``model_type`` that means this family, of whole models and of their text parts.
        containers: possible full names of a layer's experts, with ``{layer}``; the first is the usual one.
        arrangements: possible arrangements, tried in order against the tensors that exist.
        describe: from the config's text part to what it says of the experts.
        uneven_tp: tensor parallelism gives each rank whole groups of columns, the last ranks fewer.
    """

    name: str
    model_types: tuple[str, ...]
    containers: tuple[str, ...]
    arrangements: tuple[Arrangement, ...]
    describe: Callable[[Mapping[str, Any]], MoeConfig]
    uneven_tp: bool = False


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text model: ``text_config`` of multimodal wrappers, else the whole."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config's ``model_type``, or of its text part's; CheckpointError with the nearest if unknown."""
    names = [str(c.get("model_type")) for c in (config, text_config(config))]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise CheckpointError(
        "config.json: model_type", expected="a known family", got=repr(names[0]), hint=nearest(names[0], FAMILIES)
    )


def ranges(layers: tuple[int, ...]) -> str:
    """Ascending numbers as text: ``3-60``, ``1, 3, 5``, ``none``."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "none"


@dataclass(frozen=True, slots=True)
class _Keys:
    """A config whose wrong or missing keys are errors that name them."""

    config: Mapping[str, Any]

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of the keys that is there and not null, an integer of at least ``least``."""
        name, value = self._find(names, default)
        if type(value) is not int or value < least:
            raise self._error(name, f"an integer of at least {least}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        name, value = self._find((name,), default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self._error(name, "a number above 0", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        name, value = self._find((name,), default)
        if not isinstance(value, bool):
            raise self._error(name, "true or false", value)
        return value

    def word(self, name: str, *known: str) -> None:
        """Check that a key, where it is there, has one of the values that are known."""
        value = self.config.get(name)
        if value is not None and value not in known:
            raise self._error(name, f"one of {', '.join(known)}", value)

    def activation(
        self, name: str = "hidden_act", *, gated: bool = True, default: str = "silu", **constants: float
    ) -> Activation:
        """The activation that a key means; an ArgumentError names the known ones."""
        return parse_activation(self._find((name,), default)[1], gated=gated, **constants)

    def _find(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        found = ((name, self.config[name]) for name in names if self.config.get(name) is not None)
        name, value = next(found, (names[0], default))
        if value is None:
            raise CheckpointError(f"config.json: {' or '.join(names)}", expected="this key", got="nothing")
        return name, value

    def _error(self, name: str, expected: str, value: Any) -> CheckpointError:
        return CheckpointError(f"config.json: {name}", expected=expected, got=repr(value))


def _gpt_oss(config: Mapping[str, Any]) -> MoeConfig:
    keys = _Keys(config)
    top_k = keys.integer("num_experts_per_tok", "experts_per_token")
    layers = keys.integer("num_hidden_layers")
    alpha, limit = keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0)
    return MoeConfig(
        hidden=keys.integer("hidden_size"),
        intermediate=keys.integer("intermediate_size"),
        experts=keys.integer("num_local_experts", "num_experts"),
        top_k=top_k,
        bias=True,
        activation=keys.activation(alpha=alpha, beta=1.0, limit=limit),
        layers=tuple(range(layers)),
        routers=(TopKSoftmax(top_k),) * layers,
        num_layers=layers,
    )


_ROWS = (
    Family(
        name="gpt-oss",
        model_types=("gpt_oss",),
        containers=("model.layers.{layer}.mlp.experts",),
        arrangements=(
            Fused(order="interleaved", dialects=("gpt_oss",)),
            Fused(order="interleaved", k_first=True, dialects=("plain",)),
        ),
        describe=_gpt_oss,
        uneven_tp=True,
    ),
)

FAMILIES: Mapping[str, Family] = {model_type: row for row in _ROWS for model_type in row.model_types}
"""Families by ``model_type``."""
