"""Every CUDA kernel, small, for compute-sanitizer: prints which ran, and relative errors against the reference.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/support/sanitized_cuda.py
    compute-sanitizer --tool racecheck python tests/support/sanitized_cuda.py

``--share I/N`` runs one of N shares, for as many processes at once. ``--sms N`` runs on so many SMs that a CTA computes
several tiles and its pipeline wraps; racecheck then reports hazards that are none (docs/performance/cuda.md). ``--only
TEXT`` takes cubins whose name contains the text; ``--only slots`` runs those of experts in host memory, whose launches
are made one by one, or with ``--graphs`` in CUDA graphs, which have a loop of waves. Graphs need torch's caching
allocator, with which memcheck sees less, and racecheck crashes in the loop (benchmarks/results/sanitizer-h100.txt).

GPU kernels of torch are not used beside, since checking them takes most of the time. Kernels that are configured for
other GPUs run too, where ``scripts/build-kernels --tests`` compiled them. Without torch's caching allocator each tensor
has bounds of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.families import activations_of, layout_on
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, KernelFamily
from polymoe.kernels.cuda.targets import SM90, Target
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.slots import run_in_waves
from polymoe.layouts import LAYOUTS
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.activations import SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from support.cuda_calls import gpu
from support.cuda_targets import TEST_TARGETS
from support.problems import problem_of, random_call, random_experts, with_input_scales

OTHERS = ("sm90-as-sm100",)
"""Test targets, of each set of cubins the one with most shared memory: it alone has room for all kernels."""


class Unit(NamedTuple):
    """A cubin of GEMM kernels."""

    target: Target
    family: KernelFamily
    format: str

    def __str__(self) -> str:
        return f"{self.target.name}, {self.family.unit(self.format)}"

    @property
    def kernels(self) -> int:
        """How many kernels it has."""
        family = self.family
        return sum(len(family.variants(part)) for part in family.parts) * len(family.tiles)


def units() -> list[Unit]:
    """All of them, those with most kernels first."""
    built = [TEST_TARGETS[name] for name in OTHERS if TEST_TARGETS[name].folder.is_dir()]
    found = [
        Unit(target, family, format)
        for target in (SM90, *built)
        for family in (KERNEL_FAMILIES[name] for name in target.families)
        for format in family.formats
    ]
    return sorted(found, key=lambda unit: -unit.kernels)


def share(all_units: list[Unit], index: int, shares: int) -> list[Unit]:
    """The units of one process, of which all have about as many kernels."""
    taken: list[list[Unit]] = [[] for _ in range(shares)]
    for unit in all_units:
        min(taken, key=lambda some: sum(u.kernels for u in some)).append(unit)
    return taken[index]


def layers(family: KernelFamily) -> Iterator[tuple[ActivationQuantization, bool, int, int, int]]:
    """Mode, whether there is a gate, H, F and ``top_k`` of layers that run all of a family's kernels.

    Of families that name several kernels for down, F is for each of them. Few tiles divide these sizes. H fits in the
    stages of the pipelines whose stages are read by ordinary loads.
    """
    several = len(family.variants("down")) > 1
    hidden, sizes = 592 if family.sorts_few_rows else 304, (208, 400, 592) if several else (208,)
    if family.activations != ("16bit",):
        hidden, sizes = 640, (384,)
    for i, mode in enumerate(activations_of(family)):
        gates = (True, False) if "up" in family.parts and i == 0 else (True,)
        for gated in gates:
            for intermediate in sizes if gated else sizes[:1]:
                yield mode, gated, hidden, intermediate, 2
        if "gate_up_tiles" in family.parts:
            yield mode, True, hidden, sizes[0], 1


def configs(family: KernelFamily) -> Iterator[CudaConfig]:
    """Each of the family's tiles, and narrow ones beside."""
    for m in family.tiles:
        yield from (CudaConfig(family.name, m, n) for n in family.block_ns or (0,))
    yield from (CudaConfig(family.name, m, narrow_m=narrow) for m, narrow in family.narrow)


