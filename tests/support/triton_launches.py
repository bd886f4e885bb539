"""Record the launches of a call of the Triton backend: no GPU, tensors on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import triton

from polymoe.backends.triton import Triton, TritonConfig
from polymoe.formats import FORMATS, Encoding
from polymoe.formats.elements import CODE_DTYPES, SCALE_DTYPES
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertsSpec

EXPERTS = 8


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and its compile options."""

    kernel: Any
    values: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__


def meta_layer(
    format: str | Encoding,
    *,
    hidden: int = 2880,
    intermediate: int = 1536,
    gated: bool = True,
    bias: bool = True,
    **kwargs: Any,
) -> tuple[Problem, Packed]:
    """Return a problem, and its packed tensors without memory."""
    e = FORMATS[format].encoding if isinstance(format, str) else format
    spec = ExpertsSpec(
        hidden=hidden, intermediate=intermediate, experts=EXPERTS, gate=e if gated else None, up=e, down=e, bias=bias
    )
    problem = Problem(spec=spec, **{"activation": SwiGLU(limit=7.0) if gated else ReLU2(), "top_k": 4, **kwargs})
    tensors = {}
    for projection in spec.encodings:
        rows, columns = spec.matrix_shape(projection)
        tensors[f"{projection}.codes"] = empty(EXPERTS, *e.codes_shape(rows, columns), dtype=CODE_DTYPES[e.element])
        if e.granularity is not None and e.scale_dtype is not None:
            shape = EXPERTS, *e.granularity.scale_shape(rows, columns)
            tensors[f"{projection}.scales"] = empty(*shape, dtype=SCALE_DTYPES[e.scale_dtype])
            if e.zero_points:
                tensors[f"{projection}.zero_points"] = empty(*shape, dtype=torch.uint8)
        if e.global_scale:
            tensors[f"{projection}.global_scale"] = empty(EXPERTS, dtype=torch.float32)
        if bias:
            tensors[f"{projection}_bias"] = empty(EXPERTS, rows, dtype=torch.bfloat16)
    for inputs in ("gate_up", "down"):
        tensors[f"{inputs}_input_scale"] = empty(EXPERTS, dtype=torch.float32)
    return problem, Packed("natural", spec, tensors)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(
    problem: Problem,
    packed: Packed,
    gpu: str,
    tokens: int,
    *,
    config: TritonConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    refuse: Callable[[Launch], Exception | None] = lambda launch: None,
    backend: Triton | None = None,
    **options: torch.Tensor,
) -> list[Launch]:
    """Return the launches of one call. If ``refuse`` returns an exception, the launch raises it."""
    found = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kw: Any) -> None:
        compile_options = {k: v for k, v in kw.items() if k not in self.arg_names}
        values = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in kw.items() if k in self.arg_names}
        launch = Launch(self, values, compile_options)
        if (error := refuse(launch)) is not None:
            raise error
        found.append(launch)

    backend = backend or Triton()
    config = config or backend.configure(problem, Machine.of(gpu), tokens)
    shape = tokens, problem.top_k
    routing = Routing(empty(*shape, dtype=torch.int64), empty(*shape, dtype=torch.float32))
    x = empty(tokens, problem.spec.hidden, dtype=dtype)
    with patch.object(triton.JITFunction, "run", record):
        backend.bind(problem, packed).run(CallArguments(x, *routing, torch.empty_like(x), **options), config)
    return found
