"""``polymoe bench decode``: a whole model in Transformers, packed, dequantized, and as Transformers packs it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymoe.checkpoint.hub import require_name
from polymoe.cli.options import CheckpointName, Computing, Options, RecordOutput, listed, option, token_counts
from polymoe.cli.output import command_line, console, measured_on, print_json, print_table, say
from polymoe.cli.progress import Progress
from polymoe.common.units import format_bytes
from polymoe.errors import ArgumentError, nearest

if TYPE_CHECKING:
    import torch

    from polymoe.bench.decode import Contender
    from polymoe.bench.model_records import Failed, ModelRecord

_MEASURED = ("packed", "dequantized", "transformers-packed")


def _contenders(text: str, option: str) -> tuple[str, ...]:
    """Names of what is measured; packed first, with which the others are compared."""
    wanted = listed(text, option)
    if unknown := [name for name in wanted if name not in _MEASURED]:
        hint = nearest(unknown[0], _MEASURED)
        raise ArgumentError(option, expected=", ".join(_MEASURED), got=repr(unknown[0]), hint=hint)
    return tuple(sorted(wanted, key=lambda name: name != "packed"))


class _Steps(Options, heading="What is measured"):
    batch_size: tuple[int, ...] = option("1,16", "Sequences decoded together, separated by commas.", parse=token_counts)
    prompt_len: int | None = option(
        None, "Number of tokens before the first timed step. Default: 512, or what fits.", min=1
    )
    steps: int = option(64, "Number of steps in one measurement.", min=1)
    prefill_len: int | None = option(
        None, "Tokens of the timed prefill; 0 for none. Default: 8192, or the whole context.", min=0
    )
    repeats: int = option(5, "Number of measurements of steps and of the prefill.", min=1)
    measure: tuple[str, ...] = option(",".join(_MEASURED), "What to measure, separated by commas.", parse=_contenders)


class _Computing(Computing):
    expert_memory: str | None = option(
        None, "GPU memory for polymoe's experts: auto, 16GiB, or 32slots in each layer. Default: all lie on the GPU."
    )
    implementations: tuple[str, ...] = option(
        "grouped_mm,batched_mm", "Implementations of Transformers' own experts; the fastest counts.", parse=listed
    )
    attention: str | None = option(None, "Attention implementation. Default: Transformers' own.")
    prefill_attention: str | None = option(
        None, "Attention of the timed prefill, such as flex_attention. Default: as --attention."
    )
    graphs: bool | None = option(None, "Replay compiled steps from a CUDA graph. Default: on a GPU.")


def command(checkpoint: CheckpointName, steps: _Steps, computing: _Computing, output: RecordOutput) -> None:
    """Compare and time decode steps and a prefill of a model in Transformers: packed by polymoe, dequantized, and
    packed by Transformers itself.

    Logits are compared first; a model whose logits differ is not timed, and the exit code is 1. If Transformers
    cannot load the checkpoint packed, the reason is printed. Its kernels are never downloaded.
    """
    require_name(checkpoint)
    from polymoe.bench.decode import ModelBench
    from polymoe.bench.model_records import ModelRecord
    from polymoe.bench.records import Stamp

    _check_names(computing)
    machine, where = measured_on(computing.device)
    if computing.graphs and where.type != "cuda":
        raise ArgumentError("--graphs", expected="a GPU", got=str(where), hint="leave --graphs out")
    append = output.appender()
    prompt_len, prefill_len = _lengths(checkpoint, steps)
    bench = ModelBench(
        checkpoint="-".join(filter(None, (Path(checkpoint).name, computing.experts))),
        prompt_len=prompt_len,
        steps=steps.steps,
        prefill_len=prefill_len,
        prefill_attention=computing.prefill_attention,
        repeats=steps.repeats,
        graphs=where.type == "cuda" if computing.graphs is None else computing.graphs,
        device=machine.device,
        stamp=Stamp.now(machine, command_line(), output.commit),
    )
    loads = _loads(checkpoint, computing, where)
    rows: list[ModelRecord | Failed] = []
    try:
        with Progress("bench decode") as progress:
            for row in bench.rows([loads[name] for name in steps.measure], steps.batch_size, progress.update):
                rows.append(row)
                if isinstance(row, ModelRecord):
                    append(row)
    finally:  # after an interruption too, print finished rows
        _print(rows, f"{bench.checkpoint}, {machine.device}", json=output.json)
    if machine.device.rates == "nominal":
        say("floor and share use nominal rates of this device, not measured ones")


def _check_names(computing: _Computing) -> None:
    """Refuse implementations that Transformers does not have, before anything is loaded."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface

    attention = ("eager", *AttentionInterface().valid_keys())
    experts = ("eager", *ExpertsInterface().valid_keys())
    for given, name, known in (
        ("--attention", computing.attention, attention),
        ("--prefill-attention", computing.prefill_attention, attention),
        *(("--implementations", name, experts) for name in computing.implementations),
    ):
        if name is not None and name not in known:
            raise ArgumentError(given, got=repr(name), hint=nearest(name, known))


