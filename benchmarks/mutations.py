"""Mistakes planted in host code, layouts, planning, checkpoints and the server, each of which tests must find.

    python benchmarks/mutations.py --out benchmarks/results/mutations.jsonl    # all, in a copy of the tree
    python benchmarks/mutations.py --only 3,17                                 # some

Each mutation replaces a text that stands once in a file of ``src/polymoe``, and runs the tests that are named with it
until the first failure, which must pass without the mistake. A mutation that no test finds, or whose text is gone, is
printed as missed; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # noqa: F401

ROOT = Path(__file__).parents[1]
sys.path = [path for path in sys.path if path not in ("", str(ROOT / "src"), str(ROOT / "tests"))]
sys.dont_write_bytecode = True
torch.set_num_threads(1)
COPIED = ("src", "tests", "pyproject.toml", "scripts")
LINKED = ("models", "docs", "benchmarks", "examples", "README.md", "CHANGELOG.md", "SECURITY.md", "mkdocs.yml")
LIMIT_S = 600


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        file: below ``src/polymoe``.
        tests: paths that find it, below ``tests``.
        right, wrong: a text that stands once in the file, and what replaces it.
    """

    file: str
    tests: str
    right: str
    wrong: str


_LAUNCH = " ".join((
    *(f"kernels/test_cuda.py::test_{name}" for name in
      ("work_tiles_of_any_routing_have_room", "ctas_of_a_permutation_have_rows_enough")),
    "backends/test_cuda_runner.py",
    "kernels/test_cuda_launch.py",
    *(f"kernels/test_cuda_emulated.py::test_{name}" for name in ("permutation", "few_rows_sorted_by_gemms")),
    "kernels/test_cuda_families.py::test_sizes",
))  # fmt: skip
_LAYOUTS = "layouts/test_cuda.py"
_PLANNING = " ".join(f"planning/test_{name}.py" for name in ("plan", "predictor", "measured", "agreement", "proof"))
_PLANNING += " contract/test_selection.py"

_MISTAKES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("kernels/cuda/launch/shape.py", _LAUNCH, (
        ("rows // block_m),", "rows // block_m - 1),"),
        ("end += count", "end += count - 1"),
        ("sorts and rows <= FEW_ROWS", "sorts and rows <= 2 * FEW_ROWS"),
        ("return min(_MOST_CTAS,", "return max(_MOST_CTAS,"),
        ('offsets["lists"] + i * LIST_BYTES', 'offsets["lists"]'),
    )),
    ("kernels/cuda/launch/steps.py", _LAUNCH, (
        ('long_ids="long_ids", even="even_tiles"', 'long_ids="true", even="even_tiles"'),
        ('({"top_k": "top_k"} if x.by_token', '({"top_k": "true"} if x.by_token'),
    )),
    ("kernels/cuda/build.py", "kernels/test_cuda.py::test_compiled_from_these_sources", (
        ("conditions[-1] = not conditions[-1]", "pass"),
    )),
    ("layouts/cuda/matrices.py", _LAYOUTS, (
        ("split = (-1, 2, 4, 2) if inverse", "split = (-1, 4, 2, 2) if inverse"),
        ("unflatten(0, (-1, 8)) for h in halves], 1)", "unflatten(0, (-1, 8)) for h in halves[::-1]], 1)"),
        ("reasons.need(size % multiple == 0, name", "reasons.need(True, name"),
        ("(found > most).nonzero()", "(found > most + 1).nonzero()"),
        ("total = 2 * spec.bias_elements", "total = spec.bias_elements"),
    )),
    ("layouts/pack_check.py", "layouts/test_pack_check.py", (
        ("if before[e] == [after[e]]:", "if before[e]:"),
        ("finite = is_finite(*found)", "finite = True"),
    )),
    ("layouts/checksums.py", "layouts/test_pack_check.py", (
        ("return (x ^ (x >> 27)) | 1", "return torch.ones_like(x)"),
    )),
    ("planning/plan.py", _PLANNING, (
        ("tokens <= step.max_tokens", "tokens < step.max_tokens"),
        ("(end + 1, step)", "(end, step)"),
    )),
    ("planning/predictor.py", _PLANNING, (
        ("above.tokens <= _REACH * tokens", "above.tokens <= tokens"),
        ("point.median_us * model.time_us / there.time_us", "point.median_us"),
    )),
    ("planning/select.py", _PLANNING, (
        ("Table(self.table.sources[:1]) if verdict.foreign", "Table(self.table.sources[:1]) if False"),
        ('self.predictor.configure(tokens)) == "unrun"', 'self.predictor.configure(tokens)) == "run"'),
    )),
    ("planning/measured.py", _PLANNING, (
        ('parts += ["batch invariant"] * problem.batch_invariant', "pass"),
    )),
    ("planning/agreement.py", _PLANNING, (
        ("if len(ranks) > 1:", "if len(ranks) > 2:"),
    )),
    ("checkpoint/shard.py", "checkpoint/test_shard.py", (
        ("shard.ep_rank * each + min(shard.ep_rank, more)", "shard.ep_rank * each"),
        ("start = sum(each[: shard.tp_rank])", "start = sum(each[: shard.tp_rank + 1]) - each[0]"),
    )),
    ("checkpoint/opener.py", "checkpoint/test_opener.py checkpoint/test_files.py", (
        ("if not stat.S_ISREG(found.st_mode):", "if stat.S_ISDIR(found.st_mode):"),
        ('and not absolute and ".." not in parts', "and not absolute"),
        ("unique_keys=True, surrogates=False)", "surrogates=False)"),
    )),
    ("checkpoint/files.py", "checkpoint/test_files.py", (
        ("if name in shards:", "if False:"),
    )),
    ("checkpoint/kv_cache.py", "checkpoint/test_kv_cache.py explanation/test_explanation.py", (
        ("ceil_div(self.heads, tp)", "(self.heads // tp)"),
    )),
    ("checkpoint/patterns.py", "checkpoint/test_patterns.py", (
        ("and not any(other.match(name) for other in unwanted)", ""),
    )),
    ("checkpoint/dialects/int4.py", "checkpoint/test_dialects.py", (
        ("if recorded != shape:", "if False:"),
    )),
    ("kernels/cuda/slots.cu", "layer/test_offload.py::test_kernels_place_and_fetch_as_the_table_says", (
        ("used[slots[e]] = -1;", ""),
        ("grid_dependency_wait();\n    const int misses", "const int misses"),
        ("to[i] = from[i];", "to[i] = (args.from[part] + args.misses[2 + 2 * miss] * size)[i];"),
    )),
    ("layer/sweep.py", "layer/test_offload.py::test_copies_wait_for_what_reads_their_buffer", (
        ("self.stream.wait_event(to._done)", "pass"),
    )),
    ("layer/sweep.py", "layer/test_offload.py::test_sweeps_in_another_order_than_last_time", (
        ("self.copies.wait(buffer)  # those of another layer, which was expected", "pass"),
    )),
    ("layer/offload.py", "layer/test_offload.py::test_update_empties_the_slots", (
        ("self._host.copy_from(buffer.tensors)\n                self._slots.empty()",
         "self._host.copy_from(buffer.tensors)"),
    )),
    ("serve/gate.py", "serve/test_gate.py", (
        ("hmac.compare_digest(_digest(key.strip", "hmac.compare_digest(self._key or _digest(key.strip"),
        ("if self._bodies[request] > self._bytes:", "if False:"),
    )),
    ("serve/choices.py", "serve/test_choices.py serve/test_fields.py", (
        ("elif self.tokens >= self.max_tokens:", "elif self.tokens > self.max_tokens:"),
    )),
    ("serve/sampling.py", "serve/test_sampling.py", (
        ("logits_V / factor, logits_V * factor", "logits_V / factor, logits_V / factor"),
        ("(p_S1 < 1) & (before_SV >= p_S1)", "(p_S1 < 1) & (before_SV > 2 * p_S1)"),
    )),
    ("serve/strict_json.py", "serve/test_strict_json.py", (
        ("if depth > MAX_DEPTH:", "if depth > 10 * MAX_DEPTH:"),
    )),
    ("serve/answers.py", "serve/test_generation_fields.py::test_several_prompts", (
        ("for choice in choices if choice.counts_prompt)", "for choice in choices)"),
    )),
)  # fmt: skip
"""Of each file, the tests that find mistakes in it, and mistakes."""

