"""A plug-in of SGLang for its benchmark: random weights, what loading takes, regions for the profiler, and
captured calls of layers.

The entry point ``sglang.srt.plugins`` of :func:`install` names :func:`register`, which SGLang calls in each of its
processes. ``POLYMOE_BENCHMARK_LOADED`` names a file for what loading took, one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LOADED = "POLYMOE_BENCHMARK_LOADED"
EXPERTS, TOP_K = "benchmark::experts", "benchmark::top_k"


def install(folder: Path) -> list[str]:
    """Write the plug-in's distribution into a folder; what must be on PYTHONPATH."""
    info = folder / "polymoe_benchmark-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polymoe_benchmark\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\npolymoe_benchmark = sglang_plugin:register\n")
    return [str(folder), str(Path(__file__).resolve().parent)]


def register() -> None:
    """Register the hooks of this process."""
    from engines.common import capture_calls
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore

    capture_calls()
    layer = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward"
    HookRegistry.register(layer, _region(EXPERTS), HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.moe.topk.TopK.forward", _region(TOP_K), HookType.AROUND)
    HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", _fill, HookType.REPLACE)
    load = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(load, _measured, HookType.AROUND)


def _region(name: str) -> Callable[..., Any]:
    from torch.profiler import record_function

    def forward(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        with record_function(f"{name} {x.shape[0]} tokens"):
            return original(module, *args, **kwargs)

    return forward


def _fill(model: Any, *_: Any, **__: Any) -> None:
    """Random weights for all but experts that polymoe fills, which wait on the CPU."""
    from engines.common import random_weights

    device = next(model.parameters()).device  # of the embeddings
    for module in model.modules():
        if all(tensor.device == device for tensor in module.parameters(recurse=False)):
            random_weights(module)


def _measured(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    if not torch.cuda.is_available():
        return original(runner, *args, **kwargs)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = original(runner, *args, **kwargs)
    torch.cuda.synchronize()
    found = {
        "load_s": round(time.perf_counter() - start, 2),
        "load_peak_bytes": torch.cuda.max_memory_allocated(),
        "loaded_bytes": torch.cuda.memory_allocated(),
        "device": torch.cuda.get_device_name(),
    }
    if runner.ps.tp_rank == 0:
        Path(os.environ[LOADED]).write_text(json.dumps(found))
    return result
