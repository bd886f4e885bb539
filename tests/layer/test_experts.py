"""FusedExperts and load_experts: calls, ranks, moves, bad input, memory."""

from __future__ import annotations

import itertools
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import polymoe
from polymoe.errors import ArgumentError, CheckpointNotFound, PlanError, VerificationError
from polymoe.formats import FORMATS
from polymoe.layer.experts import FusedExperts
from polymoe.layer.load import load_experts
from polymoe.machine import Machine
from polymoe.problem.activations import SwiGLU
from polymoe.problem.numerics import relative_error
from support.loading import V4, deepseek_v4_flash_layer, measured
from support.problems import GPT_OSS, plain_experts, random_call, random_experts

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"


@pytest.fixture(scope="module")
def sums() -> FusedExperts:
    return load_experts(SUMS, layer=1, device="cpu")


def fused(**kwargs: object) -> FusedExperts:
    weights = random_experts(**{"format": "mxfp4", "bias": True, **kwargs})  # type: ignore[arg-type]
    return FusedExperts.from_weights(weights, GPT_OSS, top_k=2, device="cpu")


def test_readme_session(sums: FusedExperts) -> None:
    x, routing = random_call(5, 192, 8, dtype=torch.bfloat16)
    y = sums(x, *routing)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert relative_error(y, plain_experts(sums.weights, sums.problem, x, routing)) < 4e-3
    assert "reference" in str(sums.explain())
    gate_up, down = sums.weights.dequantize()
    assert gate_up.shape == (8, 2 * 192, 192)
    assert down.shape == (8, 192, 192)
    assert gate_up.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_dtypes(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    experts = fused()
    x, routing = random_call(6, 64, 5, dtype=dtype)
    y = experts(x, routing.topk_ids_TA.to(ids_dtype), routing.topk_weights_TA)
    assert y.dtype == dtype
    error = relative_error(y, plain_experts(experts.weights, experts.problem, x, routing))
    assert error < {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}[dtype]


def test_no_tokens() -> None:
    y = fused()(torch.empty(0, 64), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert (y.shape, y.dtype) == ((0, 64), torch.float32)


def test_any_number_of_active_experts_and_strides() -> None:
    experts = fused()
    x = torch.randn(64, 7).T
    ids, weights = torch.randint(0, 5, (9, 7)).T, torch.rand(9, 7).T
    y = experts(x, ids, weights)
    assert torch.equal(y, experts(x.contiguous(), ids.contiguous(), weights.contiguous()))
    assert y.is_contiguous()


def test_ids_of_nobody_and_of_other_ranks_add_nothing() -> None:
    experts = fused()
    x, _ = random_call(3, 64, 5)
    y = experts(x, torch.tensor([[-1, 5], [5, 5], [-1, -1]]), torch.full((3, 2), float("inf")))
    assert torch.equal(y, torch.zeros(3, 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 63)}, r"x_TH: expected \[T, 64\], got \[2, 63\]"),
        ({"x": torch.zeros(64)}, r"x_TH: expected \[T, 64\]"),
        ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "x_TH: expected bfloat16, float16 or float32"),
        ({"ids": torch.zeros(2, 2, dtype=torch.uint8)}, "topk_ids_TA: expected torch.int32 or torch.int64"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, r"topk_ids_TA: expected \[2, A\]"),
        ({"ids": torch.zeros(2, 0).long(), "weights": torch.zeros(2, 0)}, r"topk_ids_TA: expected \[2, A\]"),
        ({"ids": torch.zeros(2, dtype=torch.int64)}, r"topk_ids_TA: expected \[2, A\]"),
        ({"weights": torch.zeros(2, 3)}, r"topk_weights_TA: expected \[2, A\]"),
        ({"weights": torch.zeros(2, 2).half()}, "topk_weights_TA: expected torch.float32"),
        ({"ids": torch.tensor([[0, 6], [0, 0]])}, "topk_ids_TA: expected 0 to 4, or -1 or 5 for none, got 0 to 6"),
        ({"ids": torch.tensor([[0, -2], [0, 0]])}, "got -2 to 0"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64, device="meta")}, "topk_ids_TA: expected on cpu"),
    ],
)  # fmt: skip
def test_bad_calls(change: dict[str, torch.Tensor], message: str) -> None:
    call = {"x": torch.zeros(2, 64), "ids": torch.zeros(2, 2, dtype=torch.int64), "weights": torch.ones(2, 2), **change}
    with pytest.raises(ArgumentError, match=message) as error:
        fused()(*call.values())
    assert isinstance(error.value, ValueError)


