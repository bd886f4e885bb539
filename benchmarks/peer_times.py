"""Times of other libraries beside this one's, in the cases in which they are compared, on the GPU at hand.

    python benchmarks/peer_times.py OUT.jsonl [ROW ...] [--commit COMMIT] [--seconds 240] [--prepare 120] [--tokens 1,2]

Each row is a process of its own. All prepare their layers and compile at the same time; then one after another times
all of its contenders at each token count, while the others wait or are stopped. What failed is in OUT.jsonl.ROW.log.
Rows that are not finished after ``--seconds`` are ended; their records so far stay. Exit status: 0 if all were
finished, else 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ALL = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192,16384"


@dataclass(frozen=True, slots=True)
class Row:
    """A case, with other sizes (H, F, E, A) if given, and what is timed on it, with at most ``most`` tokens. Peers that
    are not installed get a line in the log."""

    case: str
    peers: str
    format: str | None = None
    activations: str | None = None
    routing: str = "uniform"
    backends: str = "cuda"
    sizes: tuple[int | None, int | None, int | None, int | None] = (None, None, None, None)
    most: int | None = None


_FP8 = "humming,vllm,deepgemm,finegrained"
ROWS = {
    "kimi-k2-tp8": Row("kimi-k2-tp8", "humming,vllm"),
    "deepseek-v4-flash-int4": Row("deepseek-v4-flash", "humming,vllm", "int4_g32"),
    "deepseek-v3-tp8": Row("deepseek-v3-tp8", _FP8),
    "deepseek-v3-ep8": Row("deepseek-v3-ep8", _FP8),
    "glm-4.5-air": Row("qwen3-235b", _FP8, "fp8_block128", sizes=(4096, 1408, 128, 8)),
    "qwen3.5-35b": Row("qwen3-235b", f"{_FP8},monomoe", "fp8_block128", sizes=(2048, 512, 256, 8), most=8),
    **{f"deepseek-v3-ep{n}": Row(f"deepseek-v3-ep{n}", "humming,vllm,deepgemm") for n in (32, 72, 320)},
    "w4a8": Row("deepseek-v4-flash", "humming", "mxfp4", "fp8_group128"),
    "w4a8-rows": Row("deepseek-v4-flash", "humming", "mxfp4", "fp8_token"),
    "bf16": Row("qwen3-235b-tp4-bf16", "vllm,quack", backends="cuda,triton"),
    "zipf": Row("deepseek-v4-flash", "humming,vllm", routing="zipf:1.1"),
    "gpt-oss-20b": Row("gpt-oss-20b", "triton_kernels"),
    "deepseek-v4-flash": Row("deepseek-v4-flash", "humming,vllm"),
}
"""In the order in which they are timed."""

SHAPES = ((3072, 1536, 128, 8), (2048, 768, 128, 8), (6144, 1024, 96, 4))
"""H, F, E and A that no heuristic was fitted to."""
_PEERS = {"fp8_block128": "humming,vllm,deepgemm", "bf16": "vllm,quack", "w4a8": "humming"}
UNTUNED = {
    f"H{sizes[0]}-{form}{'-zipf' * (routing != 'uniform')}": Row(
        "qwen3-235b",
        _PEERS.get(form, "humming,vllm"),
        "mxfp4" if form == "w4a8" else form,
        "fp8_token" if form == "w4a8" else None,
        routing=routing,
        sizes=sizes,
        backends="cuda,triton" if form == "bf16" else "cuda",
    )
    for routing in ("uniform", "zipf:1.1")
    for form in ("int4_g32", "w4a8", "fp8_block128", "bf16", "mxfp4", "nvfp4")
    for sizes in SHAPES
}
"""Only if they are named."""

_POLL = 0.02


def main() -> int:
    """Run the rows, or one of them in a process that the first one started."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join({**ROWS, **UNTUNED}))
    parser.add_argument("--commit")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--prepare", type=float, default=120)
    parser.add_argument("--tokens", default=ALL)
    parser.add_argument("--rest", type=float, default=0.2)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = {**ROWS, **UNTUNED}
    if unknown := [name for name in options.rows if name not in known]:
        parser.error(f"row: expected {', '.join(known)}, got {unknown[0]!r}")
    if options.turn is not None:
        run_row(options)
        return 0
    return run_rows(options)


