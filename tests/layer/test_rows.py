"""Experts as rows of packed tensors: any row holds any expert, or the layout says that it does not."""

from __future__ import annotations

import pytest
import torch

from polymoe.errors import UnsupportedProblem
from polymoe.layer.rows import need_rows, require_rows, rows_as_bytes
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.planning.select import select
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.activations import SwiGLU
from polymoe.problem.verdict import Reasons
from support.problems import random_experts, with_input_scales

CPU = torch.device("cpu")
FORMS = ("bf16", "mxfp4", "nvfp4", "mxfp8", "int4_g32", "int4_g128_zp", "fp8_tensor", "fp8_channel", "fp8_block128")


def selected(weights: object, machine: str = "cpu", backend: str = "auto", activations: str = "16bit") -> Selection:
    quantization = ActivationQuantization.of(activations)
    problem = Problem(spec=weights.spec, activation=SwiGLU(), top_k=2, activations=quantization)  # type: ignore[attr-defined]
    return select(problem, Machine.of(machine), backend=backend)


def pairs() -> list[tuple[str, str]]:
    """Each layout whose backends read rows, with each format that it holds."""
    names = [name for name in LAYOUTS if not name.startswith("flashinfer")]
    specs = {form: random_experts(form, experts=1, hidden=256, intermediate=256).spec for form in FORMS}
    return [(name, form) for form, spec in specs.items() for name in names if not LAYOUTS[name].check(spec)]


@pytest.mark.parametrize(("name", "form"), pairs())
def test_a_row_of_any_layer_is_its_expert(name: str, form: str) -> None:
    """Experts of one layer in rows of another are what they were, bit for bit."""
    first, second = (
        with_input_scales(random_experts(form, hidden=256, intermediate=256, bias=form == "mxfp4", seed=seed))
        for seed in (0, 1)
    )
    layout = LAYOUTS[name]
    to, source = layout.pack(first, CPU), layout.pack(second, CPU)
    require_rows(selected(first), to, "experts", "")
    for mine, others in zip(to.tensors.values(), source.tensors.values(), strict=True):
        rows_as_bytes(mine)[0].copy_(rows_as_bytes(others)[2])
    got = layout.unpack(to)
    for at, expected in ((0, second.expert(2)), (1, first.expert(1))):
        parts = got.expert(at).parts()
        assert parts.keys() == expected.parts().keys()
        for part, tensor in expected.parts().items():
            assert torch.equal(parts[part].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), part


def test_scales_that_belong_to_all_experts_are_no_rows() -> None:
    weights = with_input_scales(random_experts("nvfp4", hidden=256, intermediate=256))
    packed = LAYOUTS["flashinfer_sm12x_nvfp4"].pack(weights, CPU)
    with pytest.raises(UnsupportedProblem, match="moving: expected packed tensors with a row for each expert") as error:
        require_rows(selected(weights), packed, "moving", "leave it")
    assert "kernel.x_scale in layout flashinfer_sm12x_nvfp4: expects a row for each expert, got [1]" in str(error.value)


@pytest.mark.parametrize(
    ("activations", "says"),
    [
        ("16bit", ["backend: expects cuda or triton or torch or reference, got flashinfer"]),
        ("nvfp4", ["activations: expects scales that belong to one expert, got nvfp4"]),
    ],
)
def test_what_rules_rows_out_before_experts_are_packed(activations: str, says: list[str]) -> None:
    weights = random_experts("nvfp4", hidden=256, intermediate=256)
    reasons = Reasons()
    named = "flashinfer" if activations == "16bit" else "reference"
    need_rows(reasons, selected(weights, "rtx5090", named, activations))
    assert [str(reason) for reason in reasons.found] == says
