"""polymoe.refit: a packed model gets the weights that a trainer has, and answers as one that is loaded with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polymoe.errors import ArgumentError, CheckpointError, FormatError, PlanError, UnsupportedProblem

pytest.importorskip("transformers")

import polymoe
from polymoe.checkpoint.arrangement import Fused
from polymoe.checkpoint.plain_experts import PlainExperts
from polymoe.checkpoint.quantized import QUANTIZED_FORMATS
from polymoe.engines.transformers.refit import _arrangement
from polymoe.formats import Encoding, PerGroup
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import SwiGLU
from support.problems import random_experts, with_input_scales
from support.stacked import MODELS

Tensors = dict[str, Tensor]
NAME = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def trained(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after a step of training."""
    path = tmp_path_factory.mktemp("trained")
    for file in bf16.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(3)
    tensors = tensors_of(bf16)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * 0.02 * tensor.float().std()
        tensors[name] = (tensor + noise.nan_to_num()).to(tensor.dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def tensors_of(path: Path) -> Tensors:
    return load_file(path / "model.safetensors")


def logits(model: Any) -> Tensor:
    ids = torch.arange(16).view(2, 8) % 10
    with torch.inference_mode():
        return model(input_ids=ids).logits


@functools.cache
def fresh(path: Path, format: str) -> Tensor:
    """The logits of a model that is loaded anew."""
    return logits(polymoe.load(path, experts=format, device="cpu")[0])


QUICK = ("mxfp4", "nvfp4")  # of which one has global scales


@pytest.mark.parametrize(
    "format", [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in QUANTIZED_FORMATS if f not in QUICK)]
)
def test_answers_are_those_of_a_fresh_load(bf16: Path, trained: Path, format: str) -> None:
    """Three times, at the same addresses."""
    model, _ = polymoe.load(bf16, experts=format, device="cpu")
    assert not torch.equal(fresh(bf16, format), fresh(trained, format))
    addresses = {name: tensor.data_ptr() for name, tensor in model.named_buffers() if ".packed_" in name}
    assert addresses
    for path in (trained, bf16, trained):
        polymoe.refit(model, tensors_of(path).items(), check=True)
        assert torch.equal(logits(model), fresh(path, format))
    assert {n: t.data_ptr() for n, t in model.named_buffers() if ".packed_" in n} == addresses


def test_stacked_experts_as_transformers_names_them(bf16: Path, trained: Path) -> None:
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    tensors = tensors_of(trained)
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{name}.{e}.{part}_proj.weight") for e in range(5)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{name}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{name}.down_proj"] = parts["down"]
    polymoe.refit(model, tensors.items())
    assert torch.equal(logits(model), fresh(trained, "mxfp4"))


