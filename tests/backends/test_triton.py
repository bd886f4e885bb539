"""The Triton backend: its verdicts and tiles anywhere, its results on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.activations import GeGLU, SwiGLU
from polymoe.backends.features import judge
from polymoe.backends.reference import run_experts
from polymoe.backends.triton import Tile, Triton, TritonConfig
from polymoe.backends.triton.tiles import smaller
from polymoe.errors import PlanError
from polymoe.experts import FusedExperts
from polymoe.formats import FORMATS, QuantTensor
from polymoe.layouts import LAYOUTS
from polymoe.machine import DEVICES, Machine
from polymoe.numerics import TOLERANCE, relative_error
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.runtime import PlanRequest
from polymoe.tensors import Expert, ExpertsSpec, ExpertWeights
from polymoe.verdict import Accepted, Rejected
from support.captured import captured_follows_new_rows
from support.problems import GPT_OSS, problem_of, random_call, random_experts

WITH_TRITON = {"triton": "3.6.0"}
CHOICE = {"triton": Triton()}


def machine(name: str, packages: dict[str, str] = WITH_TRITON) -> Machine:
    return Machine(DEVICES[name], packages)


def seed_problem(format: str = "mxfp4", **kwargs: Any) -> Problem:
    encoding = FORMATS[format].encoding
    spec = ExpertsSpec(hidden=4096, intermediate=2048, experts=256, gate=encoding, up=encoding, down=encoding)
    return Problem(spec=spec, activation=GPT_OSS, top_k=6, **kwargs)


class TestCheck:
    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("gpu", ["a100", "rtx4090", "h200", "b200", "rtx5090"])
    def test_every_format_on_every_gpu_since_ampere(self, format: str, gpu: str) -> None:
        assert Triton().check(seed_problem(format), machine(gpu)) == Accepted(capturable=True)

    @pytest.mark.parametrize(
        ("format", "hidden", "widths"),
        [
            ("mxfp4", 2880, (2880, 1440, 736, 672, 384, 192)),  # GPT-OSS, whole and its tensor-parallel slices
            ("mxfp4", 4096, (2048, 1024, 512, 256, 128)),  # DeepSeek-V4-Flash
            ("mxfp4", 7168, (3072, 384)),  # DeepSeek-V4-Pro
            ("fp8_block128", 7168, (2048, 256)),  # DeepSeek-V3
            ("int4_g32", 7168, (2048, 256, 32)),  # Kimi-K2
            ("nvfp4", 1024, (2688, 1344, 672, 336)),  # Nemotron-3-Super
            ("nvfp4", 5120, (1536, 192)),  # GLM-4.7
            ("fp8_channel", 5120, (1536, 192)),
            ("fp8_block128", 2048, (768,)),  # Qwen3-30B-A3B
            ("bf16", 4096, (1536, 192)),  # Qwen3-235B-A22B
            ("fp8_tensor", 4096, (14336, 1792)),  # Mixtral
            ("fp8_channel", 5120, (8192, 1024)),  # Llama-4
        ],
    )
    def test_no_shape_of_a_family_is_refused(self, format: str, hidden: int, widths: tuple[int, ...]) -> None:
        encoding = FORMATS[format].encoding
        modes = ("16bit", "fp8_token", "fp8_group128", "fp8_static") if format != "int4_g32" else ("16bit",)
        for width in widths:
            spec = ExpertsSpec(
                hidden=hidden, intermediate=width, experts=8, gate=encoding, up=encoding, down=encoding
            )  # fmt: skip
            for mode in modes:
                problem = Problem(spec=spec, activation=GPT_OSS, top_k=2, activations=mode)  # type: ignore[arg-type]
                for gpu in ("a100", "h200", "rtx5090"):
                    assert Triton().check(problem, machine(gpu)) == Accepted(capturable=True)
                    assert Triton().configure(problem, machine(gpu), 100).tokens >= 8

    def test_all_reasons_at_once(self) -> None:
        verdict = judge(
            Triton(),
            seed_problem(activations="fp8_static", weight_on="input", batch_invariant=True),
            machine("cpu", {"triton": "3.5.1"}),
        )
        assert isinstance(verdict, Rejected)
        assert {r.what for r in verdict.reasons} == {
            "GPU", "triton", "routing weight on the input", "batch-invariant results"
        }  # fmt: skip

    def test_triton_missing(self) -> None:
        verdict = Triton().check(seed_problem(), machine("h200", {}))
        assert isinstance(verdict, Rejected)
        assert str(verdict.reasons[0]) == "triton: expects 3.6 or newer, got none"

    def test_gate_unlike_up(self) -> None:
        problem = seed_problem()
        mixed = replace(problem, spec=replace(problem.spec, gate=FORMATS["bf16"].encoding))
        assert isinstance(Triton().check(mixed, machine("h200")), Rejected)


class TestConfigure:
    def test_tiles_widen_with_tokens(self) -> None:
        backend, problem, h200 = Triton(), seed_problem(), machine("h200")
        widths = [backend.configure(problem, h200, t).tokens for t in (1, 256, 512, 1024, 2048, 8192)]
        assert widths == [8, 8, 16, 32, 64, 128]

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("gpu", [name for name, d in DEVICES.items() if d.kind == "cuda"])
    def test_pipelines_fit_into_shared_memory(self, gpu: str, format: str) -> None:
        for tokens in (1, 64, 512, 1024, 4096, 65536):
            config = Triton().configure(seed_problem(format), machine(gpu), tokens)
            bits = FORMATS[format].encoding.bits
            for tile, matrices in ((config.up, 2), (config.down, 1)):
                step = matrices * tile.rows * tile.columns * bits // 8 + tile.columns * config.tokens * 2
                assert tile.stages * step <= DEVICES[gpu].shared_memory_bytes

    def test_predicted_time_is_above_the_floor_and_grows(self) -> None:
        times = [Triton().predict(seed_problem(), machine("h200"), t).time_us for t in (1, 16, 256, 4096)]
        assert times == sorted(times)
        assert times[0] > 18.7
        assert str(Triton().configure(seed_problem(), machine("h200"), 1)).startswith("tokens=8, up=64x256")


class TestTooLittleSharedMemory:
    """An estimate chooses tiles; what a GPU then refuses gives way to the next smaller one."""

    @staticmethod
    def refuse(most: dict[str, int]) -> Any:
        """Refuses products with more stages than ``most`` says for "up" and "down"."""
        from triton.runtime.errors import OutOfResources

        def check(launch: Any) -> Exception | None:
            if launch.name != "grouped_gemm":
                return None
            stages = launch.options["num_stages"]
            limit = most["up" if launch.values["GATHER"] else "down"]
            return OutOfResources(stages, limit, "shared memory") if stages > limit else None

        return check

    def test_next_tile_once_said(self, caplog: pytest.LogCaptureFixture) -> None:
        pytest.importorskip("triton")
        from support.triton_launches import launches, meta_layer

        backend, layer = Triton(), meta_layer("mxfp4")
        config = TritonConfig(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))
        for products in (3, 2, 2):  # up once more when down is refused; later calls try nothing again
            found = launches(
                *layer, "h200", 64, config=config, backend=backend, refuse=self.refuse({"up": 2, "down": 3})
            )
            made = [x for x in found if x.name == "grouped_gemm"]
            assert len(made) == products
            up, down = made[-2:]
            assert (up.options["num_stages"], down.options["num_stages"]) == (2, 3)
            assert (up.values["BLOCK_N"], up.values["BLOCK_K"]) == (64, 128)
        (record,) = caplog.records
        assert "do not fit this GPU" in record.message
        assert "shared memory" in record.message
        assert Triton() == backend  # what was found is no part of what a backend is

    def test_nothing_is_small_enough(self) -> None:
        triton = pytest.importorskip("triton")
        from support.triton_launches import launches, meta_layer

        with pytest.raises(triton.OutOfResources):
            launches(*meta_layer("mxfp4"), "h200", 8192, refuse=self.refuse({"up": 0, "down": 0}))

    @pytest.mark.parametrize("format", FORMATS)
    def test_tiles_shrink_to_the_smallest(self, format: str) -> None:
        problem = seed_problem(format)
        config: TritonConfig | None = Triton().configure(problem, machine("h200"), 8192)
        seen = []
        while config is not None:
            seen.append(config)
            config = smaller(config, "up", problem.spec.up)
        assert len(set(seen)) == len(seen) > 5
        assert (seen[-1].tokens, seen[-1].up.stages, seen[-1].up.rows) == (16, 2, 16)


def with_input_scales(weights: ExpertWeights) -> ExpertWeights:
    scales = torch.rand(2, weights.spec.local_experts, generator=torch.Generator().manual_seed(3)) * 0.02 + 0.005
    return ExpertWeights(
        weights.spec,
        lambda e: replace(weights.expert(e), gate_up_input_scale=scales[0, e], down_input_scale=scales[1, e]),
    )


def scaled(expert: Expert, exponent: int) -> Expert:
    """The expert with down's E8M0 scales times a power of two, and up's divided by it."""

    def times(tensor: QuantTensor, exponent: int) -> QuantTensor:
        assert tensor.scales is not None
        moved = (tensor.scales.view(torch.uint8).int() + exponent).to(torch.uint8)
        return replace(tensor, scales=moved.view(torch.float8_e8m0fnu))

    return replace(expert, up=times(expert.up, -exponent), down=times(expert.down, exponent))


def on_gpu(weights: ExpertWeights, x: torch.Tensor, routing: Routing, **kwargs: Any) -> None:
    """Compare with the reference, and twenty runs with each other to the bit; outputs start as NaN."""
    config = kwargs.pop("config", None)
    problem = problem_of(weights, **kwargs)
    here = Machine.of("cuda")
    expected = run_experts(problem, weights, x, routing)
    packed = LAYOUTS["natural"].pack(weights, torch.device("cuda"))
    config = config or Triton().configure(problem, here, x.shape[0])
    first = None
    for _ in range(20):
        out = torch.full_like(x, float("nan"), device="cuda")
        there = Routing(*(part.cuda() for part in routing))
        Triton().bind(problem, packed).run(x.cuda(), there, config, out)
        first = out if first is None else first
        assert torch.equal(out, first)
    assert first is not None
    assert relative_error(first.cpu(), expected) < TOLERANCE


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("tokens", [1, 33, 700])
    @pytest.mark.parametrize("format", FORMATS)
    def test_formats(self, format: str, tokens: int) -> None:
        weights = random_experts(format, hidden=256, intermediate=192)
        on_gpu(weights, *random_call(tokens, 256, 5, dtype=torch.bfloat16))

    @pytest.mark.parametrize("tokens", [1, 33, 700])
    @pytest.mark.parametrize("mode", ["fp8_token", "fp8_group128", "fp8_static"])
    @pytest.mark.parametrize("format", ["fp8_tensor", "fp8_channel", "fp8_block128", "mxfp4", "nvfp4", "bf16", "fp16"])
    def test_fp8_activations(self, format: str, mode: str, tokens: int) -> None:
        weights = with_input_scales(random_experts(format, hidden=384, intermediate=320))
        on_gpu(weights, *random_call(tokens, 384, 5, dtype=torch.bfloat16), activations=mode)

    @pytest.mark.parametrize("tokens", [1, 40, 500])
    @pytest.mark.parametrize(("format", "mode"), [("fp8_block128", "fp8_group128"), ("int4_g32", "16bit")])
    def test_several_blocks_a_program(self, format: str, mode: str, tokens: int) -> None:
        config = TritonConfig(16 if tokens < 100 else 64, Tile(64, 128), Tile(64, 128, blocks=4), tail=8, chained=True)
        weights = random_experts(format, hidden=1152, intermediate=256)
        call = random_call(tokens, 1152, 5, dtype=torch.bfloat16)
        on_gpu(weights, *call, activations=mode, config=config)

    def test_scales_beyond_the_fast_range_are_exact(self) -> None:
        plain = random_experts("mxfp4", hidden=128, intermediate=128)
        weights = ExpertWeights(plain.spec, lambda e: scaled(plain.expert(e), 30))
        x, routing = random_call(9, 128, 5)
        problem = problem_of(weights)
        choice = PlanRequest(Machine.of("cuda"), "mixed", "triton", CHOICE, LAYOUTS)
        experts = FusedExperts.pack(problem, weights, choice)
        assert experts.problem.scales is not None
        assert experts.problem.scales.outside_bfloat16
        expected = run_experts(problem, weights, x, routing)
        y = experts(x.cuda(), *(part.cuda() for part in routing))
        assert relative_error(y.cpu(), expected) < TOLERANCE
        with pytest.raises(PlanError, match="load these experts anew"):
            FusedExperts.pack(problem, plain, choice).update(weights)

    def test_wide_tiles_repeat_to_the_bit(self) -> None:
        """Weights are wgmma's operand in registers, which assemblers before 13.3 may let be overwritten too early."""
        weights = random_experts("mxfp4", hidden=1024, intermediate=512, experts=4)
        problem, here = problem_of(weights), Machine.of("cuda")
        packed = LAYOUTS["natural"].pack(weights, torch.device("cuda"))
        x, routing = random_call(1000, 1024, 4, dtype=torch.bfloat16)
        expected = run_experts(problem, weights, x, routing)
        x, there = x.cuda(), Routing(*(part.cuda() for part in routing))
        for tile in (Tile(64, 128), Tile(128, 128, 8), Tile(64, 64, 4, 4), Tile(128, 128, 4, 2)):
            config = replace(Triton().configure(problem, here, 1000), tokens=64, up=tile, down=tile)
            outs = [torch.empty_like(x) for _ in range(2)]
            Triton().bind(problem, packed).run(x, there, config, outs[0])
            assert relative_error(outs[0].cpu(), expected) < TOLERANCE
            for _ in range(250):
                Triton().bind(problem, packed).run(x, there, config, outs[1])
                assert torch.equal(*outs)

    @pytest.mark.parametrize("tokens", [1, 12])
    def test_compiled_graph_without_a_break(self, tokens: int) -> None:
        weights = random_experts("mxfp4", hidden=128, intermediate=128)
        experts = FusedExperts.from_weights(weights, SwiGLU(), top_k=2, device="cuda", backend="triton")
        x, routing = random_call(tokens, 128, 5, dtype=torch.bfloat16)
        call = (x.cuda(), *(part.cuda() for part in routing))
        compiled = torch.compile(lambda *a: experts(*a) + 1, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            assert torch.equal(compiled(*call), experts(*call) + 1)

    def test_another_stream(self) -> None:
        weights = random_experts("nvfp4", hidden=128, intermediate=128)
        experts = FusedExperts.from_weights(weights, SwiGLU(), top_k=2, device="cuda", backend="triton")
        x, routing = random_call(40, 128, 5, dtype=torch.bfloat16)
        call = (x.cuda(), *(part.cuda() for part in routing))
        expected = experts(*call)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            y = experts(*call)
        stream.synchronize()
        assert torch.equal(y, expected)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("format", ["fp16", "bf16", "mxfp4"])
    def test_dtypes_of_x(self, format: str, dtype: torch.dtype) -> None:
        on_gpu(random_experts(format), *random_call(9, 64, 5, dtype=dtype))

    @pytest.mark.parametrize("weight_on", ["output", "input"])
    @pytest.mark.parametrize("activation", [GPT_OSS, GeGLU(), GeGLU("tanh")], ids=lambda a: a.name)
    def test_activations(self, activation: Any, weight_on: str) -> None:
        weights = random_experts(bias=True)
        on_gpu(weights, *random_call(9, 64, 5, dtype=torch.bfloat16), activation=activation, weight_on=weight_on)

    @pytest.mark.parametrize(
        ("hidden", "intermediate", "gated", "top_k"),
        [(2880, 2880, True, 4), (1024, 2688, False, 22), (192, 336, True, 1)],
    )
    @pytest.mark.parametrize("tokens", [1, 40, 300])
    def test_odd_sizes(self, tokens: int, hidden: int, intermediate: int, gated: bool, top_k: int) -> None:
        weights = random_experts("nvfp4", hidden=hidden, intermediate=intermediate, gated=gated, experts=7)
        on_gpu(weights, *random_call(tokens, hidden, 7, top_k, torch.bfloat16))

    @pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
    def test_tiles(self, block: int) -> None:
        config = TritonConfig(block, Tile(64, 64), Tile(64, 64, splits=2))
        weights = random_experts(bias=True, hidden=192)
        on_gpu(weights, *random_call(3 * block, 192, 5, dtype=torch.bfloat16), config=config)

    def test_ids_of_others_are_never_read(self) -> None:
        weights = random_experts(bias=True)
        x, routing = random_call(40, 64, 5, dtype=torch.bfloat16)
        routing.topk_ids_TA[::3, 0] = -1
        routing.topk_ids_TA[1::3, 1] = 5
        routing.topk_weights_TA[::3, 0] = float("nan")
        on_gpu(weights, x, routing)

    def test_captured_graph_follows_new_routings(self) -> None:
        weights = random_experts("mxfp4", experts=16, hidden=256, intermediate=256)
        problem = problem_of(weights)
        choice = PlanRequest(Machine.of("cuda"), "mixed", "triton", CHOICE, LAYOUTS)
        experts = FusedExperts.pack(problem, weights, choice)
        captured_follows_new_rows(experts, weights, 20, replays=5)
