"""load(): the packed model against Transformers' own dequantized one, on a trained checkpoint; and refusals."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from polymoe.errors import ArgumentError, CheckpointError, CheckpointNotFound, UnsupportedProblem
from polymoe.layer.experts import FusedExperts
from polymoe.problem.numerics import relative_error

pytest.importorskip("transformers")

import transformers.integrations.mxfp4 as builtin_mxfp4
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from polymoe.checkpoint.architectures.config import neutral
from polymoe.engines.transformers import PackedExperts, load
from support.family_checkpoints import stored_nbytes
from support.packed_model import CHECKPOINT, batch, dequantized, experts_of


@pytest.fixture(scope="module")
def packed_fp32() -> tuple[Any, Any]:
    return load(CHECKPOINT, device="cpu", dtype=torch.float32)


# --- The packed model computes what the dequantized one does --------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
def test_generates_the_same_tokens_in_batches(packed_fp32: tuple[Any, Any], options: dict[str, Any]) -> None:
    model, tokenizer = packed_fp32
    inputs = batch(tokenizer)
    expected = dequantized(torch.float32).generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options), expected)


def test_a_config_that_save_pretrained_wrote_has_infinities(tmp_path: Path) -> None:
    path = shutil.copytree(CHECKPOINT.parent / "sums-nemotron-h-nvfp4", tmp_path / "c")
    theirs = AutoConfig.from_pretrained(path, trust_remote_code=False)
    theirs.time_step_limit = (0.0, float("inf"))
    theirs.save_pretrained(path)
    assert {"__float__": "Infinity"} in json.loads((path / "config.json").read_text())["time_step_limit"]
    model, _ = load(path, device="cpu")
    assert tuple(model.config.time_step_limit) == (0.0, float("inf"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"__float__": "-Infinity"}, -math.inf),
        ({"__float__": "NaN"}, {"__float__": "NaN"}),
        ({"__float__": ["Infinity"]}, {"__float__": ["Infinity"]}),
        ({"__float__": "Infinity", "more": 1}, {"__float__": "Infinity", "more": 1}),
    ],
    ids=str,
)
def test_only_infinities_are_read_as_numbers(written: dict[str, Any], read: Any) -> None:
    assert neutral({"a": {"b": written}, "c": [[written]]}) == {"a": {"b": read}, "c": [[read]]}


def test_a_file_is_no_model() -> None:
    with pytest.raises(CheckpointError, match="expected a directory or a Hub id"):
        load(CHECKPOINT / "config.json", device="cpu")


# --- What was loaded, and how ---------------------------------------------------------------------------------------


def test_experts_stay_packed_and_the_rest_is_transformers_own(packed: tuple[Any, Any]) -> None:
    model, _ = packed
    assert type(model).__name__ == "GptOssForCausalLM"
    assert not model.training
    assert model.dtype == torch.bfloat16
    assert model.config.quantization_config.to_dict()["quant_method"] == "mxfp4"
    fused = [module.fused for module in experts_of(model)]
    assert len(fused) == 4
    # 8 experts of 3 * 192 * 192 weights at 4.25 bits, and their biases.
    assert all(f is not None and stored_nbytes(f) == 8 * (3 * 192 * 192 * 17 // 32 + 2 * 3 * 192) for f in fused)
    assert not [name for name in model.state_dict() if "experts" in name]
    assert not [name for name, _ in model.named_parameters() if "experts" in name]


def test_transformers_dequantizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("Transformers dequantized experts")

    for name in ("convert_moe_packed_tensors", "dequantize_convertops"):
        monkeypatch.setattr(builtin_mxfp4, name, fail)
    load(CHECKPOINT, device="cpu")
    with pytest.raises((AssertionError, RuntimeError)):  # the trap works
        dequantized(torch.bfloat16)


def test_loading_says_nothing_about_keys(capfd: pytest.CaptureFixture[str]) -> None:
    load(CHECKPOINT, device="cpu")
    said = capfd.readouterr()
    assert "REPORT" not in said.err
    assert "MXFP4" not in said.err
    assert not said.out


@pytest.mark.slow
def test_loading_never_holds_the_experts_unpacked(tmp_path: Path) -> None:
    """Anonymous memory grows by little more than the packed experts, a quarter of what dequantized ones take."""
    experts, hidden, intermediate, layers = 64, 512, 768, 3  # so many that what else is allocated matters little
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config |= {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_local_experts": experts,
        "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers,
    }  # fmt: skip
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model*"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        at = f"model.layers.{layer}.mlp."
        for name, (n, k) in rows.items():
            tensors[f"{at}experts.{name}_blocks"] = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8)
            tensors[f"{at}experts.{name}_scales"] = torch.full((experts, n, k // 32), 120, dtype=torch.uint8)
            tensors[f"{at}experts.{name}_bias"] = torch.zeros(experts, n, dtype=torch.bfloat16)
        tensors[f"{at}router.weight"] = torch.zeros(experts, hidden, dtype=torch.bfloat16)
        tensors[f"{at}router.bias"] = torch.zeros(experts, dtype=torch.bfloat16)
        for name, n, k in (("q", 192, hidden), ("k", 64, hidden), ("v", 64, hidden), ("o", hidden, 192)):
            projection = f"model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{projection}.weight"] = torch.zeros(n, k, dtype=torch.bfloat16)
            tensors[f"{projection}.bias"] = torch.zeros(n, dtype=torch.bfloat16)
        tensors[f"model.layers.{layer}.self_attn.sinks"] = torch.zeros(6, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.zeros(16, hidden, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    packed_mib = sum(t.numel() for n, t in tensors.items() if n.endswith(("blocks", "scales"))) / 2**20

    code = """
