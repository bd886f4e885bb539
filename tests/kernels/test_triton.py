"""Triton kernels in the interpreter, compared with the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polymoe.formats import FORMATS

pytest.importorskip("triton")


def case(**options: Any) -> dict[str, Any]:
    return options


CASES: dict[str, dict[str, Any]] = {
    **{format: case(format=format) for format in FORMATS},
    "one token": case(tokens=1),
    "memory of its own": case(tokens=40, workspace=False, hidden=32, intermediate=32, split_k=2, block_m=64),
    "zero points": case(zero_points=True),
    "bias, gpt-oss": case(bias=True, activation="gpt_oss"),
    "bias, split K": case(bias=True, split_k=2),
    "no gate": case(gated=False),
    "weight on input": case(weight_on="input", bias=True, format="bf16"),
    "gelu": case(activation="gelu", format="bf16"),
    "gelu tanh": case(activation="gelu_tanh", format="bf16"),
    "clamped": case(activation="limit", format="bf16"),
    "partial tiles": case(hidden=96, intermediate=80, format="int4_g32", tile=[32, 64]),
    "partial groups": case(hidden=72, intermediate=40, format="mxfp4"),
    "partial blocks": case(hidden=192, intermediate=160, format="fp8_block128", tile=[32, 128]),
    "22 of 5": case(top_k=22, tokens=4, format="bf16"),
    "one expert has all": case(all_to=4, tokens=20),
    "ids of others": case(ids=[[0, 0, -1], [0, 1, 5], [2, 1, -1], [3, 0, 5]], ids_dtype="int32"),
    "no id of ours": case(all_to=-1),
    "rank of two": case(rank=[2, 2], bias=True),
    "two launches of permute": case(tokens=300, format="bf16", hidden=16, intermediate=16, tile=[16, 16], block_m=64),
    "tiles of 64": case(tokens=60, block_m=64, format="bf16", hidden=32, intermediate=32),
    "half x": case(dtype="float16"),
    "narrow tail": case(tokens=50, block_m=64, tail_block_m=16, format="bf16", hidden=32, intermediate=32),
    "split gate and up": case(split_k=2, bias=True, format="bf16", activation="gpt_oss", weight_on="input"),
    "split up, no gate": case(split_k=2, gated=False, format="int4_g32"),
    **{
        f"{mode}, {format}": case(
            activations=mode, format=format, hidden=256, intermediate=160, tokens=5, experts=3, tile=tile
        )
        for mode in ("fp8_token", "fp8_group128", "fp8_static")
        for format, tile in (
            ("fp8_block128", [32, 64]),
            ("fp8_channel", [64, 128]),
            ("mxfp4", [64, 128]),
            ("bf16", [64, 128]),
        )
    },
    **{
        f"mxfp8, {format}": case(activations="mxfp8", format=format, hidden=160, intermediate=72, tokens=5, experts=3)
        for format in ("mxfp8", "fp8_block128", "mxfp4", "bf16")
    },
    **{
        f"ue8m0, {format}": case(
            activations="fp8_group128_ue8m0", format=format, hidden=160, intermediate=72, experts=3
        )
        for format in ("mxfp4", "fp8_block128")
    },
    "fp8_token, int4_g32": case(activations="fp8_token", format="int4_g32", hidden=160, intermediate=72),
    "fp8_group128, zero points": case(activations="fp8_group128", zero_points=True, hidden=160, intermediate=72),
    "fp8_static, int4_g128, float16 scales": case(
        activations="fp8_static", format="int4_g128", scale_dtype="float16", intermediate=72
    ),
    "mxfp8, int4_g32": case(activations="mxfp8", format="int4_g32", hidden=160, intermediate=72),
    "mxfp8 weights, fp8 rows": case(activations="fp8_group128", format="mxfp8", hidden=160),
    "E8M0 scales of blocks": case(format="fp8_block128", scale_dtype="e8m0", hidden=256, intermediate=160),
    "E8M0 scales of rows": case(format="fp8_channel", scale_dtype="e8m0"),
    "fp8, split": case(activations="fp8_group128", format="fp8_block128", split_k=2, hidden=320, bias=True),
    "fp8, weight on input": case(activations="fp8_token", format="fp8_tensor", weight_on="input"),
    **{
        f"several N blocks per CTA, {name}": case(n_blocks_per_cta=3, hidden=224, experts=3, tile=[32, 128]) | options
        for name, options in {
            "bf16": case(format="bf16", bias=True, intermediate=48),
            "mxfp4": case(intermediate=160),
            "nvfp4": case(format="nvfp4", intermediate=160),
            "zero points": case(zero_points=True, tail_block_m=8, tokens=12, block_m=32),
            "fp8": case(format="fp8_block128", activations="fp8_group128", intermediate=256, hidden=256),
            "fp8, E8M0": case(format="fp8_block128", scale_dtype="e8m0", intermediate=256, hidden=256),
            "mxfp8": case(format="mxfp8", intermediate=160),
            "fp8, int4": case(format="int4_g32", activations="fp8_group128", intermediate=160, hidden=96),
            "fp8 row": case(format="fp8_channel", activations="fp8_token", intermediate=160),
        }.items()
    },
    "expert map": case(expert_map=[3, -1, 0, -1, 1, 2, 4, -1], experts_named=8, bias=True),
    "expert map, split, fp8 static": case(
        expert_map=[-1, 2, 0, 1, -1], rank=[2, 3], split_k=2, activations="fp8_static", format="mxfp4"
    ),
    **{
        f"x quantized, {mode}, {format}": case(
            activations=mode, format=format, quantized=True, hidden=320, experts=3, tile=tile
        )
        for mode in ("fp8_token", "fp8_group128", "fp8_group128_ue8m0", "mxfp8")
        for format, tile in (("mxfp4", [64, 128]), ("fp8_block128", [32, 128]), ("bf16", [64, 64]))
    },
    "x quantized, int4_g32": case(activations="fp8_token", format="int4_g32", quantized=True, hidden=160),
    "fp8, rank of two": case(activations="fp8_static", format="fp8_tensor", rank=[2, 2]),
}


SLOW = {
    *(f"{mode}, fp8_channel" for mode in ("fp8_group128", "fp8_static")),
    *(f"{mode}, bf16" for mode in ("fp8_token", "fp8_static")),
    "fp8_token, fp8_block128",
    *(f"x quantized, {mode}, bf16" for mode in ("fp8_token", "fp8_group128")),
    "x quantized, fp8_token, mxfp4",
    *(f"x quantized, {mode}, fp8_block128" for mode in ("fp8_token", "fp8_group128", "mxfp8")),
    "x quantized, fp8_group128_ue8m0, mxfp4",
    "fp8_static, fp8_block128",
    "x quantized, int4_g32",
    "mxfp8, int4_g32",
    "mxfp8, fp8_block128",
    "fp8_token, int4_g32",
    *(f"x quantized, {mode}, bf16" for mode in ("fp8_group128_ue8m0", "mxfp8")),
    "several N blocks per CTA, fp8, E8M0",
    "several N blocks per CTA, fp8, int4",
}
"""Pairs of a mode and a format, both of which are in other pairs too."""
assert CASES.keys() >= SLOW


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """A function that runs one case in a separate process, which stays for the next case."""
    tests = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)])}
    command = [sys.executable, str(tests / "support/interpreted.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(case: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(case), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_interpreter_agrees_with_the_reference(
    interpreter: Callable[[dict[str, Any]], dict[str, Any]], name: str
) -> None:
    limit = 1e-3 if CASES[name].get("dtype") == "float16" else 2e-6
    found = interpreter(CASES[name])
    assert found.get("error", float("nan")) < limit, found.get("exception")
