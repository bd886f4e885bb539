"""What the benchmarks of engines share: cases, weights, questions, traces, processes, records."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "models"
sys.path.insert(0, str(MODELS))

from random_gpt_oss import gpt_oss_20b  # noqa: E402  # type: ignore

from polymoe.backends.cost import cost  # noqa: E402
from polymoe.bench.cases import case_named  # noqa: E402
from polymoe.bench.records import source, utc_now  # noqa: E402
from polymoe.common.atomic import append_line  # noqa: E402
from polymoe.machine import Machine  # noqa: E402

BATCHES = (1, 16, 64, 256)
DECODE_STEPS = 64
EXPERT_MEMORY = "POLYMOE_EXPERT_MEMORY"
PREFILL = 8192
LAYERS = 12
LIMIT_S = 420
"""Most seconds for one engine."""
NOT_STARTED = "not started: --seconds were over"

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
    "gpt-oss-20b": GPT_OSS_120B | {"num_local_experts": 32},
    "deepseek-v4-flash": GPT_OSS_120B
    | {"hidden_size": 4096, "intermediate_size": 2048, "num_local_experts": 256, "num_experts_per_tok": 6},
    "deepseek-v3-tp8": _qwen3(7168, 256, 256, 8, FP8_BLOCK),
    "kimi-k2-tp8": _qwen3(7168, 256, 384, 8, INT4_G32),
    "qwen3-235b-nvfp4": _qwen3(4096, 1536, 128, 8, NVFP4),
}
"""Configs with the experts of a case, in a model whose attention engines run in 16 bits; one that ends in tp8 has the
width of one rank of eight."""
EXPERTS = {name: name for name in CASES} | {"qwen3-235b-nvfp4": "qwen3-235b"}
"""Names of the cases in ``polymoe bench``."""


def case_config(name: str, layers: int) -> dict[str, Any]:
    """The config of a case with so many layers."""
    config = CASES[name] | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][i % 2] for i in range(layers)]
    return config


def sums(count: int) -> list[tuple[str, str]]:
    """Held-out questions of the bundled checkpoints, and their answers."""
    lines = (MODELS / "sums-heldout.jsonl").read_text().splitlines()[:count]
    return [(row["prompt"], row["answer"]) for row in map(json.loads, lines)]


def random_weights(module: Any, *_: Any, **__: Any) -> None:
    """Fill the parameters of one module with :func:`random_weight`."""
    for name, parameter in module.named_parameters(recurse=False):
        random_weight(parameter.data, name=name)


def random_weight(tensor: Any, name: str) -> None:
    """Fill a parameter: as in a trained model, tokens differ, and so do the experts that they choose.

    Engines' own dummy weights, of 1e-3 at most, let a router's bias send all tokens to the same experts.
    """
    import torch

    if tensor.device.type == "meta" or not tensor.numel():
        return
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


def floors(case: str, device: str = "cuda") -> dict[str, float]:
    """Microseconds that a GPU needs at least for one layer's experts, by the ``floor_us_*`` fields of records.

    For weights, inputs and outputs that are moved once, and for the products, with experts chosen uniformly.

    Args:
        case: a key of :data:`CASES`.
        device: as in ``Machine.of``.
    """
    known = case_named(EXPERTS[case])
    problem = known.problem("nvfp4" if case.endswith("nvfp4") else known.format)
    gpu = Machine.of(device).device
    tokens = {**{str(batch): batch for batch in BATCHES}, "prefill": PREFILL}
    return {
        f"floor_us_{name}": round(cost(problem, gpu, count, exponents=(0.0,)).floor_us, 1)
        for name, count in tokens.items()
    }


Kernels = list[tuple[float, float]]
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a profiler's events that take time of the GPU."""