import re, sys, threading, time
from polymoe.engines.transformers import load
load(sys.argv[2], device="cpu", backend="reference")  # what the first call allocates once
anonymous = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
start = peak = anonymous()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
model, _ = load(sys.argv[1], device="cpu", backend="reference")  # torch keeps float32 matrices too
done = True
watcher.join()
print(peak - start)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(CHECKPOINT)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    grown_mib = float(run.stdout)
    dequantized_mib = packed_mib / 4.25 * 16
    assert packed_mib * 0.9 < grown_mib < dequantized_mib / 2, (grown_mib, packed_mib, dequantized_mib)


def test_moves_and_keeps_its_bytes_when_cast(packed: tuple[Any, Any]) -> None:
    _, tokenizer = packed
    model, _ = load(CHECKPOINT, device="cpu")
    first = experts_of(model)[0].fused
    assert first is not None
    before = {name: t.clone() for name, t in first.packed.tensors.items()}
    model.to(torch.float16).to("cpu")
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in first.packed.tensors.items())
    assert "1+2=3" in tokenizer.decode(model.generate(**tokenizer("1+2=", return_tensors="pt"))[0])


def test_saving_is_refused_before_anything_is_written(packed: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedProblem, match=r"copy .*sums-gpt-oss-mxfp4"):
        packed[0].save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


# --- Unquantized checkpoints ----------------------------------------------------------------------------------------


def test_an_unquantized_checkpoint_runs_through_the_experts_interface(tmp_path: Path, packed: tuple[Any, Any]) -> None:
    weights = dequantized(torch.bfloat16)
    plain: Any = AutoModelForCausalLM.from_config(weights.config, dtype=torch.bfloat16, trust_remote_code=False).eval()
    plain.load_state_dict(weights.state_dict())
    plain.save_pretrained(tmp_path)
    packed[1].save_pretrained(tmp_path)
    model, tokenizer = load(tmp_path, device="cpu", backend="reference")
    assert not experts_of(model)
    assert model.get_experts_implementation()[""] == "polymoe:reference"
    inputs = batch(tokenizer)
    with torch.inference_mode():
        assert relative_error(model(**inputs).logits, plain(**inputs).logits) < 0.1
        assert torch.equal(model.generate(**inputs, max_new_tokens=8), packed[0].generate(**inputs))


def test_load_leaves_transformers_as_it_was() -> None:
    builtin = AUTO_QUANTIZER_MAPPING["mxfp4"]
    load(CHECKPOINT, device="cpu")
    assert AUTO_QUANTIZER_MAPPING["mxfp4"] is builtin


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"device": "gpu"}, ArgumentError, "auto, cpu, cuda"),
        ({"dtype": torch.float64}, ArgumentError, "float64"),
        ({"dtype": "float61"}, ArgumentError, "expected auto, bfloat16, float16 or float32"),
        ({"dtype": "Tensor"}, ArgumentError, "got 'Tensor'"),
        ({"backend": "refrence"}, ArgumentError, "did you mean 'reference'"),
        ({"trust_remote_code": True}, ArgumentError, "no code from a checkpoint"),
        ({"subfolder": "model"}, ArgumentError, "own path"),
        ({"gguf_file": "x.gguf"}, ArgumentError, "safetensors"),
        ({"use_kernels": True}, ArgumentError, "use_kernels"),
        ({"device": "auto", "device_map": {"": "disk"}}, UnsupportedProblem, "disk"),
        ({"quantization_config": Mxfp4Config(dequantize=True)}, ArgumentError, "from_pretrained"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load(CHECKPOINT, **{"device": "cpu", **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said() -> None:
    with pytest.raises(ArgumentError, match="CUDA"):
        load(CHECKPOINT, device="cuda")


def test_a_missing_checkpoint_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointNotFound, match=path.name):
            load(path, device="cpu")


def test_a_quantization_without_its_tensors_is_refused_with_all_names_that_it_may_have(tmp_path: Path) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gate_up_proj_\* or model\S+experts\.0\.gate_proj\.\*, got none"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("shard", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_a_truncated_shard_is_a_checkpoint_error(tmp_path: Path, shard: str) -> None:
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    data = (tmp_path / shard).read_bytes()
    (tmp_path / shard).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        load(tmp_path, device="cpu")


def test_a_call_before_loading_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        PackedExperts()(torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1))


def test_fused_experts_explain_themselves(packed: tuple[Any, Any]) -> None:
    fused = experts_of(packed[0])[0].fused
    assert isinstance(fused, FusedExperts)
    assert "reference" in str(fused.explain())


def test_dtypes_by_name() -> None:
    for name, dtype in (("auto", torch.bfloat16), ("float32", torch.float32), ("torch.float16", torch.float16)):
        assert load(CHECKPOINT, device="cpu", dtype=name)[0].dtype == dtype


def test_a_device_and_a_device_map_contradict(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ArgumentError, match="give only one of them"):
        load(checkpoint("qwen3"), device="cpu", device_map="auto")


def test_an_unknown_argument_is_not_the_checkpoint_s_fault(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ArgumentError, match=r"^devise: expected arguments of polymoe\.load"):
        load(checkpoint("qwen3"), device="cpu", devise="cuda")
