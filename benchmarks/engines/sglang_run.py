"""SGLang with polymoe and without it, on the GPUs of this machine: answers and speed.

    python benchmarks/engines/sglang_run.py answers --out FILE [--tp 2] [--ep] [--models NAME ...]
    python benchmarks/engines/sglang_run.py reload --out FILE [--models NAME ...]
    python benchmarks/engines/sglang_run.py speed --out FILE [--case NAME] [--backends polymoe triton ...]

``answers`` asks each bundled checkpoint that SGLang can run for sums, once with ``POLYMOE=require`` and once with
``POLYMOE=0``; the record of the one that ends last has the number of equal answers. On one rank it also compares each
layer's last call of several tokens with the reference (``layer_errors``: relative error by layer). ``reload`` updates
the weights of each to changed ones, the first ones, and the changed ones again, and compares the answers with those of
a fresh start. ``speed`` runs some layers of real sizes with random weights, whose router chooses experts about
uniformly: for each backend the time to load, the peak of memory while loading, and the time inside the choice of
experts and the experts' layer in one decode step by batch and in one prefill of 8,192 tokens (``moe_us_*``: time in
which at least one of their kernels runs, median over layers and steps). With ``--graphs`` instead, under CUDA graphs,
output tokens per second and the GPU's time for one decode step (``step_us_*``). Each engine runs in processes of its
own; one that fails is a record with its error. With ``--jobs``, engines start together, and measure speed one after
another. Records are JSON lines. On a machine without a GPU ``answers`` and ``reload`` run on the CPU.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engines.common import BATCHES, DECODE_STEPS, MODELS, PREFILL, Record, busy_us

from engines import common, sglang_plugin

PROMPT = 17
"""Tokens of a prompt before decoding: no number of prompts has as many tokens as a decode step."""
SETTINGS: dict[str, Any] = {
    "attention_backend": "triton",
    "cuda_graph_bs_decode": list(BATCHES),
    "disable_custom_all_reduce": True,
    "disable_overlap_schedule": True,
    "disable_prefill_cuda_graph": True,
    "disable_radix_cache": True,
    "grammar_backend": "none",
    "log_level": "info",
    "random_seed": 0,
    "sampling_backend": "pytorch",
    "skip_server_warmup": True,
}
MODEL_SETTINGS: dict[str, dict[str, Any]] = {
    "sums-gpt-oss-mxfp4": {"json_model_override_args": '{"sliding_window": 9}'},
}
"""What a bundled checkpoint needs of SGLang on a GPU.

A decode step of SGLang's Triton attention sees one token fewer than gpt-oss's sliding window has. Its prefill sees the
whole window, but no prompt here is longer than the checkpoint's 8 tokens. With 9, both see what the checkpoint means.
"""
NOT_IN_SGLANG = {
    "sums-kimi-k2-int4": "SGLang's Triton attention does not compile for latents of 64 with 32 rotary columns",
}
"""Bundled checkpoints that SGLang cannot run, with or without polymoe."""
ON_CPU: dict[str, Any] = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
MODEL_SETTINGS_ON_CPU: dict[str, dict[str, Any]] = {
    "sums-gpt-oss-mxfp4": {"attention_backend": "triton", "disable_hybrid_swa_memory": True}
}
"""The tests' plug-in for CPUs has attention with sinks by the name of a backend that SGLang allows for gpt-oss."""


def engine(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An engine of SGLang, the seconds until it is ready, and what loading took."""
    common.starting()
    import sglang  # pyright: ignore
    import torch

    found: dict[str, Any] = {"sglang": sglang.__version__, "torch": torch.__version__}
    start = time.perf_counter()
    made = sglang.Engine(**settings)
    found["ready_s"] = round(time.perf_counter() - start, 1)
    loaded = Path(os.environ[sglang_plugin.LOADED])
    return made, found | (json.loads(loaded.read_text()) if loaded.exists() else {})


def answers(request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of sums, and how many are right; then again after each update with other weights."""
    made, found = engine(request["settings"])
    questions = common.sums(request["count"])
    tokenizer = made.tokenizer_manager.tokenizer
    prompts = [tokenizer(question)["input_ids"] for question, _ in questions]

    def ask() -> list[list[int]]:
        outputs = made.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 8})
        return [list(out["output_ids"]) for out in outputs]

    tokens, reloaded = ask(), []
    texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]
    found |= {"right": sum(text == answer for text, (_, answer) in zip(texts, questions, strict=True))}
    found |= {"tokens": tokens, "of": len(texts)}
    for path in request.get("reload", ()):
        while not made.flush_cache().success:  # SGLang ends if its scheduler has not yet removed what was answered
            time.sleep(0.1)
        succeeded, message = made.update_weights_from_disk(path)[:2]
        if not succeeded:
            raise RuntimeError(message)
        reloaded.append(ask())
    if reloaded:
        found["reloaded"] = reloaded
    made.shutdown()
    return found | {"layer_errors": common.layer_errors(Path(request["settings"]["model_path"]))}


