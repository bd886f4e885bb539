"""Store a float model of Transformers as its family's own releases are stored: names, formats, dtypes, shards.

What is quantized, and how, is said by the config alone, as polymoe reads it: experts are written by
`polymoe.checkpoint.write_checkpoint`, the model's other linear layers by the same dialects. A model of which nothing is
quantized is saved by Transformers, except for its config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from families import TrainedFamily
from sums import EOS, PAD, write_tokenizer
from torch import Tensor, nn

from polymoe.checkpoint import write_checkpoint
from polymoe.checkpoint.config import parse_quantization
from polymoe.checkpoint.dialects import DIALECTS
from polymoe.checkpoint.families import Fused, family_of, text_config
from polymoe.checkpoint.layer import StoredLayer
from polymoe.formats import Encoding, format_of
from polymoe.problem.tensors import Expert, ExpertWeights

EXPERTS = re.compile(r"(.*\.layers\.(\d+)\.\w+\.experts)\.(\w+)")
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def store(
    model: Any, family: TrainedFamily, directory: Path, *, largest_inputs: Mapping[str, float] | None = None
) -> Path:
    """Write config.json, the tokenizer and the weights in two shards to a new directory.

    Args:
        model: of Transformers, with float weights.
        family: its config decides every encoding.
        directory: to be created.
        largest_inputs: largest absolute input of linear layers by Transformers' name, and of experts as
            "layers.3.experts.gate_up" and "layers.3.experts.down"; for static input scales.
    """
    config, text = family.config, text_config(family.config)
    dtype = getattr(torch, text.get("torch_dtype") or text["dtype"])
    if family.quantized:
        _write_quantized(model, family, directory, dtype, largest_inputs or {})
    else:
        size = sum(p.numel() * dtype.itemsize for p in model.parameters())
        model.to(dtype).save_pretrained(directory, max_shard_size=int(size * 0.55))
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": EOS, "max_new_tokens": 8, "pad_token_id": PAD}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory, text["max_position_embeddings"])
    return directory


def _write_quantized(
    model: nn.Module, family: TrainedFamily, directory: Path, dtype: torch.dtype, largest_inputs: Mapping[str, float]
) -> None:
    config = family.config
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    others: dict[str, Tensor] = {}
    experts: dict[int, dict[str, Tensor]] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if match := EXPERTS.fullmatch(name):
            experts.setdefault(int(match[2]), {})[match[3]] = value.float()
            continue
        stored = family.in_files(name)
        if name in linear and (found := family.encoding(stored)):
            dialect, encoding = found
            static = parse_quantization(config).scheme(stored.removesuffix(".weight")).activations.static
            scale = _input_scale(largest_inputs.get(name.removesuffix(".weight")), encoding, static)
            written = DIALECTS[dialect].write(format_of(encoding).quantize(value.float()), scale)
            others |= {f"{stored.removesuffix('weight')}{suffix}": tensor for suffix, tensor in written.items()}
        else:
            keep = re.search(family.float32, stored) or not value.is_floating_point()
            others[stored] = value if keep else value.to(dtype)
    layers = {layer: _experts(config, layer, parts, largest_inputs) for layer, parts in experts.items()}
    size = sum(t.numel() * t.element_size() for t in others.values())
    size += sum(w.spec.local_experts * w.spec.expert_bytes for w in layers.values())
    write_checkpoint(directory, config, layers, other_tensors=others, max_shard_bytes=int(size * 0.55))


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
    moe = family.moe(config)
    quantization = parse_quantization(config)
    stored = StoredLayer.described(family, moe, quantization, layer)
    encodings = stored.spec().encodings
    formats = {name: format_of(encoding) for name, encoding in encodings.items()}
    static = stored.recipe().static
    floats = natural(parts, config)
    scales = {
        name: _input_scale(largest_inputs.get(f"layers.{layer}.experts.{name}"), encodings["down"], static)
        for name in ("gate_up", "down")
    }

    def one(e: int) -> Expert:
        biases = (floats[f"{name}_bias"][e].bfloat16() for name in ("gate_up", "down")) if moe.bias else ()
        return replace(
            Expert.quantize(formats, floats["gate_up"][e], floats["down"][e], *biases),
            gate_up_input_scale=scales["gate_up"],
            down_input_scale=scales["down"],
        )

    return ExpertWeights.of([one(e) for e in range(moe.experts)])


def _input_scale(largest: float | None, encoding: Encoding, static: bool) -> Tensor | None:
    """What the largest input is divided by to be the largest number of a quantized one, where files say it."""
    if largest is None or not (static or encoding.name == "nvfp4"):
        return None
    steps = E4M3_MAX * (E2M1_MAX if encoding.element == "e2m1" else 1.0)
    return torch.tensor(largest / steps)
