"""vLLM with polymoe and without it, on the GPUs of this machine: answers and speed.

    python benchmarks/engines/vllm_run.py answers --out FILE [--tp 2] [--dp 2] [--ep] [--models NAME ...]
    python benchmarks/engines/vllm_run.py reload --out FILE [--models NAME ...]
    python benchmarks/engines/vllm_run.py pair --out FILE [--models NAME ...]
    python benchmarks/engines/vllm_run.py speed --out FILE [--case NAME] [--backends polymoe marlin ...]

``answers`` asks each bundled checkpoint that vLLM can run for sums, once with ``POLYMOE=require`` and once with
``POLYMOE=0``; the record of the one that ends last has the number of equal answers. On one rank it also compares each
layer's last call of several tokens with the reference (``layer_errors``: relative error by layer). With ``--again`` it
asks all questions so often again, and counts the answers that stay the same; where vLLM moves experts between ranks
(EPLB), also the places that hold another expert after each time (``moved``). With ``--sleep``, it sends the engine to
sleep on levels 1, 2 and 1, and counts the equal answers after each time. ``reload`` starts each with CUDA graphs,
reloads changed weights, the first ones, and the changed ones again, and compares the answers with those of a fresh
start. ``pair`` fills the cache in one engine and continues in another, on the same GPU, and counts the continuations
that are those of one engine that does both; ``margins_where_others`` has by how much that engine's token was more
likely than the next (logarithms) where another came. ``speed`` runs some layers of real sizes with random weights,
whose router chooses experts about uniformly: for each backend the time to load, the peak of memory while loading, and
the time inside the experts' operation of one decode step by batch and of one prefill of 8,192 tokens (``moe_us_*``:
time in which at least one of its kernels runs, median over layers and steps). With ``--graphs`` instead, under CUDA
graphs, output tokens per second and the GPU's time for one decode step (``step_us_*``), or with ``--requests`` seconds
for so many prompts of 1,024 tokens at once, 256 tokens out (``seconds``), how long the GPU works meanwhile
(``busy_s``), and the time of each kernel (``kernels_ms``). Each engine runs in a process of its own; one that fails is
a record with its error. With ``--dp``, ``answers`` starts as many processes, each a data-parallel rank with a GPU and
prompts of its own. Records are JSON lines.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engines.common import DECODE_STEPS, MODELS, PREFILL, Record, busy_us

from engines import common

MODEL_SETTINGS: dict[str, dict[str, Any]] = {"sums-llama-4-fp8": {"language_model_only": True}}
"""What a bundled checkpoint needs of vLLM: Llama-4's has no image processor."""
NOT_IN_VLLM = {
    "sums-deepseek-v3-fp8": "an FP8 linear layer has 96 inputs, and vLLM quantizes x in groups of 128",
    "sums-deepseek-v4-mxfp4": "vLLM's attention has kernels for heads of 512 only, the model's have 64",
}
"""Bundled checkpoints that vLLM cannot run, with or without polymoe."""


