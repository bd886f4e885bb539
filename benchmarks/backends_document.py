"""docs/backends.md: which backend takes what, by its own ``check``. Needs no GPU; ``write_docs.py`` writes it."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from polymoe.backends import BACKENDS, Backend
from polymoe.bench.cases import CASES
from polymoe.formats import FORMATS
from polymoe.machine import DEVICES, Device, Machine
from polymoe.planning.measured import Table
from polymoe.planning.proof import ProofStatus, weakest
from polymoe.planning.proof import said as status_said
from polymoe.planning.select import select
from polymoe.planning.selection import Candidate, describe
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ACTIVATIONS
from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.verdict import Accepted, Verdict

GPUS = ("a100", "rtx4090", "h100", "h200", "b200", "rtx5090", "cpu")
MODES = tuple(ACTIVATIONS)
USUAL = tuple(name for name, mode in ACTIVATIONS.items() if not mode.fast_accumulation)
"""Those that "all" stands for."""
CASE = replace(CASES["deepseek-v4-flash"], activation=SwiGLU())  # without its limit

INTRODUCTION = f"""\
# Backends

Which backend runs which format on which GPU. `benchmarks/write_docs.py` generates this
page from each backend's own `check`. What a backend accepts depends on properties of the problem and of the machine,
never on the name of a model or a format. `polymoe explain` answers the same question for any checkpoint and GPU.

The example is one layer of {CASE.experts} experts ({CASE.top_k} active, H {CASE.hidden}, F {CASE.intermediate}), \
{CASE.activation.name}, x in bfloat16, on a machine with
Triton 3.6, FlashInfer 0.7.2 with its compiled kernels and compilers and a driver for CUDA 13.

| activations | how the experts' inputs are quantized |
| --- | --- |
| `16bit` | not at all |
| `fp8_token` | E4M3, one scale per token |
| `fp8_group128` | E4M3, one scale per 128 columns of a token |
| `fp8_group128_ue8m0` | the same, with power-of-two scales |
| `fp8_static` | E4M3, with the checkpoint's scales |
| `mxfp8` | E4M3, one power-of-two scale per 32 columns |
| `nvfp4` | E2M1, one E4M3 scale per 16 columns and a global scale. Only on request; a backend may keep 16 bits for \
calls of few tokens, and `explain` says so |
| `fp8_token_fast_accumulation`, `fp8_static_fast_accumulation` | as without the suffix, but where experts have many \
rows the tensor cores add up all columns (fast accumulation): errors of up to 1.3e-2 instead of 6e-3. Only on request; \
not for batch-invariant results |

`auto` chooses, by measured or predicted time, among the backends that accept the problem and are not marked as
available on request only. It uses *another library's kernels* only if `polymoe tune` measured them as faster on this
machine.

A cell says how far the backend is proven on that GPU model, or "-" if the backend refuses:

- timed: timings on this model are recorded in `benchmarks/results/`, of results that were checked.
- tested: the GPU tests passed on this model.
- never tested: the backend was compiled for this model, emulated, or run on other GPUs, but never on this one. `auto`
  uses it only if nothing better accepts the problem, and the log line at load says so.

A CPU counts as tested, because the test suite runs there. `explain` gives a backend's reasons for refusing.
"""


_COMPILER = {"nvidia-cutlass-dsl": "4.7.1"}

_CHANGED = (
    "Each row changes one property of a problem (MXFP4 with 16-bit activations on an H200, unless the row says "
    "otherwise) and gives the reasons of the backends that then refuse. Those that accept nothing on an H200 are left "
    "out."
)


def backends_document(table: Mapping[str, Backend] = BACKENDS) -> str:
    """The whole text, for the backends of ``table``."""

    h200 = machine(DEVICES["h200"])
    asked = [problem_of(form, mode) for form in FORMATS for mode in MODES]
    here = {n: b for n, b in table.items() if any(isinstance(verdict(b, p, h200), Accepted) for p in asked)}
    rows = []
    for what, problem, where in changes():
        refused = {n: lines(v) for n, b in here.items() if not isinstance(v := verdict(b, problem, where), Accepted)}
        names = _by_value({n: tuple(reasons) for n, reasons in refused.items()})
        texts = [f"{', '.join(f'`{n}`' for n in held)}: {'; '.join(reasons)}" for reasons, held in names.items()]
        rows.append([what, "<br>".join(texts) or "none"])
    return "\n".join(
        [
            INTRODUCTION,
            *map(_section, table.values()),
            f"## Beyond format and GPU\n\n{_CHANGED}\n",
            markdown(["changed", "refused by"], rows),
        ]
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, ["---"] * len(header), *rows])


def problem_of(format: str = "mxfp4", activations: str = "16bit") -> Problem:
    """The layer in a format of ``FORMATS``."""
    return CASE.problem(format, activations)


def machine(device: Device, triton: str = "3.6.0", flashinfer: str | None = "0.7.2") -> Machine:
    """The machine that the document speaks of, whatever this one is."""
    parts = ("flashinfer-python", "flashinfer-cubin")
    foreign = {} if flashinfer is None else dict.fromkeys(parts, flashinfer) | _COMPILER
    packages = {"torch": "2.11.0", "triton": triton, **foreign}
    cuda = (13, 0) if device.kind == "cuda" else None
    return Machine(device, packages, cuda, cuda)


def candidate(backend: Backend, problem: Problem, where: Machine) -> Candidate:
    """The backend's verdict, with the reasons of its layouts, and how far it is proven."""
    return select(problem, where, backends={backend.name: backend}, table=Table(())).candidates[0]


