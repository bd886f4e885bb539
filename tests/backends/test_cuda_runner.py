"""The CUDA backend's runner, with launches recorded instead of made: what calls share, and what they do not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from polymoe.backends.base import mapped_ids
from polymoe.backends.cuda import Cuda, CudaConfig
from polymoe.errors import ArgumentError
from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.launch.shape import LIST_BYTES
from polymoe.kernels.cuda.targets import Target
from polymoe.problem.call import CallArguments
from polymoe.problem.routing import Routing
from support.cuda_calls import gpu, pack, run_emulated
from support.cuda_emulator import Emulator, Recorded, compile_units, emulated
from support.problems import problem_of, random_call, random_experts

FEW, MANY = CudaConfig("w4a16_mma", 8, 64), CudaConfig("w4a16_wgmma", 32)
Made = list[dict[str, Any]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The launches of all runners: their kernels, grids and arguments."""
    found: Made = []

    def kernel(unit: str, name: str, target: Target) -> Recorded:
        def call(args: Any, grid: tuple[int, ...], threads: int, shared: int) -> None:
            fields = {n: getattr(args, n) for kind in type(args).__mro__ for n, _ in getattr(kind, "_fields_", ())}
            found.append({"kernel": name, "grid": grid, "thread": threading.get_ident(), **fields})

        return Recorded(call)

    monkeypatch.setattr(modules, "kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(132))
    return found


def bound(**kwargs: Any) -> Any:
    weights = random_experts(hidden=128, intermediate=128, **kwargs)
    problem = problem_of(weights)
    return Cuda().bind(problem, pack(problem, weights))


def call(runner: Any, config: CudaConfig, tokens: int, **kwargs: Any) -> None:
    x, routing = random_call(tokens, 128, 5, 2, torch.bfloat16)
    runner.run(CallArguments(x, *routing, torch.empty_like(x), **kwargs), config)


@pytest.mark.parametrize("config", [FEW, MANY], ids=str)
def test_a_call_follows_the_number_of_tokens(made: Made, config: CudaConfig) -> None:
    """Also where the call before had another one."""
    runner = bound()
    for tokens in (3, 40, 3, 1500):
        made.clear()
        call(runner, config, tokens)
        assert {m["rows"] for m in made if "rows" in m} == {2 * tokens}
        permutations = sum(m["kernel"].startswith("permutation") for m in made)
        assert permutations == {3: 0 if config is FEW else 1, 40: 1, 1500: 2}[tokens]
        assert made[-1]["grid"] == (-(-tokens // made[-1]["tokens_per_cta"]), 1)
        gate_up, down = (m for m in made if "k" in m)
        assert gate_up["out"] == down["x"]
        assert down["out"] == made[-1]["y"]
        assert down["tiles"] - gate_up["tiles"] == LIST_BYTES
        if permutations:
            assert gate_up["tiles"] == made[0]["lists"]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (16, ["permutation_one_warp"]),
        (17, ["permutation_one_cta"]),
        (1024, ["permutation_one_cta"]),
        (1025, ["permutation_count", "permutation_many_ctas"]),
    ],
)
def test_which_kernels_sort_and_what_they_know_of_ids(made: Made, tokens: int, expected: list[str]) -> None:
    runner = bound()
    x, (ids, weights) = random_call(tokens, 128, 5, 2, torch.bfloat16)
    for dtype in (torch.int32, torch.int64):
        made.clear()
        runner.run(CallArguments(x, ids.to(dtype), weights, torch.empty_like(x)), MANY)
        assert [m["kernel"] for m in made][: len(expected)] == expected
        assert not made[len(expected)]["kernel"].startswith("permutation")
        assert {m["long_ids"] for m in made if "long_ids" in m} == {int(dtype is torch.int64)}


@pytest.mark.parametrize("config", [FEW, MANY], ids=str)
def test_arrays_of_a_call_lie_in_the_workspace_that_is_given(made: Made, config: CudaConfig) -> None:
    runner = bound()
    bytes = runner.workspace_bytes(7, 2, config)
    call(runner, config, 7)
    for _ in range(2):
        made.clear()
        workspace = torch.empty(bytes, dtype=torch.uint8)
        call(runner, config, 7, workspace=workspace)
        begin, end = workspace.data_ptr(), workspace.data_ptr() + bytes
        gate_up, down = (m for m in made if "k" in m)
        inside = [gate_up["out"], gate_up["tiles"], gate_up["work_tiles"], down["out"], made[0]["permuted_to_expanded"]]
        assert all(begin <= at < end for at in inside)
        assert len({gate_up["out"], down["out"], gate_up["work_tiles"], gate_up["tiles"], down["tiles"]}) == 5
    with pytest.raises(ArgumentError, match="workspace: expected an address that is a multiple of 16"):
        call(runner, config, 7, workspace=torch.empty(bytes + 1, dtype=torch.uint8)[1:])


def test_threads_do_not_share_arguments(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of one layer at once, the second begun and ended between two launches of the first."""
    runner = bound()
    call(runner, FEW, 3)
    made.clear()
    xs = {name: random_call(tokens, 128, 5, 2, torch.bfloat16) for name, tokens in (("outer", 3), ("inner", 5))}
    outs = {name: torch.empty_like(x) for name, (x, _) in xs.items()}
    started: list[threading.Thread] = []
    prepared = modules.kernel

    def other() -> None:
        runner.run(CallArguments(xs["inner"][0], *xs["inner"][1], outs["inner"]), FEW)

    def run_outer() -> None:
        free = runner._free[FEW][-1]
        launches = free._launches

        def between(stream: int) -> None:
            launches[0](stream)
            thread = threading.Thread(target=other)
            started.append(thread)
            thread.start()
            thread.join()

        free._launches = (between, *launches[1:])
        runner.run(CallArguments(xs["outer"][0], *xs["outer"][1], outs["outer"]), FEW)

    run_outer()
    assert prepared is modules.kernel
    by_thread: dict[int, Made] = {}
    for m in made:
        by_thread.setdefault(m["thread"], []).append(m)
    assert len(by_thread) == 2
    outer, inner = by_thread[threading.get_ident()], by_thread[next(t for t in by_thread if t != threading.get_ident())]
    for launched, name in ((outer, "outer"), (inner, "inner")):
        x, routing = xs[name]
        assert [m["kernel"] for m in launched] == ["w4a16_mma_gate_up_m8_n64", "w4a16_mma_down_m8_k256", "finalize_f32"]
        assert {m["ids"] for m in launched} == {routing.topk_ids_TA.data_ptr()}
        assert (launched[0]["x"], launched[-1]["out"]) == (x.data_ptr(), outs[name].data_ptr())
        assert launched[-1]["grid"] == (len(x), 1)
    assert outer[1]["x"] != inner[1]["x"]
    assert len(runner._free[FEW]) == 2  # both are there for calls to come


def test_an_expert_map_says_where_experts_are(made: Made) -> None:
    places = torch.tensor([2, -1, 0, -1, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 1, 2], [4, -1, 5], [3, 4, 99]])
    found = [[2, -1, 0], [1, -1, -1], [-1, 1, -1]]
    for kind in (torch.int32, torch.int64):
        for where in (places, places.long()):
            assert mapped_ids(ids.to(kind), where).tolist() == found
    runner = bound()
    x = torch.randn(3, 128).bfloat16()
    routing = Routing(ids, torch.ones(3, 3))
    runner.run(CallArguments(x, *routing, torch.empty_like(x), expert_map=places), FEW)
    assert (made[0]["first_expert"], made[0]["long_ids"], made[-1]["first_expert"]) == (0, 0, 0)


def test_which_options_it_takes(made: Made) -> None:
    assert bound().options == {"workspace", "expert_map"}
    weights = random_experts("fp8_block128", hidden=128, intermediate=128)
    problem = problem_of(weights, activations="fp8_group128")
    assert Cuda().bind(problem, pack(problem, weights)).options == {"workspace", "expert_map", "x_scales"}


@emulated
@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (CudaConfig("w8a8_f16", 32), 20),
        (CudaConfig("w8a8", 160), 20),
        (CudaConfig("w8a8_mma", 8), 20),
        (CudaConfig("w8a8_mma", 8), 5),
    ],
    ids=str,
)
def test_x_that_is_quantized_already_and_experts_elsewhere(
    monkeypatch: pytest.MonkeyPatch, config: CudaConfig, tokens: int
) -> None:
    """Emulated: codes and scales as the kernel makes them, and experts at other places, to the bit the same result; and
    the call after them is as any other."""
    weights = random_experts("fp8_block128", hidden=256, intermediate=128)
    problem = problem_of(weights, activations="fp8_group128")
    x, routing = random_call(tokens, 256, 5, 2, torch.bfloat16)
    x[3, :128] = 0
    libraries = compile_units(config.kernels.unit("fp8_block128"))
    expected, _ = run_emulated(monkeypatch, libraries, weights, x, routing, config, activations="fp8_group128")
    packed = pack(problem, weights)
    monkeypatch.setattr(modules, "kernel", Emulator(libraries, list(packed.tensors.values())))
    runner, out = Cuda().bind(problem, packed), torch.empty_like(x)
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2) / 448
    scales[scales == 0] = 1
    codes = (groups / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
    ids_TA, weights_TA = routing
    order = torch.tensor([3, 1, 4, 0, 2])  # an id's place is where it is in here
    places = order.argsort().int()
    for x_in, ids, options in (
        (codes, ids_TA, {"x_scales": scales}),
        (x, ids_TA, {}),
        (codes, order[ids_TA], {"x_scales": scales, "expert_map": places}),
        (x, order[ids_TA], {"expert_map": places}),
        (x, ids_TA, {}),
    ):
        out.fill_(float("nan"))
        runner.run(CallArguments(x_in, ids, weights_TA, out, **options), config)
        assert torch.equal(out, expected), list(options)