def _loads(checkpoint: str, computing: _Computing, where: torch.device) -> dict[str, Contender]:
    """Return what is measured, by name."""
    from polymoe.bench.decode import Contender
    from polymoe.engines.transformers import load
    from polymoe.engines.transformers.without_polymoe import load_dequantized, load_transformers_packed, local_kernels

    also: dict[str, Any] = {"device": where, "experts": computing.experts}
    if computing.attention is not None:
        also["attn_implementation"] = computing.attention
    memory, kinds = computing.expert_memory, computing.implementations
    planned = {"backend": computing.backend, "role": computing.role, "expert_memory": memory}
    return {
        "packed": Contender("packed", (), lambda: load(checkpoint, **planned, **also)[0], expert_memory=memory),
        "dequantized": Contender("dequantized", kinds, lambda: load_dequantized(checkpoint, **also)),
        "transformers-packed": Contender(
            "transformers-packed", kinds, lambda: load_transformers_packed(checkpoint, **also), foreign=True,
            within=local_kernels,
        ),
    }  # fmt: skip


def _print(rows: list[ModelRecord | Failed], title: str, *, json: bool) -> None:
    from polymoe.bench.model_records import ModelRecord

    measured = [row for row in rows if isinstance(row, ModelRecord)]
    failed = [row for row in rows if not isinstance(row, ModelRecord)]
    ratios = {other: _ratios(measured, other) for other in _MEASURED[1:]}
    if json and rows:
        print_json(
            {
                "records": [asdict(r) for r in measured],
                "not_measured": [asdict(f) for f in failed],
                **{
                    f"packed_to_{other.replace('-', '_')}": [{"what": what, "ratio": ratio} for what, ratio in pairs]
                    for other, pairs in ratios.items()
                },
            }
        )
    elif measured:
        _print_table(measured, failed, title)
        for what, ratio in [pair for pairs in ratios.values() for pair in pairs]:
            console().print(f"{what}: {ratio:.2f} x")
        for r in measured:
            if r.misses is not None and r.hits is not None and r.copied_bytes is not None:
                counted = f"{r.hits:.2f} hits, {r.misses:.2f} misses, {format_bytes(round(r.copied_bytes))} copied"
                console().print(f"{r.phase} at batch {r.batch}, each step in each layer: {counted}")
    for row in failed:
        say(str(row))


def _lengths(checkpoint: str, steps: _Steps) -> tuple[int, int]:
    """Tokens of the prompt and of the prefill: those that are given, else as many as the model's context has room for.
    What does not fit into it is refused before minutes of loading."""
    from polymoe.bench.decode import COMPARED
    from polymoe.checkpoint import Checkpoint
    from polymoe.checkpoint.kv_cache import kv_cache

    with Checkpoint.open(checkpoint) as opened:
        kv = kv_cache(opened.config)
    context = kv.max_tokens if kv is not None and kv.max_tokens is not None else 1 << 40
    expected, count = f"at most {context}, the model's context", max(steps.steps, COMPARED)
    prompt_len = min(512, max(context - count, 1)) if steps.prompt_len is None else steps.prompt_len
    prefill_len = min(8192, context) if steps.prefill_len is None else steps.prefill_len
    if prompt_len > context - count:
        got = f"{prompt_len} and {count} steps"
        raise ArgumentError("--prompt-len", expected=expected, got=got, hint="choose fewer --steps or a shorter prompt")
    if prefill_len > context:
        raise ArgumentError("--prefill-len", expected=expected, got=str(prefill_len))
    return prompt_len, prefill_len


def _print_table(rows: list[ModelRecord], failed: list[Failed], title: str) -> None:
    columns = (
        "experts", "run by", "weights", "phase", "batch", "after", "median", "tokens/s", "floor", "share",
        "experts read", "logits",
    )  # fmt: skip
    lines = [
        (
            _shown(r), r.implementation + (", graph" if r.graphs else ""), format_bytes(r.weight_bytes), r.phase,
            r.batch, r.tokens, f"{r.median_us:.0f} us", f"{r.tokens_per_second:.1f}",
            *((f"{r.floor_us:.0f} us", f"{r.share:.2f}", f"{r.experts_read:.1f}") if r.floor_us else (None,) * 3),
            None if r.difference is None else f"{r.difference:.1e}",
        )
        for r in sorted(rows, key=lambda row: (row.phase, row.batch, row.experts != "packed", row.median_us))
    ]  # fmt: skip
    # The reasons follow below the table.
    missing = [(_shown(f), f.implementation, "", f.phase, f.batch, "", "not measured", *[""] * 5) for f in failed]
    print_table(columns, [*lines, *missing], title)


def _shown(row: ModelRecord | Failed) -> str:
    # On a CPU polymoe's experts are dequantized too.
    return "polymoe" if row.experts == "packed" else row.experts


def _ratios(rows: list[ModelRecord], other: str) -> list[tuple[str, float]]:
    """Ratios of packed to other experts: weights, and speeds against the fastest implementation."""
    packed = [r for r in rows if r.experts == "packed"]
    others = [r for r in rows if r.experts == other]
    if not packed or not others:
        return []
    found = [(f"weights, polymoe over {other}", packed[0].weight_bytes / others[0].weight_bytes)]
    for r in packed:
        same = [o.tokens_per_second for o in others if (o.phase, o.batch, o.tokens) == (r.phase, r.batch, r.tokens)]
        if same:
            what = f"{r.phase} at batch {r.batch}" if r.phase == "decode" else f"prefill of {r.tokens} tokens"
            found.append((f"{what}, tokens/s, polymoe over the fastest {other}", r.tokens_per_second / max(same)))
    return found