def verdict(backend: Backend, problem: Problem, where: Machine) -> Verdict:
    """The backend's, with the reasons of its layouts."""
    return candidate(backend, problem, where).verdict


def lines(found: Verdict) -> list[str]:
    """What is accepted; or every requirement that is not met, without what came instead: where it holds says that.
    A requirement of gate, up and down is one of the weights; a mode of activations is named where it is refused."""
    if isinstance(found, Accepted):
        return [re.sub(r"(another library's kernels): auto [^,)]*", r"\1", describe(found))]
    texts = (str(replace(r, got="")).removesuffix(", got ") for r in found.reasons)
    texts = (re.sub(r"(^|, )(gate|up|down) (weights|elements|scales)", r"\1weights' \3", text) for text in texts)
    texts = (text.replace("weights' weights", "weights") for text in texts)
    return list(
        dict.fromkeys(re.sub(r"^activations \w+: not supported", "activations: not supported", t) for t in texts)
    )


def changes() -> list[tuple[str, Problem, Machine]]:
    """What to say, and the question with one property changed."""
    problem, h200 = problem_of(), machine(DEVICES["h200"])
    spec, bf16, fp8 = problem.spec, problem_of("bf16"), problem_of("fp8_tensor", "fp8_static")
    rank = replace(spec, first_expert=32, local_experts=16)
    turing = replace(DEVICES["a100"], name="sm_75", capability=(7, 5))
    limited, rtx5090 = replace(problem_of("nvfp4"), activation=SwiGLU(limit=10.0)), machine(DEVICES["rtx5090"])
    return [
        ("NVFP4 on an RTX 5090, SwiGLU with a limit", limited, rtx5090),
        ("no gate, ReLU squared", replace(problem, spec=replace(spec, gate=None), activation=ReLU2()), h200),
        ("biases", replace(problem, spec=replace(spec, bias=True)), h200),
        ("routing weight on the input", replace(problem, weight_on="input"), h200),
        ("the same, with FP8 weights and `fp8_static`", replace(fp8, weight_on="input"), h200),
        ("x in float32", replace(problem, dtype="fp32"), h200),
        ("16 of 256 experts on this rank", replace(problem, ep=16, spec=rank), h200),
        ("2048 experts", replace(problem, spec=replace(spec, experts=2048, local_experts=2048)), h200),
        ("H 2880, F 1440", replace(problem, spec=replace(spec, hidden=2880, intermediate=1440)), h200),
        ("BF16 weights, H 4098", replace(bf16, spec=replace(bf16.spec, hidden=4098)), h200),
        ("gate in BF16, up in MXFP4", replace(problem, spec=replace(spec, gate=bf16.spec.up)), h200),
        ("an E8M0 scale above 2**25", replace(problem, scales=ScaleRange(largest_exponent=26)), h200),
        ("batch-invariant results", replace(problem, batch_invariant=True), h200),
        ("no Triton", problem, machine(DEVICES["h200"], triton="")),
        ("Triton 3.5", problem, machine(DEVICES["h200"], triton="3.5.1")),
        ("no FlashInfer", problem, machine(DEVICES["h200"], flashinfer=None)),
        ("FlashInfer 0.6.11", problem, machine(DEVICES["h200"], flashinfer="0.6.11")),
        ("a GPU before Ampere", problem, machine(turing)),
    ]


def _section(backend: Backend) -> str:
    module = inspect.getdoc(sys.modules[type(backend).__module__]) or ""
    words = f"{module} {inspect.getdoc(type(backend)) or ''} Layout: {', '.join(backend.layouts)}.".split()
    text = textwrap.fill(" ".join(words), 120, break_on_hyphens=False)
    asked = [(gpu, form, mode) for gpu in GPUS for form in FORMATS for mode in MODES]
    found = {(g, f, m): candidate(backend, problem_of(f, m), machine(DEVICES[g])) for g, f, m in asked}

    def taken(gpu: str, form: str) -> str:
        modes: dict[ProofStatus, list[str]] = {"measured": [], "run": [], "unrun": []}
        for mode in MODES:
            if isinstance(found[gpu, form, mode].verdict, Accepted):
                modes[weakest(status for _, status in found[gpu, form, mode].proofs)].append(mode)
        return "; ".join(f"{status_said(status)}: {_modes(held)}" for status, held in modes.items() if held) or "-"

    columns = _by_value({gpu: tuple(taken(gpu, f) for f in FORMATS) for gpu in GPUS})
    rows = _by_value({f: tuple(taken(gpus[0], f) for gpus in columns.values()) for f in FORMATS})
    return "\n".join(
        [
            f"## {backend.name}\n\n{text}\n",
            markdown(
                ["format", *(", ".join(gpus) for gpus in columns.values())],
                [[", ".join(f"`{f}`" for f in forms), *cells] for cells, forms in rows.items()],
            ),
        ]
    )


def _modes(held: Sequence[str]) -> str:
    usual = _joined([name for name in held if name in USUAL], USUAL, "all")
    return ", ".join(filter(None, [usual, *(name for name in held if name not in USUAL)]))


def _joined(found: Sequence[str], every: Collection[str], word: str) -> str:
    left = [name for name in every if name not in found]
    if len(left) > 2 or len(found) < 3:
        return ", ".join(found)
    return f"{word} but {' and '.join(left)}" if left else word


_K = TypeVar("_K")
_V = TypeVar("_V")


def _by_value(pairs: Mapping[_K, _V]) -> dict[_V, list[_K]]:
    keys: dict[_V, list[_K]] = {}
    for key, value in pairs.items():
        keys.setdefault(value, []).append(key)
    return keys
