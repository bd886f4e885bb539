"""Experts in host memory: how many slots a GPU has room for, what host memory they need, and what the link allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polymoe.common.units import format_bytes, format_count
from polymoe.errors import ArgumentError
from polymoe.explanation.explanation import Explanation
from polymoe.explanation.fit import RESERVE, usable_bytes
from polymoe.machine import host_memory
from polymoe.machine.link import LINKS, links

AUTO_CONTEXT = 8192
"""Tokens of context for which "auto" leaves room."""
HIT_RATES = (0.0, 0.5, 0.8, 0.9, 0.95)
"""Shares of the experts of a token that are in slots. Which one a text has, only running it shows."""
LAYER_US = 80.0
"""Time that a layer of Transformers takes for one token beside its experts and reading its other weights: attention,
norms, router, the search for slots, some two dozen small kernels in a CUDA graph. Measured: 74 to 97 us
(decode-h200.jsonl and offload-decode-h100.jsonl in benchmarks/results)."""


@dataclass(frozen=True, slots=True)
class Offload:
    """A model whose experts lie in host memory.

    Attributes:
        slots: experts of each layer on the GPU.
        experts: of a layer.
        gpu_bytes: of all slots, and of the two buffers that layers share.
        other_bytes: of the model's other weights; None where sizes are not known.
        memory_bytes: of the GPU.
        host_bytes: of all experts, page-locked.
        host_free_bytes: of this machine's memory, or the container's; None where Linux does not say.
        token_bytes: of the experts of one token in all layers: what no hit at all copies.
        step_us: predicted time of a token whose experts are all in slots: experts, reading other weights, and
            :data:`LAYER_US` for each layer; None where it is not known.
        links: names and rates, bytes/s, of links to host memory.
    """

    slots: int
    experts: int
    gpu_bytes: int
    host_bytes: int
    token_bytes: int
    other_bytes: int | None
    memory_bytes: int
    step_us: float | None
    links: Sequence[tuple[str, float]] = LINKS
    host_free_bytes: int | None = None

    def tokens_per_second(self, hits: float, bytes_per_s: float) -> float:
        """Return the predicted tokens per second of one sequence at a share of hits: the step and the copies."""
        copies_us = 1e6 * (1 - hits) * self.token_bytes / bytes_per_s
        return 1e6 / ((self.step_us or 0.0) + copies_us)

    def line(self) -> str:
        """Slots and memory, as a sentence, and whether the GPU has room for them."""
        gpu, host = format_bytes(self.gpu_bytes), format_bytes(self.host_bytes)
        beside, fits, free = "", "", ""
        if self.other_bytes is not None:
            beside = f" beside {format_bytes(self.other_bytes)} of other weights"
            fits = "fits" if self.gpu_bytes + self.other_bytes <= usable_bytes(self.memory_bytes) else "does not fit"
            fits += " with experts in host memory: "
        if self.host_free_bytes is not None:
            free = f" (this machine has {format_bytes(self.host_free_bytes)} free)"
        return (
            f"{fits}{self.slots} of {self.experts} experts of each layer in slots, {gpu} on the GPU{beside}, {host} of "
            f"page-locked host memory{free}; a token whose experts are in none copies {format_bytes(self.token_bytes)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        names = ("slots", "gpu_bytes", "host_bytes", "host_free_bytes", "token_bytes")
        rates = [
            {"link": name, "hits": hits, "tokens_per_second": round(self.tokens_per_second(hits, rate), 1)}
            for name, rate in self.links
            for hits in HIT_RATES
        ]
        return {**{name: getattr(self, name) for name in names}, "tokens_per_second": rates}


def offload_of(explanation: Explanation, expert_memory: str, *, memory_bytes: int | None = None) -> Offload:
    """Return the slots of each layer for an ``expert_memory``, and what follows from them.

    Args:
        explanation: of the model on a GPU.
        expert_memory: as for :func:`polymoe.load`: "32slots", "16GiB", or "auto": all memory but the other weights,
            :data:`RESERVE` and :data:`AUTO_CONTEXT` tokens of context.
        memory_bytes: of the GPU that is free; by default all of it.

    Raises:
        ArgumentError: for another text, memory that is too small or that holds all experts, and "auto" on a CPU or
            where sizes are not known.
        UnsupportedProblem: for a GPU that shares the host's memory.
    """
    from polymoe.layer.offload import require_own_memory, require_slots, slots_in, slots_of  # imports torch

    require_own_memory(explanation.device)
    problems = [row.problem for row in explanation.rows for _ in row.layers]
    specs, top_k = [p.spec for p in problems], max(p.top_k for p in problems)
    if expert_memory == "auto":
        if explanation.device.kind != "cuda":
            hint = "name an amount, such as 32slots or 16GiB"
            raise ArgumentError("expert_memory", expected="a GPU for auto", got=str(explanation.device), hint=hint)
        if explanation.dense is None:
            hint = "name an amount, such as 16GiB"
            raise ArgumentError("expert_memory", expected="a model whose other weights have a known size", got="auto",
                                hint=hint)  # fmt: skip
        context = AUTO_CONTEXT * (explanation.kv.token_bytes(explanation.tp) if explanation.kv else 0)
        free = memory_bytes or explanation.device.memory_bytes
        dense = explanation.dense.total_bytes
        left_by = (
            f" for auto: {format_bytes(free)} less {RESERVE:.0%}, other weights ({format_bytes(dense)}) and "
            f"{format_count(AUTO_CONTEXT)} tokens of context ({format_bytes(context)})"
        )
        slots = slots_in(usable_bytes(free) - dense - context, specs, top_k, left_by)
    else:
        slots = slots_of(expert_memory, specs, top_k)
    for problem in problems:
        require_slots(problem, slots, "expert_memory")
    memory = host_memory()
    each = [spec.local_bytes // spec.local_experts for spec in specs]
    step_us = None
    if explanation.times and (alone := explanation.times[0]).tokens == 1:
        step_us = (alone.total_us or alone.experts_us) + len(problems) * LAYER_US
    return Offload(
        slots=slots,
        experts=max(spec.local_experts for spec in specs),
        gpu_bytes=slots * sum(each) + 2 * max(spec.local_bytes for spec in specs),
        host_bytes=sum(spec.local_bytes for spec in specs),
        host_free_bytes=memory and memory[0],
        token_bytes=sum(p.top_k * size for p, size in zip(problems, each, strict=True)),
        other_bytes=explanation.dense and explanation.dense.total_bytes,
        memory_bytes=explanation.device.memory_bytes,
        links=links(explanation.device.name),
        step_us=step_us,
    )
