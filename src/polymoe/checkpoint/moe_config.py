"""MoeConfig: the routed experts of a model according to its config; one reader function for each kind of config.

Defaults of missing keys are those of Transformers' configuration classes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from polymoe.checkpoint.config_reader import MOST_EXPERTS, MOST_LAYERS, ConfigReader
from polymoe.common.units import format_ranges
from polymoe.errors import ArgumentError, CheckpointError, CheckpointNotFound
from polymoe.problem import WeightOn
from polymoe.problem.activations import Activation
from polymoe.problem.routing import (
    HashTopK,
    Router,
    SigmoidInput,
    SigmoidTopK,
    SoftmaxTopK,
    SqrtSoftplusTopK,
    TopKSoftmax,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The routed experts of a model according to its config.

    Attributes:
        hidden: H, the experts' own width (Nemotron-3: the latent width).
        intermediate: F, before tensor parallelism.
        experts: E.
        top_k: A, experts active per token.
        gated: whether experts have a gate projection.
        bias: whether projections have biases.
        activation: the function between the projections, with its constants.
        layers: the layers with routed experts, ascending.
        routers: the router of each of ``layers``; empty where the model has its own and nothing here needs to know it.
        num_layers: of the whole model; neither this nor ``layers`` counts layers for multi-token prediction.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    bias: bool = False
    activation: Activation
    layers: tuple[int, ...]
    routers: tuple[Router, ...] = ()
    num_layers: int

    def __post_init__(self) -> None:
        assert len(self.routers) in (0, len(self.layers))
        if self.top_k > self.experts:
            raise CheckpointError(
                "config.json: experts per token",
                expected=f"at most {self.experts}, the number of experts",
                got=str(self.top_k),
            )
        if not self.layers:
            raise CheckpointError("config.json", expected="a layer with routed experts", got="dense layers only")

    @property
    def gated(self) -> bool:
        """Whether experts have a gate projection."""
        return self.activation.gated

    @property
    def weight_on(self) -> WeightOn:
        """Whether the routing weight multiplies each expert's output, or its input."""
        return self.routers[0].weight_on if self.routers else "output"

    def place(self, layer: int) -> int:
        """Return the index of ``layer`` among :attr:`layers`.

        Raises:
            CheckpointNotFound: if the layer has no routed experts; the message lists the layers that have.
            ArgumentError: if ``layer`` is not an integer.
        """
        if type(layer) is not int:
            raise ArgumentError("layer", expected="an integer", got=repr(layer))
        place = bisect_left(self.layers, layer)
        if self.layers[place : place + 1] != (layer,):
            what = "a dense layer" if 0 <= layer < self.num_layers else "no such layer"
            raise CheckpointNotFound(
                f"layer {layer}", expected=f"a layer with routed experts ({format_ranges(self.layers)})", got=what
            )
        return place

    def router(self, layer: int) -> Router:
        """Return the router of ``layer``; raises as :meth:`place`."""
        return self.routers[self.place(layer)]


_MIXTRAL = ("num_local_experts", "num_experts")


def _config(
    keys: ConfigReader,
    layers: Sequence[int],
    routers: Sequence[Router],
    num_layers: int,
    *,
    experts: tuple[str, ...] = ("n_routed_experts", "num_local_experts"),
    hidden: tuple[str, ...] = ("hidden_size",),
    width: str = "moe_intermediate_size",
    activation: Activation | None = None,
    bias: bool = False,
) -> MoeConfig:
    """The config of these layers; ``experts``, ``hidden`` and ``width`` are names of keys."""
    return MoeConfig(
        hidden=keys.width(*hidden),
        intermediate=keys.width(width),
        experts=keys.experts(*experts),
        top_k=routers[0].top_k if routers else 0,  # without layers MoeConfig raises
        bias=bias,
        activation=activation or keys.activation(),
        layers=tuple(layers),
        routers=tuple(routers),
        num_layers=num_layers,
    )


def gpt_oss(keys: ConfigReader) -> MoeConfig:
    """gpt-oss: softmax over the chosen experts; every layer has experts, and every projection a bias."""
    top_k, layers = keys.top_k("num_experts_per_tok", "experts_per_token"), keys.layers()
    alpha, limit = keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0)
    return _config(
        keys, range(layers), [TopKSoftmax(top_k)] * layers, layers, experts=_MIXTRAL, width="intermediate_size",
        activation=keys.activation(alpha=alpha, beta=1.0, limit=limit), bias=True,
    )  # fmt: skip


def deepseek_v3(
    keys: ConfigReader, *, scaling: float = 2.5, groups: tuple[int, int] = (8, 4), dense: int = 3
) -> MoeConfig:
    """DeepSeek V3, V3.1, R1 and V3.2, Kimi K2: sigmoid scores with a correction bias, groups of experts, after a few
    dense layers. The arguments are defaults of missing keys."""
    keys.word("scoring_func", "sigmoid", default="sigmoid")
    keys.word("topk_method", "noaux_tc", default="noaux_tc")
    num_layers = keys.layers()
    kinds = keys.items("mlp_layer_types", str, most=MOST_LAYERS)
    if kinds is not None:
        if len(kinds) < num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise keys.error("mlp_layer_types", f"dense or sparse for each of {num_layers} layers", list(kinds))
        layers = tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "sparse")
    else:
        first = keys.integer("first_k_dense_replace", default=dense, least=0, most=MOST_LAYERS)
        step = keys.integer("moe_layer_freq", default=1, most=MOST_LAYERS)
        layers = tuple(i for i in range(first, num_layers) if i % step == 0)
    router = _sigmoid_router(keys, scaling, groups)
    return _config(keys, layers, [router] * len(layers), num_layers)