def test_moving_a_model_to_another_dtype_leaves_codes_and_scales_alone() -> None:
    for format in FORMATS:
        experts = fused(format=format, bias=False)
        before = {n: b.clone() for n, b in experts.named_buffers()}
        torch.nn.Sequential(experts).to(torch.float64).half().float()
        for name, buffer in experts.named_buffers():
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer.float(), before[name].float())


def test_experts_are_packed_again_where_nothing_reads_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = fused()
    x, routing = random_call(5, 64, 5)
    expected, layout = experts(x, *routing), experts.packed.layout
    here = Machine.of("cpu")
    small = replace(here, device=replace(here.device, name="small"), layer_bytes=0)  # no room for float32 matrices
    monkeypatch.setattr("polymoe.layer.experts.Machine.of", lambda _: small)
    monkeypatch.setattr(FusedExperts, "device", property(lambda _: torch.device("cpu", 1)))
    torch.nn.Sequential(experts).to("cpu")
    assert (layout, experts.packed.layout) == ("dequantized", "natural")
    assert not [name for name, _ in experts.named_buffers() if "dequantized" in name]
    assert relative_error(experts(x, *routing), expected) < 1e-5


def test_packed_weights_are_not_in_the_state_dict_and_need_no_gradient() -> None:
    experts = fused()
    assert not experts.state_dict()
    assert not list(experts.parameters())
    with torch.inference_mode():
        experts(*_call(experts))
    x, ids, weights = _call(experts)
    assert not experts(x.requires_grad_(), ids, weights).isnan().any()


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_the_cpu_has_two_names(device: torch.device | str) -> None:
    weights = random_experts(bias=True)
    experts = FusedExperts.from_weights(weights, GPT_OSS, top_k=2, device=device).to(device)
    experts.update(random_experts(bias=True, seed=5), check=True)
    x, routing = random_call(4, 64, 5)
    assert experts(x.to(device), *(part.to(device) for part in routing)).device == torch.device("cpu")
    assert load_experts(SUMS, layer=1, device=device, check=False).device == torch.device("cpu")
    assert Machine.of(str(device)).device.kind == "cpu"


def test_update_refills_in_place(sums: FusedExperts) -> None:
    experts, other = fused(), random_experts(bias=True, seed=5)
    before = {n: b.data_ptr() for n, b in experts.named_buffers()}
    experts.update(other)
    assert {n: b.data_ptr() for n, b in experts.named_buffers()} == before
    x, routing = random_call(4, 64, 5)
    assert relative_error(experts(x, *routing), plain_experts(other, experts.problem, x, routing)) < 1e-6
    with pytest.raises(PlanError):
        experts.update(sums.weights)


def test_a_repacked_layer_is_the_same(sums: FusedExperts) -> None:
    again = FusedExperts.from_weights(sums.weights, sums.problem.activation, top_k=2, device="cpu")
    for (name, a), (_, b) in zip(sums.named_buffers(), again.named_buffers(), strict=True):
        assert torch.equal(a.float(), b.float()), name


def test_problem_of_the_checkpoint(sums: FusedExperts) -> None:
    p = sums.problem
    assert (p.spec.hidden, p.spec.intermediate, p.spec.experts, p.spec.format) == (192, 192, 8, "mxfp4")
    assert p.activation == SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
    assert p.spec.bias
    assert "mxfp4, H=192 F=192 E=8" in repr(sums)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (3, 1), (6, 1), (1, 2), (1, 3), (1, 8), (2, 2)])
def test_parallel_ranks_add_up(sums: FusedExperts, tp: int, ep: int) -> None:
    x, routing = random_call(9, 192, 8)
    ranks = itertools.product(range(tp), range(ep))
    parts = [load_experts(SUMS, layer=1, device="cpu", tp=(t, tp), ep=(e, ep)) for t, e in ranks]
    assert sum(p.problem.spec.local_experts for p in parts) == 8 * tp
    assert relative_error(torch.stack([p(x, *routing) for p in parts]).sum(0), sums(x, *routing)) < 1e-6


