"""calibrate: one pass of a model in 16 bits over texts, which measures the inputs of its experts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.architectures.interface import projections
from polymoe.checkpoint.calibration import LEAST_TOKENS, Calibration, InputSquares, Texts
from polymoe.checkpoint.moe_config import MoeConfig
from polymoe.engines.transformers.contract import checked_call
from polymoe.engines.transformers.families import interface_modules
from polymoe.engines.transformers.loading import load
from polymoe.engines.transformers.model_config import context_length
from polymoe.errors import ArgumentError, CheckpointError
from polymoe.problem.activations import Activation

_MOST_TOKENS = 2048
"""Of one text; the rest of it is left out."""

_NAME = "polymoe_calibration"

_Measured: TypeAlias = tuple[InputSquares, Activation]


def calibrate(
    path: str | os.PathLike[str],
    texts: Texts,
    *,
    device: torch.device | str = "auto",
    progress: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measure the mean squares of the inputs of each expert, which decide how much an error in a column costs.

    Args:
        path: a checkpoint whose experts are in 16 bits. It is loaded whole.
        texts: what it reads: 2,048 tokens of each.
        device: as for :func:`polymoe.load`.
        progress: called with each text that begins.

    Raises:
        ArgumentError: for texts whose tokens reach no expert often enough.
        CheckpointError: for experts that are quantized, or whose inputs are not finite.
        UnsupportedProblem: as :func:`polymoe.load`, and for a model without Transformers' experts interface.
    """
    with Checkpoint.open(os.fspath(path)) as checkpoint:
        if checkpoint.quantization.quantized:
            raise CheckpointError(str(path), expected="experts in 16 bits", got=checkpoint.quantization.method)
        model, tokenizer = load(path, device=device)
        measured, layers = dict[nn.Module, _Measured](), dict[tuple[int, int], InputSquares]()
        for name, group, layer in interface_modules(model, checkpoint.parts):
            module, moe = model.get_submodule(name), checkpoint.parts[group].moe
            layers[layer, group] = _zeros(moe, next(module.parameters()).device)
            measured[module] = layers[layer, group], moe.activation
    tokens, at = 0, next(model.parameters()).device
    most = min(_MOST_TOKENS, context_length(model) or _MOST_TOKENS)
    with torch.inference_mode(), _measuring(model, measured):
        for number, text in enumerate(texts.lines, 1):
            progress(f"text {number} of {len(texts.lines)}")
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=most)["input_ids"].to(at)
            if ids.numel():
                model(input_ids=ids, attention_mask=torch.ones_like(ids))
                tokens += ids.numel()
    found = {place: InputSquares(s.tokens_E.cpu(), s.gate_up_EH.cpu(), s.down_EF.cpu()) for place, s in layers.items()}
    for (layer, _), squares in found.items():
        if not all(bool(each.isfinite().all()) for each in squares.sums().values()):
            raise CheckpointError(
                f"{path}: layer {layer}", expected="finite inputs of experts", got="NaN or infinity",
                hint="run the model: weights before this layer are damaged, or too large for its dtype",
            )  # fmt: skip
    if not any(bool((squares.tokens_E >= LEAST_TOKENS).any()) for squares in found.values()):
        raise ArgumentError(
            f"calibrate: {texts.file}", expected=f"texts that give at least one expert {LEAST_TOKENS} tokens",
            got=f"{tokens} tokens in {len(texts.lines)} texts", hint="give more text",
        )  # fmt: skip
    return Calibration(texts, tokens, found)


def _zeros(moe: MoeConfig, device: torch.device) -> InputSquares:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(moe.experts, *shape, dtype=torch.float64, device=device)

    return InputSquares(zeros(), zeros(moe.hidden), zeros(moe.intermediate))


@contextmanager
def _measuring(model: Any, measured: Mapping[nn.Module, _Measured]) -> Iterator[None]:
    """Run the model's experts by :func:`_experts_forward`."""
    ExpertsInterface.register(_NAME, partial(_experts_forward, measured))
    try:
        model.set_experts_implementation(_NAME)
        yield
    finally:
        ExpertsInterface._global_mapping.pop(_NAME, None)


def _experts_forward(
    measured: Mapping[nn.Module, _Measured], experts: nn.Module, *args: Tensor, **others: Any
) -> Tensor:
    """Transformers calls this instead of the forward of ``experts``: one expert after the other."""
    x_TH, ids_TA, weights_TA = checked_call(type(experts).__name__, args, others)
    squares, activation = measured[experts]
    matrices = projections(experts, dict(experts.named_parameters(recurse=False)))
    out_TH = torch.zeros_like(x_TH)
    for e in ids_TA.unique().tolist():
        if not 0 <= e < len(matrices["down"]):  # of no expert
            continue
        token, place = (ids_TA == e).nonzero(as_tuple=True)

        def project(name: str, rows: Tensor, e: int = e) -> Tensor:
            bias = matrices.get(f"{name}_bias")
            return F.linear(rows, matrices[name][e], None if bias is None else bias[e])

        x = x_TH[token]
        h = activation(*[project(name, x).float() for name in ("gate", "up") if name in matrices]).to(x.dtype)
        squares.tokens_E[e] += len(token)
        squares.gate_up_EH[e] += x.double().square().sum(0)
        squares.down_EF[e] += h.double().square().sum(0)
        out_TH.index_add_(0, token, (project("down", h) * weights_TA[token, place, None]).to(out_TH.dtype))
    return out_TH
