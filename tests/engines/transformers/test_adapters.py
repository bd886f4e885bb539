"""LoRA adapters on models with packed experts: those of experts are refused however they are loaded; others load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

import peft
from dequantized import filled
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file

from polymoe.errors import UnsupportedProblem
from support.family_checkpoints import token_ids

Checkpoints = Callable[[str], Path]
FAMILY = "gpt-oss"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def adapters(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter of attention and experts, and the same without its expert part."""
    whole, others = (tmp_path_factory.mktemp(name) for name in ("whole", "others"))
    for path, experts in ((whole, EXPERTS), (others, None)):
        options = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
        config = peft.LoraConfig(**options, target_parameters=experts)
        model = peft.get_peft_model(filled(checkpoint(FAMILY), torch.float32), config)
        model.save_pretrained(str(path))
    return whole, others


@pytest.fixture
def model(pair: Any) -> Any:
    return copy.deepcopy(pair(FAMILY)[1])


def _as_peft_model(model: Any, path: Path) -> Any:
    return peft.PeftModel.from_pretrained(model, path)


def _as_mixed_model(model: Any, path: Path) -> Any:
    return peft.PeftMixedModel.from_pretrained(model, path)


def _on_the_meta_device(model: Any, path: Path) -> Any:
    return peft.PeftModel.from_pretrained(model, path, low_cpu_mem_usage=True)


def _without_the_head(model: Any, path: Path) -> Any:
    """A part of the model alone, which holds no hook of the whole."""
    tensors = {name.replace(".model.model.", ".model."): t for name, t in load_file(path / FILE).items()}
    wrapped = peft.get_peft_model(model.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return peft.set_peft_model_state_dict(wrapped, tensors)


def _second_of_a_peft_model(model: Any, path: Path) -> Any:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return wrapped.load_adapter(path, "second")


def _injected(model: Any, path: Path) -> Any:
    config = peft.PeftConfig.from_pretrained(str(path))
    peft.inject_adapter_in_model(config, model)
    return peft.set_peft_model_state_dict(model, load_file(path / FILE))


def _by_transformers(model: Any, path: Path) -> Any:
    return model.load_adapter(str(path))


def _by_transformers_from_tensors(model: Any, path: Path) -> Any:
    config = peft.PeftConfig.from_pretrained(str(path))
    return model.load_adapter(peft_config=config, adapter_state_dict=load_file(path / FILE))


def _by_transformers_from_pickle(model: Any, path: Path) -> Any:
    """A file whose names are known only once it is loaded."""
    target = Path(str(path) + "-pickle")
    target.mkdir(exist_ok=True)
    (target / "adapter_config.json").write_bytes((path / "adapter_config.json").read_bytes())
    torch.save(load_file(path / FILE), target / "adapter_model.bin")
    return model.load_adapter(str(target), use_safetensors=False)


FILE = "adapter_model.safetensors"
WAYS = (
    _as_peft_model, _as_mixed_model, _on_the_meta_device, _without_the_head, _second_of_a_peft_model, _injected,
    _by_transformers, _by_transformers_from_tensors, _by_transformers_from_pickle,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:target_parameters:RuntimeWarning")  # PEFT finds none in packed experts
@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_of_experts_is_refused(way: Callable[[Any, Path], Any], model: Any, adapters: Any) -> None:
    with pytest.raises(
        UnsupportedProblem, match=r"^layer \d, \S+\.experts\.\S*lora_A\S*: expected .*no adapter, got one"
    ):
        way(model, adapters[0])


@pytest.mark.parametrize("way", [way for way in WAYS if way not in (_as_mixed_model, _without_the_head)])
def test_an_adapter_of_other_modules_loads_and_counts(
    way: Callable[[Any, Path], Any], model: Any, adapters: Any, checkpoint: Checkpoints
) -> None:
    way(model, adapters[1])
    plain = peft.PeftModel.from_pretrained(filled(checkpoint(FAMILY), torch.float32), adapters[1])
    if way is _second_of_a_peft_model:
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.set_adapter("second")
    with torch.inference_mode():
        expected, got = (m(token_ids()).logits for m in (plain, model))
        with plain.disable_adapter():
            without = plain(token_ids()).logits
    assert (got - expected).abs().max() < 0.01 * (expected - without).abs().max()


def test_tensors_by_the_names_of_checkpoints_are_refused_too(model: Any) -> None:
    name = "model.layers.2.block_sparse_moe.experts.7.w1.lora_B.weight"
    with pytest.raises(UnsupportedProblem, match=r"^layer 2, model\.layers\.2\.block_sparse_moe\.experts\.7\.w1"):
        model.load_state_dict({name: torch.zeros(1)}, strict=False)


def test_hot_swapping_refuses_them_itself(model: Any, adapters: Any) -> None:
    wrapped = peft.PeftModel.from_pretrained(model, adapters[1])
    with pytest.raises((RuntimeError, UnsupportedProblem), match="experts"):
        hotswap_adapter(wrapped, adapters[0], "default")
