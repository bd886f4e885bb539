"""Runs a whole SGLang engine on the CPU: ``python sglang_engine.py JOB`` prints the answers as a line of JSON.

A job, a JSON object: the model's directory, arguments of ``Engine``, and updates of its weights, each with where they
come from ("disk"; "tensors", sent in three parts; "lacking", tensors without one of an expert) and a directory. The
environment comes from :func:`environment`: ``sglang_cpu`` beside this file has what SGLang lacks on a machine without a
GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPTS = ["123+456=", "7+8=", "500-123=", "999+1=", "42-17="]
OPTIONS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "context_length": 64,
    "device": "cpu",
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "grammar_backend": "none",
    "log_level": "info",
    "max_running_requests": 8,
    "max_total_tokens": 1024,
    "mem_fraction_static": 0.8,  # of what other processes may take meanwhile; max_total_tokens limits the cache
    "random_seed": 0,
    "sampling_backend": "pytorch",
    "skip_server_warmup": True,
}


def environment(ranks: int, changes: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that runs an engine of so many ranks, with ``changes``."""
    path = [str(HERE.parents[1] / "src"), str(HERE / "sglang_cpu")]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("POLYMOE", "SGLANG"))},
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks)),
        "SGLANG_USE_CPU_ENGINE": "1",
        **changes,
    }


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Start an engine and ask it, and again after each update of its weights."""
    import sglang

    engine = sglang.Engine(model_path=job["model"], **{**OPTIONS, **job["options"]})
    try:
        found: dict[str, Any] = {"answers": answers(engine)}
        for source, path in job["updates"]:
            found.setdefault("updated", []).append(update(engine, source, path))
            found.setdefault("after", []).append(answers(engine))
    finally:
        engine.shutdown()
    return found


def update(engine: Any, source: str, path: str) -> Any:
    """Update the weights, and return what SGLang says of it."""
    while not engine.flush_cache().success:  # SGLang ends if its scheduler has not yet removed what was answered
        time.sleep(0.1)
    if source == "disk":
        return engine.update_weights_from_disk(path)[:2]
    from safetensors.torch import load_file

    tensors = [pair for file in sorted(Path(path).glob("*.safetensors")) for pair in load_file(file).items()]
    if source == "lacking":
        tensors = [(name, tensor) for name, tensor in tensors if "layers.1.mlp.experts.2.up_proj" not in name]
    found = [True, ""]
    for part in range(3):
        found = engine.update_weights_from_tensor(tensors[part::3], flush_cache=part == 2)
    return list(found)[:2]


def answers(engine: Any) -> list[str]:
    """Greedy answers to :data:`PROMPTS`."""
    return [found["text"] for found in engine.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 8})]


if __name__ == "__main__":
    print("\n" + json.dumps(run(json.loads(sys.argv[1]))), flush=True)
