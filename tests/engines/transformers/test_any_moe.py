"""Every architecture of the installed Transformers that has its experts interface: found, not listed.

Each is built tiny from its own config class, saved as its releases are, loaded by polymoe and compared with
Transformers' own experts in float32.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from polymoe import load
from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.architectures.config import model_class
from polymoe.checkpoint.architectures.interface import has_interface, projections
from polymoe.checkpoint.calibration import Texts
from polymoe.checkpoint.dialects import DIALECTS
from polymoe.checkpoint.quantize import quantize_checkpoint
from polymoe.engines.transformers import PackedExperts, calibrate
from polymoe.errors import PolymoeError, UnsupportedProblem
from polymoe.formats import FORMATS
from polymoe.problem.tensors import Expert
from support.tiny_models import KNOWS_CONVERSIONS, architectures, tiny_config

pytestmark = pytest.mark.skipif(not KNOWS_CONVERSIONS, reason="Transformers before 5.23")

TOKENIZER = Path(__file__).parents[3] / "models" / "sums-qwen3-fp8"

REFUSED = {
    "diffusion_gemma": "return_dict_in_generate: expected no such field",  # it generates in its own way
    "inkling2": "Inkling2Experts: expected an activation equal to .*, got another gate",  # soft caps
    "muse_spark": "expected MuseSparkExperts with has_post_expert_norm=False",
    "openai_privacy_filter": "expected a model that generates text",
}
"""What is not loaded, and the words that name the reason."""


def build(model_type: str) -> Any:
    """A random model in float32, whose weights bfloat16 can hold."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    tags = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)] if model_type == "openai_privacy_filter" else None
    try:
        model = (tags or model_class(config))._from_config(config, dtype=torch.float32).eval()
    except ModuleNotFoundError as error:
        pytest.skip(f"{model_type}: {error}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                nn.init.normal_(parameter, std=0.2)
            parameter.copy_(parameter.bfloat16())
    return model.requires_grad_(False)


def save(model: Any, path: Path) -> None:
    """As ``save_pretrained`` does in bfloat16, and a tokenizer."""
    copy.deepcopy(model).bfloat16().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path / name)


def logits(model: Any) -> Tensor:
    ids = torch.tensor([[3, 5, 8, 13, 2, 7]])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def error(got: Any, expected: Tensor) -> float:
    """The largest difference of logits, relative to the largest logit."""
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.slow(sample=12)
@pytest.mark.parametrize("model_type", architectures())
def test_bf16(model_type: str, tmp_path: Path) -> None:
    if model_type in REFUSED:
        tiny_config(model_type).save_pretrained(tmp_path)
        if model_type == "diffusion_gemma":
            save(build(model_type), tmp_path)
        with pytest.raises(PolymoeError, match=REFUSED[model_type]):
            load(tmp_path, device="cpu", dtype=torch.bfloat16)
        return
    model = build(model_type)
    save(model, tmp_path)
    loaded, _ = load(tmp_path, device="cpu", dtype=torch.bfloat16)
    # Everything but the experts in float32, so that a difference is theirs.
    for module in loaded.modules():
        if not has_interface(module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.float() if buffer.is_floating_point() else buffer
    assert error(logits(loaded), logits(model)) < 1e-4


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("model_type", ["diffusion_gemma", "openai_privacy_filter"])
def test_models_for_other_tasks_take_the_experts_implementation(model_type: str) -> None:
    model, ids = build(model_type), torch.tensor([[3, 5, 8, 13, 2, 7]])
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model_type == "diffusion_gemma" else {})}
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        if has_interface(module):
            module.bfloat16()
    model.set_experts_implementation("polymoe")
    with torch.inference_mode(), pytest.raises(UnsupportedProblem, match="float32"):  # polymoe is what runs
        model(**inputs)
    model.set_experts_implementation("eager")
    rounded.set_experts_implementation("polymoe")
    with torch.inference_mode():
        assert error(rounded(**inputs).logits, model(**inputs).logits) < 1e-4


PER_EXPERT = re.compile(r".*[._]experts?\.\d+\.\w+\.weight")
"""Experts that releases store one by one."""


def quantization() -> dict[str, Any]:
    """MXFP4 as llm-compressor describes it, for experts alone."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    weights["scale_dtype"] = "torch.uint8"
    group = {"format": "mxfp4-pack-quantized", "targets": [r"re:.*experts\.\d+\..*"], "weights": weights}
    groups = {"group_0": {**group, "input_activations": None, "output_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups}


def quantized(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as compressed-tensors stores it, and what it means."""
    packed = FORMATS["mxfp4"].quantize(matrix.float())
    return DIALECTS["ct_mxfp4"].write(packed), packed.dequantize()


