"""vLLM with polymoe and without it, on the GPUs of this machine: answers and speed.

    python benchmarks/engines/vllm_run.py answers --out FILE [--tp 2] [--ep] [--models NAME ...]
    python benchmarks/engines/vllm_run.py reload --out FILE [--models NAME ...]
    python benchmarks/engines/vllm_run.py speed --out FILE [--case NAME] [--backends polymoe marlin ...]

``answers`` asks each bundled checkpoint that vLLM can run for sums, once with ``POLYMOE=require`` and once with
``POLYMOE=0``; the record of the one that ends last has the number of equal answers. ``reload`` starts each with CUDA
graphs, reloads changed weights, the first ones, and the changed ones again, and compares the answers with those of a
fresh start. ``speed`` runs some layers of real
sizes with random weights, whose router chooses experts about uniformly: for each backend the time to load, the peak of
memory while loading, and the time inside the experts' operation of one decode step by batch and of one prefill of 8,192
tokens (``moe_us_*``: time in which at least one of its kernels runs, median over layers and steps). With ``--graphs``
instead, under CUDA graphs, output tokens per second and the GPU's time for one decode step (``step_us_*``). Each engine
runs in a process of its own; one that fails is a record with its error. Records are JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "models"
sys.path.insert(0, str(MODELS))

from random_gpt_oss import gpt_oss_20b  # noqa: E402

from polymoe.atomic import append_line  # noqa: E402
from polymoe.bench.records import source, utc_now  # noqa: E402

BATCHES = (1, 16, 64, 256)
DECODE_STEPS = 64
PREFILL = 8192
LAYERS = 12
LIMIT_S = 420
"""Most seconds for one engine."""

# A small vocabulary: neither embeddings nor sampling are what is compared.
GPT_OSS_120B: dict[str, Any] = gpt_oss_20b(layers=LAYERS, experts=128) | {
    "eos_token_id": 2,
    "max_position_embeddings": 16384,
    "pad_token_id": 0,
    "vocab_size": 32768,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "intermediate_size": 4096,
    "max_position_embeddings": 16384,
    "max_window_layers": LAYERS,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}
FP8_BLOCK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
INT4_G32 = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "group_size": 32, "num_bits": 4, "observer": "minmax", "strategy": "group", "symmetric": True,
                "type": "int", "dynamic": False, "actorder": None,
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
NVFP4 = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}


def _qwen3(hidden: int, intermediate: int, experts: int, top_k: int, quantization: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "quantization_config": quantization,
    }
    return QWEN3 | sizes


CASES = {
    "gpt-oss-120b": GPT_OSS_120B,
    "deepseek-v4-flash": GPT_OSS_120B
    | {"hidden_size": 4096, "intermediate_size": 2048, "num_local_experts": 256, "num_experts_per_tok": 6},
    "deepseek-v3-tp8": _qwen3(7168, 256, 256, 8, FP8_BLOCK),
    "kimi-k2-tp8": _qwen3(7168, 256, 384, 8, INT4_G32),
    "qwen3-235b-nvfp4": _qwen3(4096, 1536, 128, 8, NVFP4),
}
"""Configs with the experts of a case, in a model whose attention vLLM runs in 16 bits; a case that ends in tp8 has the
width of one rank of eight."""

MODEL_SETTINGS: dict[str, dict[str, Any]] = {"sums-llama-4-fp8": {"language_model_only": True}}
"""What a bundled checkpoint needs of vLLM: Llama-4's has no image processor."""
NOT_IN_VLLM = {
    "sums-deepseek-v3-fp8": "an FP8 linear layer has 96 inputs, and vLLM quantizes x in groups of 128",
    "sums-deepseek-v4-mxfp4": "vLLM's attention has kernels for heads of 512 only, the model's have 64",
}
"""Bundled checkpoints that vLLM cannot run, with or without polymoe."""


def sums(count: int) -> list[tuple[str, str]]:
    """Held-out questions of the bundled checkpoints, and their answers."""
    lines = (MODELS / "sums-heldout.jsonl").read_text().splitlines()[:count]
    return [(row["prompt"], row["answer"]) for row in map(json.loads, lines)]


