"""What a layer computes: values that layouts and backends are asked about.

:class:`Problem` has everything that a kernel's fitness depends on. The other modules have its parts (the experts'
tensors, activations, how x and h are quantized, the range of scales) and what an answer consists of: verdicts, errors
of results.
"""

from __future__ import annotations

from polymoe.problem.problem import Dtype, Problem, WeightOn

__all__ = ["Dtype", "Problem", "WeightOn"]