def test_gpt_oss_with_biases_and_alternating_rows() -> None:
    """Its own weights, dequantized to the names of its releases in BF16: MXFP4 finds the same numbers again."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    path = MODELS / "sums-gpt-oss-mxfp4"
    model, _ = polymoe.load(path, device="cpu")
    before = logits(model)
    plain = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=Mxfp4Config(dequantize=True), trust_remote_code=False
    )
    polymoe.refit(model, plain.state_dict().items(), check=True)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=2e-2)
    changed = {n: t.flip(0) if n.endswith("gate_up_proj_bias") else t for n, t in plain.state_dict().items()}
    polymoe.refit(model, changed.items())
    assert not torch.equal(logits(model), before)


def missing_expert(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    return iter([(name, tensor) for name, tensor in tensors.items() if name != NAME])


def missing_layer(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    return iter([(name, tensor) for name, tensor in tensors.items() if ".layers.2.mlp.experts." not in name])


def missing_norm(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    return iter([(name, tensor) for name, tensor in tensors.items() if name != "model.norm.weight"])


def doubled(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from tensors.items()
    yield NAME, tensors[NAME]


def with_nan(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    broken = tensors[NAME].clone()
    broken[3, 4] = float("nan")
    yield from {**tensors, NAME: broken}.items()


def of_another_shape(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from {**tensors, NAME: tensors[NAME].T.contiguous()}.items()


def in_float32(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from {**tensors, NAME: tensors[NAME].float()}.items()


def unknown(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from {**tensors, "model.layers.2.mlp.experts.3.up_prj.weight": tensors[NAME]}.items()


def interrupted(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from list(tensors.items())[: len(tensors) // 2]
    raise ConnectionError("the trainer is gone")


@pytest.mark.parametrize(
    ("stream", "error", "said"),
    [
        (missing_expert, CheckpointError, r"layers\.2\.mlp\.experts: .*got none for up of expert 3"),
        (missing_layer, CheckpointError, r"layers\.2\.mlp\.experts: .*gate of expert 0.* and 10 more"),
        (missing_norm, CheckpointError, r"got none for model\.norm\.weight"),
        (doubled, CheckpointError, rf"{NAME}: expected each tensor once"),
        (with_nan, FormatError, rf"{NAME}: expected finite .*NaN"),
        (of_another_shape, FormatError, rf"{NAME}: expected shape \["),
        (in_float32, FormatError, rf"{NAME}: expected bfloat16 or float16, got torch.float32"),
        (unknown, CheckpointError, r"3\.up_prj\.weight: expected a tensor of the model"),
        (interrupted, ConnectionError, "the trainer is gone"),
    ],
)
def test_half_a_refit_is_named_and_unusable(
    bf16: Path,
    trained: Path,
    stream: Callable[[Tensors], Iterator[tuple[str, Tensor]]],
    error: type[Exception],
    said: str,
) -> None:
    model, _ = polymoe.load(bf16, experts="nvfp4", device="cpu")
    with pytest.raises(error, match=said):
        polymoe.refit(model, stream(tensors_of(trained)))
    with pytest.raises(PlanError, match="expected weights of one whole update, got a mixture"):
        logits(model)
    polymoe.refit(model, tensors_of(trained).items())
    assert torch.equal(logits(model), fresh(trained, "nvfp4"))


def test_a_dictionary_instead_of_its_items_changes_nothing(bf16: Path, trained: Path) -> None:
    """What ``state_dict()`` returns: iterating over it gives names."""
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    before = logits(model)
    with pytest.raises(ArgumentError, match=r"tensors: expected pairs of a name and a tensor, got dict\n.*items\(\)"):
        polymoe.refit(model, tensors_of(trained))  # pyright: ignore[reportArgumentType]
    assert torch.equal(logits(model), before)


def test_a_model_that_accelerate_offloads_is_refused_as_it_is(bf16: Path, trained: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    before = logits(model)
    accelerate.cpu_offload(model.model.layers[0].self_attn, execution_device="cpu")
    with pytest.raises(UnsupportedProblem, match=r"stay on their devices.*self_attn"):
        polymoe.refit(model, tensors_of(trained).items())
    assert torch.equal(logits(model), before)


def test_numbers_that_the_models_dtype_cannot_hold_are_refused(bf16: Path) -> None:
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu", dtype=torch.float16)
    name = "model.norm.weight"
    with pytest.raises(FormatError, match=f"{name}: expected numbers that are finite in float16"):
        polymoe.refit(model, [(name, torch.full_like(tensors_of(bf16)[name], 1e5))])


def test_a_model_without_packed_experts_is_refused(bf16: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(bf16, trust_remote_code=False)
    with pytest.raises(UnsupportedProblem, match="expected a model with packed experts"):
        polymoe.refit(plain, {}.items())


def test_static_scales_of_inputs_are_refused(bf16: Path, trained: Path) -> None:
    """They were calibrated with the old weights."""
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    weights = with_input_scales(random_experts("fp8_tensor", hidden=256, intermediate=128))
    packed(model)[1].fused = FusedExperts.from_weights(
        weights, SwiGLU(), top_k=2, device="cpu", activations="fp8_static"
    )
    require_refused(model, trained, r"new weights of model.layers.1.mlp.experts: .*got static scales")


def test_a_format_that_polymoe_only_reads_is_refused(bf16: Path, trained: Path) -> None:
    """FP4 with scales in E4M3, and none for the whole matrix."""
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    module, read = packed(model)[2], Encoding(element="e2m1", granularity=PerGroup(1, 16), scale_dtype="e4m3")
    module.plain = replace(module.plain, whole=replace(module.plain.whole, down=read))
    require_refused(model, trained, r"layers.2.mlp.experts: expected a format that polymoe quantizes to")


def test_experts_in_host_memory_are_refused(bf16: Path, trained: Path) -> None:
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu", expert_memory="3slots")
    require_refused(model, trained, "expected experts on the GPU, got experts in host memory")


@pytest.mark.parametrize("split", [{"ep": (0, 2)}, {"tp": (0, 2)}])
def test_a_part_of_the_experts_is_refused(bf16: Path, trained: Path, split: dict[str, tuple[int, int]]) -> None:
    """As on a rank of a model that Transformers splits."""
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    packed(model)[0].fused = polymoe.load_experts(bf16, 0, device="cpu", **split)  # type: ignore[arg-type]
    require_refused(model, trained, r"layers.0.mlp.experts: expected a model on one rank")


def packed(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.model.layers]


def require_refused(model: Any, trained: Path, says: str) -> None:
    before = logits(model)
    with pytest.raises(UnsupportedProblem, match=says):
        polymoe.refit(model, tensors_of(trained).items())
    assert torch.equal(logits(model), before)


def test_one_refit_at_a_time(bf16: Path, trained: Path) -> None:
    """Another one, and updates of single layers, are refused while tensors come, and leave the first as it is."""
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    other, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    layer = packed(model)[3].fused

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        for at, pair in enumerate(tensors_of(trained).items()):
            yield pair
            if at == 30:
                with pytest.raises(UnsupportedProblem, match="expected one at a time"):
                    polymoe.refit(model, tensors_of(bf16).items())
                with pytest.raises(UnsupportedProblem, match="expected one at a time"):
                    layer.update(packed(other)[3].fused.weights)
                with pytest.raises(PlanError, match="a mixture"):
                    logits(model)

    polymoe.refit(model, interrupted())
    assert torch.equal(logits(model), fresh(trained, "mxfp4"))


def test_an_update_of_one_layer_does_not_end_a_refit_that_failed(bf16: Path, trained: Path) -> None:
    model, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    other, _ = polymoe.load(bf16, experts="mxfp4", device="cpu")
    with pytest.raises(CheckpointError):
        polymoe.refit(model, missing_layer(tensors_of(trained)))
    for module, source in zip(packed(model), packed(other), strict=True):
        module.fused.update(source.fused.weights)
        with pytest.raises(PlanError, match="a mixture"):
            logits(model)
    polymoe.refit(model, tensors_of(bf16).items())
    assert torch.equal(logits(model), logits(other))


STACKED_WAYS = (Fused(k_first=True), Fused())


@pytest.mark.parametrize(("hidden", "intermediate", "square"), [(64, 64, "down"), (64, 32, "gate_up")])
def test_square_matrices_lie_as_the_layers_other_ones(hidden: int, intermediate: int, square: str) -> None:
    """A model that two versions of Transformers save in two ways: no matrix is turned by guessing."""
    spec = random_experts("bf16", experts=3, hidden=hidden, intermediate=intermediate).spec
    plain = PlainExperts((("experts", STACKED_WAYS[0]), ("experts", STACKED_WAYS[1])), spec)
    other = "gate_up" if square == "down" else "down"
    shapes = {"down": (3, hidden, intermediate), "gate_up": (3, 2 * intermediate, hidden)}
    for way in STACKED_WAYS:
        tensors = {part: torch.zeros(shapes[part]) for part in shapes}
        tensors = {part: t.mT if way.k_first else t for part, t in tensors.items()}
        (decided,) = plain.fitting(STACKED_WAYS, other, tensors[other], other)
        assert decided == way
        both = plain.fitting(STACKED_WAYS, square, tensors[square], square)
        assert _arrangement(both, decided, square) == way
        with pytest.raises(FormatError, match="send the layer's other projection first"):
            _arrangement(both, None, square)
