"""`vllm bench serve` of gpt-oss-20b's size with polymoe's experts and with vLLM's own, on one GPU.

    python models/random_gpt_oss.py /dev/shm/gpt-oss-20b
    python benchmarks/engines/vllm_serve.py /dev/shm/gpt-oss-20b --out FILE [--rates inf:200 1:20 16:160 4:60]

Both servers start at once and keep their weights. First both answer the requests of all rates, unmeasured, so that
what they compile for new shapes is compiled. Then each is asked in turn while the other is idle. A record has what
``vllm bench serve`` measured of random prompts (1,024 tokens in, 256 out), the GPU's energy meanwhile for each token
that was generated, and how many kernels vLLM compiled meanwhile (``compiled``); a rate at which it compiled any is
measured again, at most twice. The first record of a server has what its log says of loading. Records are JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engines.common import append_line, source, utc_now

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
SERVERS = {"polymoe": ("require", 8101), "auto": ("0", 8102)}
SAID = r"(?i)polymoe|(?-i:MoE backend)|loading took|Loading weights took|Graph capturing|init engine"
COMPILED = rb"compilation\S* .*during inference"
"""What a server's log says of each kernel that it compiles after it has started."""
MOST_TRIES = 3
MOST_SECONDS = 200
"""For one rate."""


def give_words(model: Path) -> None:
    """Replace the tokenizer by one that has a word for each id, so that random ids stay themselves as text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = json.loads((model / "config.json").read_text())
    core = Tokenizer(models.WordLevel({str(i): i for i in range(config["vocab_size"])}, unk_token="3"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    ends = {name: str(config[f"{name}_id"]) for name in ("eos_token", "pad_token")}
    PreTrainedTokenizerFast(tokenizer_object=core, **ends).save_pretrained(model)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


@contextlib.contextmanager
def server(model: Path, experts: str, log: Path, more: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server of its own process group, until the block ends."""
    mode, port = SERVERS[experts]
    command = [*VLLM, "serve", str(model), "--port", str(port), "--max-model-len", "2048", "--no-enable-prefix-caching"]
    command += ["--jit-monitor-verbose"]  # each kernel that is compiled later, not only the first of a name
    # Two servers start on one GPU, so neither can take what is free.
    command += ["--kv-cache-memory-bytes", str(16 << 30), "--gpu-memory-utilization", "0.3", *more]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | {"POLYMOE": mode}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(process: subprocess.Popen[bytes], port: int, until: float) -> None:
    """Return when a server answers.

    Raises:
        RuntimeError: if it ends, or the time does.
    """
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"not ready: exit status {process.poll()}")


class Energy(threading.Thread):
    """Samples of the GPU's energy counter."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml  # pyright: ignore

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
        self.samples: list[tuple[float, float]] = []
        self.start()

    def run(self) -> None:
        while True:
            self.samples.append((time.perf_counter(), self.read()))
            time.sleep(0.05)

    def joules(self, start: float, end: float) -> float:
        inside = [joules for at, joules in self.samples if start <= at <= end]
        return inside[-1] - inside[0]


@functools.cache
def client() -> tuple[Any, Callable[..., Any]]:
    """The parser of ``vllm bench serve``'s arguments, and what runs it; importing it takes longer than a rate."""
    from vllm.benchmarks.serve import add_cli_args, main_async  # pyright: ignore
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser, main_async


def bench(model: Path, experts: str, rate: str, prompts: str) -> dict[str, Any]:
    """What ``vllm bench serve`` measures at a rate, with each request's times; or its error."""
    parser, run = client()
    command = ["--backend", "openai", "--model", str(model), "--disable-tqdm", "--ready-check-timeout-sec", "0"]
    command += ["--base-url", f"http://127.0.0.1:{SERVERS[experts][1]}", "--dataset-name", "random"]
    command += ["--random-input-len", "1024", "--random-output-len", "256", "--temperature", "0", "--seed", "0"]
    command += ["--num-prompts", prompts, "--request-rate", rate, "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--metric-percentiles", "50,90,99", "--save-detailed"]
    try:
        return asyncio.run(asyncio.wait_for(run(parser.parse_args(command)), MOST_SECONDS))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1500]}


def measured(model: Path, experts: str, rate: str, prompts: str, log: Path, energy: Energy) -> dict[str, Any]:
    """What :func:`bench` finds, with joules, and how many kernels the server compiled meanwhile."""
    before = log.stat().st_size
    found = bench(model, experts, rate, prompts)
    if "error" in found:
        return found
    with log.open("rb") as file:
        file.seek(before)
        compiled = len(re.findall(COMPILED, file.read()))
    kept = {
        k: v for k, v in found.items() if re.match(r"(mean|median|p\d+)_|duration|completed|total_|\w+_throughput", k)
    }
    start = min(found["start_times"])  # perf_counter, which is the samples' clock
    joules = energy.joules(start, start + found["duration"])
    about = {"joules": round(joules, 1), "joules_a_token": round(joules / found["total_output_tokens"], 4)}
    return kept | about | {"compiled": compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="where records are appended")
    parser.add_argument("--rates", nargs="+", default=["inf:200", "1:20", "16:160", "4:60"], help="rate:prompts")
    parser.add_argument("--backends", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--more", default="", help="further arguments of both servers")
    parser.add_argument("--commit", help="of the code, where git does not know it")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end, too
    give_words(args.model)
    about = {"date": utc_now(), "commit": args.commit or source(), "command": " ".join(sys.argv), "serve": True}

    def record(row: dict[str, Any]) -> None:
        print(json.dumps(row)[:600], flush=True)
        append_line(args.out, json.dumps(about | row))

    energy, until, rates = Energy(), time.monotonic() + args.start_seconds, [r.split(":") for r in args.rates]
    logs = {experts: args.out.with_suffix(f".{experts}.log") for experts in args.backends}
    with contextlib.ExitStack() as running:
        begun = {e: running.enter_context(server(args.model, e, logs[e], args.more.split())) for e in args.backends}
        client()
        ready = []
        for experts, process in begun.items():
            start = {"model": args.model.name, "experts": experts}
            try:
                wait(process, SERVERS[experts][1], until)
                ready.append(experts)
            except RuntimeError as error:
                start["error"] = str(error)
            lines = logs[experts].read_text(errors="replace").splitlines()
            record(start | {"log": [line[:400] for line in lines if re.search(SAID, line)][:20]})
        with ThreadPoolExecutor(len(SERVERS)) as pool:  # not measured
            list(pool.map(lambda experts: [bench(args.model, experts, *rate) for rate in rates], ready))
        for rate, prompts in rates:
            for experts in ready:
                about_run = {"model": args.model.name, "experts": experts, "rate": rate, "prompts": int(prompts)}
                for _ in range(MOST_TRIES):
                    found = measured(args.model, experts, rate, prompts, logs[experts], energy)
                    record(about_run | found)
                    if not found.get("compiled"):
                        break


if __name__ == "__main__":
    main()
