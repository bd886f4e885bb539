"""Agreement: the ranks of one group run the same experts in the same way, or each of them refuses.

Each rank plans for itself. A GPU of another model, a table of measured times that only one machine has, another version
or a variable set on one host would give ranks different plans: partial sums of differently quantized activations, a
rank that waits for one whose backend cannot be captured, results that no single process repeats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from polymoe.common.json_input import parse_json
from polymoe.common.units import format_tokens
from polymoe.errors import PlanError, UnsupportedProblem
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.problem.scale_range import ScaleRange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Gather = Callable[[bytes], Sequence[bytes]]
"""Takes the bytes of this rank, and returns those of all ranks in their order. Ranks may have different lengths."""

_WAIT = timedelta(minutes=10)
_EVERYWHERE = ("polymoe", "runs", "question")


def require_agreement(
    selection: Selection | None,
    group: ProcessGroup | Gather,
    where: str = "experts",
    *,
    slots: int | None = None,
    scales: bool = False,
) -> None:
    """Compare this rank's selection with those of all other ranks of its group.

    Every rank of the group has to call it, in the same order of layers, also one that cannot run the experts: for a
    rank that does not call, the others wait ten minutes in a group of gloo, and in others as long as the group says.
    Ranks whose parts of the experts differ in size may have different layouts and configurations, since these depend
    on it.

    Args:
        selection: this rank's, with a plan or without; None if this rank does not run these experts with polymoe.
        group: a process group of torch.distributed, or a function that gathers bytes.
        where: the layer's name for the message.
        slots: of experts in host memory; None for experts on the GPU.
        scales: whether the scales must be in the same range, as where ranks give each other experts.

    Raises:
        PlanError: on every rank, unless all agree.
    """
    if not callable(group):
        _meet(group, where)
    gather = group if callable(group) else _gather_of(group)
    mine = json.dumps(_statement(selection, slots, scales)).encode()
    stated: list[Mapping[str, str]] = [parse_json(content) for content in gather(mine)]
    for name in _EVERYWHERE:
        _compare(where, {rank: s[name] for rank, s in enumerate(stated)})
    for sizes in dict.fromkeys(s["sizes"] for s in stated):
        _compare(where, {rank: s["plan"] for rank, s in enumerate(stated) if s["sizes"] == sizes})


def _statement(selection: Selection | None, slots: int | None, scales: bool) -> dict[str, str]:
    """What is compared: facts that are the same on every rank, and those that depend on the size of its part."""
    from polymoe import __version__

    stated = {"polymoe": f"polymoe {__version__}", "question": "", "sizes": "", "plan": ""}
    if selection is None or selection.plan is None:
        return {**stated, "runs": "polymoe does not run them" + _why_not(selection)}
    s, plan = selection.problem.spec, selection.plan
    steps = [f"{format_tokens(tokens)}: {step.backend} ({step.config})" for tokens, step in plan.ranges()]
    asked = f"role {selection.role}, backend {selection.requested}"
    if scales:
        asked += f", {selection.problem.scales or ScaleRange()}"
    return {
        **stated,
        "runs": "polymoe runs them" + ("" if slots is None else f" in {slots} slots"),
        "question": f"{_question(selection.problem)}, {asked}",
        "sizes": f"F={s.intermediate}, {s.local_experts} experts",
        "plan": f"layout {plan.layout}, {', '.join(steps)}",
    }


def _why_not(selection: Selection | None) -> str:
    try:
        if selection is not None:
            selection.require()
    except UnsupportedProblem as error:
        return f", {error.got}"
    return ""


def _question(problem: Problem) -> str:
    """Return what a problem has in common on all ranks: neither the size of its part nor the scales in it."""
    s = problem.spec
    encodings = ", ".join(f"{name} {encoding}" for name, encoding in s.encodings.items())
    parts = [f"H={s.hidden} E={s.experts} A={problem.top_k}", encodings, problem.activation.name]
    parts += ["bias"] * s.bias + ["weight on input"] * (problem.weight_on == "input")
    parts += [f"x {problem.dtype}, {problem.activations} activations", f"tp={problem.tp} ep={problem.ep}"]
    return ", ".join(parts + ["batch invariant"] * problem.batch_invariant)


def _compare(where: str, values: Mapping[int, str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        found = [f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {value}" for value, of in ranks.items()]
        raise PlanError(
            where,
            expected="the same plan on all ranks of the group",
            got="\n  ".join(["different ones:", *found]),
            hint="the same GPUs, versions, variables and tables of measured times everywhere, or one named backend",
        )


def _meet(group: ProcessGroup, where: str) -> None:
    """Wait for the other ranks, where the group can say who is missing."""
    import torch.distributed as dist

    if dist.get_backend(group) != "gloo":
        return
    try:
        dist.monitored_barrier(group, timeout=_WAIT, wait_all_ranks=True)
    except RuntimeError as error:
        raise PlanError(
            where,
            expected=f"all ranks of the group to plan it within {_WAIT.total_seconds():.0f} s",
            got=str(error).strip().splitlines()[0],
            hint="polymoe on all ranks or on none: the same packages and variables on every host",
        ) from error


def _gather_of(group: ProcessGroup) -> Gather:
    import torch
    import torch.distributed as dist

    backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl", or of one kind of device alone
    device: Any = "cpu" if "cpu:" in backends else backends.partition(":")[0]
    ranks = dist.get_world_size(group)

    def gather(mine: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
        dist.all_gather(lengths, torch.tensor([len(mine)], device=device), group=group)
        sizes = [int(length) for length in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        contents = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(contents, padded, group=group)
        return [bytes(c[:size].cpu().numpy()) for c, size in zip(contents, sizes, strict=True)]

    return gather
