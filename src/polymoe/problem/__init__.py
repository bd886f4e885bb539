"""What a layer computes: values that layouts and backends are asked about.

:class:`Problem` has everything that a kernel's fitness depends on. The other modules have its parts (the experts'
tensors, activations, how x and h are quantized, the range of scales) and what an answer consists of: verdicts, errors
of results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymoe.problem.problem import Dtype, Problem, WeightOn

__all__ = ["Dtype", "Problem", "WeightOn"]


def __getattr__(name: str) -> Any:
    # On first use: whoever describes an activation or reads a verdict needs no torch.
    if name in __all__:
        from polymoe.problem import problem

        return getattr(problem, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
