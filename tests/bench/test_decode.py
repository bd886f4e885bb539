"""``polymoe bench decode``: what is timed is right, its bytes are counted, and what fails is said."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers.integrations import hub_kernels
from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers import quantizer_mxfp4

from polymoe.bench import decode
from polymoe.bench.model_bytes import experts_modules, held_bytes, step_bytes
from polymoe.bench.records import Stamp
from polymoe.engines.transformers import load
from polymoe.engines.transformers.without_polymoe import load_dequantized, load_transformers_packed, local_kernels
from polymoe.errors import UnsupportedProblem
from polymoe.formats.elements import E2M1_VALUES
from polymoe.layer.experts import FusedExperts
from polymoe.machine import Machine

MODELS = Path(__file__).parents[2] / "models"
SUMS = MODELS / "sums-gpt-oss-mxfp4"
SMALL = ("--device", "cpu", "--prompt-len", 12, "--steps", 3, "--repeats", 1, "--prefill-len", 20)

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stand_in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' MXFP4 path on a CPU, with torch in the place of the Triton kernels that it takes from the Hub."""
    K = SimpleNamespace

    def dequantized(w: Any, config: Any) -> torch.Tensor:
        codes = torch.stack([w.data & 15, w.data >> 4], -2).flatten(-3, -2).long()  # [E, K, N]: K was packed
        return torch.tensor(E2M1_VALUES)[codes] * 2.0 ** (config.weight_scale.data.float() - 127).repeat_interleave(
            32, 1
        )

    def routing(logits: torch.Tensor, top_k: int) -> Any:
        values, ids = logits.float().topk(top_k)
        data = K(ids=ids.flatten(), gate_scal=values.softmax(-1).flatten(), top_k=top_k)
        return data, "gather", "scatter"

    def matmul(x: Any, w: Any, bias: Any, data: Any, *, precision_config: Any, gammas: Any, **how: Any) -> torch.Tensor:
        rows = x.float().repeat_interleave(data.top_k, 0) if "gather_indx" in how else x.float()
        y = torch.einsum("rk,rkn->rn", rows, dequantized(w, precision_config)[data.ids]) + bias[data.ids]
        if "gather_indx" in how:
            gate, up = y[:, ::2].clamp(max=7), y[:, 1::2].clamp(-7, 7)
            return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).bfloat16()
        return (y * gammas[:, None]).unflatten(0, (-1, data.top_k)).sum(1).bfloat16()

    hub = K(
        matmul_ogs=K(PrecisionConfig=K, FlexCtx=K, InFlexData=K, FnSpecs=tuple, FusedActivation=lambda *_: None),
        tensor=K(FP4="fp4", wrap_torch_tensor=lambda t, dtype=None: K(data=t), convert_layout=lambda t, *_, **__: t),
        tensor_details=K(layout=K(StridedLayout=0, make_default_matmul_mxfp4_w_layout=lambda mx_axis: (0, {}))),
        swiglu=K(swiglu_fn=None),
        routing=K(routing=routing),
    )
    hub.matmul_ogs.matmul_ogs, hub.matmul_ogs.FnSpecs = matmul, lambda *_: None
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: hub)
    monkeypatch.setattr(quantizer_mxfp4.Mxfp4HfQuantizer, "validate_environment", lambda self, **_: None)
    monkeypatch.setattr(quantizer_mxfp4, "get_current_accelerator", lambda: torch.device("cuda"))


