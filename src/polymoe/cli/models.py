"""``polymoe models``: which well-known models fit a GPU, and how fast they can be on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polymoe.cli.options import Options, Output, gpus, option
from polymoe.cli.output import console, print_json, print_table
from polymoe.common.lazy_torch import postpone_torch
from polymoe.common.units import format_bytes, format_count

if TYPE_CHECKING:
    from polymoe.explanation.models import ModelOnGpu


class _Gpu(Options, heading="The GPU"):
    device: str | None = option(
        None, "Any GPU, not only yours: rtx4090, 'RTX 5090', sm_120. Default: this machine's.", complete=gpus
    )
    context: int = option(8192, "Tokens of context that must have room beside the weights.", min=1)


def command(gpu: _Gpu, output: Output) -> None:
    """Show which of the models whose sizes ship with polymoe fit a GPU, the largest first, with their room for context
    and the greatest number of tokens per second of one request. Nothing is downloaded.
    """
    postpone_torch()
    from polymoe.explanation.models import models

    found = models(gpu.device, gpu.context)
    device = found[0].explanation.device
    if output.json:
        rows = [one.to_dict() for one in found]
        print_json({"device": str(device), "context": gpu.context, "models": rows})
        return
    fitting = sum(one.fits for one in found)
    title = f"{fitting} of {len(found)} models fit on one {device.name} with {gpu.context:,} tokens of context"
    columns = ("model", "experts", "weights", "room for tokens", "tokens/s (limit)", "backend")
    print_table((*columns, "kernels were"), [_cells(one) for one in found], title)
    console().print(
        "tokens/s of one request at most: predicted or measured time of the experts, and the least time for all other "
        "weights; in brackets what the GPU's bandwidth allows"
    )


def _cells(one: ModelOnGpu) -> tuple[Any, ...]:
    from polymoe.planning.proof import said

    tokens = one.explanation.cache_tokens
    if one.fits:
        room = "not known" if tokens is None else format_count(tokens)
    elif one.explanation.fits:
        room = f"only {format_count(tokens or 0)}"
    else:
        room = f"needs {one.gpus} GPUs" if one.gpus else "needs over 64 GPUs"
    speed = f"{_speed(one.tokens_per_second)} ({_speed(one.floor_tokens_per_second)})" if one.fits else "does not fit"
    backend = " and ".join(one.backends) or "none"
    proven = said(one.proof) if one.backends else "no backend runs it"
    return one.name, one.format, format_bytes(one.explanation.weight_bytes), room, speed, backend, proven


def _speed(per_second: float | None) -> str:
    return "not known" if per_second is None else format_count(round(per_second))
