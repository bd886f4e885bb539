"""``experts_implementation="polymoe"`` on small random models of several families, against Transformers' experts."""

from __future__ import annotations

import inspect
import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polymoe.errors import PlanError, UnsupportedProblem
from polymoe.layer.runtime import LayerRuntime, PlanCache
from polymoe.problem import Problem
from polymoe.problem.activations import GeGLU, ReLU2, SwiGLU
from polymoe.problem.numerics import relative_error

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from polymoe.checkpoint.architectures import interface
from polymoe.engines.transformers import experts_interface
from polymoe.engines.transformers.experts_interface import experts_forward, register, unregister
from support.small_models import COMMON, FAMILIES, build, routed

SUMS = Path(__file__).parents[3] / "models" / "sums-qwen3-fp8"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    unregister()


def test_experts_that_transformers_keeps_quantized_say_what_packs_them() -> None:
    finegrained_fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    _, experts = build("qwen3_moe")
    theirs = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    for name in ("polymoe", "polymoe:triton"):
        with pytest.raises(UnsupportedProblem, match=r"quantized itself\n  hint: polymoe\.install\(\) before"):
            theirs.get_interface(name, None)(experts, *routed(experts))
    unregister()
    with pytest.raises(KeyError):
        theirs.get_interface("polymoe", None)