def random_weights(module: Any, *_: Any, **__: Any) -> None:
    """Fill the parameters of one module: as in a trained model, tokens differ, and so do the experts that they choose.

    vLLM's own dummy weights, of 1e-3 at most, let a router's bias send all tokens to the same experts.
    """
    import torch

    for name, parameter in module.named_parameters(recurse=False):
        tensor = parameter.data
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        if "bias" in name or "sink" in name or "g_idx" in name or "indices" in name or "shape" in name:
            tensor.zero_()
        elif "scale" in name:
            tensor.fill_(120 if tensor.dtype == torch.uint8 else 2.0**-7)  # both are 2**-7
        elif tensor.dim() == 1:
            tensor.fill_(1)  # a norm's
        elif not tensor.dtype.is_floating_point:
            tensor.view(torch.uint8).random_(0, 256)
        elif tensor.dtype.itemsize == 1:
            for row in tensor:
                row.copy_(torch.randn(row.shape, device=row.device))
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)


def engine(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A vLLM engine in this process (with one GPU), the seconds until it is ready, and the peak while loading."""
    import torch
    import vllm  # pyright: ignore

    found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__}

    def measured(load: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            result = load(self, *args, **kwargs)
            torch.cuda.synchronize()
            found["load_s"] = round(time.perf_counter() - start, 2)
            found["load_peak_bytes"] = torch.cuda.max_memory_allocated()
            found["loaded_bytes"] = torch.cuda.memory_allocated()
            return result

        return wrapper

    for name in ("gpu_model_runner", "gpu.model_runner"):  # which of them vLLM takes depends on version and model
        with contextlib.suppress(ImportError):
            runner = importlib.import_module(f"vllm.v1.worker.{name}").GPUModelRunner
            runner.load_model = measured(runner.load_model)
    dummy_loader = importlib.import_module("vllm.model_executor.model_loader.dummy_loader")
    dummy_loader.initialize_dummy_weights = random_weights  # called for each module
    start = time.perf_counter()
    llm = vllm.LLM(seed=0, disable_log_stats=True, enable_prefix_caching=False, **settings)
    found["ready_s"] = round(time.perf_counter() - start, 1)
    found["device"] = torch.cuda.get_device_name()
    return llm, found


def answers(request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of sums, and how many are right; then again after each reload of other weights."""
    from vllm import SamplingParams  # pyright: ignore

    llm, found = engine(request["settings"])
    questions = sums(request["count"])
    tokenizer = llm.get_tokenizer()
    prompts = [{"prompt_token_ids": tokenizer(question)["input_ids"]} for question, _ in questions]

    def ask() -> list[list[int]]:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outputs]

    tokens = ask()
    texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]
    found |= {"right": sum(text == answer for text, (_, answer) in zip(texts, questions, strict=True))}
    reloaded = []
    for path in request.get("reload", ()):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        reloaded.append(ask())
    return found | {"tokens": tokens, "of": len(texts)} | ({"reloaded": reloaded} if reloaded else {})