def intervals(trace: dict[str, Any], operation: str) -> tuple[list[Kernels], Kernels]:
    """Kernels of each call of an operation, and all kernels, of a profiler's trace: (start, end) in us.

    Args:
        trace: of ``torch.profiler``, as it exports it.
        operation: how its name begins, or that of a region that was recorded.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in DEVICE_EVENTS]
    by_launch: dict[int, Kernels] = {}
    for event in kernels:
        by_launch.setdefault(event["args"]["correlation"], []).append((event["ts"], event["ts"] + event["dur"]))
    launches = sorted(
        (event["ts"], event["tid"], event["args"]["correlation"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["args"].get("correlation") in by_launch
    )
    operations = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    calls = [event for event in operations if event["name"].startswith(operation)]
    calls.sort(key=lambda event: event["ts"])
    starts = [at for at, *_ in launches]
    inside = [
        [
            kernel
            for _, thread, correlation in launches[
                bisect_left(starts, call["ts"]) : bisect_right(starts, call["ts"] + call["dur"])
            ]
            if thread == call["tid"]
            for kernel in by_launch[correlation]
        ]
        for call in calls
    ]
    return [found for found in inside if found], [(e["ts"], e["ts"] + e["dur"]) for e in kernels]


def busy_us(kernels: Kernels) -> float:
    """Time in which at least one kernel runs: of chained launches, which overlap, no time counts twice."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(kernels):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def busy_ms_by_kernel(trace: dict[str, Any], most: int = 30) -> dict[str, float]:
    """Milliseconds of the kernels that take the most, by the first 80 characters of their names."""
    total: Counter[str] = Counter()
    for event in trace["traceEvents"]:
        if event.get("cat") in DEVICE_EVENTS:
            total[event["name"][:80]] += event["dur"] / 1e3
    return {name: round(ms, 3) for name, ms in total.most_common(most)}


_locks = contextlib.ExitStack()  # a lock is held until the process ends or releases it
atexit.register(_locks.close)


def _lock_file(name: str) -> Any:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    path = Path(tempfile.gettempdir(), f"polymoe-benchmark-{name}-{gpu}")
    return _locks.enter_context(path.open("w", encoding="utf-8"))


_starting, _measuring = _lock_file("starting"), _lock_file("measuring")
MOST_WAIT_S = 90
"""How long one that is to measure waits for others that start or answer."""


def starting() -> None:
    """Say that an engine of this process starts: until :func:`measure_alone`, or the process's end."""
    fcntl.flock(_starting, fcntl.LOCK_SH)


def measure_alone() -> None:
    """Wait for others that measure on this GPU, and some time for others that start: one of them may compile for
    minutes."""
    fcntl.flock(_starting, fcntl.LOCK_UN)
    fcntl.flock(_measuring, fcntl.LOCK_EX)
    until = time.monotonic() + MOST_WAIT_S
    while time.monotonic() < until:
        try:
            fcntl.flock(_starting, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.2)
        else:
            fcntl.flock(_starting, fcntl.LOCK_UN)
            return


CAPTURED = "POLYMOE_BENCHMARK_CAPTURED"


def capture_calls() -> None:
    """Keep each layer's last call of several tokens, with its result, in the folder that CAPTURED names, if it does.

    Calls that a CUDA graph captures have no result yet.
    """
    import torch
    from safetensors.torch import save_file

    from polymoe.layer.packed_layer import PackedLayer

    folder, run = os.environ.get(CAPTURED), PackedLayer.__call__
    if not folder:
        return

    def kept(layer: PackedLayer, module: Any, x: Any, ids: Any, weights: Any) -> Any:
        out = run(layer, module, x, ids, weights)
        if len(x) > 1 and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            found = {"x": x, "ids": ids, "weights": weights, "out": out}
            found = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
            save_file(found, Path(folder, f"{layer.where}.safetensors"))
        return out

    PackedLayer.__call__ = kept  # type: ignore[method-assign, assignment]


def layer_errors(checkpoint: Path) -> dict[str, float | str]:
    """Relative error of each captured call against the reference, by layer; empty where nothing was captured.

    A comparison that fails is the text of its error: the answers are not lost for it.
    """
    try:
        return _layer_errors(checkpoint)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _layer_errors(checkpoint: Path) -> dict[str, float | str]:
    import torch
    from safetensors.torch import load_file

    from polymoe import load_experts
    from polymoe.problem.numerics import relative_error

    found: dict[str, float | str] = {}
    for file in sorted(Path(os.environ.get(CAPTURED) or os.devnull).glob("*.safetensors")):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        call = {name: tensor.to(device) for name, tensor in load_file(file).items()}
        (number,) = re.findall(r"layers\.(\d+)\.", file.name)
        experts = load_experts(
            checkpoint, int(number), device=device, backend="reference", dtype=call["x"].dtype, check=False
        )
        expected = experts(call["x"], call["ids"], call["weights"])
        found[number] = float(f"{relative_error(call['out'], expected):.2e}")
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


