"""Every tensor of a late expert, in every dialect: missing, or with another dtype, rank or size. No weight is read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.files import CheckpointFiles, Header
from polymoe.errors import CheckpointError, FormatError
from support.configs import CONFIGS, INT4_G32, compressed
from support.written import LAYER, Library

MODELS = sorted((Path(__file__).parents[2] / "models").glob("sums-*-*"))
OPTIONAL = ("input_scale", "input_global_scale", "g_idx")
Headers = dict[str, Header]


class HeaderFiles(CheckpointFiles):
    """The files of a checkpoint with other headers, and without data."""

    def __init__(self, config: dict[str, Any], headers: Headers) -> None:
        super().__init__(Path("checkpoint"), config, None, dict.fromkeys(headers, "model.safetensors"))
        self.headers = headers

    def header(self, name: str) -> Header:
        return self.headers[name]


def opened(path: Path) -> tuple[dict[str, Any], Headers]:
    with Checkpoint.open(path) as checkpoint:
        return checkpoint.files.config, {name: checkpoint.files.header(name) for name in checkpoint.files.names}


def added(headers: Headers, after: str, suffix: str, header: Header) -> Headers:
    """The headers, and one more beside each that ends in ``after``."""
    names = [name.removesuffix(after) + suffix for name in headers if name.endswith(after)]
    assert names
    return headers | dict.fromkeys(names, header)


def with_bias(config: dict[str, Any], headers: Headers) -> tuple[dict[str, Any], Headers]:
    sizes = {"up_proj.weight": config["moe_intermediate_size"], "down_proj.weight": config["moe_latent_size"]}
    for end, rows in sizes.items():
        headers = added(headers, end, end.replace("weight", "bias"), Header("BF16", (rows,)))
    return config | {"mlp_bias": True}, headers


def with_zero_points(config: dict[str, Any], headers: Headers) -> tuple[dict[str, Any], Headers]:
    asymmetric = compressed("pack-quantized", INT4_G32 | {"symmetric": False}, None, [])
    for name, header in list(headers.items()):
        if name.endswith(".weight_scale"):
            rows, groups = header.shape
            headers = added(
                headers, name, f"{name.removesuffix('scale')}zero_point", Header("I32", (rows // 8, groups))
            )
    return config | {"quantization_config": asymmetric}, headers


def with_input_scales(config: dict[str, Any], headers: Headers) -> tuple[dict[str, Any], Headers]:
    return config, added(headers, ".weight_scale", ".input_scale", Header("F32", ()))


def with_input_divisors(config: dict[str, Any], headers: Headers) -> tuple[dict[str, Any], Headers]:
    return config, added(headers, ".weight_scale", ".input_global_scale", Header("F32", (1,)))


VARIANTS = {
    "nemotron-3-bf16 with biases": ("nemotron-3-bf16", with_bias),
    "kimi-k2-thinking-int4 with zero points": ("kimi-k2-thinking-int4", with_zero_points),
    "mixtral-fp8-static with input scales": ("mixtral-fp8-static", with_input_scales),
    "glm-4.7-nvfp4 with input scales": ("glm-4.7-nvfp4", with_input_scales),
    "glm-4.5-air-nvfp4-ct with input scales": ("glm-4.5-air-nvfp4-ct", with_input_divisors),
}


def other_headers(header: Header) -> Iterator[Header]:
    """Headers of a dtype that no dialect has, of another rank, and of another size along each axis."""
    for dtype in ("F64", "BOOL", "I16"):
        yield Header(dtype, header.shape)
    for shape in ((*header.shape, 1), (1, *header.shape), header.shape[1:], header.shape[:-1]):
        if shape != header.shape:
            yield Header(header.dtype, shape)
    for axis, size in enumerate(header.shape):
        for other in (0, 1, size // 2, size + 1, 2 * size):
            if other != size:
                yield Header(header.dtype, (*header.shape[:axis], other, *header.shape[axis + 1 :]))


def bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of size 1 at its end."""
    return bare(shape[:-1]) if shape[-1:] == (1,) else shape


def refusal(config: dict[str, Any], headers: Headers, layer: int) -> CheckpointError | FormatError | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Checkpoint("checkpoint", HeaderFiles(config, headers)).weights(layer)
        except (CheckpointError, FormatError) as error:
            return error
    return None


def check_all(config: dict[str, Any], headers: Headers, layer: int) -> None:
    checkpoint = Checkpoint("checkpoint", HeaderFiles(config, headers))
    container, last = f"{checkpoint.layer(layer).container}.", checkpoint.moe.experts - 1
    tensors = [name for name in headers if name.startswith(container)]
    late = [n for n in tensors if n.startswith(f"{container}{last}.")] or tensors  # stacked: all experts in one
    assert refusal(config, headers, layer) is None
    assert late
    for name in late:
        error = refusal(config, {n: h for n, h in headers.items() if n != name}, layer)
        if not name.endswith(OPTIONAL):
            assert isinstance(error, CheckpointError), name
            assert error.where == name
            assert error.expected
            assert error.got
        for other in other_headers(headers[name]):
            if other.dtype == headers[name].dtype and bare(other.shape) == bare(headers[name].shape):
                continue  # one number may have any number of axes, and a scale for each row one or two
            error = refusal(config, headers | {name: other}, layer)
            assert error is not None, (name, other)
            assert error.where == name, (name, other, error)
            assert error.expected
            assert error.got


@pytest.mark.parametrize("name", [*CONFIGS, *VARIANTS])
def test_every_tensor_of_a_late_expert_is_checked(name: str, library: Library) -> None:
    source, change = VARIANTS.get(name, (name, lambda config, headers: (config, headers)))
    check_all(*change(*opened(library(source))), LAYER)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_every_tensor_of_a_late_expert_of_the_trained_models_is_checked(path: Path) -> None:
    config, headers = opened(path)
    check_all(config, headers, Checkpoint("checkpoint", HeaderFiles(config, headers)).layers[-1])


def test_a_bias_that_only_a_late_expert_has(library: Library) -> None:
    config, headers = opened(library("nemotron-3-bf16"))
    name = "backbone.layers.3.mixer.experts.7.down_proj.bias"
    error = refusal(config, headers | {name: Header("BF16", (64,))}, LAYER)
    assert error is not None
    assert str(error) == f"{name}: expected no bias, as the first expert has none, got BF16 [64]"


def test_a_huge_number_of_experts_ends_at_the_first_missing_one(library: Library) -> None:
    config, headers = opened(library("deepseek-v4-fp4"))
    error = refusal(config | {"n_routed_experts": 65_536}, headers, LAYER)
    assert error is not None
    assert error.where == "layers.3.ffn.experts.8.w1.weight"
