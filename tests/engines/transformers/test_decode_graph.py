"""Decode steps as one graph: static caches, replays, Transformers' own compilation and continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from polymoe.engines.transformers import load
from polymoe.engines.transformers.decode_graph import Decoder, require_capturable
from polymoe.errors import ArgumentError, PlanError, UnsupportedProblem
from polymoe.layer.experts import FusedExperts
from support.decode_steps import LENGTH, STEPS, given_tokens, prompts, step_by_step
from support.packed_model import CHECKPOINT
from support.paged_attention import batching_config

COMPILE = pytest.mark.parametrize("compile", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def model_and_tokenizer() -> tuple[Any, Any]:
    """The first two layers, one with a sliding window and one without: half as much to compile."""
    model, tokenizer = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.config.layer_types = model.config.layer_types[:2]
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    return model, tokenizer


@pytest.fixture(scope="module")
def model(model_and_tokenizer: tuple[Any, Any]) -> Any:
    return model_and_tokenizer[0]


@pytest.fixture
def prompts_BT() -> Tensor:
    return prompts()


@pytest.fixture
def given_NB1() -> Tensor:
    return given_tokens()


def at_once(model: Any, prompts_BT: Tensor, given_NB1: Tensor) -> Tensor:
    """Logits [1 + N, B, V] of the same tokens in one forward pass, without a cache."""
    with torch.inference_mode():
        logits = model(torch.cat([prompts_BT, *given_NB1], 1), use_cache=False).logits
    return logits[:, prompts_BT.shape[1] - 1 :].transpose(0, 1)


class Replaying(Decoder):
    """Stands in for CUDA's capture: a replay repeats the step's work, and nothing that Python counts advances."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, capture=False, **kwargs)
        self.capture = True

    def _capture_step(self) -> Callable[[], None]:
        self.captures = getattr(self, "captures", 0) + 1
        layers: list[Any] = self.cache.layers
        counted = [{k: v for k, v in vars(layer).items() if type(v) in (int, bool)} for layer in layers]
        self._logits_BV = self._advance().clone()

        def replay() -> None:
            for layer, values in zip(layers, counted, strict=True):
                vars(layer).update(values)
            self._logits_BV.copy_(self._advance())

        return replay


@COMPILE
def test_steps_give_the_logits_of_one_pass(
    model: Any, prompts_BT: Tensor, given_NB1: Tensor, compile: str | None
) -> None:
    decoder = Decoder(model, max_tokens=LENGTH + STEPS, compile=compile, capture=False)
    expected = at_once(model, prompts_BT, given_NB1)
    torch.testing.assert_close(step_by_step(decoder, prompts_BT, given_NB1), expected, rtol=1e-4, atol=1e-4)
    # And again: what the first run left in the cache has no effect.
    torch.testing.assert_close(step_by_step(decoder, prompts_BT, given_NB1), expected, rtol=1e-4, atol=1e-4)


@COMPILE
def test_a_replayed_step_needs_nothing_that_the_host_counts(
    model: Any, prompts_BT: Tensor, given_NB1: Tensor, compile: str | None
) -> None:
    decoder = Replaying(model, max_tokens=LENGTH + STEPS, compile=compile)
    expected = at_once(model, prompts_BT, given_NB1)
    torch.testing.assert_close(step_by_step(decoder, prompts_BT, given_NB1), expected, rtol=1e-4, atol=1e-4)
    longer = torch.cat([prompts_BT, *given_NB1[:2]], 1)  # the step was made at another length
    got = step_by_step(decoder, longer, given_NB1[2:])
    torch.testing.assert_close(got, expected[2:], rtol=1e-4, atol=1e-4)