def _sigmoid_router(keys: ConfigReader, scaling: float, groups: tuple[int, int]) -> SigmoidTopK:
    experts = keys.experts("n_routed_experts", "num_local_experts")
    n_group = keys.integer("n_group", default=groups[0], most=MOST_EXPERTS)
    topk_group = keys.integer("topk_group", default=groups[1], most=MOST_EXPERTS)
    if topk_group > n_group:
        raise keys.error("topk_group", f"at most n_group={n_group}", topk_group)
    if topk_group < n_group and experts % n_group:
        raise keys.error("n_group", f"a divisor of the {experts} experts", n_group)
    return SigmoidTopK(
        keys.top_k("num_experts_per_tok"),
        renormalize=keys.flag("norm_topk_prob", True),
        scaling=keys.number("routed_scaling_factor", scaling),
        n_group=n_group,
        topk_group=topk_group,
    )


def deepseek_v4(keys: ConfigReader, *, hashed: int = 3) -> MoeConfig:
    """DeepSeek V4: square root of softplus; the first ``hashed`` layers choose experts by token id, none of V4.1.
    ``n_group`` may be left over from V3's template; V4 has no groups."""
    keys.word("scoring_func", "sqrtsoftplus", default="sqrtsoftplus")
    num_layers = keys.layers()
    hashed = keys.integer("num_hash_layers", default=hashed, least=0, most=MOST_LAYERS)
    kinds = keys.items("mlp_layer_types", str, most=MOST_LAYERS)
    kinds = kinds or tuple("hash_moe" if i < hashed else "moe" for i in range(num_layers))
    top_k, renormalize = keys.top_k("num_experts_per_tok"), keys.flag("norm_topk_prob", True)
    scaling = keys.number("routed_scaling_factor", 1.5)
    routers = {
        "hash_moe": HashTopK(top_k, renormalize=renormalize, scaling=scaling),
        "moe": SqrtSoftplusTopK(top_k, renormalize=renormalize, scaling=scaling),
    }
    if len(kinds) != num_layers or not set(kinds) <= set(routers):
        raise keys.error("mlp_layer_types", f"{num_layers} of hash_moe and moe", list(kinds))
    activation = keys.activation(limit=keys.number("swiglu_limit", 10.0))
    return _config(keys, range(num_layers), [routers[kind] for kind in kinds], num_layers, activation=activation)


def nemotron_h(keys: ConfigReader) -> MoeConfig:
    """Nemotron-H and -3: no gate projection, other kinds of layers in between, a latent width if there is one."""
    kinds = keys.items("layers_block_type", str, most=MOST_LAYERS) or keys.items("layer_types", str, most=MOST_LAYERS)
    kinds = kinds or tuple("moe" if c == "E" else c for c in keys.text("hybrid_override_pattern"))
    if not 0 < len(kinds) <= MOST_LAYERS:
        expected = f"the kind of each layer, of at most {MOST_LAYERS}"
        raise keys.error("layers_block_type or hybrid_override_pattern", expected, list(kinds) or None)
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "moe")
    router = _sigmoid_router(keys, scaling=1.0, groups=(1, 1))
    return _config(
        keys, layers, [router] * len(layers), len(kinds), hidden=("moe_latent_size", "hidden_size"),
        activation=keys.activation("mlp_hidden_act", gated=False, default="relu2"), bias=keys.flag("mlp_bias", False),
    )  # fmt: skip


def qwen(keys: ConfigReader, *, renormalize: bool = True) -> MoeConfig:
    """Qwen3-MoE, -Next, -VL, Qwen3.5: softmax over all experts; ``renormalize`` is the default of the missing key."""
    num_layers, step = keys.layers(), keys.integer("decoder_sparse_step", default=1, most=MOST_LAYERS)
    dense = frozenset(keys.items("mlp_only_layers", int, most=MOST_LAYERS) or ())
    layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    router = SoftmaxTopK(keys.top_k("num_experts_per_tok"), keys.flag("norm_topk_prob", renormalize))
    return _config(keys, layers, [router] * len(layers), num_layers, experts=("num_experts", "num_local_experts"))


def mixtral(keys: ConfigReader) -> MoeConfig:
    """Mixtral: every layer has experts."""
    num_layers, top_k = keys.layers(), keys.top_k("num_experts_per_tok", default=2)
    routers = [SoftmaxTopK(top_k, True)] * num_layers
    return _config(keys, range(num_layers), routers, num_layers, experts=_MIXTRAL, width="intermediate_size")


def llama4(keys: ConfigReader) -> MoeConfig:
    """Llama-4: weights multiply the input; layers with experts at regular steps or as listed."""
    num_layers, step = keys.layers(), keys.integer("interleave_moe_layer_step", default=1, most=MOST_LAYERS)
    listed = keys.items("moe_layers", int, most=MOST_LAYERS)
    layers = tuple(range(step - 1, num_layers, step)) if listed is None else tuple(sorted(set(listed)))
    if layers and not 0 <= layers[0] <= layers[-1] < num_layers:
        raise keys.error("moe_layers", f"layers from 0 to {num_layers - 1}", list(layers))
    top_k = keys.top_k("num_experts_per_tok", default=1)
    routers = [SigmoidInput(top_k)] * len(layers)
    return _config(keys, layers, routers, num_layers, experts=("num_local_experts",), width="intermediate_size")
