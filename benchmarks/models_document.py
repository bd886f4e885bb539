"""docs/models.md: every architecture of Transformers that has its experts interface, and how polymoe takes it."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import transformers

from polymoe.checkpoint.architectures.families import groups_of
from polymoe.checkpoint.architectures.interface import NEWEST
from polymoe.checkpoint.arrangement import PerExpert
from polymoe.errors import MissingDependency, PolymoeError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.tiny_models import OTHER_GENERATION, architectures, tiny_config

__all__ = ["models_document"]

_INTRODUCTION = """# Models

<!-- Written by benchmarks/write_docs.py. -->

Every architecture of Transformers {version} whose experts have its experts interface. polymoe keeps no list of them:
sizes, activation, and names and order of tensors in files are asked of Transformers
([how](structure.md#the-path-of-a-checkpoint)). `polymoe.load`, `run`, `chat`, `serve`, `bench`, `explain` and `verify`
take them.

- **BF16**: `polymoe.load` runs the experts in place, by `experts_implementation="polymoe"`.
- **packed**: quantized experts stay packed, each projection of each expert under a name of its own: that of the
  release, or that of llm-compressor (`experts.7.gate_proj.weight_packed`).
- **quantized**: `load(experts="mxfp4")` and [`polymoe quantize`](quantizing.md), with and without `--calibrate`, take
  every architecture that the tables call packed.

What runs is tested on a CPU, with a tiny model of two layers: logits differ from those of Transformers' own experts in
float32 by less than 1e-4 of the largest logit, in BF16, packed in MXFP4 of compressed-tensors, and quantized to MXFP4,
while loading and to a file, which give the same bits. The test for
`inkling_mm_model` needs scipy. No test on a GPU covers all of them. Stacked experts that are quantized as a stack are
read for gpt-oss (its own MXFP4) and Llama-4 only.

Kimi K2, Kimi K2.5, DeepSeek V4.1 and Llama-4 are known besides: Transformers has them under other names, without the
experts interface, or not at all.

Releases store the experts one by one ("one by one") or all of a layer in one tensor ("stacked"). The
second table has the exceptions. By `experts_implementation="polymoe"` two of them run all the same: `diffusion_gemma`
and `openai_privacy_filter`, as the same test shows.

| experts compute | stored by releases | model types |
|---|---|---|
"""

_OTHERS = """
| model type | BF16 | packed |
|---|---|---|
"""


@cache
def models_document(path: Path) -> str:
    """The document; with another version of Transformers than the newest known, the one that exists."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) != NEWEST:
        return path.read_text(encoding="utf-8")
    alike: dict[str, list[str]] = {}
    others = []
    for model_type in architectures():
        runs, row = _row(model_type)
        if runs:
            alike.setdefault(row, []).append(f"`{model_type}`")
        else:
            others.append(f"| `{model_type}` | {row} |")
    rows = [f"| {row} | {', '.join(names)} |" for row, names in alike.items()]
    return "\n".join(
        [_INTRODUCTION.format(version=".".join(map(str, NEWEST))) + "\n".join(rows), _OTHERS + "\n".join(others), ""]
    )


def _row(model_type: str) -> tuple[bool, str]:
    """Whether it runs in both ways, and what its experts compute and how releases store them, or why it does not."""
    config = json.loads(tiny_config(model_type).to_json_string(use_diff=False))
    if model_type in OTHER_GENERATION:
        return False, f"no: {OTHER_GENERATION[model_type]} | no"
    try:
        with patch.dict(sys.modules, {"scipy": None}):  # the same text wherever it is installed
            groups = groups_of(config)
    except MissingDependency:
        return False, "yes, with the packages that its vision tower needs | yes, with these"
    except PolymoeError as error:
        expected = str(error.expected).partition(" equal to one of ")[0]
        return False, f"no: {error.where}: expected {expected}, got {error.got} | no"
    computed = dict.fromkeys(moe.activation.name for _, moe, _ in groups)
    bias = ", biases" if groups[0][1].bias else ""
    stored = {"one by one" if isinstance(places[0][1], PerExpert) else "stacked" for _, _, places in groups}
    several = f" ({len(groups)} kinds)" if len(groups) > 1 else ""
    return True, f"{' and '.join(computed)}{bias}{several} | {' and '.join(sorted(stored))}"