def speed(request: dict[str, Any]) -> dict[str, Any]:
    """With ``eager`` microseconds in the experts' layer, else tokens per second and microseconds of a step."""
    import torch

    made, found = engine(request["settings"])
    generator = torch.Generator().manual_seed(0)

    def generate(batch: int, prompt: int, steps: int) -> float:
        ids = torch.randint(100, 30000, (batch, prompt), generator=generator).tolist()
        start = time.perf_counter()
        made.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": steps, "ignore_eos": True})
        return time.perf_counter() - start

    def traced(batch: int, prompt: int, steps: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            made.start_profile(output_dir=folder, activities=["CPU", "GPU"], with_stack=False, record_shapes=False)
            generate(batch, prompt, steps)
            made.stop_profile()
            (file,) = Path(folder).glob("*TP-0*.trace.json.gz")
            with gzip.open(file) as opened:
                return json.load(opened)

    def layer_us(batch: int, prompt: int, steps: int, tokens: int) -> float:
        trace = traced(batch, prompt, steps)
        parts = (sglang_plugin.TOP_K, sglang_plugin.EXPERTS)
        top_k, experts = (common.intervals(trace, f"{part} {tokens} tokens")[0] for part in parts)
        times = sorted(busy_us(a + b) for a, b in zip(top_k, experts, strict=True))
        return round(times[len(times) // 2], 1)

    for batch in BATCHES:  # kernels are compiled now, while other engines start
        generate(batch, PROMPT, 4)
    generate(1, PREFILL, 1)
    common.measure_alone()
    if request["eager"]:
        for batch in BATCHES:
            found[f"moe_us_{batch}"] = layer_us(batch, PROMPT, 6, batch)
        found["moe_us_prefill"] = layer_us(1, PREFILL, 1, PREFILL)
        found |= common.floors(request["case"])
    else:
        for batch in BATCHES:
            times = [generate(batch, PROMPT, 1 + DECODE_STEPS) - generate(batch, PROMPT, 1) for _ in range(5)]
            found[f"decode_tokens_per_s_{batch}"] = round(batch * DECODE_STEPS / sorted(times)[2], 1)
            few, many = (busy_us(common.intervals(traced(batch, PROMPT, steps), "")[1]) for steps in (2, 18))
            found[f"step_us_{batch}"] = round((many - few) / 16, 1)
        times = [generate(1, PREFILL, 1) for _ in range(3)]
        found["prefill_tokens_per_s"] = round(PREFILL / sorted(times)[1])
    made.shutdown()
    return found


_ports = itertools.count(20000 + os.getpid() % 100 * 100)


def free_port() -> int:
    """A port for one engine, below those that Linux gives out: SGLang's own choice can be another engine's too."""
    for port in _ports:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError


def one(request: dict[str, Any], polymoe: str) -> dict[str, Any]:
    """Run a request in a process of its own, with a value of ``POLYMOE``; its result, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = [*sglang_plugin.install(Path(folder)), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "POLYMOE": polymoe,
            "PYTHONPATH": os.pathsep.join(path),
            sglang_plugin.LOADED: str(Path(folder, "loaded")),
        }
        request["settings"]["nccl_port"] = free_port()
        said, first_error = r"polymoe \d|MoE backend|M[oO]E kernel", "hit an exception"
        return common.one(__file__, request, environment, said=said, first_error=first_error)


def on_cpu() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def parallel(args: Namespace) -> dict[str, Any]:
    return SETTINGS | {"tp_size": args.tp, "ep_size": args.tp if args.ep else 1} | args.settings


def small(name: str, args: Namespace, **more: Any) -> dict[str, Any]:
    """Settings of an engine with a bundled checkpoint."""
    settings = parallel(args) | {
        "model_path": str(MODELS / name),
        "context_length": 64,
        "disable_cuda_graph": not args.graphs,
        "max_running_requests": 64,
        "max_total_tokens": 8192,
        "mem_fraction_static": 0.5,
        **more,
    }
    if on_cpu():
        return settings | ON_CPU | {"mem_fraction_static": 0.1} | MODEL_SETTINGS_ON_CPU.get(name, {})
    return settings | MODEL_SETTINGS.get(name, {})


def run_answers(args: Namespace, record: Record) -> None:
    bundled = {p.parent.name for p in MODELS.glob("sums-*/config.json") if "quantization_config" in p.read_text()}

    def ask(name: str, mode: str) -> dict[str, Any]:
        request = {"what": "answers", "count": args.count, "settings": small(name, args)}
        return one(request | {"capture": mode == "require" and args.tp == 1}, mode)

    common.compare_answers(args.models or sorted(bundled - NOT_IN_SGLANG.keys()), ask, args, record, "sglang")


def run_reload(args: Namespace, record: Record) -> None:
    def ask(name: str, path: Path, then: list[str]) -> dict[str, Any]:
        settings = small(name, args) | {"model_path": str(path)}
        return one({"what": "answers", "count": args.count, "settings": settings, "reload": then}, "require")

    common.compare_reloads(args.models or ["sums-gpt-oss-mxfp4", "sums-qwen3-fp8"], ask, args, record)


def run_speed(args: Namespace, record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        Path(folder, "config.json").write_text(json.dumps(common.case_config(args.case, args.layers)))
        running = {}
        for backend in args.backends:
            settings = parallel(args) | {
                "model_path": folder, "load_format": "dummy", "skip_tokenizer_init": True,
                "disable_cuda_graph": not args.graphs, "context_length": PREFILL + 128,
                "chunked_prefill_size": PREFILL, "max_prefill_tokens": PREFILL,
                "max_running_requests": max(BATCHES), "max_total_tokens": 65536, "mem_fraction_static": 0.8,
            }  # fmt: skip
            if backend not in ("polymoe", "auto"):
                settings["moe_runner_backend"] = backend
            request = {"what": "speed", "settings": settings, "case": args.case, "eager": not args.graphs}
            running[pool.submit(one, request, "require" if backend == "polymoe" else "0")] = backend
        common.record_speed(running, args, record)


def main() -> None:
    args = common.arguments(__doc__, "all that SGLang runs")
    if args.what == "one":
        request = json.loads(args.files[0].read_text())
        result = {"answers": answers, "speed": speed}[request["what"]](request)
        args.files[1].write_text(json.dumps(result))
        return
    {"answers": run_answers, "reload": run_reload, "speed": run_speed}[args.what](args, common.recorder(args))


if __name__ == "__main__":
    main()
