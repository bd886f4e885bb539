"""Store a float model of Transformers as its family's own releases are stored: names, formats, dtypes, shards.

What is quantized, and how, is said by the config alone, as polymoe reads it: experts are written by
`polymoe.checkpoint.write_checkpoint`, the model's other linear layers by the same dialects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sums import EOS, PAD, write_tokenizer
from torch import Tensor, nn

from polymoe.checkpoint import write_checkpoint
from polymoe.checkpoint.config import parse_quantization
from polymoe.checkpoint.dialects import DIALECTS
from polymoe.checkpoint.families import Fused, family_of, text_config
from polymoe.checkpoint.layer import StoredLayer
from polymoe.checkpoint.naming import module_name
from polymoe.checkpoint.scheme import Scheme
from polymoe.formats import format_of
from polymoe.tensors import Expert, ExpertWeights

EXPERTS = re.compile(r"(.*\.layers\.(\d+)\.\w+\.experts)\.(\w+)")
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def store(
    model: nn.Module,
    config: Mapping[str, Any],
    directory: Path,
    *,
    renames: Sequence[tuple[str, str]] = (),
    float32: str = r"$^",
    unquantized: str = r"$^",
    largest_inputs: Mapping[str, float] | None = None,
) -> Path:
    """Write config.json, the tokenizer and the weights in two shards to a new directory.

    Args:
        model: of Transformers, with float weights.
        config: config.json as the family's releases have it; decides every encoding.
        directory: to be created.
        renames: (pattern, replacement) from Transformers' names of tensors to the family's own, all applied in order.
        float32: pattern of the (renamed) tensors that are stored in float32, others being 16 bit.
        unquantized: pattern of the (renamed) linear layers that stay in 16 bit although the config does not say so.
        largest_inputs: largest absolute input of linear layers by Transformers' name, and of experts as
            "layers.3.experts.gate_up" and "layers.3.experts.down"; for static input scales.
    """
    quantization = parse_quantization(config)
    text = text_config(config)
    dtype = getattr(torch, text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype"))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    others: dict[str, Tensor] = {}
    experts: dict[int, dict[str, Tensor]] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if match := EXPERTS.fullmatch(name):
            experts.setdefault(int(match[2]), {})[match[3]] = value.float()
            continue
        stored = renamed(name, renames)
        module = stored.rpartition(".")[0]
        scheme = quantization.scheme(module)
        owner = name.removesuffix(".weight")
        if owner in linear and scheme.dialect != "plain" and not re.search(unquantized, stored):
            scale = _input_scale((largest_inputs or {}).get(owner), scheme)
            matrix = format_of(scheme.encoding).quantize(value.float())
            written = DIALECTS[scheme.dialect].write(matrix, scale)
            others |= {f"{module}.{suffix}": tensor for suffix, tensor in written.items()}
        else:
            keep = re.search(float32, stored) or not value.is_floating_point()
            others[stored] = value if keep else value.to(dtype)
    layers = {layer: _experts(config, layer, parts, largest_inputs or {}) for layer, parts in experts.items()}
    size = sum(t.numel() * t.element_size() for t in others.values())
    size += sum(w.spec.local_experts * w.spec.expert_bytes for w in layers.values())
    write_checkpoint(directory, config, layers, other_tensors=others, max_shard_bytes=int(size * 0.55))
    generation = {"do_sample": False, "eos_token_id": EOS, "max_new_tokens": 8, "pad_token_id": PAD}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory, text["max_position_embeddings"])
    return directory


def natural(parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Experts' parameters in polymoe's natural order: `gate_up` [E, 2F, H] (gate rows first) or `up`, and `down`."""
    held = next(a for a in reversed(family_of(config).arrangements) if isinstance(a, Fused))  # as Transformers does
    gate_up, down = (parts[name].mT if held.k_first else parts[name] for name in (held.gate_up, held.down))
    found = {"gate_up": gate_up, "down": down}
    if f"{held.gate_up}_bias" in parts:
        found |= {"gate_up_bias": parts[f"{held.gate_up}_bias"], "down_bias": parts[f"{held.down}_bias"]}
    if held.order == "interleaved":
        for name in ("gate_up", "gate_up_bias"):
            pairs = found[name].unflatten(1, (-1, 2))
            found[name] = torch.cat((pairs[:, :, 0], pairs[:, :, 1]), 1)
    return found


def _experts(
    config: Mapping[str, Any], layer: int, parts: Mapping[str, Tensor], largest_inputs: Mapping[str, float]
) -> ExpertWeights:
    """One layer's experts in the config's encodings, with static input scales where there are largest inputs."""
    family = family_of(config)
    moe = family.describe(text_config(config))
    quantization = parse_quantization(config)
    stored = StoredLayer.described(family, moe, quantization, layer)
    encodings = stored.spec().encodings
    scheme = quantization.scheme(module_name(stored.container, stored.arrangement, "down", 0))
    floats = natural(parts, config)
    scales = {
        name: _input_scale(largest_inputs.get(f"layers.{layer}.experts.{name}"), scheme) for name in ("gate_up", "down")
    }

    def one(e: int) -> Expert:
        halves = floats["gate_up"][e].split(moe.intermediate)
        biases = floats["gate_up_bias"][e].bfloat16().split(moe.intermediate) if moe.bias else (None, None)
        return Expert(
            gate=format_of(encodings["gate"]).quantize(halves[0]) if moe.gated else None,
            up=format_of(encodings["up"]).quantize(halves[-1]),
            down=format_of(encodings["down"]).quantize(floats["down"][e]),
            gate_bias=biases[0] if moe.gated else None,
            up_bias=biases[-1],
            down_bias=floats["down_bias"][e].bfloat16() if moe.bias else None,
            gate_up_input_scale=scales["gate_up"],
            down_input_scale=scales["down"],
        )

    return ExpertWeights.of([one(e) for e in range(moe.experts)])


def _input_scale(largest: float | None, scheme: Scheme) -> Tensor | None:
    """What the largest input is divided by to be the largest number of a quantized one, where that is said
    beforehand."""
    if largest is None or not (scheme.activations == "fp8_static" or scheme.encoding.name == "nvfp4"):
        return None
    steps = E4M3_MAX * (E2M1_MAX if scheme.encoding.element == "e2m1" else 1.0)
    return torch.tensor(largest / steps)


def renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name
