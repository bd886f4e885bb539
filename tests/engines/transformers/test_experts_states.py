"""``experts_implementation="polymoe"`` where models are offloaded, compiled, exported, trained, or in float32."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef

from polymoe.errors import UnsupportedProblem
from polymoe.problem.numerics import relative_error

pytest.importorskip("transformers")

from polymoe.engines.transformers import experts_interface
from polymoe.engines.transformers.experts_interface import experts_forward, register, unregister
from support.small_models import FAMILIES, build, routed

IDS = torch.arange(12).view(2, 6)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    torch.compiler.reset()  # a frame that another test compiled would be compiled again, and count
    register()
    experts_interface._say_once.cache_clear()
    yield
    unregister()
    torch.compiler.reset()


def frozen(family: str = "qwen3_moe", **sizes: Any) -> tuple[Any, Any]:
    model, experts = build(family, **sizes)
    model.requires_grad_(False).set_experts_implementation("polymoe")
    return model, experts


OFFLOAD = """
import os, sys, torch
from pathlib import Path
from accelerate import disk_offload
from transformers import AutoConfig, AutoModelForCausalLM
from polymoe.engines.transformers.experts_interface import register

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

register()
torch.manual_seed(0)
sizes = dict(hidden_size=256, num_experts=32, num_experts_per_tok=2, num_hidden_layers=4, moe_intermediate_size=1024)
others = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=64, vocab_size=64)
config = AutoConfig.for_model("qwen3_moe", **sizes, **others)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
with torch.no_grad():
    expected = model(torch.arange(8)[None]).logits
    model.set_experts_implementation("polymoe")
    disk_offload(model, sys.argv[1], execution_device="cpu")
    before = resident()
    for _ in range(3):
        got = model(torch.arange(8)[None]).logits
