"""Models with packed experts in Transformers, on a GPU: their logits, captured steps, continuous batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from polymoe.engines.transformers import load
from polymoe.engines.transformers import paged_attention as paged
from polymoe.engines.transformers.decode_graph import Decoder
from polymoe.engines.transformers.experts_interface import register, unregister
from support.decode_steps import LENGTH, STEPS, given_tokens, prompts, step_by_step
from support.family_checkpoints import fused_of, token_ids, write
from support.packed_model import CHECKPOINT, batch
from support.paged_attention import QUERIES, SUMS_RIGHT, answers, attention, by_definition, ragged


def test_a_model_on_a_gpu() -> None:
    cpu, tokenizer = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    model, _ = load(CHECKPOINT, device="cuda", dtype=torch.float32, backend="reference")
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cuda"}
    inputs = batch(tokenizer)
    with torch.inference_mode():
        got = model(**{name: t.cuda() for name, t in inputs.items()}).logits.cpu()
        torch.testing.assert_close(got, cpu(**inputs).logits, rtol=0, atol=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v4", "llama-4"])
def test_a_model_on_several_gpus(tmp_path: Path, name: str) -> None:
    if name == "deepseek-v4" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("before 5.20 Transformers runs DeepSeek-V4 in float32 only")
    path = write(name, tmp_path / "checkpoint")
    names = [n for n, _ in load(path, device="cpu")[0].named_children()]
    model, _ = load(path, device_map="balanced", backend="reference", dtype=torch.float32)
    assert {fused.device.index for fused in fused_of(model)} == set(range(torch.cuda.device_count())), names
    one, _ = load(path, device="cuda:0", backend="reference", dtype=torch.float32)
    ids = token_ids().cuda()
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids).logits.cpu(), one(input_ids=ids).logits.cpu())


def test_captured_steps() -> None:
    model, _ = load(CHECKPOINT, device="cuda", dtype=torch.bfloat16)
    prompts_BT, given_NB1 = prompts().cuda(), given_tokens().cuda()
    expected = step_by_step(
        Decoder(model, max_tokens=LENGTH + STEPS, compile=None, capture=False), prompts_BT, given_NB1
    )
    decoder = Decoder(model, max_tokens=LENGTH + STEPS)
    got = step_by_step(decoder, prompts_BT, given_NB1)
    assert (got - expected).norm() / expected.norm() < 3e-2
    assert torch.equal(step_by_step(decoder, prompts_BT, given_NB1), got)
    kept = [p.data for p in model.parameters()]  # so that their memory is not given to the copies
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for former in kept:
        former.zero_()
    assert torch.equal(step_by_step(decoder, prompts_BT, given_NB1), got)


def test_captured_steps_of_experts_in_host_memory() -> None:
    """With as few slots as can be, so that a step of several sequences runs in waves; and compiled by generate."""
    got = []
    config = AutoConfig.from_pretrained(CHECKPOINT, trust_remote_code=False)
    for memory in (None, f"{config.num_experts_per_tok}slots"):
        model, tokenizer = load(CHECKPOINT, device="cuda", dtype=torch.bfloat16, expert_memory=memory)
        got.append(step_by_step(Decoder(model, max_tokens=LENGTH + STEPS), prompts().cuda(), given_tokens().cuda()))
    assert torch.equal(*got)
    inputs = tokenizer("123+456=", return_tensors="pt").to("cuda")
    ids = model.generate(**inputs, max_new_tokens=4, do_sample=False, cache_implementation="static")
    assert tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).startswith("579")


def test_a_capture_of_experts_whose_parameters_move() -> None:
    """What polymoe can say of it, at the next call outside of the graph."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, intermediate_size=128, num_experts_per_tok=2)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval().cuda()
    register()
    try:
        model.set_experts_implementation("polymoe")
        experts = next(module for module in model.modules() if hasattr(module, "has_gate"))
        x_TH = torch.randn(4, 128, dtype=torch.bfloat16, device="cuda")
        ids_TA = torch.rand(4, 8, device="cuda").topk(2).indices
        weights_TA = torch.rand(4, 2, device="cuda")
        with torch.inference_mode():
            expected = experts(x_TH, ids_TA, weights_TA)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = experts(x_TH, ids_TA, weights_TA)
            graph.replay()
            assert torch.equal(got, expected)
            experts.down_proj.data = experts.down_proj.data.clone()
            with pytest.warns(UserWarning, match="have moved since a CUDA graph captured it"):
                assert torch.equal(experts(x_TH, ids_TA, weights_TA), expected)
    finally:
        unregister()


@pytest.mark.parametrize("most", [0, 512])
@pytest.mark.parametrize("window", [0, 2])
def test_pytorchs_flash_attention_is_what_it_is_taken_for(monkeypatch: Any, window: int, most: int) -> None:
    monkeypatch.setattr(paged, "_TOKEN_BY_TOKEN", most)
    query, key, value = [x.cuda() for x in ragged(padding=3, dtype=torch.bfloat16)]
    sinks = torch.tensor([-1.0, 0.0, 2.0, 4.0]).cuda()
    attend = attention(query, key, value, sinks, window, monkeypatch)
    got = attend()
    expected = by_definition(query.float().cpu(), key.float().cpu(), value.float().cpu(), sinks.cpu(), window)
    torch.testing.assert_close(got[: sum(QUERIES)].float().cpu(), expected, rtol=2e-2, atol=2e-2)
    assert not got[sum(QUERIES) :].any()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    graph.replay()
    assert torch.equal(captured, got)


@pytest.mark.parametrize("graphs", [False, True])
def test_answers_of_requests_batched_continuously(graphs: bool) -> None:
    model, tokenizer = load(CHECKPOINT, device="cuda", dtype=torch.bfloat16)
    runners = []

    def before(manager: Any) -> None:
        paged.use(model)
        if graphs:
            paged.capture_small_steps(manager)
        create = manager._create_batch_processor
        manager._create_batch_processor = lambda: runners.append(create()) or runners[-1]

    for _ in range(3):  # what a graph has computed is computed again
        assert answers(model, tokenizer, paged.batching_config(graphs=graphs, cache_memory=0.02), before) == SUMS_RIGHT
    pairs = runners[0].inputs_and_outputs.io_pairs
    assert any(pair.device_io.graphs._storage for pair in pairs) == graphs
