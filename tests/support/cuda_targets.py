"""Configurations of other GPUs' kernels, compiled for SM90, so that they run where there is an H200.

``scripts/build-kernels --tests`` compiles them, into a folder that git ignores.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from polymoe.kernels.cuda.pipelines import Budget
from polymoe.kernels.cuda.targets import SM90, TARGETS

__all__ = ["TEST_TARGETS"]

_BUILD = Path(__file__).parents[2] / "build/cuda"
_IN_STAGES = replace(SM90, families=TARGETS["sm120"].families, folder=_BUILD / "x-in-stages", fp4_cvt=True)

TEST_TARGETS = {
    t.name: t
    for t in (
        replace(_IN_STAGES, name="sm90-as-sm120", budget=Budget(99 * 1024, x_in_stages=True)),
        replace(_IN_STAGES, name="sm90-as-sm100", budget=Budget(227 * 1024, x_in_stages=True)),
    )
}
"""By name: the sources as configured for SM120 and SM100. What an H200 has no instruction for is computed."""
