"""A method that was taken over keeps its name, its state and what is not replaced."""

from __future__ import annotations

from typing import Any

from torch import nn

from polymoe.engines.serving.take_over import derived_method


class TheirMethod(nn.Module):
    """As an engine's may be: a Module, whose constructor must not run twice."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.bits, self.padded = 4, True

    def create(self) -> str:
        return f"{self.bits} bits"

    def compute(self) -> str:
        return "theirs"


class OurBase:
    padded = False
    plan: str

    def compute(self) -> str:
        return f"ours, {self.plan}"


def test_a_method_that_was_taken_over() -> None:
    theirs = TheirMethod()
    ours: Any = derived_method(theirs, OurBase, plan="planned")
    assert type(ours).__name__ == "TheirMethod"
    assert isinstance(ours, TheirMethod)
    assert (ours.create(), ours.compute(), ours.padded) == ("4 bits", "ours, planned", False)
    assert (TheirMethod.made, theirs.compute(), theirs.padded) == (1, "theirs", True)
