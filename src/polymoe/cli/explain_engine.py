"""``polymoe explain --engine``: what the plug-in of a serving engine would do with the layers of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from polymoe.cli.output import console, print_json
from polymoe.common.units import format_bytes, format_ranges, format_tokens
from polymoe.errors import ArgumentError, printable

if TYPE_CHECKING:
    from polymoe.checkpoint import Checkpoint
    from polymoe.engines.serving.preview import Engine, LayerPreview
    from polymoe.explanation import Fit, Ranks
    from polymoe.machine import Device


def explain_engine(
    checkpoint: str,
    *,
    engine: str,
    enable_expert_parallel: bool,
    device: str | None,
    tp: tuple[int, int],
    ep: tuple[int, int],
    dp: int,
    batch_invariant: bool,
    json: bool,
    **chosen: str,
) -> None:
    """Print the plug-in's decision for each kind of layers; the variables ``POLYMOE_*`` count as they do there.
    Other arguments are those of :func:`polymoe.explain`."""
    from polymoe.backends import BACKENDS
    from polymoe.checkpoint.known_models import open_checkpoint
    from polymoe.engines.serving.chooser import machine_of
    from polymoe.engines.serving.preview import ENGINES, preview
    from polymoe.engines.serving.settings import EngineSettings
    from polymoe.layer.runtime import PlanRequest
    from polymoe.layouts import LAYOUTS

    about, settings = ENGINES[engine], EngineSettings.read()
    ranks = _ranks(engine, tp, ep, dp, enable_expert_parallel)
    shard = ranks.experts
    defaults = {"activations": "auto", "backend": "auto", "role": "mixed"}
    settings = replace(settings, **{name: value for name, value in chosen.items() if value != defaults[name]})
    machine = machine_of(device)
    request = PlanRequest(machine, settings.role or "mixed", settings.backend, BACKENDS, LAYOUTS)
    opened = open_checkpoint(checkpoint)
    ranks.require_heads(opened)
    fit, unknown = _fit(opened, machine.device, ranks)
    rows = preview(opened, about, request, settings, shard, batch_invariant=batch_invariant)
    off = settings.mode == "off"
    if json:
        print_json(
            {
                "checkpoint": str(opened.name),
                "model_type": opened.model_type,
                "engine": engine,
                "device": str(machine.device),
                "tp": shard.tp,
                "ep": shard.ep,
                "dp": ranks.dp,
                **(fit.to_dict() if fit else {"gpus": ranks.gpus, "fits": None}),
                "role": request.role,
                "off": off,
                "layers": [_row(row) for row in rows],
            }
        )
        return
    out = console()
    sizes = (("tp", shard.tp), ("dp", ranks.dp), ("ep", shard.ep))
    split = "".join(f", {name}={size}" for name, size in sizes if size > 1)
    role = f", role {request.role}" if request.role != "mixed" else ""
    out.print(f"{printable(opened.name)}: {opened.model_type}, in {about.name} on {machine.device}{split}{role}")
    if machine.device.kind == "cuda":
        out.print(fit.line() if fit else f"whether it fits is not known: {unknown}")
    if off:
        out.print(f"POLYMOE=0: {about.name} runs all experts; without it:")
    for row in rows:
        for line in _lines(row, about):
            out.print(line)


def _fit(checkpoint: Checkpoint, device: Device, ranks: Ranks) -> tuple[Fit | None, str]:
    """Return the memory of one GPU, or why it is not known: the engine may pad what polymoe refuses to split."""
    from polymoe.explanation import fit_of

    try:
        return fit_of(checkpoint, device, ranks), ""
    except ArgumentError as error:
        return None, str(error).partition("\n")[0]


def _ranks(engine: str, tp: tuple[int, int], ep: tuple[int, int], dp: int, enable_expert_parallel: bool) -> Ranks:
    """Return one GPU by the options of the engine: SGLang's data parallel groups are parts of its --tp GPUs."""
    from polymoe.explanation import Ranks

    (rank, size), (_, groups) = tp, ep
    if groups > 1 and (engine == "vllm" or enable_expert_parallel):
        raise ArgumentError("ep", expected="--enable-expert-parallel, for as many ranks as --tp", got=str(groups))
    if engine == "sglang" and size % dp:
        raise ArgumentError("dp", expected=f"a number that divides --tp, which is {size}", got=str(dp))
    gpus = size if engine == "sglang" else size * dp
    groups = gpus if enable_expert_parallel else groups
    if gpus % groups:
        raise ArgumentError("ep", expected=f"a number that divides --tp, which is {gpus}", got=str(groups))
    each = gpus // groups
    return Ranks(gpus // dp, dp, groups, rank % each, rank // each)


def _lines(row: LayerPreview, engine: Engine) -> list[str]:
    """The row as text: one line for what is run and where, then one for each token range or reason."""
    from polymoe.problem.verdict import Rejected

    which, verdict = f"layers {format_ranges(row.layers)} ({row.method})", row.verdict
    if isinstance(verdict, Rejected):
        return [f"{which}: polymoe leaves them to {engine.name}", *(f"  {reason}" for reason in verdict.reasons)]
    plan, packed = verdict.selection.require(), format_bytes(verdict.problem.spec.local_bytes)
    return [
        f"{which}: polymoe runs them: {verdict.problem}",
        f"  layout {plan.layout}, {packed} packed for each layer on this rank",
        *(f"  {format_tokens(r.tokens)}: {r.step.backend}, {r.known}" for r in verdict.selection.ranges()),
    ]


def _row(row: LayerPreview) -> dict[str, Any]:
    """The row as plain values."""
    from polymoe.problem.verdict import Rejected

    found: dict[str, Any] = {"layers": list(row.layers), "name": row.where, "method": row.method}
    if isinstance(row.verdict, Rejected):
        return {**found, "runs": False, "reasons": list(map(asdict, row.verdict.reasons))}
    packed = row.verdict.problem.spec.local_bytes
    return {**found, "runs": True, "packed_bytes_per_layer": packed, **row.verdict.selection.to_dict()}