def pack(model: Any, path: Path) -> Any:
    """Replace the experts of a checkpoint by ones in MXFP4, each projection a module of its own.

    Where the release stores them one by one, these have its names, otherwise those of llm-compressor. Returns the same
    model with what they mean.
    """
    file = path / "model.safetensors"
    stored, exact, packed = load_file(file), copy.deepcopy(model), dict[str, Tensor]()
    apart = [name for name, tensor in stored.items() if PER_EXPERT.fullmatch(name) and tensor.dim() == 2]
    for name in apart:
        tensors, stored[name] = quantized(stored[name])
        packed |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in tensors.items()}
    if apart:
        floats = {name: tensor.float() for name, tensor in stored.items()}
        exact = (
            type(model)
            .from_pretrained(None, config=copy.deepcopy(model.config), state_dict=floats, trust_remote_code=False)
            .float()
            .eval()
        )
    for name, module in exact.named_modules() if not apart else ():
        if has_interface(module):
            for part, stack in projections(module, dict(module.named_parameters(recurse=False))).items():
                for e, matrix in enumerate(stack):
                    if part.endswith("_bias"):
                        packed[f"{name}.{e}.{part.removesuffix('_bias')}_proj.bias"] = matrix.bfloat16()
                        continue
                    tensors, meaning = quantized(matrix)
                    packed |= {f"{name}.{e}.{part}_proj.{suffix}": tensor for suffix, tensor in tensors.items()}
                    matrix.copy_(meaning)
    stacked = {n for n, t in stored.items() if not apart and t.shape[:1] == (4,) and STACKED.search(n)}
    left = {name: tensor for name, tensor in stored.items() if name not in {*apart, *stacked}}
    save_file({name: tensor.contiguous() for name, tensor in (left | packed).items()}, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization()}))
    return exact


STACKED = re.compile(r"\.experts\.|\.(input|output)_linear\.")


@pytest.mark.slow(sample=12)
@pytest.mark.parametrize("model_type", [name for name in architectures() if name not in REFUSED])
def test_packed(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    save(model, tmp_path)
    exact = pack(model, tmp_path)
    loaded, _ = load(tmp_path, device="cpu", dtype=torch.float32)
    held = [module for module in loaded.modules() if isinstance(module, PackedExperts)]
    assert len(held) == sum(has_interface(module) for module in model.modules()) > 0
    assert error(logits(loaded), logits(exact)) < 1e-4
    assert error(logits(model), logits(exact)) > 1e-3  # what is compared depends on the experts


def dequantized(model: Any) -> Any:
    """The same model with experts that MXFP4 has rounded."""
    exact = copy.deepcopy(model)
    for module in exact.modules():
        if has_interface(module):
            for part, stack in projections(module, dict(module.named_parameters(recurse=False))).items():
                for matrix in stack if not part.endswith("_bias") else ():
                    matrix.copy_(FORMATS["mxfp4"].quantize(matrix.float()).dequantize())
    return exact


@pytest.mark.slow(sample=12)
@pytest.mark.parametrize("model_type", [name for name in architectures() if name not in REFUSED])
def test_quantized_while_loading_and_to_a_file(model_type: str, tmp_path: Path) -> None:
    """Both give the same bits, and the logits of Transformers' own experts on the dequantized weights."""
    source, out = tmp_path / "source", tmp_path / "out"
    model = build(model_type)
    save(model, source)
    quantize_checkpoint(source, "mxfp4", out)
    with Checkpoint.open(source, experts="mxfp4") as wanted, Checkpoint.open(out) as got:
        assert len(got.parts) == len(wanted.parts)
        for ours, theirs in zip(got.parts, wanted.parts, strict=True):
            assert ours.layers_here == theirs.layers
            for layer in theirs.layers:
                for e in range(theirs.moe.experts):
                    require_equal(ours.weights(layer).expert(e), theirs.weights(layer).expert(e))
    loaded, expected = (
        logits(load(path, device="cpu", dtype=torch.float32, **options)[0])
        for path, options in ((out, {}), (source, {"experts": "mxfp4"}))
    )
    assert torch.equal(loaded, expected)
    exact = logits(dequantized(model))
    assert error(loaded, exact) < 1e-4
    assert error(logits(model), exact) > 1e-3  # what is compared depends on the experts


def require_equal(got: Expert, wanted: Expert) -> None:
    assert got.projections.keys() == wanted.projections.keys()
    for name, matrix in wanted.projections.items():
        for part, tensor in matrix.parts().items():
            assert torch.equal(got.projections[name].parts()[part], tensor), (name, part)


@pytest.mark.slow(sample=12)
@pytest.mark.parametrize("model_type", [name for name in architectures() if name not in REFUSED])
def test_calibrated(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that measures inputs computes what Transformers' own experts do."""
    save(build(model_type), tmp_path)
    forward, calls = calibrate._experts_forward, list[str]()

    def compared(found: Any, experts: Any, *args: Tensor, **others: Any) -> Tensor:
        out, wanted = forward(found, experts, *args, **others), type(experts).forward.__wrapped__(experts, *args)
        assert error(out, wanted) < 2e-2
        calls.append(type(experts).__name__)
        return out

    monkeypatch.setattr(calibrate, "_experts_forward", compared)
    (tmp_path / "texts.jsonl").write_text('{"text": "' + "123+456=579 " * 16 + '"}\n')
    found = calibrate.calibrate(tmp_path, Texts.read(tmp_path / "texts.jsonl"), device="cpu")
    assert calls
    assert any(squares.importance(e) for squares in found.layers.values() for e in range(len(squares.tokens_E)))
