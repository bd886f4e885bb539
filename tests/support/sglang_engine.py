"""Runs a whole SGLang engine on the CPU: ``python sglang_engine.py JOB`` prints the answers as a line of JSON.

A job, a JSON object: the model's directory, arguments of ``Engine``, and a directory to update weights from. The
environment comes from :func:`environment`: ``sglang_cpu`` beside this file has what SGLang lacks on a machine without a
GPU.
"""

from __future__ import annotations

import json
import os
import sys
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
    "mem_fraction_static": 0.1,
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
    """Start an engine and ask it; update its weights, and ask it again."""
    import sglang

    engine = sglang.Engine(model_path=job["model"], **{**OPTIONS, **job["options"]})
    try:
        found: dict[str, Any] = {"answers": answers(engine)}
        if job["update"]:
            found["updated"] = engine.update_weights_from_disk(job["update"])
            found["after"] = answers(engine)
    finally:
        engine.shutdown()
    return found


def answers(engine: Any) -> list[str]:
    """Greedy answers to :data:`PROMPTS`."""
    return [found["text"] for found in engine.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 8})]


if __name__ == "__main__":
    print("\n" + json.dumps(run(json.loads(sys.argv[1]))), flush=True)