@pytest.mark.slow
def test_the_name_is_known_once_polymoe_has_anything_to_do_with_transformers() -> None:
    """In a process of its own, without `install`."""
    script = (
        "import polymoe; polymoe.PolymoeConfig\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "config = AutoConfig.for_model('mixtral', hidden_size=16, intermediate_size=16, num_hidden_layers=1,\n"
        "    num_attention_heads=2, num_key_value_heads=1, vocab_size=8, num_local_experts=2)\n"
        "model = AutoModelForCausalLM.from_config(config, experts_implementation='polymoe')\n"
        "print(model.config._experts_implementation)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "polymoe\n"), done.stderr


def problem_of(experts: Any) -> Problem:
    return experts._polymoe.plans.problem


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The storages that the backends of each call have read the experts from, by address."""
    found: list[set[int]] = []
    layer = PlanCache.layer

    def noted(self: PlanCache, tensors: Sequence[Tensor]) -> LayerRuntime:
        found.append({tensor.untyped_storage().data_ptr() for tensor in tensors})
        return layer(self, tensors)

    monkeypatch.setattr(PlanCache, "layer", noted)
    return found


def storages(experts: Any) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in experts.parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_eager_experts_and_copies_nothing(family: str, read: list[set[int]]) -> None:
    model, experts = build(family)
    x_TH, ids_TA, weights_TA = routed(experts)
    with torch.inference_mode():
        model.set_experts_implementation("polymoe")
        got = experts(x_TH, ids_TA, weights_TA)
        assert read == [storages(experts)]
        model.set_experts_implementation("eager")
        # In float32, so that the difference is polymoe's rounding and not that of eager's sums.
        exact = experts.float()(x_TH.float(), ids_TA, weights_TA.float())
    assert got.dtype == torch.bfloat16
    assert relative_error(got, exact) < 3e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["polymoe", "polymoe:reference"])
def test_whole_models_generate(family: str, implementation: str) -> None:
    model, _ = build(family)
    names = set(model.state_dict())
    model.set_experts_implementation(implementation)
    ids = torch.randint(0, 64, (2, 6))
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape[0] == 2
    assert out.shape[1] > 6
    assert set(model.state_dict()) == names


def test_ids_beyond_the_experts_contribute_nothing() -> None:
    model, experts = build("qwen3_moe")
    model.set_experts_implementation("polymoe")
    x_TH, ids_TA, weights_TA = routed(experts)
    with torch.inference_mode():
        both = experts(x_TH, ids_TA[:, :2], weights_TA[:, :2])
        masked = experts(x_TH, ids_TA.index_fill(1, torch.tensor([2]), 5), weights_TA)
    assert torch.equal(both, masked)


def test_follows_its_module() -> None:
    """Parameters that are cast, moved or refilled take effect."""
    model, experts = build("qwen3_moe")
    model.set_experts_implementation("polymoe")
    call = routed(experts)
    with torch.inference_mode():
        before = experts(*call)
        first = experts._polymoe
        experts.down_proj.mul_(2)
        torch.testing.assert_close(experts(*call), 2 * before)
        experts.down_proj.data = experts.down_proj / 2
        torch.testing.assert_close(experts(*call), before)
        assert experts._polymoe is first
        model.to(torch.float16)
        experts(*routed(experts, dtype=torch.float16))
        assert problem_of(experts).spec.up.element == "fp16"


@pytest.mark.parametrize(
    ("family", "change", "activation"),
    [
        ("gpt_oss", {}, SwiGLU(1.702, 1.0, 0.5)),
        ("qwen3_moe", {"hidden_act": "silu"}, SwiGLU()),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, GeGLU("tanh")),
        ("nemotron_h", {}, ReLU2()),
    ],
)
def test_reads_the_activation_off_the_module(family: str, change: dict[str, str], activation: Any) -> None:
    model, experts = build(family)
    if change:
        experts.act_fn = ACT2FN[change["hidden_act"]]
    if family == "gpt_oss":
        experts.limit = 0.5  # 5.17 reads neither constant from its config
    model.set_experts_implementation("polymoe")
    with torch.inference_mode():
        experts(*routed(experts))
    assert problem_of(experts).activation == activation


def test_refuses_what_it_cannot_compute() -> None:
    _, experts = build("qwen3_moe")
    call = routed(experts)
    experts.act_fn = ACT2FN["tanh"]
    with pytest.raises(UnsupportedProblem, match="Tanh"), torch.inference_mode():
        experts_forward(experts, *call)

    _, experts = build("qwen3_moe", dtype=torch.float32)
    with pytest.raises(UnsupportedProblem, match=r"expected bfloat16 or float16, got torch\.float32"), torch.no_grad():
        experts_forward(experts, *call)

    if "has_post_expert_norm" in inspect.signature(interface.use_experts_implementation).parameters:  # not in 5.17
        _, experts = build("qwen3_moe")
        experts.has_post_expert_norm = True
        with pytest.raises(UnsupportedProblem, match="norm"), torch.inference_mode():
            experts_forward(experts, *call)

    class OwnGate(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate_up

    _, experts = build("qwen3_moe")
    experts.__class__ = OwnGate
    with pytest.raises(UnsupportedProblem, match="another gate"), torch.inference_mode():
        experts_forward(experts, *call)


def called(change: Callable[[Any], None]) -> None:
    """A call of an experts module after ``change(module)``."""
    _, experts = build("qwen3_moe")
    change(experts)
    with torch.inference_mode():
        experts_forward(experts, *routed(experts))


def cast_one(experts: Any) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj.half(), requires_grad=False)


def split_one(experts: Any) -> None:
    experts.down_proj.device_mesh = "a mesh"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: e.register_parameter("scales", nn.Parameter(torch.ones(5))), "got down_proj, gate_up_proj, scales"),
        (
            lambda e: e.__delattr__("down_proj"),
            "Qwen3MoeExperts with the parameters down_proj, gate_up_proj, got gate_up",
        ),
        (lambda e: setattr(e, "has_bias", True), "gate_up_proj_bias, got down_proj, gate_up_proj"),
        (cast_one, r"parameters of one dtype, got torch\.bfloat16, torch\.float16"),
        (split_one, "this rank's part of its parameters, got down_proj as a DTensor"),
    ],
)
def test_parameters_that_are_not_known_are_refused_by_name(change: Callable[[Any], None], says: str) -> None:
    with pytest.raises(UnsupportedProblem, match=rf"Transformers \d.*{says}"):
        called(change)


def test_a_property_of_experts_that_a_later_version_adds_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_experts_implementation(
        experts_class: Any = None, *, has_gate: bool = True, is_scaled: bool = False
    ) -> None: ...

    monkeypatch.setattr(interface, "use_experts_implementation", use_experts_implementation)
    called(lambda experts: None)
    called(lambda experts: setattr(experts, "is_scaled", False))
    with pytest.raises(UnsupportedProblem, match="expected Qwen3MoeExperts with is_scaled=False, got is_scaled=True"):
        called(lambda experts: setattr(experts, "is_scaled", True))


def test_arguments_in_another_order_are_refused_by_name() -> None:
    _, experts = build("qwen3_moe")
    x_TH, ids_TA, weights_TA = routed(experts)
    for call in ((x_TH, weights_TA, ids_TA), (ids_TA, x_TH, weights_TA)):
        with pytest.raises(UnsupportedProblem, match=r"expected Qwen3MoeExperts\(x \[T, H\]"), torch.no_grad():
            experts_forward(experts, *call)
    with pytest.raises(UnsupportedProblem, match=r"scales=bfloat16 \[20, 48\]"), torch.no_grad():
        experts_forward(experts, x_TH, ids_TA, weights_TA, scales=x_TH)


def test_parameters_that_move_after_a_capture_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay cannot be refused: nothing of polymoe runs in it."""
    capturing = [True]
    monkeypatch.setattr(experts_interface, "capturing", lambda x: capturing[0])
    _, experts = build("qwen3_moe")
    with torch.inference_mode():
        experts_forward(experts, *routed(experts))
        capturing[0] = False
        experts.down_proj.data = experts.down_proj.data.clone()
        with pytest.warns(
            UserWarning, match="Qwen3MoeExperts have moved since a CUDA graph captured it.*capture it again"
        ):
            experts_forward(experts, *routed(experts))
        with warnings.catch_warnings():  # what no graph has captured may move
            warnings.simplefilter("error")
            experts_forward(experts, *routed(experts))
            experts.down_proj.data = experts.down_proj.data.clone()
            experts_forward(experts, *routed(experts))


class Group:
    """A group of two ranks, of which the other one says the same or something else."""

    def __init__(self, other: bytes | None = None) -> None:
        self.other, self.asked = other, 0

    def __call__(self, mine: bytes) -> list[bytes]:
        self.asked += 1
        return [mine, self.other or mine]


def test_ranks_that_share_experts_agree_at_the_first_call() -> None:
    _, experts = build("qwen3_moe")
    group = experts.__dict__["_polymoe_groups"] = [Group()]
    with torch.inference_mode():
        for _ in range(3):
            experts_forward(experts, *routed(experts))
    assert group[0].asked == 1
    _, experts = build("qwen3_moe")
    other = b'{"polymoe": "polymoe 0.0", "runs": "", "question": "", "sizes": "", "plan": ""}'
    experts.__dict__["_polymoe_groups"] = [Group(other)]
    with (
        pytest.raises(PlanError, match=r"Qwen3MoeExperts: expected the same plan(?s:.*)rank 1: polymoe 0\.0"),
        torch.no_grad(),
    ):
        experts_forward(experts, *routed(experts))


def test_a_rank_that_cannot_plan_says_so_to_the_others() -> None:
    _, experts = build("qwen3_moe", dtype=torch.float32)
    group = Group()
    experts.__dict__["_polymoe_groups"] = [group]
    with pytest.raises(UnsupportedProblem, match="bfloat16 or float16"), torch.no_grad():
        experts_forward(experts, *routed(experts))
    assert group.asked == 1


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tp", "ep"])
def test_ranks_of_a_model_that_transformers_splits(tmp_path: Path, split: str) -> None:
    """Two processes: with one plan they answer as one process does, with two plans both refuse."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model("qwen3_moe", **{**COMMON, **FAMILIES["qwen3_moe"], **sizes})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
    model.save_pretrained(tmp_path / "model")
    for file in SUMS.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(__file__).parents[2] / "support" / "split_model.py"
    command = [sys.executable, program, tmp_path / "model", split, tmp_path]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen([*command], env={**env, "RANK": r, "LOCAL_RANK": r}) for r in ("0", "1")]
    assert [rank.wait(240) for rank in ranks] == [0, 0]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "expected the same plan on all ranks of the group" in said[0]
    assert "backend reference" in said[0]
    with torch.inference_mode():
        expected = model(torch.arange(12).view(2, 6)).logits
    for rank in range(2):
        assert relative_error(torch.load(tmp_path / f"logits-{rank}", weights_only=True), expected) < 1e-2