MUTATIONS = [Mutation(file, tests, *pair) for file, tests, pairs in _MISTAKES for pair in pairs]


def copy_of_tree(folder: Path) -> None:
    """Copy sources and tests, and link what they only read."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        else:
            shutil.copy2(source, target)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


def run(folder: Path, tests: list[str]) -> str:
    """Run tests until the first failure, and return its name; empty if all passed. They run in a fork of this process,
    which has imported what takes seconds, but nothing of polymoe."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os.chdir(folder)
            sys.path[:0] = [str(folder / "src"), str(folder / "tests")]
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
            os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--slow", "none", *tests]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
    if code > 0 and not failed:
        raise RuntimeError(text)
    return "" if code == 0 else failed[0] if failed else f"signal {-code}"


def planted(folder: Path, mutation: Mutation) -> dict[str, Any]:
    """Plant a mistake, run its tests, take it back, and run the test that failed once more."""
    path = folder / "src" / "polymoe" / mutation.file
    text = path.read_text(encoding="utf-8")
    row: dict[str, Any] = {"file": mutation.file, "right": mutation.right, "wrong": mutation.wrong}
    if (times := text.count(mutation.right)) != 1:
        return {**row, "found": False, "by": f"the text stands {times} times in the file"}
    path.write_text(text.replace(mutation.right, mutation.wrong), encoding="utf-8")
    try:
        by = run(folder, [f"tests/{path}" for path in mutation.tests.split()])
    finally:
        path.write_text(text, encoding="utf-8")
    if by.startswith("tests/") and "::" in by and run(folder, [by]):
        by += " fails without the mistake too"
        return {**row, "found": False, "by": by}
    return {**row, "found": bool(by), "by": by}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="append records to this file")
    parser.add_argument("--only", help="numbers of mutations, from 1")
    asked = parser.parse_args()
    numbers = range(1, len(MUTATIONS) + 1) if asked.only is None else [int(n) for n in asked.only.split(",")]
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_of_tree(folder)
        for number in numbers:
            row = {"number": number, **planted(folder, MUTATIONS[number - 1]), "commit": commit}
            missed += not row["found"]
            print(f"{number:2} {'found by' if row['found'] else 'MISSED'} {row['by']}: {row['file']}", flush=True)
            if asked.out is not None:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"{len(numbers) - missed} of {len(numbers)} found")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