def engine(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A vLLM engine in this process (with one GPU), the seconds until it is ready, and the peak while loading."""
    import torch
    import vllm  # pyright: ignore

    common.starting()
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
    dummy_loader: Any = importlib.import_module("vllm.model_executor.model_loader.dummy_loader")
    dummy_loader.initialize_dummy_weights = common.random_weights  # called for each module, until vLLM 0.26
    theirs = getattr(dummy_loader, "initialize_single_dummy_weight", None)  # since 0.33 for each tensor, buffers too

    def fill(tensor: torch.Tensor, name: str) -> None:
        if isinstance(tensor, torch.nn.Parameter):
            common.random_weight(tensor.data, name)
        elif theirs:
            theirs(tensor, name=name)

    dummy_loader.initialize_single_dummy_weight = fill
    start = time.perf_counter()
    llm = vllm.LLM(seed=0, disable_log_stats=True, enable_prefix_caching=False, **settings)
    found["ready_s"] = round(time.perf_counter() - start, 1)
    found["device"] = torch.cuda.get_device_name()
    return llm, found


def answers(request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of sums, and how many are right; then again after each reload of other weights."""
    from vllm import SamplingParams  # pyright: ignore

    common.capture_calls()
    llm, found = engine(request["settings"])
    questions = common.sums(request["count"])[3 * request.get("rank", 0) :]  # ranks have other numbers of prompts
    tokenizer = llm.get_tokenizer()
    prompts = [{"prompt_token_ids": tokenizer(question)["input_ids"]} for question, _ in questions]

    def ask() -> list[list[int]]:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outputs]

    tokens = ask()
    texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]
    found |= {"right": sum(text == answer for text, (_, answer) in zip(texts, questions, strict=True))}
    if request.get("capture"):
        found["layer_errors"] = common.layer_errors(Path(request["settings"]["model"]))
    held, again, moves = [], [], request["settings"].get("enable_eplb")
    for _ in range(request.get("again", 0)):
        held += llm.collective_rpc(experts_held) if moves else []
        again.append(sum(a == b for a, b in zip(ask(), tokens, strict=True)))
    if again:
        found["same_again"] = again
    if moves:
        held += llm.collective_rpc(experts_held)
        found["moved"] = [int((a != b).sum()) for a, b in itertools.pairwise(held)]
    for level in request.get("sleep", ()):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:  # weights were not kept
            llm.collective_rpc("reload_weights")
        equal = sum(a == b for a, b in zip(ask(), tokens, strict=True))
        found.setdefault("same_after_sleep", []).append(equal)
    reloaded = []
    for path in request.get("reload", ()):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        reloaded.append(ask())
    return found | {"tokens": tokens, "of": len(texts)} | ({"reloaded": reloaded} if reloaded else {})


def experts_held(worker: Any) -> Any:
    """The expert of each place of each layer, of an engine that moves experts."""
    (state,) = worker.model_runner.eplb_state.model_states.values()
    return state.physical_to_logical_map.cpu().clone()