def test_packed_beside_dequantized(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, "--batch-size", "1,3", "--out", out, "--commit", "abc")
    assert code == 0, stderr
    for text in ("polymoe", "torch", "grouped_mm", "batched_mm", "weights, polymoe over dequantized: 2."):
        assert text in stdout
    assert "prefill of 20 tokens, tokens/s, polymoe over the fastest dequantized" in stdout
    assert "nominal rates" in stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    done = [(r["experts"], r["implementation"], r["phase"], r["batch"]) for r in records]
    assert done == [
        ("packed", "torch", "decode", 1),
        ("packed", "torch", "decode", 3),
        ("packed", "torch", "prefill", 1),
        ("dequantized", "grouped_mm", "decode", 1),
        ("dequantized", "grouped_mm", "decode", 3),
        ("dequantized", "grouped_mm", "prefill", 1),
        ("dequantized", "batched_mm", "decode", 1),
        ("dequantized", "batched_mm", "decode", 3),  # six copies of eight experts; the prefill's forty are left out
    ]
    assert f"{SUMS} packed by Transformers" in stderr  # and why it was not measured
    assert "dequantizing the model to bf16" in stderr
    for r in records:
        assert r["tokens_per_second"] == pytest.approx(
            1e6 * (r["batch"] if r["phase"] == "decode" else r["tokens"]) / r["median_us"], rel=1e-3
        )
        assert (r["difference"] is None) == (r["experts"] == "packed" or r["phase"] == "prefill")
        assert (r["floor_us"] is None) == (r["phase"] == "prefill")
    assert records[0]["experts_read"] == 2
    assert 2 < records[1]["experts_read"] <= 6


def test_experts_in_host_memory(cli: Cli) -> None:
    """Each token has two experts in each layer, which are in slots or copied."""
    asked = ("bench", "decode", SUMS, *SMALL, "--measure", "packed", "--batch-size", 1, "--expert-memory", "4slots")
    code, stdout, stderr = cli(*asked, "--json")
    assert code == 0, stderr
    decode, prefill = json.loads(stdout)["records"]
    assert decode["expert_memory"] == "4slots"
    assert decode["hits"] + decode["misses"] == pytest.approx(2, abs=2e-3)
    assert decode["copied_bytes"] > 1000 * decode["misses"] > 0
    assert prefill["misses"] is None
    code, stdout, stderr = cli(*asked)
    assert code == 0, stderr
    assert re.search(r"decode at batch 1, each step in each layer: [\d.]+ hits, [\d.]+ misses, ", stdout)


def test_a_record_names_the_backends_of_its_token_count() -> None:
    model, _ = load(SUMS, device="cpu")
    layers: list[Any] = [module for module in model.modules() if isinstance(module, FusedExperts)]
    selection = layers[0].explain()
    [step] = selection.require().steps
    steps = (replace(step, max_tokens=8, backend="small"), replace(step, backend="large"))
    mixed = replace(selection, plan=replace(selection.require(), steps=steps))
    for layer in layers:
        layer.explain = lambda: mixed
    assert [decode._backends(model, tokens) for tokens in (1, 8, 9)] == ["small", "small", "large"]


def test_json_of_one_way_has_no_ratios(cli: Cli) -> None:
    code, stdout, _ = cli("bench", "decode", SUMS, *SMALL, "--measure", "packed", "--batch-size", 1, "--json")
    found = json.loads(stdout)
    assert code == 0
    assert [r["phase"] for r in found["records"]] == ["decode", "prefill"]
    assert found["packed_to_dequantized"] == found["packed_to_transformers_packed"] == found["not_measured"] == []


@pytest.mark.parametrize("format", ["nvfp4", "int4_g128"])
def test_experts_that_are_quantized_while_loading(cli: Cli, bf16: Path, tmp_path: Path, format: str) -> None:
    """The dequantized model has the same numbers, so that its logits are those of the packed one."""
    out = tmp_path / "r.jsonl"
    args = ("--experts", format, "--batch-size", 2, "--implementations", "grouped_mm", "--out", out)
    code, _, stderr = cli("bench", "decode", bf16, *SMALL, *args)
    assert code == 0, stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["experts"], r["phase"]) for r in rows] == [
        (experts, phase) for experts in ("packed", "dequantized") for phase in ("decode", "prefill")
    ]
    assert {r["checkpoint"] for r in rows} == {f"bf16-{format}"}
    assert rows[2]["difference"] < 0.02
    assert f"transformers-packed: {bf16} packed by Transformers" in stderr
    assert f"got {format} while loading" in stderr