def run_row(options: argparse.Namespace) -> None:
    """Time one row; wait for the file ``--turn`` with ``.go`` before timing begins."""
    from side_by_side import side_by_side

    from polymoe.bench.cases import CASES, Workload
    from polymoe.bench.measure import Bench
    from polymoe.bench.records import Stamp, append
    from polymoe.bench.routings import parse_routing
    from polymoe.cli.output import measured_on

    row = {**ROWS, **UNTUNED}[options.rows[0]]
    hidden, intermediate, experts, top_k = row.sizes
    case = CASES[row.case].changed(hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
    machine, device = measured_on(options.device)
    workload = Workload.of_case(case, device, row.format, row.activations)
    distribution, _ = parse_routing(row.routing, workload.problem)
    shown = [a for a in sys.argv[1:] if not a.startswith("--turn")]
    command = shlex.join(["python", "benchmarks/peer_times.py", *shown])
    bench = Bench(
        workload=workload, distribution=distribution, machine=machine, device=device,
        stamp=Stamp.now(machine, command, options.commit), rest_seconds=options.rest, repeats=options.repeats,
    )  # fmt: skip
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    def wait_for_turn() -> None:
        Path(f"{options.turn}.ready").touch()
        while not Path(f"{options.turn}.go").exists():
            time.sleep(_POLL)

    tokens = [t for t in map(int, options.tokens.split(",")) if row.most is None or t <= row.most]
    found = side_by_side(bench, tokens, row.backends.split(","), row.peers.split(","), say, wait_for_turn)
    for r in found:
        if r.record is not None:
            append(options.out, r.record)
            say(f"{r.backend}: {r.record.median_us:.1f} us, floor {r.record.floor_us:.1f}, error {r.record.error:.1e}")
        else:
            say(f"not measured: {r.backend} {r.version or ''}, {r.tokens or 'any number of'} tokens: {r.note}")


def run_rows(options: argparse.Namespace) -> int:
    """Start a process for each row, and give each its turn."""
    began = time.monotonic()
    names = options.rows or list(ROWS)
    own = [a for a in sys.argv[2:] if a not in names]
    turns = {name: options.out.with_name(f"{options.out.name}.{name}") for name in names}
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name, turn in turns.items():
        for suffix in (".ready", ".go"):
            Path(f"{turn}{suffix}").unlink(missing_ok=True)
        command = [sys.executable, __file__, str(options.out), name, *own, f"--turn={turn}"]
        with Path(f"{turn}.log").open("wb") as log:
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def left() -> float:
        return began + options.seconds - time.monotonic()

    def waiting() -> list[str]:
        """Rows whose turn could begin."""
        return [name for name in names if name in running and Path(f"{turns[name]}.ready").exists()]

    status = 0
    while running and left() > 0:
        ended = [name for name, process in running.items() if process.poll() is not None]
        for name in ended:
            print(f"{name}: ended before its turn, see {turns[name]}.log", flush=True)
            del running[name]
            status = 1
        ready = waiting()
        unready = [process for name, process in running.items() if name not in ready]
        if not ready or (unready and time.monotonic() - began < options.prepare):
            time.sleep(_POLL)
            continue
        for other in unready:
            other.send_signal(signal.SIGSTOP)
        name, start = ready[0], time.monotonic()
        Path(f"{turns[name]}.go").touch()
        process = running.pop(name)
        try:
            process.wait(max(left(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        status = status or process.returncode
        print(
            f"{name}: {time.monotonic() - start:.1f} s, after {start - began:.1f} s, exit {process.returncode}",
            flush=True,
        )
        for other in unready:
            other.send_signal(signal.SIGCONT)
    for name, process in running.items():
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        print(f"{name}: no time left", flush=True)
        status = 1
    for turn in turns.values():
        for suffix in (".ready", ".go"):
            Path(f"{turn}{suffix}").unlink(missing_ok=True)
    return 1 if status else 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
