"""Stacked expert tensors as a serving engine's loader fills them, made from the files of the bundled checkpoints.

:func:`stacked` is a second reading of the files, without polymoe: which rows and columns a rank gets follows from
vLLM's ``RoutedExperts.weight_loader``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from polymoe.backends import BACKENDS
from polymoe.engines.serving.chooser import machine_of
from polymoe.engines.serving.sources import SGLANG, VLLM, StackedExperts
from polymoe.engines.serving.stand_aside import LayerFacts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.problem.activations import ReLU2, SwiGLU

CPU = PlanRequest(machine_of("cpu"), "mixed", "auto", BACKENDS, LAYOUTS)

MODELS = Path(__file__).parents[2] / "models"


@dataclass(frozen=True)
class Bundled:
    """A bundled checkpoint's experts: the method of vLLM that loads them, and how the files name them.

    ``experts`` is the number of them, ``gated`` whether ``names`` of the projections w1 (gate) and w3 (up) both exist.
    """

    method: str
    layer: int
    container: str
    experts: int
    hidden: int
    intermediate: int
    names: tuple[str, str, str] = ("gate_proj", "down_proj", "up_proj")
    gated: bool = True
    bias: bool = False
    k_first: bool = False
    tp: tuple[int, ...] = (1, 2)


BUNDLED = {
    "sums-gpt-oss-mxfp4": Bundled(
        "GptOssMxfp4MoEMethod", 1, "model.layers.1.mlp.experts", 8, 192, 192, bias=True, tp=(1, 2, 4)
    ),
    "sums-deepseek-v3-fp8": Bundled("Fp8MoEMethod", 1, "model.layers.1.mlp.experts", 6, 256, 128),
    "sums-kimi-k2-int4": Bundled("CompressedTensorsWNA16MoEMethod", 1, "model.layers.1.mlp.experts", 8, 192, 128),
    "sums-deepseek-v4-mxfp4": Bundled(
        "Mxfp4MoEMethod", 1, "layers.1.ffn.experts", 8, 256, 128, names=("w1", "w2", "w3")
    ),
    "sums-nemotron-h-nvfp4": Bundled(
        "ModelOptNvFp4FusedMoE", 2, "backbone.layers.2.mixer.experts", 16, 96, 208, ("up_proj", "down_proj", ""),
        gated=False, tp=(1,),
    ),
    "sums-glm-4-nvfp4": Bundled(
        "CompressedTensorsW4A4Nvfp4MoEMethod", 1, "model.layers.1.mlp.experts", 8, 192, 144, tp=(1,)
    ),
    "sums-qwen3-fp8": Bundled("Fp8MoEMethod", 1, "model.layers.1.mlp.experts", 5, 256, 128),
    "sums-mixtral-awq": Bundled(
        "AutoAWQMoEMethod", 1, "model.layers.1.block_sparse_moe.experts", 8, 256, 128, ("w1", "w2", "w3"),
        k_first=True, tp=(1,),
    ),
    "sums-llama-4-fp8": Bundled(
        "CompressedTensorsW8A8Fp8MoEMethod", 1, "language_model.model.layers.1.feed_forward.experts", 8, 160, 96
    ),
}  # fmt: skip
"""By the checkpoint's name; ``tp`` are the sizes that split no group."""

_SUFFIXES = {"scale": "weight_scale"}  # DeepSeek-V4, renamed by vLLM


def stacked(model: str, tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1)) -> dict[str, Tensor]:
    """The tensors of one layer for ``(rank, size)`` of the parallel groups, by name: ``w13_weight`` [E, 2 F, K], ..."""
    about = BUNDLED[model]
    files = _tensors(MODELS / model, about.container)
    first, count = local_experts(about.experts, ep)
    if about.method == "GptOssMxfp4MoEMethod":
        return _gpt_oss(files, tp, first, count)
    experts = [_expert(files, about, e, tp) for e in range(first, first + count)]
    return {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}


