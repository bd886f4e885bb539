"""Matrices outside the experts, quantized by Transformers itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.errors import ArgumentError, CheckpointError, UnsupportedProblem

pytest.importorskip("transformers")


from polymoe.engines.transformers import load
from support.family_checkpoints import fused_of, token_ids
from support.written import patch_config

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4"])
def test_transformers_own_quantizer_takes_what_is_no_expert(checkpoint: Checkpoints, pair: Any, name: str) -> None:
    """On a CPU it dequantizes, to the same numbers."""
    pytest.importorskip("accelerate")
    _, expected, _ = pair(name)
    model, _ = load(checkpoint(name), device="cpu", dtype=torch.float32, dense="transformers")
    assert len(fused_of(model)) == len(fused_of(expected))
    ours, theirs = expected.state_dict(), model.state_dict()
    assert all(torch.equal(theirs[key].float(), ours[key]) for key in ours)


def test_fp8_layers_stay_fp8_where_transformers_has_kernels(
    checkpoint: Checkpoints, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the kernel and for the GPU that Transformers requires."""
    from transformers.integrations import finegrained_fp8
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    class Kernel:
        @staticmethod
        def matmul(x: Tensor, w: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype, **_: Any) -> Tensor:
            spread = scale.float().repeat_interleave(block[0], 0)[: w.shape[0]].repeat_interleave(block[1], 1)
            return (x.float() @ (w.float() * spread[:, : w.shape[1]]).T).to(dtype)

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, **_: None)
    monkeypatch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", Kernel)
    path, (_, expected, _) = checkpoint("qwen3"), pair("qwen3")
    model, _ = load(path, device="cpu", dtype=torch.float32, dense="transformers")
    projection = model.model.layers[0].self_attn.q_proj
    assert (type(projection).__name__, projection.weight.dtype) == ("FP8Linear", torch.float8_e4m3fn)
    assert type(model.lm_head) is torch.nn.Linear
    assert len(fused_of(model)) == 4
    for parameter in model.parameters():  # Transformers leaves what is stored in 16 bit as it is
        if parameter.dtype == torch.bfloat16 and "scale" not in parameter.__class__.__name__:
            parameter.data = parameter.data.float()
    with torch.inference_mode():
        got, want = model(input_ids=token_ids()).logits, expected(input_ids=token_ids()).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dense", "error"), [("mixtral", "transformers", UnsupportedProblem), ("qwen3", "fp8", ArgumentError)]
)
def test_dense_layers_that_cannot_be_had_so(checkpoint: Checkpoints, name: str, dense: str, error: Any) -> None:
    with pytest.raises(error, match="16bit"):
        load(checkpoint(name), device="cpu", dense=dense)


@pytest.mark.parametrize("pattern", ["(a+)+$", "re:.*gate", "*.mlp.gate", "a*b*c*d"])
def test_patterns_that_transformers_might_not_finish_to_match_are_refused(
    checkpoint: Checkpoints, tmp_path: Path, pattern: str
) -> None:
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "c")
    description = json.loads((path / "config.json").read_text())["quantization_config"]
    description["modules_to_not_convert"] = ["lm_head", "layers.*.gate", pattern]
    patch_config(path, quantization_config=description)
    with pytest.raises(CheckpointError, match="modules_to_not_convert: expected names of modules"):
        load(path, device="cpu", dense="transformers")
