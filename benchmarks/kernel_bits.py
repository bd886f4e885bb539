"""What every CUDA kernel computes, as hashes: proof that a change of sources or of launchers moves no bit.

    python benchmarks/kernel_bits.py --out FILE [--launches] [--only TEXT] [--repeats N]
    python benchmarks/kernel_bits.py --compare BEFORE AFTER

The record of an H100 is ``results/kernel-bits-h100.jsonl``: 2488 cells in less than 30 s.

Runs each configuration of each kernel family with seeded inputs, for several shapes and token counts, on an SM90 GPU,
and writes a line for each cell: the SHA-256 of the result. Every result is computed ``--repeats`` times into memory
that holds NaN, and all must agree. Other GPUs' kernels run too, if ``scripts/build-kernels --tests`` compiled them.

With ``--launches``, no GPU is needed: a line has the launches of a call instead, with their grids, shared memory and
arguments, in which addresses are offsets in named tensors. ``--compare`` prints the cells that differ or that one side
lacks; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.families import activations_of, layout_on
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.bench.records import source, utc_now
from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, KernelFamily
from polymoe.kernels.cuda.targets import SM90, Target
from polymoe.layouts import LAYOUTS
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.activations import Activation, GeGLU, ReLU2, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertWeights
from support.cuda_targets import TEST_TARGETS  # type: ignore
from support.problems import random_call, random_experts, with_input_scales  # type: ignore

EXPERTS = 12
TOKENS = (1, 5, 70, 700)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and options of a layer. K of the down projection chooses between kernels of w4a16_mma."""

    hidden: int
    intermediate: int
    top_k: int
    activation: Activation
    bias: bool = False
    weight_on: str = "output"

    def __str__(self) -> str:
        options = f"{' bias' * self.bias}{' weight on input' * (self.weight_on == 'input')}"
        return f"H {self.hidden} F {self.intermediate} top_k {self.top_k} {type(self.activation).__name__}{options}"


SHAPES = (
    Shape(512, 256, 2, SwiGLU(alpha=1.702, beta=1.0, limit=7.0), bias=True),
    Shape(1152, 512, 6, GeGLU(), weight_on="input"),
    Shape(384, 1536, 1, ReLU2(), bias=True),
    Shape(384, 1408, 3, SwiGLU()),
)


def configurations(family: KernelFamily) -> Iterator[CudaConfig]:
    """All configurations of a family, those that no heuristic chooses included."""
    for m in family.tiles:
        yield from (CudaConfig(family.name, m, n) for n in family.block_ns or (0,))
        wider = (down for down in family.tiles if family.wider_down and down > m)
        yield from (CudaConfig(family.name, m, down_block_m=down) for down in wider)
    yield from (CudaConfig(family.name, m, narrow_m=narrow) for m, narrow in family.narrow)


@cache
def quantized(format: str, shape: Shape) -> ExpertWeights:
    """The experts of a shape, quantized once for all families; there are three, each several times."""
    gated = not isinstance(shape.activation, ReLU2)
    sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate, "experts": 3}
    few = random_experts(format, **sizes, gated=gated, bias=shape.bias)
    return ExpertWeights(replace(few.spec, experts=EXPERTS), lambda e: few.expert(e % 3))


def layers(family: KernelFamily) -> Iterator[tuple[str, Shape, Problem, ExpertWeights]]:
    """Format, shape, problem and weights of all layers that the family runs."""
    for format in family.formats:
        for mode in activations_of(family):
            for shape in SHAPES:
                gated = not isinstance(shape.activation, ReLU2)
                no_kernel = (family.gated_only and not gated) or (
                    shape.weight_on == "input" and (family.output_weight_only or mode.static)
                )
                if no_kernel:
                    continue
                weights = quantized(format, shape)
                if mode.static:
                    weights = with_input_scales(weights)
                yield format, shape, _problem(weights, shape, mode), weights


def _problem(weights: ExpertWeights, shape: Shape, mode: ActivationQuantization) -> Problem:
    return Problem(
        spec=weights.spec,
        activation=shape.activation,
        top_k=shape.top_k,
        activations=mode,
        weight_on=shape.weight_on,  # type: ignore[arg-type]
    )


def fits(config: CudaConfig, problem: Problem, formats: tuple[str, str], target: Target) -> bool:
    """Whether the pipelines of all of a configuration's GEMMs fit in the target's shared memory."""
    spec = problem.spec
    sides = (("gate_up" if spec.gated else "up", spec.hidden, 0), ("down", spec.intermediate, config.down_block_m))
    return all(
        config.kernels.fits(target.budget, format, part, m or config.block_m, k)
        for format, (part, k, m) in zip(formats, sides, strict=True)
    )


def cells(target: Target, device: str, only: str) -> Iterator[tuple[str, CudaRunner, CudaConfig, CallArguments]]:
    """Name, runner, configuration and arguments of every cell of a target."""
    for family in (KERNEL_FAMILIES[name] for name in target.families):
        for format, shape, problem, weights in layers(family):
            layer = f"{target.name}, {format}, {problem.activations}, {shape}"
            runner = None
            for config in configurations(family):
                if not fits(config, problem, (format, format), target):
                    continue
                for tokens in TOKENS:
                    name = f"{layer}, {config}, {tokens} tokens"
                    if only not in name:
                        continue
                    if runner is None:
                        packed = LAYOUTS[layout_on(family, target, problem.spec)].pack(weights, torch.device(device))
                        runner = CudaRunner(problem, packed, target)
                    x, (ids, router_weights) = random_call(tokens, shape.hidden, EXPERTS, shape.top_k, torch.bfloat16)
                    ids[0, 0] = -1
                    x, ids, router_weights = (part.to(device) for part in (x, ids, router_weights))
                    out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=device)
                    yield name, runner, config, CallArguments(x, ids, router_weights, out)


