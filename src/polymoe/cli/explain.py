"""``polymoe explain``: the experts of a checkpoint and how they would run, from its config alone."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

from polymoe.cli.options import (
    ActivationsName,
    Invariance,
    Options,
    Output,
    Planned,
    QuantizedExperts,
    checkpoint_argument,
    gpus,
    option,
)
from polymoe.cli.output import console, print_json, print_table
from polymoe.common.lazy_torch import postpone_torch
from polymoe.common.units import format_bytes, format_count, format_ranges, format_us
from polymoe.errors import ArgumentError, printable

if TYPE_CHECKING:
    from polymoe.explanation import Explanation, Row
    from polymoe.explanation.offload import Offload


class _Where(QuantizedExperts):
    device: str | None = option(
        None, "Any GPU, not only yours: h200, 'RTX 5090', sm_120; or cpu. Default: this machine's.", complete=gpus
    )
    activations: Literal["auto", ActivationsName] = option(
        "auto", "How the experts' inputs are quantized; auto follows the checkpoint's recipe on a GPU."
    )
    expert_memory: str | None = option(
        None, "With all experts in host memory: GPU memory for some of them: auto, 16GiB, or 32slots in each layer."
    )


class _Ranks(Options, heading="Parallel ranks"):
    tp: int = option(1, "Tensor parallel size.", "--tp", "--tensor-parallel-size", min=1)
    tp_rank: int = option(0, "Tensor parallel rank.", min=0)
    dp: int = option(1, "Data parallel size.", "--dp", "--data-parallel-size", min=1)
    ep: int = option(1, "Expert parallel size: of the same GPUs.", "--ep", "--expert-parallel-size", min=1)
    ep_rank: int = option(0, "Expert parallel rank.", min=0)


class _InEngine(Options, heading="Engines"):
    engine: Literal["vllm", "sglang"] | None = option(
        None, "Show what the plug-in of this engine would do; the engine need not be installed."
    )
    enable_expert_parallel: bool = option(False, "With --engine: --tp ranks each get whole experts.")


def command(
    checkpoint: Annotated[str, checkpoint_argument("A checkpoint's directory, a config.json, or a Hub id.")],
    where: _Where,
    planned: Planned,
    ranks: _Ranks,
    invariance: Invariance,
    engine: _InEngine,
    output: Output,
) -> None:
    """Show whether a checkpoint fits a GPU, which backend would run its experts at each token count, how far that
    backend is proven on the GPU, and why the others would not run.

    Reads config files and, if there are any, tensor headers, but no weights. polymoe ships the sizes of well-known
    models, so their Hub ids work without files and without a network.
    """
    asked: dict[str, Any] = {
        **vars(where),
        **vars(planned),
        **vars(invariance),
        "tp": (ranks.tp_rank, ranks.tp),
        "ep": (ranks.ep_rank, ranks.ep),
        "dp": ranks.dp,
    }
    expert_memory = asked.pop("expert_memory")
    if engine.engine is not None:
        if asked.pop("experts") is not None:
            hint = "an engine runs experts as they are stored"
            raise ArgumentError("experts", expected="no --engine", got="both", hint=hint)
        if expert_memory is not None:
            hint = "vLLM's plug-in takes POLYMOE_EXPERT_MEMORY=16GiB, and SGLang has --enable-paged-experts"
            raise ArgumentError("expert_memory", expected="no --engine", got="both", hint=hint)
        from polymoe.cli.explain_engine import explain_engine

        explain_engine(checkpoint, **vars(engine), **asked, json=output.json)
        return
    if engine.enable_expert_parallel:
        hint = "without an engine, use --ep"
        raise ArgumentError("enable_expert_parallel", expected="--engine as well", got="none", hint=hint)
    postpone_torch()
    from polymoe.explanation import explain

    explanation = explain(checkpoint, **asked)
    found = None
    if expert_memory is not None:
        from polymoe.explanation.offload import offload_of

        if explanation.device.kind != "cuda":
            hint = "name one with --device, such as rtx4090; on a CPU all experts are in host memory anyway"
            raise ArgumentError("expert_memory", expected="a GPU", got=str(explanation.device), hint=hint)
        found = offload_of(explanation, expert_memory)
    if output.json:
        print_json(explanation.to_dict() | ({"offload": found.to_dict()} if found else {}))
    else:
        _print(explanation, found)


def _print(explanation: Explanation, offload: Offload | None) -> None:
    from rich.text import Text

    out = console()
    rest = f": {explanation.model_type}, on {explanation.where}"
    out.print(Text.assemble((printable(explanation.name), "bold"), rest))
    for line in explanation.conclusion():
        out.print(line)
    if offload is not None:
        out.print(offload.line())
        _print_hits(offload)
    elif explanation.fit.fits is False and explanation.fit.ranks.gpus == 1 and not explanation.device.unified_memory:
        out.print("--expert-memory auto keeps experts in host memory: slots and tokens/s on this GPU")
    for row in explanation.rows:
        sizes = f"{row.memory()}, {format_bytes(row.dequantized_bytes)} in 16 bits"
        out.print(f"layers {format_ranges(row.layers)}: {row.problem}: {sizes}")
    if explanation.times:
        _print_times(explanation)
    for row in explanation.rows:
        if row.selection.plan:
            _print_ranges(row)
        _print_candidates(row)
    for note in explanation.notes:
        out.print(f"note: {note}")


def _print_hits(offload: Offload) -> None:
    from polymoe.explanation.offload import HIT_RATES

    columns = ("experts of a token in slots", *(link for link, _ in offload.links))
    rows = [
        (f"{hits:.0%}", *(f"{offload.tokens_per_second(hits, rate):.1f}" for _, rate in offload.links))
        for hits in HIT_RATES
    ]
    print_table(columns, rows, "predicted tokens/s of one sequence, by the link to host memory")


def _print_times(explanation: Explanation) -> None:
    layers = sum(len(row.layers) for row in explanation.rows)
    known = explanation.dense is not None
    title = "predicted time of a call" + (": experts, and a lower bound of the rest" if known else "")
    rows = []
    for time in explanation.times:
        rest: tuple[str | None, ...] = ("prefill: not predicted" if known else None,) * 3
        if time.rest_us is not None and time.total_us is not None and time.tokens_per_second is not None:
            rest = format_us(time.rest_us), format_us(time.total_us), format_count(round(time.tokens_per_second))
        rows.append((time.tokens, format_us(time.experts_us), *rest))
    columns = ("tokens", f"experts of {layers} layers", "all other weights", "total, at least", "tokens/s, at most")
    print_table(columns, rows, title)


def _print_ranges(row: Row) -> None:
    from polymoe.backends.base import inputs_of

    title = f"layers {format_ranges(row.layers)}: plan, with layout {row.selection.require().layout}"
    ranges = row.selection.ranges()
    one_kind = "of one kind" if any(found.step.config.kernel_family for found in ranges) else None
    rows = []
    for found in ranges:
        config = found.step.config
        inputs = inputs_of(row.problem, config)
        kept = row.problem.activations.quantized and not inputs.quantized
        fast = ", fast accumulation" if inputs.fast_accumulation else ""
        backend = found.step.backend + (", 16-bit inputs" if kept else fast)
        proven = found.proven or None  # a CPU's all passed the tests
        times = found.time, found.floor, found.source
        rows.append((found.tokens, backend, config.kernel_family or one_kind, *times, proven))
    columns = ("tokens", "backend", "kernels", "time of one layer", "floor", "time is", "kernels were")
    print_table(columns, rows, title)


def _print_candidates(row: Row) -> None:
    from polymoe.planning.selection import describe
    from polymoe.problem.verdict import Accepted

    selection = row.selection
    what = "verdicts of all backends" if selection.plan else f"nothing runs here with backend {selection.requested}"
    device, rows = selection.machine.device, []
    for c in selection.candidates:
        verdict = c.verdict
        said = describe(verdict) if isinstance(verdict, Accepted) else "\n".join(map(str, verdict.reasons))
        ratios = [p.time_us / selection.floor_us(tokens) for tokens, p in c.predictions]
        proven = (c.proven(device) or "refused") if device.kind == "cuda" else None
        rows.append((c.backend, said, f"{fmean(ratios):.2f}" if ratios else "refused", proven))
    columns = ("backend", "verdict", "time / floor", "kernels were")
    print_table(columns, rows, f"layers {format_ranges(row.layers)}: {what}")
