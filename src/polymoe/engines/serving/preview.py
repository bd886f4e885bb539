"""What a plug-in would decide for the layers of a checkpoint: facts from its config or headers, without the engine.

The decision is :func:`~polymoe.engines.serving.stand_aside.judge_layer`, which the plug-ins ask too. What only the
engine knows is not seen here: other command line options, and what its version refuses or pads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.layer import StoredLayer
from polymoe.checkpoint.shard import FINEST_BLOCK, Shard
from polymoe.common.shapes import ceil_div, round_up
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.sources import SGLANG, VLLM, StackedSource
from polymoe.engines.serving.stand_aside import LayerFacts, LayerPlan, judge_layer, reason_of
from polymoe.errors import ArgumentError, FormatError
from polymoe.formats import FORMATS, Encoding, PerGroup, QuantTensor
from polymoe.layer.runtime import PlanRequest
from polymoe.problem import Problem
from polymoe.problem.tensors import ExpertsSpec
from polymoe.problem.verdict import Reason, Reasons, Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A serving engine, as far as a checkpoint's layers are concerned.

    Attributes:
        name: in messages.
        sources: its methods, or the schemes that store their tensors.
        maps_ids: whether it gives a rank of an expert parallel group the places of experts on this rank.
        refines: whether it repeats the scales of FP8 blocks that ranks split; otherwise it refuses such ranks.
        tested: the version that ran, or whose source was read.
        unread: dialects with a method whose tensors this version does not load.
        limits: by dialect, where the engine reads it, or how far that is known.
        single_group: where it reads INT4 whose rows of ``down`` are one group, of {group} columns; none if everywhere.
    """

    name: str
    sources: Mapping[str, StackedSource]
    maps_ids: bool
    refines: bool
    tested: str
    unread: frozenset[str] = frozenset()
    limits: Mapping[str, str] = field(default_factory=dict)
    single_group: str = ""

    @property
    def methods(self) -> dict[str, str]:
        """The method that loads a dialect of a checkpoint; DeepSeek-V4's by its format."""
        return {dialect: name for name, source in self.sources.items() for dialect in source.loads}


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "vllm": Engine(
            name="vLLM",
            sources=VLLM,
            maps_ids=False,
            refines=True,
            tested="0.32.0",
            limits={
                **dict.fromkeys(("ct_mxfp8", "modelopt_mxfp8"), "loaded on a CPU, its kernels never run"),
                "minimax_mxfp8": "by its source and never run",
            },
            # vLLM 0.33 orders the scales of gate and up as if F were the columns of both, which are H.
            single_group="only with polymoe where a rank's experts have {group} intermediate columns: vLLM's Marlin "
            "kernel then takes the scales of gate and up in a wrong order (vllm#50196)",
        ),
        "sglang": Engine(
            name="SGLang",
            sources=SGLANG,
            maps_ids=True,
            refines=False,
            tested="0.5.17",
            unread=frozenset({"ct_mxfp4"}),
            limits={"ct_nvfp4": "on Blackwell only", "modelopt_nvfp4": "on GPUs only"},
        ),
    }
)
"""By the name of the package."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerPreview:
    """Layers about which a plug-in decides alike.

    Attributes:
        layers: their numbers.
        where: name of the first one.
        method: class name of the engine's method.
        verdict: a plan, or every reason why the engine keeps them.
    """

    layers: tuple[int, ...]
    where: str
    method: str
    verdict: LayerPlan | Rejected


def preview(
    checkpoint: Checkpoint,
    engine: Engine,
    request: PlanRequest,
    settings: EngineSettings,
    shard: Shard,
    *,
    batch_invariant: bool = False,
) -> tuple[LayerPreview, ...]:
    """Return what the plug-in would decide on one rank, for each kind of layers.

    Args:
        checkpoint: a config is enough.
        shard: the rank.
        batch_invariant: whether the engine promises batch invariance.

    Raises:
        CheckpointError: if the checkpoint cannot be understood.
        ArgumentError: for an unknown backend, role or kind of activations.
    """
    kinds: dict[tuple[Problem | Reason, str, bool], list[int]] = {}
    for layer in checkpoint.layers:
        problem, stored = _problem(checkpoint, layer, shard), checkpoint.layer(layer)
        kinds.setdefault((problem, _dialect(stored), settings.includes(stored.container)), []).append(layer)
    found = []
    for (problem, dialect, _), layers in kinds.items():
        stored = checkpoint.layer(layers[0])
        method = engine.methods.get(dialect, dialect)
        if isinstance(problem, Problem):
            facts = _facts(stored, problem, engine, method, settings, batch_invariant)
            verdict = facts if isinstance(facts, Rejected) else judge_layer(facts, request, settings)
        else:
            verdict = Rejected((problem,))
        found.append(LayerPreview(tuple(layers), stored.container, method, verdict))
    return tuple(found)


def _problem(checkpoint: Checkpoint, layer: int, shard: Shard) -> Problem | Reason:
    """Return the problem of a layer, or why this rank has none."""
    try:
        return checkpoint.problem(layer, tp=(shard.tp_rank, shard.tp), ep=(shard.ep_rank, shard.ep))
    except ArgumentError as error:
        return reason_of(error)


def _dialect(stored: StoredLayer) -> str:
    """Return how the projections are stored, as a key of :attr:`Engine.methods`."""
    found = sorted({part.dialect.name for part in stored.parts.values()})
    if found == ["deepseek_v4"]:
        return f"deepseek_v4 {stored.spec().up.name}"
    return " and ".join(found)


def _facts(
    stored: StoredLayer,
    problem: Problem,
    engine: Engine,
    method: str,
    settings: EngineSettings,
    batch_invariant: bool,
) -> LayerFacts | Rejected:
    """Return what the engine would say of the layer, or why there is nothing that it could say."""
    spec, source, reasons = problem.spec, engine.sources.get(method), Reasons()
    settings.need_included(reasons, stored.container)
    multiple = 1 if source is None else source.multiple
    each = ceil_div(stored.moe.intermediate, problem.tp) if multiple > 1 else spec.intermediate
    intermediate = round_up(each, multiple)
    tensors: Mapping[str, Tensor] = {}
    if source is not None:
        try:
            encodings = _encodings(stored.spec(), spec, engine)
            tensors = _created(source, spec, encodings, intermediate, static=stored.recipe().static)
        except FormatError as error:
            return Rejected((*reasons.found, reason_of(error)))
    return LayerFacts(
        where=stored.container,
        method=method,
        sources=engine.sources,
        tensors=tensors,
        k_first=source is not None and source.dialects[0].k_first,
        symmetric=not spec.up.zero_points,
        hidden=spec.hidden,
        intermediate=intermediate,
        experts=spec.experts,
        first_expert=None if engine.maps_ids and problem.ep > 1 else spec.first_expert,
        activation=problem.activation,
        interleaved=stored.interleaved,
        bias=spec.bias,
        top_k=problem.top_k,
        weight_on=problem.weight_on,
        dtype=torch.bfloat16,
        tp=problem.tp,
        ep=problem.ep,
        batch_invariant=batch_invariant,
        refused=tuple(reasons.found),
    )


def _encodings(whole: ExpertsSpec, rank: ExpertsSpec, engine: Engine) -> tuple[Encoding, Encoding]:
    """Return the encodings of gate and up, and of down, that the engine gives to tensors of this rank.

    Raises:
        FormatError: if the engine does not split the blocks of FP8 weights so.
    """
    up, down, block = rank.up, rank.down, whole.up.granularity
    if isinstance(block, PerGroup) and block.n > 1 and rank.intermediate % block.n:
        finer = math.gcd(block.n, block.k, rank.intermediate, rank.hidden) if engine.refines else 1
        if finer < FINEST_BLOCK:
            raise FormatError(
                "intermediate size on a rank", expected=f"whole blocks of {block.n}", got=str(rank.intermediate)
            )
        up = down = replace(whole.up, granularity=PerGroup(finer, finer))
    if up.element == "e4m3" and up != FORMATS["mxfp8"].encoding:
        # Both engines hold these scales so, however the checkpoint stores them.
        up, down = replace(up, scale_dtype="float32"), replace(down, scale_dtype="float32")
    return up, down


def _created(
    source: StackedSource, spec: ExpertsSpec, encodings: tuple[Encoding, Encoding], intermediate: int, *, static: bool
) -> dict[str, Tensor]:
    """Return the tensors that a method creates for these experts, on the meta device, by name.

    Raises:
        FormatError: if the method has no tensors for their encoding.
    """
    tensors, k_first = {}, source.dialects[0].k_first
    for prefix, encoding in zip(("w13", "w2"), encodings, strict=True):
        halves = 2 if prefix == "w13" and spec.gated else 1
        rows, columns = (intermediate, spec.hidden) if prefix == "w13" else (spec.hidden, intermediate)
        stored = _stored(source, encoding, rows, columns, torch.ones(()) if static else None)
        if spec.bias:
            stored[source.bias] = torch.empty(rows, dtype=torch.bfloat16)
        for suffix, tensor in stored.items():
            shape = list(tensor.shape)
            if tensor.dim() < 2 and tensor.numel() == 1:  # one number for each matrix
                shape = [halves] * (halves > 1)
            else:
                shape[1 if k_first and tensor.dim() == 2 else 0] *= halves
            full = (spec.local_experts, *shape)
            tensors[f"{prefix}_{suffix}"] = torch.empty(full, dtype=tensor.dtype, device="meta")
    return tensors


def _stored(
    source: StackedSource, encoding: Encoding, rows: int, columns: int, input_scale: Tensor | None
) -> dict[str, Tensor]:
    """Return the tensors of one matrix, which hold anything, in the first dialect of ``source`` that stores it."""
    matrix = QuantTensor.empty(encoding, rows, columns, "cpu")
    if matrix.zero_points is not None:
        matrix.zero_points.fill_(8)
    failure: FormatError | None = None
    for dialect in source.dialects:
        try:
            return dialect.write(matrix, input_scale)
        except FormatError as error:
            failure = failure or error
    assert failure is not None
    raise failure
