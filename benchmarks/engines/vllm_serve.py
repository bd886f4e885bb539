"""`vllm bench serve` of gpt-oss-20b's size with polymoe's experts and with vLLM's own, on one GPU.

    python models/random_gpt_oss.py /dev/shm/gpt-oss-20b
    python benchmarks/engines/vllm_serve.py /dev/shm/gpt-oss-20b --out FILE [--rates 1:20 4:60 16:160 inf:200]

Both servers start at once and keep their weights; then each is asked in turn while the other is idle. A record has what
``vllm bench serve`` measured of random prompts (1,024 tokens in, 256 out), and the GPU's energy meanwhile for each
token that was generated. The first record of a server has what its log says of loading. Records are JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engines.common import append_line, source, utc_now

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
SERVERS = {"polymoe": ("require", 8101), "auto": ("0", 8102)}
SAID = r"(?i)polymoe|(?-i:MoE backend)|loading took|Loading weights took|Graph capturing|init engine"
PERCENTILES = "50,90,99"


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


def ask(model: Path, experts: str, rate: str, prompts: str, energy: Energy) -> dict[str, Any]:
    """What ``vllm bench serve`` measures at a rate."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*VLLM, "bench", "serve", "--backend", "openai", "--model", str(model), "--disable-tqdm"]
        command += ["--base-url", f"http://127.0.0.1:{SERVERS[experts][1]}", "--dataset-name", "random"]
        command += ["--random-input-len", "1024", "--random-output-len", "256", "--temperature", "0", "--seed", "0"]
        command += ["--num-prompts", prompts, "--request-rate", rate, "--percentile-metrics", "ttft,tpot,itl,e2el"]
        command += ["--metric-percentiles", PERCENTILES, "--save-result", "--result-dir", folder]
        command += ["--result-filename", "result.json", "--save-detailed"]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        result = Path(folder, "result.json")
        if not result.exists():
            return {"error": f"exit status {run.returncode}: {(run.stdout + run.stderr)[-1500:]}"}
        found = json.loads(result.read_text())
    kept = {
        k: v for k, v in found.items() if re.match(r"(mean|median|p\d+)_|duration|completed|total_|\w+_throughput", k)
    }
    start = min(found["start_times"])  # perf_counter, which processes of one machine share
    kept["joules"] = round(energy.joules(start, start + found["duration"]), 1)
    kept["joules_a_token"] = round(kept["joules"] / found["total_output_tokens"], 4)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="where records are appended")
    parser.add_argument("--rates", nargs="+", default=["1:20", "4:60", "16:160", "inf:200"], help="rate:prompts")
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

    energy, until = Energy(), time.monotonic() + args.start_seconds
    logs = {experts: args.out.with_suffix(f".{experts}.log") for experts in args.backends}
    with contextlib.ExitStack() as running:
        begun = {e: running.enter_context(server(args.model, e, logs[e], args.more.split())) for e in args.backends}
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
        for experts in ready:  # one round that is not measured
            ask(args.model, experts, "inf", "32", energy)
        for rate, prompts in (pair.split(":") for pair in reversed(args.rates)):
            for experts in ready:
                about_run = {"model": args.model.name, "experts": experts, "rate": rate, "prompts": int(prompts)}
                record(about_run | ask(args.model, experts, rate, prompts, energy))


if __name__ == "__main__":
    main()
