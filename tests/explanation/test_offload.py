"""Slots that a GPU has room for, and tokens per second by link and share of hits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.explanation import explain, offload
from polymoe.explanation.offload import offload_of
from polymoe.machine.link import LINKS, MeasuredLink, recorded_link

Cli = Callable[..., tuple[int, str, str]]


def test_gpt_oss_120b_on_an_rtx_4090() -> None:
    """By hand: 36 layers of 128 experts of 3 * 2880 * 2880 * 17 / 32 bytes, and biases of 3 * 2880 bfloat16."""
    explanation = explain("openai/gpt-oss-120b", device="rtx4090")
    found = offload_of(explanation, "auto")
    record = 3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2
    assert found.host_bytes == 36 * 128 * record
    assert found.token_bytes == 36 * 4 * record
    assert explanation.dense is not None
    assert explanation.kv is not None
    free = explanation.device.memory_bytes * 0.95 - explanation.dense.total_bytes - 8192 * explanation.kv.token_bytes(1)
    assert found.slots == int((free - 2 * 128 * record) / (36 * record))
    assert 30 < found.slots < 45
    # Without hits the link decides: the step itself is less than a sixth.
    assert found.tokens_per_second(0.0, 26e9) == pytest.approx(26e9 / found.token_bytes, rel=0.15)
    assert found.tokens_per_second(1.0, 26e9) == pytest.approx(1e6 / (found.step_us or 0))
    assert found.to_dict()["tokens_per_second"][0]["link"].startswith("PCIe 4")
    assert found.line().startswith(f"fits with experts in host memory: {found.slots} of 128 experts")
    assert offload_of(explanation, "30GiB").line().startswith("does not fit with experts in host memory: 60 of 128")
    exact = replace(found, memory_bytes=round((found.gpu_bytes + (found.other_bytes or 0)) / 0.95) + 1)
    assert exact.line().startswith("fits")
    assert replace(exact, memory_bytes=exact.memory_bytes - 10).line().startswith("does not fit")  # 5 % are reserved


def test_free_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "host_memory", lambda: (7 << 30, 8 << 30))
    found = offload_of(explain("openai/gpt-oss-120b", device="rtx4090"), "auto")
    assert "host memory (this machine has 7.0 GiB free);" in found.line()
    assert found.to_dict()["host_free_bytes"] == 7 << 30


@pytest.mark.parametrize(
    ("device", "memory", "message"),
    [
        ("rtx4090", "3slots", "expert_memory: expected 4 slots .* to 127"),
        ("rtx4090", "128slots", "expert_memory: expected 4 slots"),
        ("rtx4090", "2GiB", "two whole layers, and 4 slots"),
        ("h200", "auto", r"less than all experts take, 56.8 GiB, got .* for auto: 140.4 GiB less 5%, other weights"),
        ("cpu", "auto", "a GPU for auto"),
        ("rtx4090", "much", "auto, 32slots, 16GiB or 512MiB"),
    ],
)
def test_memory_that_does_not_do(device: str, memory: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        offload_of(explain("openai/gpt-oss-120b", device=device), memory)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu", "--expert-memory", "32slots"), "--expert-memory: expected a GPU, got cpu"),
        (("--device", "rtx4090", "--expert-memory", "16GiB", "--engine", "vllm"), "POLYMOE_EXPERT_MEMORY=16GiB"),
    ],
)
def test_explain_where_it_says_nothing(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cli("explain", "openai/gpt-oss-120b", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_gpu_that_shares_the_hosts_memory() -> None:
    with pytest.raises(UnsupportedProblem, match=r"a GPU with memory of its own.*gb10"):
        offload_of(explain("openai/gpt-oss-120b", device="gb10"), "auto")


def test_steps_that_were_measured() -> None:
    """12 of gpt-oss-120b's layers on an H100 whose kernels copied at 46.9 GB/s, by the hits that were counted."""
    explanation = explain("openai/gpt-oss-120b", device="h100")
    assert explanation.dense is not None
    head_us = 1e6 * explanation.dense.unread_bytes / 3.35e12  # as large as the embedding
    file = Path(__file__).parents[2] / "benchmarks/results/offload-decode-h100.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 3
    for record in records:
        found = offload_of(explanation, record["expert_memory"])
        step_us = head_us + ((found.step_us or 0) - head_us) / 3
        whole = replace(found, token_bytes=found.token_bytes // 3, step_us=step_us)
        assert 1e6 / whole.tokens_per_second(record["hits"] / 4, 46.9e9) == pytest.approx(record["median_us"], rel=0.05)


def test_a_link_that_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """doctor --link records it by GPU; a file that cannot be read counts as none."""
    monkeypatch.setenv("POLYMOE_CACHE", str(tmp_path / "cache"))
    explanation = explain("openai/gpt-oss-120b", device="rtx4090")
    for name, rate in (("h200", 60e9), ("rtx4090", 10e9), ("rtx4090", 20e9)):
        path = MeasuredLink(name, 2 * rate, rate, 13 << 20, 700.0).save()
    assert path is not None
    found = offload_of(explanation, "32slots")
    assert found.links == (("measured, 20.0 GB/s", 20e9),)
    assert {row["link"] for row in found.to_dict()["tokens_per_second"]} == {"measured, 20.0 GB/s"}
    assert recorded_link("h200") == MeasuredLink("h200", 120e9, 60e9, 13 << 20, 700.0)
    for text in ("", "[]", '{"rtx4090": {"device": "rtx4090"}}', '{"rtx4090": 3}'):
        path.write_text(text)
        assert offload_of(explanation, "32slots").links == LINKS