def test_loading_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "polymoe"), polymoe.Checkpoint.open(SUMS) as checkpoint:
        for layer in (2, 3):
            load_experts(checkpoint, layer=layer, device="cpu")
    (record,) = caplog.records  # once for all layers that pose the same problem
    assert "layer 2, and all layers like it: mxfp4, H=192" in record.message
    assert "layout dequantized, 1+ tokens: torch" in record.message


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"path": "no/such/checkpoint"}, CheckpointNotFound, "no/such/checkpoint"),
        ({"layer": 4}, CheckpointNotFound, "0-3"),
        ({"layer": -1}, CheckpointNotFound, "0-3"),
        ({"backend": "fast"}, ArgumentError, "known: auto, cuda, "),
        ({"backend": None}, ArgumentError, "backend: expected the name of a backend, got None"),
        ({"role": "decoding"}, ArgumentError, "did you mean 'decode'"),
        ({"activations": "fp8"}, ArgumentError, "known: 16bit"),
        ({"dtype": torch.float64}, ArgumentError, "dtype: expected torch.bfloat16"),
        ({"tp": 4}, ArgumentError, "sizes that work.*1, 2, 3, 6"),
        ({"tp": (2, 2)}, ValueError, "rank"),
        ({"device": "cdua"}, ArgumentError, "device: expected cpu, cuda or cuda:1, got 'cdua'"),
        ({"device": "h200"}, ArgumentError, "device: expected cpu, cuda or cuda:1"),
        ({"device": "meta"}, ArgumentError, "device: expected cpu, cuda or cuda:1"),
        ({"layer": "1"}, ArgumentError, "layer: expected an integer, got '1'"),
        ({"layer": True}, ArgumentError, "layer: expected an integer"),
        ({"path": SUMS / "config.json"}, CheckpointNotFound, "name a directory that holds tensors"),
        ({"ep": 9}, ValueError, "8"),
    ],
)
def test_refusals_at_load(kwargs: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"path": SUMS, "layer": 0, "device": "cpu", **kwargs}
    with pytest.raises(error, match=message):
        load_experts(**arguments)  # type: ignore[arg-type]


def test_a_layer_moves_to_no_other_kind_of_device() -> None:
    experts = load_experts(SUMS, 0, device="cpu", backend="reference")
    with pytest.raises(ArgumentError, match="device: expected cpu, cuda or cuda:1, got 'meta'"):
        experts.to("meta")
    assert experts.device.type == "cpu"


def test_weights_that_overflow_are_not_a_backend_s_fault(tmp_path: Path) -> None:
    """A scale of 2^127 is a number; six times it is none in float32."""
    shutil.copytree(SUMS, tmp_path / "huge")
    for shard in (tmp_path / "huge").glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith("_scales"):
                tensors[name].fill_(254)
        save_file(tensors, shard)
    with pytest.raises(VerificationError, match=r"layer 1, experts 0, 2, 5, 7: expected finite results"):
        load_experts(tmp_path / "huge", 1, device="cpu")


def test_naming_the_reference_is_allowed_anywhere() -> None:
    assert load_experts(SUMS, 0, device="cpu", backend="reference").explain().requested == "reference"


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_holds_the_packed_layer_and_one_expert(tmp_path: Path) -> None:
    """256 experts, H=1024, F=512: growth of anonymous memory at most packed + one expert + 100 MB."""
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 1024, "intermediate_size": 512,
        "num_local_experts": 256, "num_experts_per_tok": 4, "num_hidden_layers": 1, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(256, 2 * 512, 1024, generator=generator).bfloat16()
    down = torch.randn(256, 1024, 512, generator=generator).bfloat16()
    biases = torch.zeros(256, 1024).bfloat16(), torch.zeros(256, 1024).bfloat16()
    polymoe.write_checkpoint(tmp_path / "big", config, {0: (gate_up, down, *biases)})
    found = measured(tmp_path / "big", 0, "cpu", SUMS, 0, "reference")
    packed, expert = found["packed_bytes"], found["expert_bytes"]
    assert packed == pytest.approx(256 * expert, rel=0.01)
    assert found["host_growth_bytes"] <= packed + expert + 100e6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_64_experts_of_deepseek_v4_flash_on_a_cpu(tmp_path: Path) -> None:
    """0.86 GB: a quarter of the layer, of which a GPU's path shares reading, checking and copying once."""
    deepseek_v4_flash_layer(tmp_path / "v4", 64)
    found = measured(tmp_path / "v4", 3, "cpu", V4, 3, "reference")
    assert found["packed_bytes"] == 64 * found["expert_bytes"]
    assert found["host_growth_bytes"] <= found["packed_bytes"] + found["expert_bytes"] + 100e6
    assert found["packed_s"] < 10  # 0.5 to 1.2 s where nothing else runs


def _call(experts: FusedExperts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, (ids, weights) = random_call(3, experts.problem.spec.hidden, experts.problem.spec.experts)
    return x, ids, weights
