"""``polymoe bench decode``: a whole model in Transformers, packed, dequantized, and as Transformers packs it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polymoe.cli.output import (
    Backend,
    Checkpoint,
    Json,
    OnDevice,
    Role,
    console,
    listed,
    measured_on,
    print_json,
    print_table,
    token_counts,
)
from polymoe.cli.progress import Progress
from polymoe.common.units import format_bytes
from polymoe.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from polymoe.bench.model_records import Failed, ModelRecord

__all__ = ["command"]

_EXPERTS = ("packed", "dequantized", "transformers-packed")


def command(
    checkpoint: Checkpoint,
    batch_size: Annotated[str, typer.Option(help="Sequences decoded together, separated by commas.")] = "1,16",
    prompt_len: Annotated[
        int | None,
        typer.Option(min=1, help="Number of tokens before the first timed step. Default: 512, or what fits."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps in one measurement.")] = 64,
    prefill_len: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens of the timed prefill; 0 for none. Default: 8192, or the whole context."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements of steps and of the prefill.")] = 5,
    experts: Annotated[str, typer.Option(help="What to measure, separated by commas.")] = ",".join(_EXPERTS),
    implementations: Annotated[
        str, typer.Option(help="Implementations of Transformers' own experts; the fastest counts.")
    ] = "grouped_mm,batched_mm",
    attention: Annotated[str | None, typer.Option(help="Attention implementation. Default: Transformers' own.")] = None,
    prefill_attention: Annotated[
        str | None,
        typer.Option(help="Attention of the timed prefill, such as flex_attention. Default: as --attention."),
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option("--graphs/--no-graphs", help="Replay compiled steps from a CUDA graph. Default: on a GPU."),
    ] = None,
    backend: Backend = "auto",
    role: Role = "mixed",
    device: OnDevice = "auto",
    out: Annotated[Path | None, typer.Option(help="Append each record to this file as one JSON line.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit for the records, if git does not know it.")] = None,
    json: Json = False,
) -> None:
    """Compare and time decode steps and a prefill of a model in Transformers: packed by polymoe, dequantized, and
    packed by Transformers itself.

    Logits are compared first; a model whose logits differ is not timed, and the exit code is 1. If Transformers
    cannot load the checkpoint packed, the reason is printed. Its kernels are never downloaded.
    """
    batches = token_counts(batch_size, "--batch-size")
    wanted = listed(experts, "--experts")
    if unknown := [name for name in wanted if name not in _EXPERTS]:
        hint = nearest(unknown[0], _EXPERTS)
        raise ArgumentError("--experts", expected=", ".join(_EXPERTS), got=repr(unknown[0]), hint=hint)
    kinds = listed(implementations, "--implementations")

    from transformers import AttentionInterface

    from polymoe.bench.decode import Contender, ModelBench
    from polymoe.bench.model_records import ModelRecord
    from polymoe.bench.records import Stamp, append, check_writable
    from polymoe.engines.transformers import load
    from polymoe.engines.transformers.dequantized import load_dequantized
    from polymoe.engines.transformers.transformers_packed import load_transformers_packed, local_kernels

    for option, name in (("--attention", attention), ("--prefill-attention", prefill_attention)):
        if name is not None and name not in (known := ("eager", *AttentionInterface().valid_keys())):
            raise ArgumentError(option, got=repr(name), hint=nearest(name, known))
    machine, where = measured_on(device)
    if graphs and where.type != "cuda":
        raise ArgumentError("--graphs", expected="a GPU", got=str(where), hint="leave --graphs out")
    if out is not None:
        check_writable(out)
    prompt_len, prefill_len = _lengths(checkpoint, prompt_len, steps, prefill_len)
    bench = ModelBench(
        checkpoint=Path(checkpoint).name,
        prompt_len=prompt_len,
        steps=steps,
        prefill_len=prefill_len,
        prefill_attention=prefill_attention,
        repeats=repeats,
        graphs=where.type == "cuda" if graphs is None else graphs,
        device=machine.device,
        stamp=Stamp.now(machine, shlex.join(["polymoe", *sys.argv[1:]]), commit),
    )
    also: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    loads = {
        "packed": Contender(
            "packed", (), lambda: load(checkpoint, device=where, backend=backend, role=role, **also)[0]
        ),
        "dequantized": Contender(
            "dequantized",
            tuple(kinds),
            lambda: load_dequantized(checkpoint, device=where, **also),
        ),
        "transformers-packed": Contender(
            "transformers-packed",
            tuple(kinds),
            lambda: load_transformers_packed(checkpoint, device=where, **also),
            foreign=True,
            within=local_kernels,
        ),
    }
    names = sorted(dict.fromkeys(wanted), key=lambda name: name != "packed")  # with what the others are compared
    rows: list[ModelRecord | Failed] = []
    try:
        with Progress("bench decode") as progress:
            for row in bench.rows([loads[name] for name in names], batches, progress.update):
                rows.append(row)
                if out is not None and isinstance(row, ModelRecord):
                    append(out, row)
    finally:  # after an interruption too, print finished rows
        measured = [row for row in rows if isinstance(row, ModelRecord)]
        failed = [row for row in rows if not isinstance(row, ModelRecord)]
        ratios = {other: _ratios(measured, other) for other in _EXPERTS[1:]}
        if json and rows:
            named = {f"packed_to_{other.replace('-', '_')}": pairs for other, pairs in ratios.items()}
            print_json(
                {
                    "records": [r.to_dict() for r in measured],
                    "not_measured": [f.to_dict() for f in failed],
                    **{
                        name: [{"what": what, "ratio": ratio} for what, ratio in pairs] for name, pairs in named.items()
                    },
                }
            )
        elif measured:
            print_table(_table(measured, failed, f"{bench.checkpoint}, {machine.device}"))
            for what, ratio in [pair for pairs in ratios.values() for pair in pairs]:
                console().print(f"{what}: {ratio:.2f} x", highlight=False)
        for row in failed:
            print(row, file=sys.stderr)
    if machine.device.rates == "nominal":
        print("floor and share use nominal rates of this device, not measured ones", file=sys.stderr)


def _lengths(checkpoint: str, prompt_len: int | None, steps: int, prefill_len: int | None) -> tuple[int, int]:
    """Tokens of the prompt and of the prefill: those that are given, else as many as the model's context has room for.

    Raises:
        ArgumentError: if they do not fit into it; before minutes of loading.
    """
    from polymoe.bench.decode import COMPARED
    from polymoe.checkpoint import Checkpoint as Opened
    from polymoe.checkpoint.kv_cache import kv_cache

    with Opened.open(checkpoint) as opened:
        kv = kv_cache(opened.config)
    context = kv.max_tokens if kv is not None and kv.max_tokens is not None else 1 << 40
    room, expected = context - max(steps, COMPARED), f"at most {context}, the model's context"
    prompt_len = min(512, max(room, 1)) if prompt_len is None else prompt_len
    prefill_len = min(8192, context) if prefill_len is None else prefill_len
    if prompt_len > room:
        got = f"{prompt_len} and {max(steps, COMPARED)} steps"
        raise ArgumentError("--prompt-len", expected=expected, got=got, hint="choose fewer --steps or a shorter prompt")
    if prefill_len > context:
        raise ArgumentError("--prefill-len", expected=expected, got=str(prefill_len))
    return prompt_len, prefill_len


def _table(rows: list[ModelRecord], failed: list[Failed], title: str) -> Table:
    from rich.table import Table

    table = Table(
        "experts", "run by", "weights", "phase", "batch", "after", "median", "tokens/s", "floor", "share",
        "experts read", "logits", title=title,
    )  # fmt: skip
    for r in sorted(rows, key=lambda row: (row.phase, row.batch, row.experts != "packed", row.median_us)):
        floor = (
            ("", "", "") if r.floor_us is None else (f"{r.floor_us:.0f} us", f"{r.share:.2f}", f"{r.experts_read:.1f}")
        )
        table.add_row(
            r.experts, r.implementation + (", graph" if r.graphs else ""), format_bytes(r.weight_bytes),
            r.phase, str(r.batch), str(r.tokens), f"{r.median_us:.0f} us", f"{r.tokens_per_second:.1f}", *floor,
            "" if r.difference is None else f"{r.difference:.1e}",
        )  # fmt: skip
    for f in failed:  # the reasons follow below the table
        batch = "" if f.batch is None else str(f.batch)
        table.add_row(f.experts, f.implementation, "", f.phase, batch, "", "not measured", *[""] * 5)
    return table


def _ratios(rows: list[ModelRecord], other: str) -> list[tuple[str, float]]:
    """Ratios of packed to other experts: weights, and speeds against the fastest implementation."""
    packed = [r for r in rows if r.experts == "packed"]
    others = [r for r in rows if r.experts == other]
    if not packed or not others:
        return []
    found = [(f"weights, packed over {other}", packed[0].weight_bytes / others[0].weight_bytes)]
    for r in packed:
        same = [o.tokens_per_second for o in others if (o.phase, o.batch, o.tokens) == (r.phase, r.batch, r.tokens)]
        if same:
            what = f"{r.phase} at batch {r.batch}" if r.phase == "decode" else f"prefill of {r.tokens} tokens"
            found.append((f"{what}, tokens/s, packed over the fastest {other}", r.tokens_per_second / max(same)))
    return found