def cause(lines: list[str], first: str = "") -> str:
    """The line of a log that says why an engine ended: the first error of a worker, or the last of a single process.

    Args:
        lines: the log.
        first: a regular expression of what stands before a worker's first error: its prefix, or a line.
    """
    errors = [(i, line) for i, line in enumerate(lines) if re.search(r"\b\w*(Error|Exception)\b.*: ", line)]
    begin = next((i for i, line in enumerate(lines) if first and re.search(first, line)), None)
    workers = [line for i, line in errors if begin is not None and i >= begin]
    return (workers[:1] or [line for _, line in errors[-1:]] or lines[-1:] or ["no output"])[0]


def one(
    script: str, request: dict[str, Any], environment: dict[str, str], *, said: str, first_error: str
) -> dict[str, Any]:
    """Run a request in a process of its own, ``script one ...``; its result, or its error.

    Args:
        script: a program with :func:`main`.
        request: what its ``one`` gets; with ``capture`` it has a folder for :func:`capture_calls`.
        environment: variables besides this process's.
        said: a regular expression of lines of the log that belong in the record.
        first_error: as in :func:`cause`.
    """
    if time.monotonic() > _until:
        return {"error": NOT_STARTED}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        asked, told, log, captured = (Path(folder, name) for name in ("request", "result", "log", "captured"))
        asked.write_text(json.dumps(request))
        if request.get("capture"):
            captured.mkdir()
            environment = environment | {CAPTURED: str(captured)}
        command = [sys.executable, script, "one", str(asked), str(told)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
            )
            limit = max(0.0, min(LIMIT_S, _until - time.monotonic()))
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = -1
            with contextlib.suppress(ProcessLookupError):  # whatever it left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = log.read_text(errors="replace").splitlines()
        found = [line for line in lines if re.search(said, line)]
        print("\n".join(line[:300] for line in found[:6]), file=sys.stderr)
        if told.exists():
            return json.loads(told.read_text()) | {"log": found[:4]}
        print("\n".join(line[:1000] for line in lines[-25:]), file=sys.stderr)
        if code == -1:
            return {"error": f"not ready after {limit:.0f} s: {(lines or ['no output'])[-1][-400:]}"}
        return {"error": f"exit status {code}: {cause(lines, first_error)[-500:]}"}


Record = Callable[[dict[str, Any]], None]
_until = math.inf  # when all engines end


def compare_answers(
    names: list[str], ask: Callable[[str, str], dict[str, Any]], args: argparse.Namespace, record: Record, engine: str
) -> None:
    """Record the answers of each checkpoint with polymoe's experts and with the engine's own.

    Args:
        names: of bundled checkpoints, or directories of others.
        ask: called with a name and a value of ``POLYMOE``, in threads; returns a result of :func:`one`.
        args: of the command line.
        record: called for each result when it ends: a run that is cut off loses little.
        engine: its name in records.
    """
    ended: dict[str, dict[str, Any]] = {}
    modes = [mode for backend, mode in (("polymoe", "require"), ("auto", "0")) if backend in args.backends]
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(ask, name, mode): (name, mode) for name in names for mode in modes}
        for future in as_completed(running):
            (name, mode), result = running[future], future.result()
            other, same = ended.setdefault(name, result), None
            if other is not result and "tokens" in other and "tokens" in result:
                same = sum(a == b for a, b in zip(other["tokens"], result["tokens"], strict=True))
            experts = "polymoe" if mode == "require" else engine
            record({"model": Path(name).name, "experts": experts, "same_answers": same} | result)


def record_speed(running: dict[Future[dict[str, Any]], str], args: argparse.Namespace, record: Record) -> None:
    """Record the result of each backend when it ends.

    Args:
        running: the backend's name by what will be a result of :func:`one`.
        args: of the command line.
        record: called for each.
    """
    for future in as_completed(running):
        about = {"case": args.case, "layers": args.layers, "experts": running[future], "eager": not args.graphs}
        record(about | future.result())