assert (got - expected).norm() < 2e-2 * expected.norm()
print(experts, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_experts_on_a_disk_do_not_stay_in_memory(tmp_path: Path) -> None:
    """Resident memory, in a process of its own."""
    pytest.importorskip("accelerate")
    command = [sys.executable, "-c", OFFLOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    experts, grown = map(int, done.stdout.split())
    assert experts == 192 * 2**20
    assert grown < experts / 4


def test_no_reference_to_the_parameters_memory_is_left_after_a_call() -> None:
    """Whoever replaces parameters, or what is in them, frees the former memory at once."""
    _, experts = frozen()
    with torch.no_grad():
        experts_forward(experts, *routed(experts))
    replaced, refilled = (StorageWeakRef(p.untyped_storage()) for p in (experts.gate_up_proj, experts.down_proj))
    experts.gate_up_proj = nn.Parameter(torch.zeros_like(experts.gate_up_proj), requires_grad=False)
    experts.down_proj.data = torch.zeros_like(experts.down_proj)
    assert replaced.expired()
    assert refilled.expired()


def test_a_copied_model_has_one_copy_of_its_experts() -> None:
    _, experts = frozen()
    call = routed(experts)
    with torch.no_grad():
        expected = experts(*call)
        made: dict[int, Any] = {}
        copied = copy.deepcopy(experts, made)
        assert sum(isinstance(one, Tensor) for one in made.values()) == len(list(experts.parameters()))
        experts.down_proj.zero_()
        assert torch.equal(copied(*call), expected)


@pytest.mark.parametrize(
    ("family", "warm"),
    [
        ("qwen3_moe", False),
        ("qwen3_moe", True),
        *[pytest.param(family, False, marks=pytest.mark.slow) for family in FAMILIES if family != "qwen3_moe"],
    ],
)
def test_models_compile_as_one_graph(family: str, warm: bool) -> None:
    model, _ = frozen(family)
    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        expected = model(IDS).logits if warm else None
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        got = compiled(IDS).logits
        expected = model(IDS).logits if expected is None else expected  # a call that is not compiled
        assert torch.equal(got, expected)
        assert torch.equal(compiled(IDS).logits, expected)
    assert counter.frame_count == 1
    assert ops(counter.graphs[0]) == ["polymoe.fused_experts"]


def ops(graph: Any) -> list[str]:
    return [str(node.target).removesuffix(".default") for node in graph.graph.nodes if "polymoe" in str(node.target)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_inductor_copies_no_weights(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[set[int]] = []
    _, experts = frozen(family)
    x_TH, ids_TA, weights_TA = routed(experts)
    with torch.no_grad():
        expected = experts(x_TH, ids_TA, weights_TA)
        layer = experts_interface.PlanCache.layer

        def noted(self: Any, tensors: Any) -> Any:
            read.append({tensor.untyped_storage().data_ptr() for tensor in tensors})
            return layer(self, tensors)

        monkeypatch.setattr(experts_interface.PlanCache, "layer", noted)
        assert torch.equal(torch.compile(experts, fullgraph=True)(x_TH, ids_TA, weights_TA), expected)
    assert read == [{p.untyped_storage().data_ptr() for p in experts.parameters()}]


def test_layers_that_compile_one_by_one_share_a_graph() -> None:
    model, _ = frozen(num_hidden_layers=12)  # more than torch compiles one function
    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        expected = model(IDS).logits
        for layer in model.model.layers:
            layer.mlp.compile(backend=counter, fullgraph=True)
        assert torch.equal(model(IDS).logits, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_models_export(strict: bool) -> None:
    model, _ = frozen()
    with torch.no_grad():
        exported = torch.export.export(model, (IDS,), {"use_cache": False}, strict=strict)
        assert ops(exported) == ["polymoe.fused_experts"]
        assert torch.equal(exported.module()(IDS, use_cache=False).logits, model(IDS).logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_models_are_traced_after_a_first_call() -> None:
    model, _ = frozen()

    def logits(ids: Tensor) -> Tensor:
        return model(ids, use_cache=False).logits

    with torch.no_grad():
        with pytest.raises(UnsupportedProblem, match="call the model once"):
            torch.jit.trace(logits, IDS)
        logits(IDS)
        traced = torch.jit.trace(logits, IDS)
        other = IDS.flip(1)
        assert torch.equal(traced(other), logits(other))


def test_a_refusal_while_torch_compiles_has_its_words() -> None:
    model, experts = frozen()
    experts.act_fn = nn.Tanh()
    with pytest.raises(Exception, match="an activation equal to one of"), torch.no_grad():
        torch.compile(model, backend="aot_eager", fullgraph=True)(IDS)


@pytest.mark.parametrize(("training", "compiled"), [(True, False), (False, True)])
def test_where_gradients_of_experts_are_recorded_grouped_mm_runs(
    training: bool, compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a model in eval mode: it would lack the gradients of its experts without a word."""
    model, experts = build("qwen3_moe")
    model.train(training)

    def gradients(run: Any) -> tuple[Tensor, ...]:
        logits = run(IDS).logits
        found = torch.autograd.grad(logits.sum(), (experts.gate_up_proj, experts.down_proj))
        return logits, *found

    model.set_experts_implementation("grouped_mm")
    expected = gradients(model)
    model.set_experts_implementation("polymoe")
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with caplog.at_level(logging.INFO, "polymoe"):
        for _ in range(2):
            for one, other in zip(gradients(run), expected, strict=True):
                assert relative_error(one.detach(), other.detach()) < 1e-2
    said = [record.message for record in caplog.records if "gradients of its parameters are recorded" in record.message]
    assert len(said) == 1
    assert said[0].startswith("Qwen3MoeExperts: ")
    with torch.no_grad():
        model(IDS)
    assert experts._polymoe.plans.problem.dtype == "bf16"  # polymoe ran


def test_gradients_of_x_and_the_router_where_experts_are_frozen() -> None:
    model, experts = build("qwen3_moe")
    model.set_experts_implementation("polymoe")
    experts.requires_grad_(False)
    model(IDS).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad.any()
    assert model.model.layers[0].mlp.gate.weight.grad.any()
    assert hasattr(experts, "_polymoe")


def test_float32_is_refused_by_the_dtype_to_load() -> None:
    model, _ = frozen(dtype=torch.float32)
    says = r"(?s)expected bfloat16 or float16, got torch\.float32.*load the model with .*dtype=torch\.bfloat16"
    with pytest.raises(UnsupportedProblem, match=says), torch.no_grad():
        model(IDS)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_float32_runs_under_autocast(family: str, compiled: bool) -> None:
    """As autocast runs other layers: with weights that it converts in each call."""
    model, experts = frozen(family, dtype=torch.float32)
    x_TH, ids_TA, weights_TA = routed(experts, dtype=torch.float32)
    run = torch.compile(experts, backend="aot_eager", fullgraph=True) if compiled else experts
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = run(x_TH, ids_TA, weights_TA)
        model.set_experts_implementation("eager")
        expected = experts(x_TH, ids_TA, weights_TA)
    assert got.dtype == torch.float32
    assert 1e-5 < relative_error(got, expected) < 1e-2
    assert experts.down_proj.dtype == torch.float32
