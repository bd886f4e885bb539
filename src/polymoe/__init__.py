"""polymoe: run the experts of any quantized mixture-of-experts checkpoint, packed, and say why it ran so.

::

    import polymoe

    experts = polymoe.load_experts("path/to/checkpoint", layer=3, device="cuda")
    y_TH = experts(x_TH, topk_ids_TA, topk_weights_TA)
    print(experts.explain())
    model, tokenizer = polymoe.load("path/to/checkpoint")  # a model of Transformers with packed experts

Public names but errors are resolved on first use, so importing polymoe imports neither torch nor a kernel library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polymoe.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFound,
    FormatError,
    MissingDependency,
    PlanError,
    PolymoeError,
    ServerError,
    UnsupportedProblem,
    VerificationError,
)

if TYPE_CHECKING:
    from polymoe import formats as formats
    from polymoe.checkpoint import Checkpoint, write_checkpoint
    from polymoe.engines.transformers import PolymoeConfig, install, load, refit, uninstall
    from polymoe.explanation import Explanation, explain
    from polymoe.layer.experts import FusedExperts
    from polymoe.layer.load import load_experts
    from polymoe.machine import Device, Machine
    from polymoe.problem import Problem
    from polymoe.problem.activations import GeGLU, ReLU2, SwiGLU
    from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights, QuantTensor

__version__ = "0.1.0"

_WHERE = {
    "problem.activations": ("GeGLU", "ReLU2", "SwiGLU"),
    "checkpoint": ("Checkpoint", "write_checkpoint"),
    "engines.transformers": ("PolymoeConfig", "install", "load", "refit", "uninstall"),
    "layer.experts": ("FusedExperts",),
    "layer.load": ("load_experts",),
    "explanation": ("Explanation", "explain"),
    "machine": ("Device", "Machine"),
    "problem": ("Problem",),
    "problem.tensors": ("Expert", "ExpertWeights", "ExpertsSpec", "QuantTensor"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "ArgumentError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFound",
    "Device",
    "Expert",
    "ExpertWeights",
    "ExpertsSpec",
    "Explanation",
    "FormatError",
    "FusedExperts",
    "GeGLU",
    "Machine",
    "MissingDependency",
    "PlanError",
    "PolymoeConfig",
    "PolymoeError",
    "Problem",
    "QuantTensor",
    "ReLU2",
    "ServerError",
    "SwiGLU",
    "UnsupportedProblem",
    "VerificationError",
    "explain",
    "formats",
    "install",
    "load",
    "load_experts",
    "refit",
    "uninstall",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "formats":
        return importlib.import_module("polymoe.formats")
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"polymoe.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'polymoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