def local_experts(experts: int, ep: tuple[int, int]) -> tuple[int, int]:
    """First expert and number of experts of a rank, placed linearly."""
    each, more = divmod(experts, ep[1])
    return ep[0] * each + min(ep[0], more), each + (ep[0] < more)


def _tensors(path: Path, container: str) -> dict[str, Tensor]:
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {n: tensors.get_tensor(n) for n in tensors.keys() if n.startswith(container)}  # noqa: SIM118
    return found


def _expert(files: dict[str, Tensor], about: Bundled, expert: int, tp: tuple[int, int]) -> dict[str, Tensor]:
    """One expert's part of each stacked tensor."""
    halves: dict[str, list[Tensor]] = {}
    for shard, stem in zip(("w1", "w2", "w3"), about.names, strict=True):
        module = f"{about.container}.{expert}.{stem}."
        for name in sorted(n for n in files if stem and n.startswith(module)):
            suffix = name.removeprefix(module)
            suffix = _SUFFIXES.get(suffix, suffix)
            part = _sliced(files[name], suffix, shard, about, tp)
            halves.setdefault(f"{'w2' if shard == 'w2' else 'w13'}_{suffix}", []).append(_as_parameter(part, about))
    return {name: _join(parts, about.k_first) for name, parts in halves.items()}


def _sliced(tensor: Tensor, suffix: str, shard: str, about: Bundled, tp: tuple[int, int]) -> Tensor:
    """This rank's rows of w1 and w3, or columns of w2."""
    rank, size = tp
    if size == 1 or tensor.numel() == 1 or suffix == "weight_shape":
        return tensor
    if suffix == "weight_scale_inv":  # a block that two ranks share: repeated onto a grid of 64
        tensor = tensor.repeat_interleave(2, 0).repeat_interleave(2, 1)
    axis = (1 if shard == "w2" else 0) ^ about.k_first
    if tensor.shape[axis] == 1:  # one scale for each row of w2
        return tensor
    each = tensor.shape[axis] // size
    return tensor.narrow(axis, rank * each, each)


def _as_parameter(tensor: Tensor, about: Bundled) -> Tensor:
    """In the dtype of the parameter that vLLM creates."""
    if tensor.dtype in (torch.int8, torch.float8_e8m0fnu):
        return tensor.view(torch.uint8)
    return tensor.float() if "Fp8" in about.method and tensor.dtype == torch.bfloat16 else tensor


def _join(parts: list[Tensor], k_first: bool) -> Tensor:
    parts = [part.reshape(()) if part.numel() == 1 else part for part in parts]
    if parts[0].dim() == 0:
        return torch.stack(parts) if len(parts) > 1 else parts[0]
    return torch.cat(parts, 1 if k_first else 0)


