"""What kernels of every family must do: their sources, run on a CPU with every asynchronous instruction emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda
from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.machine import Machine
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from support.cuda_calls import run_emulated
from support.cuda_emulator import emulated
from support.cuda_families import KERNELS, Kernels, libraries
from support.problems import GPT_OSS, problem_of, random_call, random_experts

pytestmark = emulated

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERY = [
    pytest.param(kernels, config, coarse, id=f"{config}{', coarse' * coarse}", marks=marks)
    for kernels in KERNELS.values()
    for configs, marks in ((kernels.configs, ()), (kernels.more, pytest.mark.slow))
    for config in configs
    for coarse in kernels.sums
]


@pytest.mark.parametrize(("kernels", "config", "coarse"), EVERY)
def test_every_configuration(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels, config: CudaConfig, coarse: bool
) -> None:
    """Experts with more rows than a work tile has, rows of zeros, ids of other ranks, biases; with a gate or not."""
    tokens = min(config.block_m + 20, kernels.most_tokens)
    for number, mode in enumerate(kernels.modes):
        x, routing = random_call(tokens, kernels.hidden, 2, 2, DTYPES[(number + coarse) % 2])
        x[5], x[6, :128], x[7, 128:] = 0, 0, 0
        routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 2, 2])
        routing.topk_weights_TA[0, 0] = float("nan")
        call: dict[str, Any] = {"coarse": coarse, "activations": mode}
        weights = kernels.experts(bias=True)
        kernels.compare(monkeypatch, config, weights, x, routing, activation=GPT_OSS, **call)
        if "up" in config.kernels.parts and mode == "16bit":
            weights = kernels.experts(gated=False, intermediate=304)
            kernels.compare(monkeypatch, config, weights, x, routing, weight_on="input", **call)


@pytest.mark.parametrize(("kernels", "config", "coarse"), EVERY)
def test_sizes(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, config: CudaConfig, coarse: bool) -> None:
    """An odd number of tiles; experts of few rows, and of none; float32 x."""
    blocks = 5 if kernels.modes == ["16bit"] else 19
    # A few rows of few columns: one number of h that fell to the other side shows.
    error = 2e-2 if coarse and kernels.error == TOLERANCE else None
    for hidden, intermediate, top_k in kernels.sizes:
        weights = kernels.experts(hidden=hidden, intermediate=intermediate, experts=3)
        call = random_call(6, hidden, 2, top_k, torch.float32)
        kernels.compare(
            monkeypatch, config, weights, *call, coarse=coarse, blocks=blocks, error=error, activation=GeGLU("tanh"),
            activations=kernels.modes[0],
        )  # fmt: skip


SIZES = {"16bit": (272, 208), "fp8_group128": (384, 256), "fp8_token": (384, 256)}


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        ("mxfp4", "16bit"),
        ("bf16", "16bit"),
        ("mxfp4", "fp8_group128"),
        ("mxfp4", "fp8_token"),
        ("fp8_block128", "fp8_group128"),
        ("fp8_channel", "fp8_token"),
        *(
            pytest.param(format, "16bit", marks=pytest.mark.slow)
            for format in ("mxfp8", "nvfp4", "int4_g32", "int4_g128")
        ),
    ],
)
def test_a_token_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch, format: str, mode: str) -> None:
    """Bitwise, in every configuration that batch-invariant calls may take, alone and among others, on any number of
    SMs."""
    hidden, intermediate = SIZES[mode]
    weights = random_experts(format, hidden=hidden, intermediate=intermediate, experts=3, bias=True)
    problem = problem_of(weights, batch_invariant=True, activations=mode)
    alike = Cuda().tuning_configs(problem, Machine.of("h200"), 60)
    x, routing = random_call(60, hidden, 3, 2, torch.bfloat16)  # more rows of an expert than 32

    def run(config: Any, some: slice, blocks: int) -> torch.Tensor:
        part = Routing(*(values[some] for values in routing))
        return run_emulated(
            monkeypatch, libraries(config, format), weights, x[some], part, config, blocks, coarse=True, aligned=True,
            activations=mode,
        )[0]  # fmt: skip

    assert len(alike) > 1
    whole = run(alike[-1], slice(60), 3)
    assert relative_error(whole, run_experts(problem, weights, x, routing)) < TOLERANCE
    for config in alike:
        for some in (slice(0, 1), slice(31, 38), slice(3, 60)):
            assert torch.equal(run(config, some, 2), whole[some]), (config, some)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_no_rows_of_this_rank(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """Zeros; and no kernel ends without having waited for the one ahead of it."""
    weights = kernels.experts()
    for config in {config.family: config for config in kernels.configs}.values():
        for tokens, mode in ((1, kernels.modes[0]), (40, kernels.modes[-1])):
            x, routing = random_call(tokens, kernels.hidden, 2, 2, torch.bfloat16)
            routing.topk_ids_TA[:] = -1
            assert not kernels.run(monkeypatch, config, weights, x, routing, activations=mode).any()


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_more_sms_than_tiles(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """The bits of one SM; and CTAs without tiles, between others of the same expert, leave no copy under way."""
    weights = kernels.experts()
    call = random_call(1, kernels.hidden, 2, 2, torch.bfloat16)
    for config in {config.family: config for config in kernels.configs}.values():
        one, *others = (
            kernels.run(monkeypatch, config, weights, *call, blocks=blocks, activations=kernels.modes[0])
            for blocks in (1, 7, 29, 61)
        )
        assert all(torch.equal(out, one) for out in others)


@pytest.mark.parametrize(
    "config", [c for name in ("w8a8", "w8a8_f16", "w8a8_mma") for c in KERNELS[name].configs], ids=str
)
def test_limits_of_the_activation_and_extreme_numbers(monkeypatch: pytest.MonkeyPatch, config: CudaConfig) -> None:
    """Columns of x and blocks of h that are many powers of two apart, and h that is zero everywhere."""
    kernels = next(kernels for kernels in KERNELS.values() if config in kernels.configs)
    weights = kernels.experts()
    x, routing = random_call(12, 384, 2, 2, torch.float32)
    x *= 2.0 ** torch.randint(-30, 4, (12, 3)).repeat_interleave(128, 1)
    x[3] *= 2.0**-90
    call: dict[str, Any] = {"coarse": not kernels.error, "activations": "fp8_group128"}
    for activation in (SwiGLU(limit=0.5), SwiGLU(alpha=1.702, beta=1.0), GeGLU("none")):
        kernels.compare(monkeypatch, config, weights, x, routing, activation=activation, **call)
    x[:] = 0
    assert not kernels.run(monkeypatch, config, weights, x, routing, **call).any()