def result(runner: CudaRunner, config: CudaConfig, call: CallArguments, repeats: int) -> str:
    """The hash of a cell's result.

    Raises:
        SystemExit: if two runs differ.
    """
    found = []
    for _ in range(repeats):
        call.out_TH.fill_(float("nan"))
        runner.run(call, config)
        found.append(call.out_TH.clone())
    if not all(torch.equal(found[0].view(torch.int16), other.view(torch.int16)) for other in found[1:]):
        raise SystemExit(f"{config}: expects the same bits in {repeats} runs, got several")
    return hashlib.sha256(found[0].cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class Recorder:
    """Takes the place of ``modules.kernel``: keeps what is launched."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, unit: str, name: str, target: Target) -> SimpleNamespace:
        """A kernel whose launches are kept as text."""

        def prepare(args: ctypes.Structure, threads: int, shared_bytes: int = 0) -> Any:
            return Recorder.Launch(self, f"{unit}/{name}", args, threads, shared_bytes)

        return SimpleNamespace(prepare=prepare)

    class Launch:
        """A prepared launch."""

        def __init__(self, recorder: Recorder, name: str, args: ctypes.Structure, threads: int, shared: int) -> None:
            self.recorder, self.name, self.args, self.threads, self.shared = recorder, name, args, threads, shared
            self.grid = (1, 1)

        def set_grid(self, x: int, y: int = 1) -> None:
            """As ``driver.Launch.set_grid``."""
            self.grid = (x, y)

        def __call__(self, stream: int) -> None:
            """Keep the launch."""
            kinds = [kind for kind in reversed(type(self.args).__mro__) if "_fields_" in vars(kind)]
            fields = [(field[0], field[1]) for kind in kinds for field in vars(kind)["_fields_"]]
            values = ", ".join(f"{n}={self.recorder.value(kind, getattr(self.args, n))}" for n, kind in fields)
            text = f"{self.name} grid={self.grid} threads={self.threads} shared={self.shared} {values}"
            self.recorder.made.append(text)

    def value(self, kind: type, value: Any) -> str:
        """A field as text: an address as an offset in a tensor."""
        if kind is not ctypes.c_void_p or value is None:
            return str(value)
        for name, tensor in self.tensors.items():
            start = tensor.data_ptr()
            if start <= value < start + tensor.numel() * tensor.element_size():
                return f"{name}+{value - start}"
        return "elsewhere"


def launched(recorder: Recorder, runner: CudaRunner, config: CudaConfig, call: CallArguments) -> list[str]:
    """The launches of a cell."""
    tokens, top_k = call.topk_ids_TA.shape
    workspace = torch.empty(runner.workspace_bytes(tokens, top_k, config), dtype=torch.uint8)
    call = call._replace(workspace=workspace)
    named = {"x": call.x_TH, "ids": call.topk_ids_TA, "weights": call.topk_weights_TA, "out": call.out_TH}
    recorder.tensors = {**named, "workspace": workspace, **runner._tensors}
    recorder.made = []
    runner.run(call, config)
    return [f"workspace of {len(workspace)} bytes", *recorder.made]


def without_gpu(recorder: Recorder) -> None:
    """Record launches; the GPU has 132 SMs."""
    modules.kernel = recorder  # type: ignore[assignment]
    shared = SM90.budget.shared_bytes
    gpu = SimpleNamespace(multi_processor_count=132, major=9, minor=0, shared_memory_per_block_optin=shared)
    torch.cuda.get_device_properties = lambda device=None: gpu  # type: ignore[assignment]


def compare(before: Path, after: Path) -> int:
    """Print the cells that differ; return how many there are."""
    sides = []
    for path in (before, after):
        _, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        sides.append({line["cell"]: line["found"] for line in lines})
    old, new = sides
    wrong = [cell for cell in {**old, **new} if old.get(cell) != new.get(cell)]
    for cell in wrong:
        kind = "differs" if cell in old and cell in new else f"only in {before if cell in old else after}"
        print(f"{cell}: {kind}")
    print(f"{len(old)} cells before, {len(new)} now: {len(wrong)} that are not the same", file=sys.stderr)
    return len(wrong)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--out", type=Path, help="file to write: what ran where, and a line for each cell")
    parser.add_argument("--launches", action="store_true", help="without a GPU: what is launched")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each cell")
    options = parser.parse_args()
    if options.compare:
        return 1 if compare(*options.compare) else 0
    if options.out is None:
        parser.error("expects --out, or --compare")
    recorder, device = Recorder(), "cpu" if options.launches else "cuda"
    if options.launches:
        without_gpu(recorder)
    elif not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("kernel_bits: expects an SM90 GPU, or --launches")
    name = "stub" if options.launches else torch.cuda.get_device_name()
    lines: list[dict[str, Any]] = [{"device": name, "torch": torch.__version__, "commit": source(), "date": utc_now()}]
    built = [t for t in TEST_TARGETS.values() if options.launches or t.folder.is_dir()]
    for target in (SM90, *built):
        for cell, runner, config, call in cells(target, device, options.only):
            found = launched(recorder, runner, config, call) if options.launches else None
            lines.append({"cell": cell, "found": found or result(runner, config, call, options.repeats)})
    options.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines) - 1} cells", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
