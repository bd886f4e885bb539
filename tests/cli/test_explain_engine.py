"""``polymoe explain --engine``: the plug-in's decision, as text and as JSON, and parallel groups of the engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "models"
SUMS = MODELS / "sums-gpt-oss-mxfp4"

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLYMOE", "POLYMOE_LAYERS", "POLYMOE_BACKEND", "POLYMOE_ACTIVATIONS", "POLYMOE_ROLE"):
        monkeypatch.delenv(name, raising=False)


def test_what_runs(cli: Cli) -> None:
    code, out, err = cli(
        "explain", SUMS, "--device", "h200", "--engine", "vllm", "--tensor-parallel-size", 2,
        "--enable-expert-parallel", "--role", "decode",
    )  # fmt: skip
    assert (code, err) == (0, "")
    first, fits, second, layout, *steps = out.splitlines()
    assert fits.startswith("fits on 2 x h200: 1.3 MiB of weights leave 133.4 GiB on each for the KV cache")
    assert first.endswith("gpt_oss, in vLLM on h200 (sm_90), ep=2, role decode")
    assert second.startswith("layers 0-3 (GptOssMxfp4MoEMethod): polymoe runs them: mxfp4, H=192 F=192 E=8 (4 from 0)")
    assert layout == "  layout w4a16_fragments, 234.0 KiB packed for each layer on this rank"
    assert steps[0].startswith("  1-16 tokens: cuda, ")
    assert "8192" not in out  # a decode worker has no calls of so many tokens
    assert "vllm" not in sys.modules


def test_why_layers_stay_with_the_engine(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYMOE_LAYERS", "0-1")
    arguments = ("explain", MODELS / "sums-mixtral-awq", "--device", "cpu", "--engine", "sglang", "--json")
    code, out, _ = cli(*arguments)
    found = json.loads(out)
    assert (code, found["engine"], found["role"], found["off"]) == (0, "sglang", "mixed", False)
    ours, theirs = found["layers"]
    assert (ours["layers"], ours["runs"], ours["plan"]["steps"][0]["backend"]) == ([0, 1], True, "reference")
    assert ours["packed_bytes_per_layer"] == 8 * 51072
    assert (theirs["layers"], theirs["runs"]) == ([2, 3], False)
    assert [reason["what"] for reason in theirs["reasons"]] == ["POLYMOE_LAYERS"]
    code, out, _ = cli(*arguments[:-1], "--backend", "cuda")
    assert "layers 0-1 (AWQMoEScheme): polymoe leaves them to SGLang\n" in out
    assert "\n  cuda: GPU: expects SM90, SM100, SM103, SM120 or SM121, got cpu\n" in out


def test_off(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYMOE", "0")
    _, out, _ = cli("explain", SUMS, "--device", "cpu", "--engine", "vllm")
    assert out.splitlines()[1] == "POLYMOE=0: vLLM runs all experts; without it:"


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (("vllm", "--tp", 2), (2, 1)),
        (("vllm", "--tp", 2, "--enable-expert-parallel"), (1, 2)),
        (("sglang", "--tp", 6, "--ep", 2), (3, 2)),
        (("sglang", "--tp", 2, "--ep", 2, "--tp-rank", 1), (1, 2)),
        (("vllm", "--tp", 1, "--dp", 2, "--enable-expert-parallel"), (1, 2)),
        (("vllm", "--tp", 1, "--dp", 2), (2, 1)),
        (("sglang", "--tp", 4, "--dp", 4), (4, 1)),
    ],
)
def test_ranks_of_the_experts(cli: Cli, options: tuple[object, ...], ranks: tuple[int, int]) -> None:
    code, out, _ = cli("explain", SUMS, "--device", "cpu", "--engine", *options, "--json")
    found = json.loads(out)
    assert (code, found["tp"], found["ep"]) == (0, *ranks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "vllm", "--ep", 2), "--ep: expected --enable-expert-parallel"),
        (("--engine", "vllm", "--experts", "mxfp4"), "--experts: expected no --engine"),
        (("--engine", "sglang", "--tp", 4, "--ep", 3), "--ep: expected a number that divides --tp"),
        (("--engine", "sglang", "--tp", 2, "--ep", 2, "--enable-expert-parallel"), "--ep: expected"),
        (("--engine", "sglang", "--tp", 4, "--dp", 3), "--dp: expected a number that divides --tp, which is 4"),
        (("--ep", 8), "--ep: expected a number that divides"),
        (("--enable-expert-parallel",), "--enable-expert-parallel: expected --engine"),
        (("--engine", "vlm"), "did you mean 'vllm'"),
    ],
)
def test_ranks_that_no_engine_has(cli: Cli, options: tuple[object, ...], said: str) -> None:
    code, out, err = cli("explain", SUMS, "--device", "cpu", *options)
    assert (code, out) == (2, "")
    assert said in err