def skewed_call(tokens: int, hidden: int, top_k: int) -> tuple[Tensor, Routing]:
    """Experts with about three quarters of the rows, a quarter, a tenth, one, and none; ids that are no expert's."""
    x, routing = random_call(tokens, hidden, 5, top_k, torch.bfloat16)
    ids = torch.full_like(routing.topk_ids_TA, -1)
    ids[:, 0] = 1
    ids[tokens * 3 // 4 + 1 :, 0] = 2
    if top_k > 1:
        ids[: tokens // 10, 1] = 3
        ids[-1, 1] = 4
    return x, Routing(ids, routing.topk_weights_TA)


def run(unit: Unit, ran: set[str]) -> float:
    """Run all kernels of a unit and print what ran; the worst error, as a share of what its activations allow."""
    worst = 0.0
    for mode, gated, hidden, intermediate, top_k in layers(unit.family):
        weights = random_experts(unit.format, hidden=hidden, intermediate=intermediate, gated=gated, bias=True)
        if mode.static:
            weights = with_input_scales(weights)
        problem = problem_of(weights, activations=mode, top_k=top_k)
        packed = LAYOUTS[layout_on(unit.family, unit.target, problem.spec)].pack(weights, torch.device("cpu"))
        packed = replace(packed, tensors={name: tensor.cuda() for name, tensor in packed.tensors.items()})
        runner = CudaRunner(problem, packed, unit.target)
        few = unit.family.sorts_few_rows  # by kernels that are for few rows
        for tokens in ((5, 40) if intermediate == 208 else (40,)) if few else (300,):
            x, routing = skewed_call(tokens, hidden, top_k)
            expected = run_experts(problem, weights, x, routing)
            for config in configs(unit.family):
                before, out = len(ran), torch.empty_like(x, device="cuda")
                runner.run(CallArguments(x.cuda(), *Routing(*(part.cuda() for part in routing)), out), config)
                torch.cuda.synchronize()
                error = relative_error(out.cpu(), expected)
                layer = f"{unit}, {mode}, {'gated' if gated else 'no gate'}, H {hidden}, F {intermediate}"
                print(f"{layer}, {tokens} tokens, {config}: {error:.2g}, {len(ran) - before} kernels more", flush=True)
                worst = max(worst, error / mode.tolerance)
    return worst


def sorts() -> float:
    """A call with so many rows that several CTAs sort them; the error, as a share of what is allowed."""
    weights = random_experts("bf16", hidden=64, intermediate=64)
    problem = problem_of(weights)
    packed = LAYOUTS["w16_swizzle128"].pack(weights, torch.device("cpu"))
    packed = replace(packed, tensors={name: tensor.cuda() for name, tensor in packed.tensors.items()})
    x, routing = skewed_call(2100, 64, 2)
    out = torch.empty_like(x, device="cuda")
    call = CallArguments(x.cuda(), *Routing(*(part.cuda() for part in routing)), out)
    CudaRunner(problem, packed, SM90).run(call, CudaConfig("bf16", 160))
    return relative_error(out.cpu(), run_experts(problem, weights, x, routing)) / problem.activations.tolerance


def slots(graphs: bool) -> float:
    """Experts in host memory: calls that fit the slots, calls in waves and prompts, the first two in CUDA graphs if
    ``graphs``. The worst error, which is 0: results are bitwise a resident layer's."""
    weights = random_experts("mxfp4", experts=7, hidden=336, intermediate=208, bias=True)
    resident, *layers = (
        FusedExperts.from_weights(weights, SwiGLU(), top_k=2, device="cuda", backend="cuda") for _ in range(3)
    )
    for offloaded in [OffloadedExperts(layer, 3) for layer in layers] * 2:
        for tokens in (1, 20):
            x, routing = random_call(tokens, 336, 7, 2, torch.bfloat16)
            x, ids, routing_weights = (t.cuda() for t in (x, *routing))
            y = torch.empty_like(x)
            again = _repeatable(offloaded, CallArguments(x, ids, routing_weights, y), graphs)
            for turn in range(3):
                ids.copy_((ids + turn) % 8)
                ids[ids == 7] = -1
                again()
                expected = resident(x, ids, routing_weights)
                if not torch.equal(y, expected) or not torch.equal(offloaded(x, ids, routing_weights), expected):
                    return float("inf")
            print(f"slots, {tokens} tokens: {offloaded.cache_stats()}", flush=True)
    return 0.0


def _repeatable(offloaded: OffloadedExperts, arguments: CallArguments, graphs: bool) -> Callable[[], object]:
    """What replays a CUDA graph of a call, or makes the launches that such a graph has."""
    call, step = offloaded._rows.planned(arguments)
    if not graphs:
        return lambda: run_in_waves(offloaded._slots, step, offloaded.problem, call, offloaded.slots)
    x_TH, ids_TA, weights_TA = call.x_TH, call.topk_ids_TA, call.topk_weights_TA
    offloaded(x_TH, ids_TA, weights_TA)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offloaded(x_TH, ids_TA, weights_TA, out=call.out)
    return graph.replay


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", default="0/1", metavar="I/N")
    parser.add_argument("--sms", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--graphs", action="store_true")
    options = parser.parse_args()
    if torch.cuda.get_device_capability() != (9, 0):
        print("no SM90 GPU: nothing to run")
        return
    if options.sms:
        torch.cuda.get_device_properties = lambda device=None: gpu(options.sms)  # type: ignore[assignment]
    ran: set[str] = set()
    load: Any = modules.kernel

    def recorded(unit: str, name: str, target: Target) -> Any:
        ran.add(f"{target.folder.name} {unit} {name}")
        return load(unit, name, target)

    modules.kernel = recorded  # type: ignore[assignment]
    index, shares = map(int, options.share.split("/"))
    worst = max((run(unit, ran) for unit in share(units(), index, shares) if options.only in str(unit)), default=0.0)
    if index == shares - 1 and not options.only:
        worst = max(worst, sorts())
    if index == shares - 1 and options.only in ("", "slots") and not options.sms:
        worst = max(worst, slots(options.graphs))
    for kernel in sorted(ran):
        print(f"ran {kernel}")
    sys.exit(not worst <= 1)


if __name__ == "__main__":
    main()
