"""The Triton backend: its verdicts and tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polymoe.backends.base import judge
from polymoe.backends.triton import Tile, Triton, TritonConfig
from polymoe.backends.triton.tiles import smaller
from polymoe.bench.cases import CASES
from polymoe.errors import ArgumentError
from polymoe.formats import FORMATS
from polymoe.layouts import LAYOUTS
from polymoe.machine import DEVICES, Machine
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertsSpec
from polymoe.problem.verdict import Accepted, Rejected
from support.problems import GPT_OSS

WITH_TRITON = {"triton": "3.6.0"}


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
            ("mxfp8", 6144, (3072, 768)),
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
        for width in widths:
            sizes = {"hidden": hidden, "intermediate": width, "experts": 8}
            spec = ExpertsSpec(**sizes, gate=encoding, up=encoding, down=encoding)  # type: ignore[arg-type]
            for mode in ("16bit", "fp8_token", "fp8_group128", "fp8_static"):
                problem = Problem(spec=spec, activation=GPT_OSS, top_k=2, activations=mode)  # type: ignore[arg-type]
                for gpu in ("a100", "h200", "rtx5090"):
                    assert Triton().check(problem, machine(gpu)) == Accepted(capturable=True)
                    assert Triton().configure(problem, machine(gpu), 100).block_m >= 8

    def test_all_reasons_at_once(self) -> None:
        verdict = judge(
            Triton(),
            seed_problem(activations="fp8_static", weight_on="input", batch_invariant=True),
            machine("cpu", {"triton": "3.5.1"}),
        )
        assert isinstance(verdict, Rejected)
        reasons = {r.what for r in verdict.reasons}
        assert reasons == {"GPU", "triton", "routing weight on the input", "batch-invariant results"}

    def test_triton_missing(self) -> None:
        verdict = Triton().check(seed_problem(), machine("h200", {}))
        assert isinstance(verdict, Rejected)
        assert str(verdict.reasons[0]) == "triton: expects 3.6 or newer, got none"

    @pytest.mark.parametrize("mode", ["mxfp8", "fp8_group128_ue8m0"])
    def test_float16_weights_and_power_of_two_scales(self, mode: str) -> None:
        """bfloat16 holds E4M3 times any power of two, float16 does not, and bfloat16 does not hold float16."""
        for format, accepted in (("fp16", False), ("bf16", True), ("mxfp8", True), ("int4_g32", True)):
            verdict = Triton().check(seed_problem(format, activations=mode), machine("h200"))
            assert isinstance(verdict, Accepted) == accepted

    @pytest.mark.parametrize("mode", ["mxfp8", "fp8_group128_ue8m0"])
    def test_routing_weight_on_the_input_of_power_of_two_scales(self, mode: str) -> None:
        """A weight moves numbers across powers of two: other roundings than the reference's."""
        verdict = Triton().check(seed_problem(activations=mode, weight_on="input"), machine("h200"))
        assert isinstance(verdict, Rejected)
        assert [reason.what for reason in verdict.reasons] == ["routing weight on the input"]

    def test_gate_unlike_up(self) -> None:
        problem = seed_problem()
        mixed = replace(problem, spec=replace(problem.spec, gate=FORMATS["bf16"].encoding))
        assert isinstance(Triton().check(mixed, machine("h200")), Rejected)


