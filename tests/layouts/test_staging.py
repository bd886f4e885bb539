"""Experts on their way to a device."""

from __future__ import annotations

import pytest
import torch

from polymoe.layouts import staging as stack
from polymoe.layouts.staging import uploaded
from support.problems import random_experts


def test_on_a_cpu_experts_come_as_they_are_read() -> None:
    weights = random_experts()
    kept = [weights.expert(e) for e in range(weights.spec.local_experts)]
    found = list(uploaded(type(weights)(weights.spec, kept.__getitem__), torch.device("cpu")))
    assert all(a is b for a, b in zip(found, kept, strict=True))


def test_at_most_two_experts_are_under_way_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stream that is slow: nothing arrives before someone waits for it."""
    said: list[str] = []

    class Stream:
        recorded = 0

        def record_event(self) -> Stream:
            self.recorded += 1
            said.append("sent")
            return self

        def synchronize(self) -> None:
            said.append("waited")

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(stack, "_sent", lambda expert, device, offsets: (expert.map(torch.clone), None))
    weights = random_experts("nvfp4", experts=5, bias=True)
    taken = []
    for expert in uploaded(weights, torch.device("cuda")):
        said.append("taken")
        taken.append(expert)
    assert said == ["sent", "taken"] * 2 + ["waited", "sent", "taken"] * 3 + ["waited"]
    for got, expected in zip(taken, weights, strict=True):
        for name, matrix in expected.projections.items():
            assert torch.equal(got.projections[name].codes, matrix.codes)
