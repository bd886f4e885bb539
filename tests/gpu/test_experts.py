"""FusedExperts on a GPU: the reference there, and loading a layer of the size of a release's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.layer.load import load_experts
from polymoe.problem.numerics import relative_error
from support.loading import V4, deepseek_v4_flash_layer, load_seconds, measured
from support.problems import random_call

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"


def test_the_reference_on_a_gpu() -> None:
    sums = load_experts(SUMS, layer=1, device="cpu")
    experts = load_experts(SUMS, layer=1, device="cuda", backend="reference")
    x, routing = random_call(33, 192, 8)
    for dtype in (torch.float32, torch.bfloat16):
        y = experts(x.to("cuda", dtype), *(t.cuda() for t in routing))
        assert y.device.type == "cuda"
        assert relative_error(y.cpu(), sums(x, *routing)) < (1e-5 if dtype == torch.float32 else 6e-3)
    with pytest.raises(ArgumentError, match="like the packed experts"):
        experts(x, *routing)
    moved = experts.to("cpu")
    assert moved.device.type == "cpu"
    assert relative_error(moved(x, *routing), sums(x, *routing)) < 1e-6


def test_a_layer_moves_to_the_gpu_and_back() -> None:
    experts = load_experts(SUMS, layer=1, device="cpu")
    x, routing = random_call(33, 192, 8)
    expected = experts(x, *routing)
    experts.to("cuda")  # packed again: no kernel reads the layout of CPUs
    on_gpu = experts(x.cuda().bfloat16(), *(t.cuda() for t in routing))
    assert relative_error(on_gpu.float().cpu(), expected) < 6e-3
    assert relative_error(experts.to("cpu")(x, *routing), expected) < 1e-5


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_kernels_refuse_gradients(backend: str) -> None:
    if backend == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an SM90 GPU")
    experts = load_experts(SUMS, layer=1, device="cuda", backend=backend)
    x, routing = random_call(33, 192, 8)
    call = x.cuda().bfloat16().requires_grad_(), *(t.cuda() for t in routing)
    compiled = torch.compile(lambda *a: experts(*a) + 1, fullgraph=True)
    for run in (experts, compiled):
        with pytest.raises(UnsupportedProblem, match="x_TH: expected no gradient"):
            run(*call)
    with torch.no_grad():
        assert torch.equal(compiled(*call), experts(*call) + 1)


@pytest.fixture(scope="session")
def v4_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole layer of DeepSeek-V4-Flash: 3.4 GB."""
    path = tmp_path_factory.mktemp("v4") / "v4"
    deepseek_v4_flash_layer(path, 256)
    return path


def needs(backend: str) -> None:
    if backend == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an SM90 GPU")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "activations", "scratch"),
    # Layouts of the backend cuda pack five experts at once: those five, packed, unpacked again and their products for
    # checksums are there together, and the factors of these products are as many bytes as an expert. An H100 had 18.6
    # and 20.1 experts.
    [("triton", "16bit", 8), ("cuda", "16bit", 4 * 5 + 1), ("cuda", "fp8_group128", 4 * 5 + 1)],
)
def test_loading_a_layer_of_deepseek_v4_flash_onto_a_gpu(
    v4_layer: Path, backend: str, activations: str, scratch: int
) -> None:
    """From the page cache to packed in 2 s, without a second copy on the GPU or the host; ``scratch`` experts' bytes
    beside the packed ones on the way."""
    needs(backend)
    found = measured(v4_layer, 3, "cuda", V4, 3, backend, activations)
    packed, expert = found["packed_bytes"], found["expert_bytes"]
    assert 256 * expert <= packed <= 1.01 * 256 * expert
    assert found["packed_s"] <= 2
    assert found["check_s"] <= 0.2
    assert found["gpu_peak_bytes"] <= packed + scratch * expert
    assert found["host_growth_bytes"] <= 8 * expert + 100e6  # pinned memory counts or not, as the driver has it


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "activations"), [("triton", "16bit"), ("cuda", "16bit"), ("cuda", "fp8_group128")])
def test_checks_of_every_expert_take_a_tenth_of_the_time_to_load_at_most(
    v4_layer: Path, backend: str, activations: str
) -> None:
    needs(backend)
    few, every = load_seconds(v4_layer, 3, "cuda", backend, activations)
    print(f"{backend} {activations}: {few:.3f} s, with every expert checked {every:.3f} s, {every / few:.3f} times")
    assert every <= 1.1 * few