class TestConfigure:
    @pytest.mark.parametrize(
        ("gpu", "version", "expected"),
        [
            ("rtx5090", "3.7.0", False), ("rtx5090", "3.7.1", True), ("gb10", "3.7.1", False), ("gb10", "3.8.0", True),
            ("h200", "3.9.0", False), ("b200", "3.9.0", False),
        ],
    )  # fmt: skip
    def test_block_scaled_mmas_of_mxfp8(self, gpu: str, version: str, expected: bool) -> None:
        """On SM120, where Triton makes them, and where experts have many rows: one way to run among those of tuning."""
        here, problem = machine(gpu, {"triton": version}), seed_problem(activations="mxfp8")
        configs = {tokens: Triton().configure(problem, here, tokens) for tokens in (1, 512, 1024, 8192)}
        assert [config.block_scaled for config in configs.values()] == [False, False, expected, expected]
        assert (configs[8192].kernel_family == "grouped_gemm_block_scaled") == expected
        assert TritonConfig.from_dict(configs[8192].to_dict()) == configs[8192]
        assert {c.block_scaled for c in Triton().tuning_configs(problem, here, 8192)} == {False, expected}  # type: ignore[attr-defined]
        ue8m0 = "fp8_group128_ue8m0"
        native = {("mxfp8", "mxfp8"), ("mxfp4", ue8m0)}
        for format, mode in native | {("fp8_block128", ue8m0), ("nvfp4", "mxfp8"), ("mxfp4", "16bit")}:
            config = Triton().configure(seed_problem(format, activations=mode), here, 8192)
            assert config.block_scaled == (expected and (format, mode) in native)

    def test_tiles_widen_with_tokens(self) -> None:
        backend, problem, h200 = Triton(), seed_problem(), machine("h200")
        widths = [backend.configure(problem, h200, t).block_m for t in (1, 256, 512, 1024, 2048, 8192)]
        assert widths == [8, 8, 16, 32, 64, 128]

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize(
        "gpu", {(d.sm, d.shared_memory_bytes): name for name, d in DEVICES.items() if d.kind == "cuda"}.values()
    )
    def test_pipelines_fit_into_shared_memory(self, gpu: str, format: str) -> None:
        for tokens in (1, 64, 512, 1024, 4096, 65536):
            config = Triton().configure(seed_problem(format), machine(gpu), tokens)
            bits = FORMATS[format].encoding.bits
            for tile, matrices in ((config.up, 2), (config.down, 1)):
                step = matrices * tile.block_n * tile.block_k * bits // 8 + tile.block_k * config.block_m * 2
                assert tile.num_stages * step <= DEVICES[gpu].shared_memory_bytes

    @pytest.mark.parametrize("case", CASES)
    def test_pipelines_of_named_cases_fit_into_99_kib(self, case: str) -> None:
        """On SM120 and SM121; test_triton_compiles.py compiles them, too."""
        problem, gpu = CASES[case].problem(), machine("rtx5090")
        assert gpu.device.shared_memory_bytes == machine("gb10").device.shared_memory_bytes == 99 * 1024
        for tokens in (1, 4, 16, 64, 256, 1024, 4096, 65536):
            config = Triton().configure(problem, gpu, tokens)
            gemms = ((config.up, "up", 2 if problem.spec.gated else 1), (config.down, "down", 1))
            for tile, projection, matrices in gemms:
                k, bits = problem.spec.matrix_shape(projection)[1], problem.spec.encodings[projection].bits
                several = tile.n_blocks_per_cta > 1  # such a CTA holds all columns of x
                weights = matrices * tile.block_n * (k if several else tile.block_k) * bits // 8
                x = k * config.block_m * 2 if several else tile.num_stages * tile.block_k * config.block_m * 2
                assert tile.num_stages * weights + x <= 99 * 1024

    def test_predicted_time_is_above_the_floor_and_grows(self) -> None:
        times = [Triton().predict(seed_problem(), machine("h200"), t).time_us for t in (1, 16, 256, 4096)]
        assert times == sorted(times)
        assert times[0] > 18.7
        assert str(Triton().configure(seed_problem(), machine("h200"), 1)).startswith("block_m=8, up=64x256")