def _gpt_oss(files: dict[str, Tensor], tp: tuple[int, int], first: int, count: int) -> dict[str, Tensor]:
    """vLLM's ``GptOssModel``: whole groups of 32 for each rank, the rest of the last rank's tensors zeros."""
    part = {name.split("experts.")[1]: tensor[first : first + count] for name, tensor in files.items()}
    rank, size = tp
    hidden = part["down_proj_blocks"].shape[1]
    intermediate = part["gate_up_proj_blocks"].shape[1] // 2
    each = -(-(intermediate // 32) // size) * 32
    start, stop = rank * each, min((rank + 1) * each, intermediate)
    rows = slice(2 * start, 2 * stop)
    tensors = {
        "w13_weight": torch.zeros(count, 2 * each, hidden // 2, dtype=torch.uint8),
        "w13_weight_scale": torch.zeros(count, 2 * each, hidden // 32, dtype=torch.uint8),
        "w13_bias": torch.zeros(count, 2 * each, dtype=torch.bfloat16),
        "w2_weight": torch.zeros(count, hidden, each // 2, dtype=torch.uint8),
        "w2_weight_scale": torch.zeros(count, hidden, each // 32, dtype=torch.uint8),
        "w2_bias": torch.zeros(count, hidden, dtype=torch.bfloat16),
    }
    tensors["w13_weight"][:, : rows.stop - rows.start] = part["gate_up_proj_blocks"].flatten(2)[:, rows]
    tensors["w13_weight_scale"][:, : rows.stop - rows.start] = part["gate_up_proj_scales"][:, rows]
    tensors["w13_bias"][:, : rows.stop - rows.start] = part["gate_up_proj_bias"][:, rows]
    tensors["w2_weight"][..., : (stop - start) // 2] = part["down_proj_blocks"].flatten(2)[..., start // 2 : stop // 2]
    tensors["w2_weight_scale"][..., : (stop - start) // 32] = part["down_proj_scales"][..., start // 32 : stop // 32]
    if rank == 0:
        tensors["w2_bias"][:] = part["down_proj_bias"]
    return tensors


def experts_of(model: str, tp: tuple[int, int], ep: tuple[int, int], **changes: object) -> StackedExperts:
    """One rank's experts of a bundled checkpoint, with other arguments of StackedExperts if given."""
    about = BUNDLED[model]
    source = VLLM[about.method]
    each = -(-about.intermediate // (tp[1] * source.multiple)) * source.multiple
    given = {
        "where": "layer",
        "source": source,
        "tensors": stacked(model, tp, ep),
        "hidden": about.hidden,
        "intermediate": each,
        "gated": about.gated,
        "bias": about.bias,
        "k_first": about.k_first,
    }
    return StackedExperts(**{**given, **changes})  # type: ignore[arg-type]


SGLANG_METHODS = {
    "AutoAWQMoEMethod": "AWQMoEScheme",
    "CompressedTensorsW4A4Nvfp4MoEMethod": "CompressedTensorsW4A4Nvfp4MoE",
    "CompressedTensorsW8A8Fp8MoEMethod": "CompressedTensorsW8A8Fp8MoE",
    "CompressedTensorsWNA16MoEMethod": "CompressedTensorsWNA16MoE",
    "Fp8MoEMethod": "Fp8MoEMethod",
    "GptOssMxfp4MoEMethod": "Mxfp4MoEMethod",
    "ModelOptNvFp4FusedMoE": "ModelOptNvFp4FusedMoEMethod",
    "Mxfp4MoEMethod": "Fp8MoEMethod",
}
"""SGLang's method, or scheme, for vLLM's."""


def sglang_experts_of(model: str, tp: tuple[int, int], ep: tuple[int, int], **changes: object) -> StackedExperts:
    """As :func:`experts_of`, in the tensors of SGLang 0.5.17."""
    theirs = experts_of(model, tp, ep, **changes)
    method = BUNDLED[model].method
    source = SGLANG[SGLANG_METHODS[method]]
    tensors = {name.replace("_bias", "_weight_bias"): tensor for name, tensor in theirs.tensors.items()}
    if method == "Mxfp4MoEMethod":
        tensors = {
            name.replace("scale", "scale_inv"): t.view(torch.float8_e8m0fnu if "scale" in name else torch.int8)
            for name, t in tensors.items()
        }
    k_first = theirs.k_first
    if method == "CompressedTensorsWNA16MoEMethod":
        k_first = True
        tensors = {n: t if "shape" in n else t.transpose(1, 2).contiguous() for n, t in tensors.items()}
    source = replace(source, interleaved=theirs.source.interleaved)
    return replace(theirs, source=source, tensors=tensors, k_first=k_first)


def facts_of(model: str, **changes: object) -> LayerFacts:
    """What an engine would say of a bundled checkpoint's layer, but for ``changes``."""
    about = BUNDLED[model]
    facts = LayerFacts(
        where="model.layers.1.mlp.experts",
        method=about.method,
        sources=VLLM,
        tensors={n: t.to("meta") for n, t in stacked(model).items()},
        k_first=about.k_first,
        hidden=about.hidden,
        intermediate=about.intermediate,
        experts=about.experts,
        first_expert=0,
        activation=SwiGLU() if about.gated else ReLU2(),
        interleaved=VLLM[about.method].interleaved,
        bias=about.bias,
        top_k=2,
        dtype=torch.bfloat16,
    )
    return replace(facts, **changes)  # type: ignore[arg-type]
