"""Every family, packed in Transformers, against the model with dequantized weights; families that are unknown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.checkpoint import Checkpoint
from polymoe.errors import UnsupportedProblem
from polymoe.layer.load import load_experts
from polymoe.problem.numerics import relative_error
from support.configs import config as checkpoint_config

pytest.importorskip("transformers")

import transformers
from dequantized import filled, own
from families import FAMILIES
from packaging.version import Version

from polymoe.engines.transformers import PackedExperts, load
from support.family_checkpoints import VARIANTS, fused_of, token_ids

Checkpoints = Callable[[str], Path]


def experts_modules(model: Any) -> dict[str, Any]:
    """The modules that packing replaces, by name: experts modules, and Llama-4's whole blocks."""
    found = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    if "llama4" in model.config.model_type:
        names = [name.removesuffix(".experts") for name in found]
        return {name: model.get_submodule(name) for name in names}
    return found


# --- A packed model computes what the dequantized one does ----------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_agree_in_float32(pair: Any, name: str) -> None:
    expected, packed, _ = pair(name)
    ids = token_ids()
    with torch.inference_mode():
        want, got = expected(input_ids=ids).logits, packed(input_ids=ids).logits
    assert want.abs().max() > 0.5  # logits near zero would agree with anything
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    # Routers, shared experts, attention, vision towers: all there, and bitwise identical.
    theirs = {name: value for name, value in expected.state_dict().items() if ".experts." not in name}
    ours = packed.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_experts_module_agrees_in_bfloat16(checkpoint: Checkpoints, name: str) -> None:
    path = checkpoint(name)
    expected = filled(path, torch.bfloat16)
    recorded: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}
    for module_name, module in experts_modules(expected).items():
        module.register_forward_hook(lambda _, args, out, name=module_name: recorded.update({name: (args, out)}))
    if name == "deepseek-v4" and Version(transformers.__version__) < Version("5.20"):
        with pytest.raises(UnsupportedProblem, match=r"expected Transformers 5\.20 or newer"):
            load(path, device="cpu", dtype=torch.bfloat16)
        return
    packed, _ = load(path, device="cpu", dtype=torch.bfloat16)
    with torch.inference_mode():
        expected(input_ids=token_ids())
        errors = {
            module_name: relative_error(_first(packed.get_submodule(module_name)(*args)), _first(out))
            for module_name, (args, out) in recorded.items()
        }
    assert len(errors) == len(fused_of(packed)) > 1
    assert 0 < max(errors.values()) <= 6e-3, errors


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("deepseek-v3", "fp8_group128"),
        ("deepseek-v4", "fp8_group128"),
        ("qwen3", "fp8_group128"),
        ("llama-4", "fp8_token"),
    ],
)
def test_experts_agree_with_their_inputs_in_fp8(checkpoint: Checkpoints, pair: Any, name: str, recipe: str) -> None:
    """With inputs quantized as the releases intend, which is the default on a GPU."""
    _, packed, _ = pair(name)
    recorded: dict[int, tuple[Tensor, ...]] = {}
    modules = [module for module in packed.modules() if isinstance(module, PackedExperts)]
    hooks = [
        module.register_forward_pre_hook(lambda _, args, layer=layer: recorded.update({layer: args}))
        for layer, module in zip(Checkpoint.open(checkpoint(name)).layers, modules, strict=True)
    ]
    with torch.inference_mode():
        packed(input_ids=token_ids())
    for hook in hooks:
        hook.remove()
    opened = Checkpoint.open(checkpoint(name))
    for module, (layer, (x, ids, weights)) in zip(modules, recorded.items(), strict=True):
        assert str(opened.recipe(layer)) == recipe
        fused = load_experts(opened, layer, device="cpu", activations=recipe)
        error = relative_error(fused(x, ids, weights.float()), module(x, ids, weights))
        assert 1e-3 < error <= 5.5e-2


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", FAMILIES)
def test_generates_the_same_tokens_from_padded_prompts(pair: Any, name: str) -> None:
    expected, packed, tokenizer = pair(name)
    inputs = tokenizer(["1+2=", "123-45=", "7+999="], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(packed.generate(**inputs, **options), expected.generate(**inputs, **options))


OWN = ["gpt-oss", "deepseek-v3", "deepseek-v4", "deepseek-v4 FP8 experts", "qwen3"]
OWN_ROUNDED = ["kimi-k2", "llama-4", "glm-4 FP8 by channel"]


@pytest.mark.parametrize("name", [*OWN, *OWN_ROUNDED])
def test_weights_are_those_that_transformers_dequantizes(checkpoint: Checkpoints, pair: Any, name: str) -> None:
    """For formats that Transformers dequantizes: no weight differs, but compressed-tensors rounds to bfloat16."""
    if name in OWN_ROUNDED:
        pytest.importorskip("compressed_tensors")
    theirs, (_, packed, _) = own(checkpoint(name), torch.float32), pair(name)

    def same(ours: Tensor, other: Tensor) -> bool:
        rounded = ours.bfloat16().float() if name in OWN_ROUNDED else ours
        return torch.equal(other.float(), rounded) or torch.equal(other.float(), ours)

    state = theirs.state_dict()
    assert all(same(value, state[key]) for key, value in packed.state_dict().items())
    for module_name, module in packed.named_modules():
        if not isinstance(module, PackedExperts) or module.fused is None:
            continue
        gate_up, down = module.fused.weights.dequantize()
        held = dict(theirs.get_submodule(module_name).named_parameters())
        if "0.up_proj.weight" in held:  # one module an expert
            for e in range(len(down)):
                both = torch.cat([held[f"{e}.gate_proj.weight"], held[f"{e}.up_proj.weight"]])
                assert same(gate_up[e], both)
                assert same(down[e], held[f"{e}.down_proj.weight"])
        elif name == "gpt-oss":
            assert same(torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2), held["gate_up_proj"].mT)
            assert same(down, held["down_proj"].mT)
        else:
            assert same(gate_up, held["gate_up_proj"])
            assert same(down, held["down_proj"])
    if name in OWN:
        ids = token_ids()
        with torch.inference_mode():
            # What was 16 bit in the files stays so in Transformers from 5.23 on, whatever the dtype asked for.
            want, got = theirs.float()(input_ids=ids).logits, packed(input_ids=ids).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_vision_tower_is_kept_and_works(pair: Any) -> None:
    expected, packed, _ = pair("llama-4")
    image, pixels = packed.config.image_token_id, torch.randn(1, 3, 28, 28)
    words = token_ids(1).clamp(max=12)
    ids = words.index_fill(1, torch.tensor([2]), image)  # 28 x 28 pixels are one token
    with torch.inference_mode():
        want = expected(input_ids=ids, pixel_values=pixels).logits
        got, without = packed(input_ids=ids, pixel_values=pixels).logits, packed(input_ids=words).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert not torch.allclose(got[0, -1], without[0, -1], atol=1e-4)


@pytest.mark.parametrize("quantized", [True, False])
def test_a_family_that_transformers_lacks(tmp_path: Path, quantized: bool) -> None:
    described = checkpoint_config("deepseek-v4-fp4") | {"model_type": "deepseek_v41"}
    if not quantized:
        del described["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(
        UnsupportedProblem, match="deepseek_v41 in Transformers: expected a family that Transformers has"
    ) as e:
        load(tmp_path, device="cpu")
    assert "install a version of Transformers with a model for deepseek_v41" in str(e.value)