def continued(request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens after prompts of three blocks of the cache and two tokens more, of several sums each; by how much
    each is more likely than the next one (logarithms)."""
    from vllm import SamplingParams  # pyright: ignore

    llm, found = engine(request["settings"])
    tokenizer = llm.get_tokenizer()
    ids = [token for question, _ in common.sums(request["count"]) for token in tokenizer(question)["input_ids"]]
    prompts = [{"prompt_token_ids": ids[i : i + 50]} for i in range(0, len(ids) - 50, 25)]
    params = SamplingParams(temperature=0, max_tokens=request["steps"], logprobs=2)
    outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    likely = [[sorted((t.logprob for t in step.values()), reverse=True) for step in out.logprobs] for out in outputs]
    found["margins"] = [[round(first - second, 4) for first, second, *_ in steps] for steps in likely]
    return found | {"tokens": [list(out.token_ids) for out in outputs], "of": len(prompts)}


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

    def trace_of(batch: int, prompt: int, steps: int) -> dict[str, Any]:
        kinds = [torch.profiler.ProfilerActivity.CUDA] if request["requests"] else torch.profiler.supported_activities()
        with torch.profiler.profile(activities=list(kinds)) as profile:
            generate(batch, prompt, steps)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            return json.loads(Path(folder, "trace.json").read_text())

    def traced(batch: int, prompt: int, steps: int) -> tuple[list[common.Kernels], common.Kernels]:
        return common.intervals(trace_of(batch, prompt, steps), "vllm::moe_forward")

    for batch in request["batches"]:  # kernels are compiled now, while other engines start
        generate(batch, 16, 4)
    generate(1, PREFILL, 1)
    common.measure_alone()
    if request["eager"]:
        for batch in request["batches"]:
            calls, _ = traced(batch, 16, 5)
            times = sorted(map(busy_us, calls[request["layers"] :]))  # the first are the prompts' own
            found[f"moe_us_{batch}"] = round(times[len(times) // 2], 1)
        times = sorted(map(busy_us, traced(1, PREFILL, 1)[0]))
        found["moe_us_prefill"] = round(times[len(times) // 2], 1)
        return found | common.floors(request["case"])
    if requests := request["requests"]:
        for _ in range(2):  # the first compiles
            found["seconds"] = round(generate(requests, 1024, 256), 3)
        trace = trace_of(requests, 1024, 256)
        found["busy_s"] = round(busy_us(common.intervals(trace, "vllm::moe_forward")[1]) / 1e6, 3)
        return found | {"requests": requests, "kernels_ms": common.busy_ms_by_kernel(trace)}
    for batch in request["batches"]:
        times = [generate(batch, 16, 1 + DECODE_STEPS) - generate(batch, 16, 1) for _ in range(5)]
        found[f"decode_tokens_per_s_{batch}"] = round(batch * DECODE_STEPS / sorted(times)[2], 1)
        few, many = (busy_us(traced(batch, 16, steps)[1]) for steps in (2, 18))
        found[f"step_us_{batch}"] = round((many - few) / 16, 1)
    times = [generate(1, PREFILL, 1) for _ in range(3)]
    found["prefill_tokens_per_s"] = round(PREFILL / sorted(times)[1])
    return found


def one(request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Run a request in a process of its own; its result, or its error."""
    said = r"(?i)polymoe|(?-i:MoE backend|External Cache Hit)"
    first_error = r"^\((Worker|EngineCore)\S* .*\b\w*(Error|Exception)\b.*: "
    return common.one(__file__, request, environment, said=said, first_error=first_error)


def small(name: str | Path, args: Namespace, **more: Any) -> dict[str, Any]:
    """Settings of an engine with a bundled checkpoint."""
    return {
        **parallel(args),
        "model": str(MODELS / name),
        "max_model_len": 64,
        "kv_cache_memory_bytes": 2**30,
        "gpu_memory_utilization": 0.2,  # what must be free at start, as others may share the GPU
        "max_num_seqs": 64,
        "attention_backend": "TRITON_ATTN",
        **MODEL_SETTINGS.get(Path(name).name, {}),
        **more,
        **args.settings,
    }


def parallel(args: Namespace) -> dict[str, Any]:
    return {"tensor_parallel_size": args.tp, "enable_expert_parallel": args.ep, "disable_custom_all_reduce": True}


def environment(args: Namespace, polymoe: str) -> dict[str, str]:
    # Latent attention has kernels for the sizes of released models only.
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if args.tp == 1 else {}
    # DeepGEMM would compile its kernels for FP8 linear layers of every size before the first answer.
    return one_process | {"POLYMOE": polymoe, "VLLM_MLA_DISABLE": "1", "VLLM_DEEP_GEMM_WARMUP": "skip"}


def data_parallel(args: Namespace, rank: int, port: int) -> dict[str, str]:
    """Variables of one of several data-parallel ranks, each a process with a GPU."""
    if args.dp == 1:
        return {}
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(args.dp),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


def run_answers(args: Namespace, record: Record) -> None:
    bundled = {p.parent.name for p in MODELS.glob("sums-*/config.json") if "quantization_config" in p.read_text()}

    def ask(name: str, mode: str) -> dict[str, Any]:
        settings = small(name, args, enforce_eager=not args.graphs)
        request = {"what": "answers", "count": args.count, "settings": settings, "again": args.again}
        if args.sleep:
            settings["enable_sleep_mode"], request["sleep"] = True, [1, 2, 1]
        request["capture"] = mode == "require" and args.tp == args.dp == 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def rank(number: int) -> dict[str, Any]:
            return one(request | {"rank": number}, environment(args, mode) | data_parallel(args, number, port))

        with ThreadPoolExecutor(args.dp) as pool:
            first, *others = pool.map(rank, range(args.dp))
        error = next((found["error"] for found in others if "error" in found), None)
        if error and "error" not in first:
            return {"error": error}
        return first | ({"other_ranks": [f"{o['right']} of {o['of']}" for o in others]} if others and not error else {})

    common.compare_answers(args.models or sorted(bundled - NOT_IN_VLLM.keys()), ask, args, record, "vllm")


def run_reload(args: Namespace, record: Record) -> None:
    def ask(name: str, path: Path, then: list[str]) -> dict[str, Any]:
        settings = small(name, args) | {"model": str(path)}
        request = {"what": "reload", "count": args.count, "settings": settings, "reload": then}
        return one(request, environment(args, "require"))

    common.compare_reloads(args.models or ["sums-gpt-oss-mxfp4", "sums-qwen3-fp8"], ask, args, record)


def run_pair(args: Namespace, record: Record) -> None:
    def ask(name: str, mode: str, steps: int, **settings: Any) -> dict[str, Any]:
        settings = small(name, args, enforce_eager=not args.graphs, block_size=16, **settings)
        request = {"what": "pair", "count": args.count, "settings": settings, "steps": steps}
        return one(request, environment(args, mode))

    def pair(name: str, mode: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            shared = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": folder}}
            filled = ask(name, mode, 1, kv_transfer_config=shared | {"kv_role": "kv_producer"})
            files = len(list(Path(folder).glob("*/*.safetensors")))
            result = ask(name, mode, 8, kv_transfer_config=shared | {"kv_role": "kv_consumer"})
        alone = ask(name, mode, 8)
        errors = [found["error"] for found in (filled, result, alone) if "error" in found]
        if errors:
            return {"error": errors[0]}
        margins, parted = alone.pop("margins"), []
        for ours, theirs, margin in zip(result["tokens"], alone["tokens"], margins, strict=True):
            parted += next(([m] for a, b, m in zip(ours, theirs, margin, strict=False) if a != b), [])
        same = sum(a == b for a, b in zip(result["tokens"], alone["tokens"], strict=True))
        del result["margins"]
        return result | {"files": files, "same_as_one": same, "margins_where_others": parted}

    for name in args.models or ["sums-qwen3-fp8"]:
        for experts, mode in (("polymoe", "require"), ("vllm", "0")):
            record({"model": Path(name).name, "experts": experts, "pair": True} | pair(name, mode))


def run_speed(args: Namespace, record: Record) -> None:
    # One engine takes what memory is left for its cache, several a share that is enough.
    memory = {"kv_cache_memory_bytes": 2**31, "gpu_memory_utilization": 0.1} if args.jobs > 1 else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        Path(folder, "config.json").write_text(json.dumps(common.case_config(args.case, args.layers)))
        running = {}
        for backend in args.backends:
            settings = {
                "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": not args.graphs,
                "max_model_len": PREFILL + 64, "max_num_batched_tokens": PREFILL, "max_num_seqs": max(args.batches),
                "gpu_memory_utilization": 0.8, **memory, **parallel(args), **args.settings,
            }  # fmt: skip
            if args.graphs:
                sizes = list(range(8, max(args.batches) + 1, 8)) if args.requests else args.batches
                settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
            if backend not in ("polymoe", "auto"):
                settings["moe_backend"] = backend
            request = {"what": "speed", "settings": settings, "case": args.case}
            request |= {
                "layers": args.layers,
                "eager": not args.graphs,
                "batches": args.batches,
                "requests": args.requests,
            }
            mode = "require" if backend == "polymoe" else "0"
            running[pool.submit(one, request, environment(args, mode))] = backend
        common.record_speed(running, args, record)


def main() -> None:
    args = common.arguments(__doc__, "all that vLLM runs", "pair")
    if args.what == "one":
        request = json.loads(args.files[0].read_text())
        result = {"answers": answers, "reload": answers, "pair": continued, "speed": speed}[request["what"]](request)
        args.files[1].write_text(json.dumps(result))
        return
    runs = {"answers": run_answers, "reload": run_reload, "pair": run_pair, "speed": run_speed}
    runs[args.what](args, common.recorder(args))


if __name__ == "__main__":
    main()