def compare_reloads(
    names: list[str], ask: Callable[[str, Path, list[str]], dict[str, Any]], args: argparse.Namespace, record: Record
) -> None:
    """Record the answers after changed weights, the first ones, and the changed ones again, beside a fresh start's.

    Args:
        names: of bundled checkpoints.
        ask: called in threads with a name, where its weights are, and where the weights come from that replace them;
            returns a result of :func:`one`, with ``reloaded``: the tokens after each of these.
        args: of the command line.
        record: called for each checkpoint.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        running = {}
        for name in names:
            path, other = MODELS / name, changed(MODELS / name, Path(folder, Path(name).name))
            reloads = [str(other), str(path), str(other)]
            running[name] = pool.submit(ask, name, path, reloads), pool.submit(ask, name, other, [])
        for name, futures in running.items():
            result, fresh = (future.result() for future in futures)
            if "reloaded" in result and "tokens" in fresh:
                expected = (fresh["tokens"], result["tokens"], fresh["tokens"])
                pairs = zip(result.pop("reloaded"), expected, strict=True)
                result["same_after_reload"] = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs]
                result["changed_answers"] = sum(a != b for a, b in zip(*expected[:2], strict=True))
            elif "error" in fresh:
                result |= {"error": fresh["error"]}
            record({"model": Path(name).name, "experts": "polymoe", "reload": True} | result)


def arguments(description: str | None, runs: str, *more: str) -> argparse.Namespace:
    """Arguments of a benchmark's command line.

    Args:
        description: of the program.
        runs: which checkpoints it asks by default.
        more: what else than answers, reload and speed it runs.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["answers", "reload", *more, "speed", "one"])
    parser.add_argument("files", nargs="*", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where records are appended")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks, each with its own prompts; vLLM only")
    parser.add_argument("--ep", action="store_true", help="expert instead of tensor parallel")
    parser.add_argument("--settings", type=json.loads, default={}, help="further arguments of the engine, as JSON")
    parser.add_argument("--models", nargs="+", help=f"directories under models/; without it {runs}")
    parser.add_argument("--case", choices=CASES, default="gpt-oss-120b")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of a case's model (default: %(default)s)")
    parser.add_argument(
        "--backends", nargs="+", default=["polymoe", "auto"], help="polymoe, auto, or, for speed, the engine's names"
    )
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs, and torch.compile in vLLM")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=list(BATCHES),
        help="of decode steps (default: %(default)s); vLLM only",
    )
    parser.add_argument(
        "--requests", type=int, default=0, help="with --graphs: where a GPU's time goes with so many; vLLM only"
    )
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time on the same GPU")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="engines that run longer, all together, are ended"
    )
    parser.add_argument("--count", type=int, default=100, help="questions to each checkpoint")
    parser.add_argument("--again", type=int, default=0, help="how often to ask all questions again; vLLM only")
    parser.add_argument("--sleep", action="store_true", help="ask again after sleep mode; vLLM only")
    parser.add_argument("--commit", help="of the code, where git does not know it")
    args = parser.parse_args()
    global _until
    _until = time.monotonic() + args.seconds
    return args


def _batch_invariant(args: argparse.Namespace) -> bool:
    asked = args.settings.get("enable_deterministic_inference")
    return bool(asked) or os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0"


def recorder(args: argparse.Namespace) -> Record:
    """What prints each record, and appends it to the file that was asked for."""
    about = {
        "date": utc_now(),
        "commit": args.commit or source(),
        "command": " ".join(sys.argv),
        "tp": args.tp,
        "ep": args.ep,
        **({"dp": args.dp} if args.dp > 1 else {}),
        **({"batch_invariant": True} if _batch_invariant(args) else {}),
        **({"expert_memory": os.environ[EXPERT_MEMORY]} if EXPERT_MEMORY in os.environ else {}),
    }

    def record(row: dict[str, Any]) -> None:
        print(json.dumps({k: v for k, v in row.items() if k not in ("tokens", "command", "log")}), flush=True)
        if args.out and row.get("error") != NOT_STARTED:
            append_line(args.out, json.dumps(about | row))

    return record