def intervals(trace: dict[str, Any]) -> tuple[list[list[tuple[float, float]]], list[tuple[float, float]]]:
    """Kernels of each call of the experts' operation, and all kernels, of a profiler's trace: (start, end) in us."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [event for event in events if event.get("cat") in device]
    by_launch: dict[int, list[tuple[float, float]]] = {}
    for event in kernels:
        by_launch.setdefault(event["args"]["correlation"], []).append((event["ts"], event["ts"] + event["dur"]))
    launches = sorted(
        (event["ts"], event["tid"], event["args"]["correlation"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["args"].get("correlation") in by_launch
    )
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    calls = [event for event in operations if event["name"].startswith("vllm::moe_forward")]
    calls.sort(key=lambda event: event["ts"])
    inside = [
        [
            kernel
            for at, thread, correlation in launches
            if thread == call["tid"] and call["ts"] <= at <= call["ts"] + call["dur"]
            for kernel in by_launch[correlation]
        ]
        for call in calls
    ]
    return [found for found in inside if found], [(e["ts"], e["ts"] + e["dur"]) for e in kernels]


def busy_us(kernels: list[tuple[float, float]]) -> float:
    """Time in which at least one kernel runs: of chained launches, which overlap, no time counts twice."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(kernels):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def speed(request: dict[str, Any]) -> dict[str, Any]:
    """With ``eager`` microseconds in the experts' operation, else tokens per second and microseconds of a step."""
    import torch
    from vllm import SamplingParams  # pyright: ignore

    llm, found = engine(request["settings"])
    generator = torch.Generator().manual_seed(0)

    def generate(batch: int, prompt: int, steps: int) -> float:
        ids = torch.randint(100, 30000, (batch, prompt), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
        return time.perf_counter() - start

    def traced(batch: int, prompt: int, steps: int) -> Any:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            generate(batch, prompt, steps)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            return intervals(json.loads(Path(folder, "trace.json").read_text()))

    generate(1, 16, 4)
    if request["eager"]:
        for batch in BATCHES:
            generate(batch, 16, 3)
            calls, _ = traced(batch, 16, 5)
            times = sorted(map(busy_us, calls[LAYERS:]))  # the first are the prompts' own
            found[f"moe_us_{batch}"] = round(times[len(times) // 2], 1)
        generate(1, PREFILL, 1)
        times = sorted(map(busy_us, traced(1, PREFILL, 1)[0]))
        found["moe_us_prefill"] = round(times[len(times) // 2], 1)
        return found
    for batch in BATCHES:
        generate(batch, 16, 4)
        times = [generate(batch, 16, 1 + DECODE_STEPS) - generate(batch, 16, 1) for _ in range(5)]
        found[f"decode_tokens_per_s_{batch}"] = round(batch * DECODE_STEPS / sorted(times)[2], 1)
        few, many = (busy_us(traced(batch, 16, steps)[1]) for steps in (2, 18))
        found[f"step_us_{batch}"] = round((many - few) / 16, 1)
    times = [generate(1, PREFILL, 1) for _ in range(3)]
    found["prefill_tokens_per_s"] = round(PREFILL / sorted(times)[1])
    return found


def changed(source: Path, target: Path) -> Path:
    """The same model with the rows of each down projection of layer 2's experts in reverse order."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name, value in tensors.items():
            if "layers.2" in name and name.endswith(("down_proj_blocks", "down_proj.weight", "w2.weight")):
                axis = 1 if value.dim() > 2 else 0
                bytes_ = value.view(torch.uint8) if value.element_size() == 1 else value
                tensors[name] = bytes_.flip(axis).view(value.dtype).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def cause(lines: list[str]) -> str:
    """The line of a log that says why an engine ended: the first error of a worker, or the last of a single process."""
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b.*: ", line)]
    workers = [line for line in errors if line.startswith(("(Worker", "(EngineCore"))]
    return (workers[:1] or errors[-1:] or lines[-1:] or ["no output"])[0]


def one(request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Run a request in a process of its own; its result, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        asked, told, log = (Path(folder, name) for name in ("request", "result", "log"))
        asked.write_text(json.dumps(request))
        command = [sys.executable, __file__, "one", str(asked), str(told)]
        with log.open("wb") as output:
            try:
                code = subprocess.run(
                    command, env=os.environ | environment, stdout=output, stderr=output, timeout=LIMIT_S, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        lines = log.read_text(errors="replace").splitlines()
        said = [line for line in lines if "polymoe" in line.lower() or "MoE backend" in line]
        print("\n".join(line[:300] for line in said[:6]), file=sys.stderr)
        if told.exists():
            return json.loads(told.read_text()) | {"log": said[:4]}
        print("\n".join(lines[-25:]), file=sys.stderr)
        return {"error": f"exit status {code}: {cause(lines)[-500:]}"}


Record = Callable[[dict[str, Any]], None]


def small(name: str | Path, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Settings of an engine with a bundled checkpoint."""
    return {
        **parallel(args),
        "model": str(MODELS / name),
        "max_model_len": 64,
        "kv_cache_memory_bytes": 2**30,
        "max_num_seqs": 64,
        "attention_backend": "TRITON_ATTN",
        **MODEL_SETTINGS.get(Path(name).name, {}),
        **more,
    }


def parallel(args: argparse.Namespace) -> dict[str, Any]:
    return {"tensor_parallel_size": args.tp, "enable_expert_parallel": args.ep, "disable_custom_all_reduce": True}


def environment(args: argparse.Namespace, polymoe: str) -> dict[str, str]:
    # Latent attention has kernels for the sizes of released models only.
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if args.tp == 1 else {}
    return one_process | {"POLYMOE": polymoe, "VLLM_MLA_DISABLE": "1"}


def run_answers(args: argparse.Namespace, record: Record) -> None:
    bundled = {p.name for p in MODELS.glob("sums-*") if p.is_dir()}
    names = args.models or sorted(bundled - NOT_IN_VLLM.keys())
    ended: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {}
        for name in names:
            settings = small(name, args, enforce_eager=not args.graphs)
            for mode in ("require", "0"):
                request = {"what": "answers", "count": 100, "settings": settings}
                running[pool.submit(one, request, environment(args, mode))] = name, mode
        for future in as_completed(running):  # each is recorded when it ends: a run that is cut off loses little
            (name, mode), result = running[future], future.result()
            other, same = ended.setdefault(name, result), None
            if other is not result and "tokens" in other and "tokens" in result:
                same = sum(a == b for a, b in zip(other["tokens"], result["tokens"], strict=True))
            experts = "polymoe" if mode == "require" else "vllm"
            record({"model": name, "experts": experts, "same_answers": same} | result)


def run_reload(args: argparse.Namespace, record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        running = {}
        for name in args.models or ("sums-gpt-oss-mxfp4", "sums-qwen3-fp8"):
            path, other = MODELS / name, changed(MODELS / name, Path(folder, name))
            running[name] = [
                pool.submit(
                    one,
                    {"what": "reload", "count": 100, "settings": small(first, args), "reload": [str(p) for p in then]},
                    environment(args, "require"),
                )
                for first, then in ((path, (other, path, other)), (other, ()))
            ]
        for name, futures in running.items():
            result, fresh = (future.result() for future in futures)
            if "reloaded" in result and "tokens" in fresh:
                expected = (fresh["tokens"], result["tokens"], fresh["tokens"])
                pairs = zip(result.pop("reloaded"), expected, strict=True)
                result["same_after_reload"] = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs]
                result["changed_answers"] = sum(a != b for a, b in zip(*expected[:2], strict=True))
            elif "error" in fresh:
                result |= {"error": fresh["error"]}
            record({"model": name, "experts": "polymoe", "reload": True} | result)


def run_speed(args: argparse.Namespace, record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CASES[args.case]))
        for backend in args.backends:
            settings = parallel(args) | {
                "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": not args.graphs,
                "max_model_len": PREFILL + 64, "max_num_batched_tokens": PREFILL, "max_num_seqs": max(BATCHES),
                "gpu_memory_utilization": 0.8,
            }  # fmt: skip
            if args.graphs:
                settings["compilation_config"] = {"cudagraph_capture_sizes": list(BATCHES)}
            if backend not in ("polymoe", "auto"):
                settings["moe_backend"] = backend
            request = {"what": "speed", "settings": settings, "eager": not args.graphs}
            result = one(request, environment(args, "require" if backend == "polymoe" else "0"))
            record({"case": args.case, "layers": LAYERS, "experts": backend, "eager": not args.graphs} | result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["answers", "reload", "speed", "one"])
    parser.add_argument("files", nargs="*", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where records are appended")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true", help="expert instead of tensor parallel")
    parser.add_argument("--models", nargs="+", help="directories under models/; without it all that vLLM runs")
    parser.add_argument("--case", choices=CASES, default="gpt-oss-120b")
    parser.add_argument("--backends", nargs="+", default=["polymoe", "auto"], help="polymoe, auto, or names of vLLM's")
    parser.add_argument("--graphs", action="store_true", help="with torch.compile and CUDA graphs")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time on the same GPU, but for speed")
    parser.add_argument("--commit", help="of the code, where git does not know it")
    args = parser.parse_args()
    if args.what == "one":
        request = json.loads(args.files[0].read_text())
        result = {"answers": answers, "reload": answers, "speed": speed}[request["what"]](request)
        args.files[1].write_text(json.dumps(result))
        return
    about = {
        "date": utc_now(),
        "commit": args.commit or source(),
        "command": " ".join(sys.argv),
        "tp": args.tp,
        "ep": args.ep,
    }

    def record(row: dict[str, Any]) -> None:
        print(json.dumps({k: v for k, v in row.items() if k not in ("tokens", "command", "log")}), flush=True)
        if args.out:
            append_line(args.out, json.dumps(about | row))

    {"answers": run_answers, "reload": run_reload, "speed": run_speed}[args.what](args, record)


if __name__ == "__main__":
    main()