def test_a_step_is_one_graph_that_copies_no_weights(model: Any, prompts_BT: Tensor, given_NB1: Tensor) -> None:
    """A CUDA graph copies inputs whose addresses may change at each replay. Packed tensors must not be among them."""
    moving, experts = [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        tensors = [i for i in inputs if isinstance(i, Tensor)]
        moving.append([list(i.shape) for i in tensors if getattr(i, "_dynamo_static_input_type", None) is None])
        experts.append([n for n in graph.graph.nodes if "fused_experts" in str(n.target)])
        return graph.forward

    decoder = Decoder(model, max_tokens=LENGTH + STEPS, compile=None, capture=False)
    decoder.prefill(prompts_BT)
    with torch.inference_mode():
        position_B1 = torch.full((2, 1), LENGTH)
        torch.compile(decoder._forward, fullgraph=True, dynamic=False, backend=backend)(given_NB1[0], position_B1)
    assert moving == [[[2, 1], [2, 1]]]  # tokens and positions
    assert len(experts[0]) == model.config.num_hidden_layers


def test_a_step_is_captured_again_after_the_model_has_moved(prompts_BT: Tensor, given_NB1: Tensor) -> None:
    """A graph reads the addresses at which it was captured, whatever is there now."""
    model, _ = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    decoder = Replaying(model, max_tokens=LENGTH + STEPS, compile=None)
    expected = at_once(model, prompts_BT, given_NB1)
    for _ in range(2):
        torch.testing.assert_close(step_by_step(decoder, prompts_BT, given_NB1), expected, rtol=1e-4, atol=1e-4)
    assert decoder.captures == 1
    weight = model.get_input_embeddings().weight
    weight.data = weight.data.clone()
    torch.testing.assert_close(step_by_step(decoder, prompts_BT, given_NB1), expected, rtol=1e-4, atol=1e-4)
    assert decoder.captures == 2
    # Packed experts are looked at in each step: their memory may belong to something else by now.
    decoder.prefill(prompts_BT)
    experts = next(module for module in model.modules() if isinstance(module, FusedExperts))
    name, tensor = next(iter(experts._buffers.items()))
    assert tensor is not None
    experts._buffers[name] = tensor.clone()
    with pytest.raises(PlanError, match=r"where they were when the step was captured(?s:.*)call prefill"):
        decoder.step(given_NB1[0])
    torch.testing.assert_close(step_by_step(decoder, prompts_BT, given_NB1), expected, rtol=1e-4, atol=1e-4)
    assert decoder.captures == 3


def test_a_model_on_another_device_needs_another_decoder(model: Any, prompts_BT: Tensor) -> None:
    decoder = Decoder(model, max_tokens=LENGTH + 1, compile=None, capture=False)
    decoder.device = torch.device("meta")
    with pytest.raises(ArgumentError, match=r"expected on meta, got cpu(?s:.*)a new Decoder"):
        decoder.prefill(prompts_BT)


@pytest.mark.slow
def test_inductor_keeps_the_logits(model: Any, prompts_BT: Tensor, given_NB1: Tensor) -> None:
    decoder = Replaying(model, max_tokens=LENGTH + STEPS, compile="inductor")
    got = step_by_step(decoder, prompts_BT, given_NB1[:2])
    expected = at_once(model, prompts_BT, given_NB1)[:3]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_generate_compiles_the_step_by_itself(model_and_tokenizer: tuple[Any, Any]) -> None:
    model, tokenizer = model_and_tokenizer
    inputs = tokenizer(["123+456=", "12+4="], return_tensors="pt", padding=True, padding_side="left")
    expected = model.generate(**inputs, max_new_tokens=6)
    compile = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode="default")
    compile._compile_all_devices = True  # type: ignore[assignment]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = model.generate(**inputs, max_new_tokens=6, cache_implementation="static", compile_config=compile)
    assert torch.equal(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] in (1, 2)  # before and after the window is full
    assert not torch._dynamo.utils.counters["graph_break"]


def test_continuous_batching_runs_packed_experts() -> None:
    model, tokenizer = load(CHECKPOINT, device="cpu", attn_implementation="eager")
    model.set_attn_implementation("paged|eager")
    prompts = [tokenizer(text)["input_ids"] for text in ("123+456=", "12+4=", "700-12=")]
    batching = batching_config(max_batch_tokens=64, max_memory_percent=0.001)
    settings = transformers.GenerationConfig(
        max_new_tokens=6, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    answers = model.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=batching, progress_bar=False
    )
    texts = {tokenizer.decode(a.generated_tokens, skip_special_tokens=True) for a in answers.values()}
    assert texts == {"579", "16", "688"}


def test_what_the_decoder_cannot_take_is_refused(model: Any, prompts_BT: Tensor, given_NB1: Tensor) -> None:
    decoder = Decoder(model, max_tokens=LENGTH + 1, compile=None, capture=False)
    with pytest.raises(ArgumentError, match="fewer than 11 tokens"):
        decoder.prefill(torch.ones(2, 11, dtype=torch.int64))
    decoder.prefill(prompts_BT)
    decoder.step(given_NB1[0])
    with pytest.raises(ArgumentError, match="at most 11 tokens"):
        decoder.step(given_NB1[1])
    with pytest.raises(ArgumentError, match="use a new Decoder"):
        decoder.prefill(prompts_BT[:1])
    with pytest.raises(ArgumentError, match="at least 8 tokens, the model's sliding window"):
        Replaying(model, max_tokens=20, compile=None).prefill(prompts_BT[:, :7])
    with pytest.raises(ArgumentError, match="expected capture=False with it"):
        Decoder(model, max_tokens=20, compile=None)


def test_a_backend_that_looks_at_tensors_is_not_captured(model: Any) -> None:
    with pytest.raises(UnsupportedProblem, match=r"layers\.0\..*CUDA graphs can capture, got backend 'torch'"):
        require_capturable(model)
