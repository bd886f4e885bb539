"""New weights under a captured CUDA graph: steps that were captured before compute with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

import polymoe
from polymoe.engines.transformers.decode_graph import Decoder
from support.decode_steps import LENGTH, STEPS, given_tokens, prompts, step_by_step
from support.requantized import write


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_block128"])
def test_captured_steps_compute_with_new_weights(format: str, tmp_path: Path) -> None:
    """Three times: changed, original and changed weights, each as a fresh start has them, without another capture."""
    first = write("BF16", tmp_path / "first")
    tensors = load_file(first / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    noise = {n: 0.05 * t.float().std() * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    second = tmp_path / "second"
    second.mkdir()
    for file in first.iterdir():
        if file.suffix != ".safetensors":
            (second / file.name).write_bytes(file.read_bytes())
    changed = {name: (tensor + noise[name].nan_to_num()).to(tensor.dtype) for name, tensor in tensors.items()}
    save_file(changed, second / "model.safetensors", metadata={"format": "pt"})

    prompts_BT, given_NB1 = prompts().cuda(), given_tokens().cuda()

    def steps(decoder: Decoder) -> torch.Tensor:
        return step_by_step(decoder, prompts_BT, given_NB1)

    def fresh(path: Path) -> torch.Tensor:
        model, _ = polymoe.load(path, experts=format, device="cuda")
        return steps(Decoder(model, max_tokens=LENGTH + STEPS, compile="aot_eager", capture=False))

    wanted = {path: fresh(path) for path in (first, second)}
    model, _ = polymoe.load(first, experts=format, device="cuda")
    decoder = Decoder(model, max_tokens=LENGTH + STEPS, compile="aot_eager")
    torch.testing.assert_close(steps(decoder), wanted[first], rtol=0, atol=0)
    captured = decoder._replay
    assert captured is not None
    for path in (second, first, second):
        polymoe.refit(model, load_file(path / "model.safetensors").items(), check=True)
        torch.testing.assert_close(steps(decoder), wanted[path], rtol=0, atol=0)
    assert decoder._replay is captured
    assert (wanted[first] - wanted[second]).norm() / wanted[first].norm() > 1e-2