class TestTooLittleSharedMemory:
    """An estimate chooses tiles. If a GPU refuses one, the next smaller one runs."""

    @staticmethod
    def refuse(most: dict[str, int]) -> Any:
        """Refuse GEMMs with more stages than ``most`` says for "up" and "down"."""
        from triton.runtime.errors import OutOfResources

        def check(launch: Any) -> Exception | None:
            if launch.name != "grouped_gemm":
                return None
            stages = launch.options["num_stages"]
            limit = most["up" if launch.values["GATHER"] else "down"]
            return OutOfResources(stages, limit, "shared memory") if stages > limit else None

        return check

    def test_the_next_tile_runs_and_is_reported_once(self, caplog: pytest.LogCaptureFixture) -> None:
        pytest.importorskip("triton")
        from support.triton_launches import launches, meta_layer

        backend, layer = Triton(), meta_layer("mxfp4")
        config = TritonConfig(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))
        for gemms in (3, 2, 2):  # up once more when down is refused; later calls try nothing again
            found = launches(
                *layer, "h200", 64, config=config, backend=backend, refuse=self.refuse({"up": 2, "down": 3})
            )
            made = [x for x in found if x.name == "grouped_gemm"]
            assert len(made) == gemms
            up, down = made[-2:]
            assert (up.options["num_stages"], down.options["num_stages"]) == (2, 3)
            assert (up.values["BLOCK_N"], up.values["BLOCK_K"]) == (64, 128)
        (record,) = caplog.records
        assert "do not fit this GPU" in record.message
        assert "shared memory" in record.message
        assert Triton() == backend  # tiles found at launch do not affect equality

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
        assert (seen[-1].block_m, seen[-1].up.num_stages, seen[-1].up.block_n) == (16, 2, 16)


TILES = {
    "plain": TritonConfig(16, Tile(64, 128), Tile(64, 128)),
    "split": TritonConfig(64, Tile(64, 128, split_k=2), Tile(64, 128, split_k=4)),
    "short K": TritonConfig(16, Tile(64, 128), Tile(64, 128, n_blocks_per_cta=4)),
}


class TestWorkspace:
    """Memory of a call that the caller gives."""

    @pytest.mark.parametrize("config", TILES)
    @pytest.mark.parametrize("activations", ["16bit", "fp8_token", "fp8_group128", "fp8_static"])
    @pytest.mark.parametrize(("format", "tokens"), [("mxfp4", 1), ("mxfp4", 1500), ("bf16", 40)])
    def test_nothing_else_is_allocated(
        self, format: str, tokens: int, activations: str, config: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch = pytest.importorskip("torch")
        pytest.importorskip("triton")
        from support.triton_launches import empty, launches, meta_layer

        problem, packed = meta_layer(format, intermediate=256, activations=activations)
        tiles = TILES[config]
        size = Triton().bind(problem, packed).workspace_bytes(tokens, 4, tiles)
        workspace = empty(size, dtype=torch.uint8)
        expected = launches(problem, packed, "h200", tokens, config=tiles)
        fresh, made = torch.empty, []
        monkeypatch.setattr(torch, "empty", lambda *a, **kw: made.append(a) or fresh(*a, **kw))
        found = launches(problem, packed, "h200", tokens, config=tiles, workspace=workspace)
        assert [a for a in made if a[0] != tokens] == []
        assert [launch.name for launch in found] == [launch.name for launch in expected]
        for mine, theirs in zip(found, expected, strict=True):
            for name, value in mine.values.items():
                if isinstance(value, torch.Tensor):
                    assert (value.shape, value.stride()) == (theirs.values[name].shape, theirs.values[name].stride())

    def test_an_address_that_is_not_aligned(self) -> None:
        torch = pytest.importorskip("torch")
        pytest.importorskip("triton")
        from support.problems import problem_of, random_call, random_experts

        weights = random_experts()
        problem = problem_of(weights)
        runner = Triton().bind(problem, LAYOUTS["natural"].pack(weights, torch.device("cpu")))
        x, routing = random_call(3, 64, 5)
        workspace = torch.empty(10_000_001, dtype=torch.uint8)[1:]
        with pytest.raises(ArgumentError, match="workspace: expected an address that is a multiple of 16"):
            runner.run(CallArguments(x, *routing, torch.empty_like(x), workspace=workspace), TILES["plain"])