def test_an_implementation_whose_package_is_missing_is_a_result(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of DeepGEMM's kernels, which Transformers looks for at the first call. The others are measured."""

    def without_kernels(*_: Any) -> Any:
        raise ImportError("DeepGEMM kernel unavailable")

    monkeypatch.setitem(ExpertsInterface._global_mapping, "deepgemm", without_kernels)
    args = ("--measure", "packed,dequantized", "--batch-size", 1, "--implementations", "deepgemm,grouped_mm", "--json")
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, *args)
    assert code == 0, stderr
    found = json.loads(stdout)
    assert [(r["experts"], r["phase"]) for r in found["records"]] == [
        (experts, phase) for experts in ("packed", "dequantized") for phase in ("decode", "prefill")
    ]
    assert [(f["implementation"], f["phase"]) for f in found["not_measured"]] == [
        ("deepgemm", "decode"), ("deepgemm", "prefill")
    ]  # fmt: skip


def test_other_logits_are_not_timed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        model = load_dequantized(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[2].mlp.experts.down_proj.mul_(1.5)
        return model

    monkeypatch.setattr("polymoe.engines.transformers.without_polymoe.load_dequantized", wrong)
    args = ("--batch-size", 2, "--measure", "packed,dequantized", "--prefill-len", 0, "--json")
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, *args)
    assert code == 1
    assert "dequantized (grouped_mm), batch 2: logits: expected logits within 0.05" in stderr
    assert "not timed" in stderr
    assert [r["experts"] for r in json.loads(stdout)["records"]] == ["packed"]
    assert [f["implementation"] for f in json.loads(stdout)["not_measured"]] == ["grouped_mm", "batched_mm"]


@pytest.mark.parametrize(
    ("step", "contender", "said", "left"),
    [
        ("decode", "dequantized", "dequantized, grouped_mm, decode", "prefill of 20 tokens"),
        (
            "prefill",
            "packed",
            "packed, torch, prefill",
            "decode at batch 1, tokens/s, polymoe over the fastest dequant",
        ),
    ],
)
def test_what_cannot_run_is_said_and_leaves_the_rest(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, step: str, contender: str, said: str, left: str
) -> None:
    def fail(self: Any, model: Any, ran: dict[str, Any], *args: Any) -> Any:
        if ran["experts"] == contender:
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return kept(self, model, ran, *args)

    kept = getattr(decode.ModelBench, step)
    monkeypatch.setattr(decode.ModelBench, step, fail)
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, "--batch-size", 1, "--implementations", "grouped_mm")
    assert code == 0
    assert f"not measured: {said}, batch 1: CUDA out of memory" in stderr
    assert left in stdout


def test_what_transformers_packs_is_measured_and_compared(cli: Cli, stand_in_kernels: Any, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    args = ("--measure", "transformers-packed,packed", "--batch-size", 2, "--out", out)
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, *args)
    assert code == 0, stderr
    assert "prefill of 20 tokens, tokens/s, polymoe over the fastest transformers-packed" in stdout
    packed, _, theirs, prefill = [json.loads(line) for line in out.read_text().splitlines()]
    assert (packed["experts"], prefill["phase"]) == ("packed", "prefill")
    assert (theirs["experts"], theirs["implementation"]) == ("transformers-packed", "triton_kernels")
    assert 0 < theirs["difference"] < 0.02  # the same codes and scales, swizzled by Transformers
    assert (theirs["floor_us"], theirs["experts_read"]) == (packed["floor_us"], packed["experts_read"])


def test_kernels_that_are_not_here_are_not_fetched(
    cli: Cli, stand_in_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str, **_: Any) -> Any:
        assert constants.HF_HUB_OFFLINE
        raise FileNotFoundError(f"no local snapshot of {name}")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_kernels, "get_kernel", find)
    args = ("--measure", "packed,transformers-packed", "--batch-size", 1, "--prefill-len", 0)
    code, stdout, stderr = cli("bench", "decode", SUMS, *SMALL, *args)
    assert code == 0
    assert "not measured" in stdout
    assert "no local snapshot of kernels-community/gpt-oss-triton-kernels" in stderr
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("found", [None, SimpleNamespace()])
def test_a_missing_deepgemm_is_not_looked_for_in_every_call(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR"
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "lazy_load_kernel", lambda name: found)
    with local_kernels():
        assert os.environ.get(variable) == (None if found else "1")
    assert variable not in os.environ


