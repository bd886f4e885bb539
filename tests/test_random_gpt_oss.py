"""Checkpoints of random weights: stored as releases are, the same each time, and loadable packed and dequantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import random_qwen3_fp8
import torch
from random_gpt_oss import gpt_oss_20b, write
from safetensors import safe_open

from polymoe.checkpoint import Checkpoint

COMMITTED = Path(__file__).parents[1] / "models" / "sums-gpt-oss-mxfp4"
TINY = {
    "vocab_size": 320,
    "eos_token_id": 300,
    "pad_token_id": 301,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tensors(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor, by name."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "tiny"
    write(path, gpt_oss_20b(layers=4, experts=6, hidden=64) | TINY)
    return path


def test_names_dtypes_and_shapes_are_those_of_a_stored_gpt_oss(tmp_path: Path) -> None:
    config = json.loads((COMMITTED / "config.json").read_text())
    write(tmp_path / "like", config)
    assert tensors(tmp_path / "like") == tensors(COMMITTED)


def test_fp8_is_stored_as_qwen3_is_and_of_the_size_that_keeps_activations_level(tmp_path: Path) -> None:
    stored = COMMITTED.with_name("sums-qwen3-fp8")
    write(tmp_path / "like", json.loads((stored / "config.json").read_text()), shards=random_qwen3_fp8.shards)
    assert tensors(tmp_path / "like") == tensors(stored)
    gate_up, down = Checkpoint.open(tmp_path / "like").weights(1).dequantize()
    assert gate_up.std() == pytest.approx(256**-0.5, rel=0.01)
    assert down.std() == pytest.approx(128**-0.5 * 8**-0.5, rel=0.01)


def test_the_same_whatever_the_number_of_workers(checkpoint: Path, tmp_path: Path) -> None:
    write(tmp_path / "again", json.loads((checkpoint / "config.json").read_text()), workers=1)
    for file in checkpoint.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_a_directory_that_exists_is_left_alone(checkpoint: Path) -> None:
    before = sorted(checkpoint.iterdir())
    with pytest.raises(FileExistsError, match="nothing was written"):
        write(checkpoint, gpt_oss_20b(layers=1, experts=2, hidden=32))
    assert sorted(checkpoint.iterdir()) == before


def test_tokenizer_takes_any_text_and_gives_it_back(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    ids = tokenizer("two ✓ words")["input_ids"]
    assert tokenizer.decode(ids) == "two ✓ words"
    assert max(ids) < TINY["vocab_size"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (300, 301)
    assert len(tokenizer) == TINY["vocab_size"]
    assert tokenizer.decode([ids[0], 310, 299, 300]) == "t 310 299<|return|>"  # whatever a model says is text
    assert tokenizer(" 310")["input_ids"] == tokenizer(" ")["input_ids"] + tokenizer("310")["input_ids"]


def test_packed_and_dequantized_agree(checkpoint: Path) -> None:
    import transformers

    from polymoe.engines.transformers import load

    packed, _ = load(checkpoint, device="cpu", dtype=torch.float32)
    quantization = transformers.Mxfp4Config(dequantize=True)
    # Transformers 5.17 leaves what it dequantizes in bfloat16, which is exact.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=quantization, trust_remote_code=False
    ).float()
    ids = torch.randint(320, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        got, expected = packed(ids).logits, theirs(ids).logits
    assert expected.std() == pytest.approx(1, rel=0.5)
    assert (got - expected).norm() / expected.norm() < 1e-5