def test_steps_that_do_not_compile_are_tried_in_parts_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, model: Any, ran: dict[str, Any], batch: int, way: str) -> Any:
        if way != "plain":
            raise RuntimeError(f"no {way}")
        return way

    monkeypatch.setattr(decode.ModelBench, "decode", run)
    model = load_dequantized(SUMS, device=torch.device("cpu"))
    stamp, device = Stamp("cpu", "", None, "", ""), Machine.of("cpu").device
    bench = decode.ModelBench(
        checkpoint="", prompt_len=1, steps=1, prefill_len=0, prefill_attention=None, repeats=1, graphs=True,
        device=device, stamp=stamp,
    )  # fmt: skip
    found = list(bench.rows([decode.Contender("theirs", ("grouped_mm",), lambda: model, foreign=True)], [1], print))
    assert [str(row) for row in found] == [
        "not measured: theirs, grouped_mm, decode, batch 1: no graph (compiled as one graph)",
        "not measured: theirs, grouped_mm, decode, batch 1: no parts (compiled in parts)",
        "plain",
    ]


@pytest.mark.parametrize(
    ("model", "reason"), [("sums-qwen3-fp8", "requires a GPU or XPU"), ("sums-mixtral-awq", "got 'awq'")]
)
def test_why_transformers_does_not_keep_experts_packed(model: str, reason: str) -> None:
    with pytest.raises(UnsupportedProblem, match=reason):
        load_transformers_packed(MODELS / model, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((SUMS, "--measure", "int8"), 2, "--measure: expected packed, dequantized, transformers-packed, got 'int8'"),
        ((SUMS, "--experts", "int8"), 2, "did you mean 'int4_g128'? known: fp8_block128, int4_g128, int4_g32, mxfp4"),
        ((SUMS, "--device", "cpu", "--experts", "nvfp4"), 1, "expected experts in 16 bits, got mxfp4"),
        ((SUMS, "--device", "cpu", "--graphs"), 2, "--graphs: expected a GPU"),
        ((SUMS, *SMALL, "--prefill-attention", "flash_attention_9"), 2, "--prefill-attention: got 'flash_attention_9'"),
        ((SUMS, *SMALL, "--implementations", "grouped"), 2, "--implementations: got 'grouped'\n  hint: did you mean"),
        ((SUMS, "--device", "cpu", "--prompt-len", 250), 2, "--prompt-len: expected at most 256, the model's context"),
        ((SUMS, "--device", "cpu", "--prefill-len", 257), 2, "--prefill-len: expected at most 256"),
        ((MODELS / "sums-nemotron-h-nvfp4", "--device", "cpu", "--measure", "dequantized"), 1, "--measure packed"),
        ((MODELS / "none", "--device", "cpu"), 1, "none"),
    ],
)
def test_bad_input(cli: Cli, args: tuple[Any, ...], code: int, message: str) -> None:
    found, stdout, stderr = cli("bench", "decode", *args)
    assert (found, "dequantized" in stdout) == (code, False)
    assert message in stderr


@pytest.mark.parametrize("packed", [True, False])
def test_bytes_of_a_step_are_all_weights_when_all_experts_are_read(packed: bool) -> None:
    device = torch.device("cpu")
    model = load(SUMS, device="cpu", backend="reference")[0] if packed else load_dequantized(SUMS, device=device)
    layers, experts = len(experts_modules(model)), 8
    assert layers == 4
    everything = held_bytes(model)
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    cache = 2 * 3 * (2 * 8 + 2 * 100) * 2 * 32 * 2  # two of four layers have a window of 8; two heads of 32, bfloat16
    expected = everything - (vocabulary - 3) * hidden * 2 + cache
    # Packed layers may hold a few bytes beside what the checkpoint has.
    assert step_bytes(model, 3, 100, layers * experts) == pytest.approx(expected, rel=2e-3 if packed else 1e-9)
    few, more = (step_bytes(model, 1, 1, count) for count in (8, 9))
    one = 3 * 192 * 192 * (4.25 / 8 if packed else 2) + 3 * 192 * 2
    assert more - few == pytest.approx(one)


def test_dequantizing_is_transformers_own_or_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="expected fp8 or mxfp4, got quantization 'awq'"):
        load_dequantized(MODELS / "sums-mixtral-awq", device=torch.device("cpu"))
    model = load_dequantized(MODELS / "sums-qwen3-fp8", device=torch.device("cpu"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
