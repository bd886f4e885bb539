"""Every family, packed in Transformers, against the model with its weights dequantized beforehand; bad input."""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polymoe.checkpoint import Checkpoint
from polymoe.errors import ArgumentError, CheckpointError, FormatError, UnsupportedProblem
from polymoe.experts import load_experts
from polymoe.numerics import relative_error
from support.configs import config as checkpoint_config
from support.written import damaged, patch_config

pytest.importorskip("transformers")

import transformers
from dequantized import filled, own
from families import FAMILIES
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from polymoe.engines.transformers import PackedExperts, PackedQuantizer, install, load, uninstall
from polymoe.engines.transformers.families import auto_class
from support.family_checkpoints import VARIANTS, family, fused_of, token_ids, write

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A checkpoint by the name of its family or variant, written once."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = write(name, tmp_path_factory.mktemp("families") / "checkpoint")
        return written[name]

    return get


@pytest.fixture(scope="module")
def pair(checkpoint: Checkpoints) -> Callable[[str], tuple[Any, Any, Any]]:
    """The dequantized model, the packed one and its tokenizer, in float32, loaded once."""
    loaded: dict[str, tuple[Any, Any, Any]] = {}

    def get(name: str) -> tuple[Any, Any, Any]:
        if name not in loaded:
            path = checkpoint(name)
            loaded[name] = (filled(path, torch.float32), *load(path, device="cpu", dtype=torch.float32))
        return loaded[name]

    return get


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


def experts_modules(model: Any) -> dict[str, Any]:
    """What packing replaces, by name: experts modules, and Llama-4's whole blocks."""
    found = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    if "llama4" in model.config.model_type:
        names = [name.removesuffix(".experts") for name in found]
        return {name: model.get_submodule(name) for name in names}
    return found


# --- A packed model computes what the dequantized one does ----------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_agree_in_float32(pair: Any, name: str) -> None:
    expected, packed, _ = pair(name)
    ids = token_ids()
    with torch.inference_mode():
        want, got = expected(input_ids=ids).logits, packed(input_ids=ids).logits
    assert want.abs().max() > 0.5  # a model that says nothing would agree with anything
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    # Routers, shared experts, attention, vision towers: all there, and the same to the bit.
    theirs = {name: value for name, value in expected.state_dict().items() if ".experts." not in name}
    ours = packed.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_experts_module_agrees_in_bfloat16(checkpoint: Checkpoints, name: str) -> None:
    path = checkpoint(name)
    expected = filled(path, torch.bfloat16)
    recorded: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}
    for module_name, module in experts_modules(expected).items():
        module.register_forward_hook(lambda _, args, out, name=module_name: recorded.update({name: (args, out)}))
    if name == "deepseek-v4" and Version(transformers.__version__) < Version("5.20"):
        with pytest.raises(UnsupportedProblem, match=r"expected Transformers 5\.20 or newer"):
            load(path, device="cpu", dtype=torch.bfloat16)
        return
    packed, _ = load(path, device="cpu", dtype=torch.bfloat16)
    with torch.inference_mode():
        expected(input_ids=token_ids())
        errors = {
            module_name: relative_error(_first(packed.get_submodule(module_name)(*args)), _first(out))
            for module_name, (args, out) in recorded.items()
        }
    assert len(errors) == len(fused_of(packed)) > 1
    assert 0 < max(errors.values()) <= 6e-3, errors


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("deepseek-v3", "fp8_group128"),
        ("deepseek-v4", "fp8_group128"),
        ("qwen3", "fp8_group128"),
        ("llama-4", "fp8_token"),
    ],
)
def test_experts_agree_with_their_inputs_in_fp8(checkpoint: Checkpoints, pair: Any, name: str, recipe: str) -> None:
    """As the releases mean them to be quantized, which is what a GPU does by itself."""
    _, packed, _ = pair(name)
    recorded: dict[int, tuple[Tensor, ...]] = {}
    modules = [module for module in packed.modules() if isinstance(module, PackedExperts)]
    hooks = [
        module.register_forward_pre_hook(lambda _, args, layer=layer: recorded.update({layer: args}))
        for layer, module in zip(Checkpoint.open(checkpoint(name)).layers, modules, strict=True)
    ]
    with torch.inference_mode():
        packed(input_ids=token_ids())
    for hook in hooks:
        hook.remove()
    opened = Checkpoint.open(checkpoint(name))
    for module, (layer, (x, ids, weights)) in zip(modules, recorded.items(), strict=True):
        assert opened.recipe(layer) == recipe
        fused = load_experts(opened, layer, device="cpu", activations=recipe)
        error = relative_error(fused(x, ids, weights.float()), module(x, ids, weights))
        assert 1e-3 < error <= 5.5e-2


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", FAMILIES)
def test_generates_the_same_tokens_from_padded_prompts(pair: Any, name: str) -> None:
    expected, packed, tokenizer = pair(name)
    inputs = tokenizer(["1+2=", "123-45=", "7+999="], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(packed.generate(**inputs, **options), expected.generate(**inputs, **options))


OWN = ["gpt-oss", "deepseek-v3", "deepseek-v4", "deepseek-v4 FP8 experts", "qwen3"]
OWN_ROUNDED = ["kimi-k2", "llama-4", "glm-4 FP8 by channel"]


@pytest.mark.parametrize("name", [*OWN, *OWN_ROUNDED])
def test_weights_are_those_that_transformers_dequantizes(checkpoint: Checkpoints, pair: Any, name: str) -> None:
    """Where Transformers has a path of its own: no weight differs; compressed-tensors rounds them to bfloat16."""
    if name in OWN_ROUNDED:
        pytest.importorskip("compressed_tensors")
    theirs, (_, packed, _) = own(checkpoint(name), torch.float32), pair(name)

    def same(ours: Tensor, other: Tensor) -> bool:
        rounded = ours.bfloat16().float() if name in OWN_ROUNDED else ours
        return torch.equal(other.float(), rounded) or torch.equal(other.float(), ours)

    state = theirs.state_dict()
    assert all(same(value, state[key]) for key, value in packed.state_dict().items())
    for module_name, module in packed.named_modules():
        if not isinstance(module, PackedExperts) or module.fused is None:
            continue
        gate_up, down = module.fused.weights.dequantize()
        held = dict(theirs.get_submodule(module_name).named_parameters())
        if "0.up_proj.weight" in held:  # one module an expert
            for e in range(len(down)):
                both = torch.cat([held[f"{e}.gate_proj.weight"], held[f"{e}.up_proj.weight"]])
                assert same(gate_up[e], both)
                assert same(down[e], held[f"{e}.down_proj.weight"])
        elif name == "gpt-oss":
            assert same(torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2), held["gate_up_proj"].mT)
            assert same(down, held["down_proj"].mT)
        else:
            assert same(gate_up, held["gate_up_proj"])
            assert same(down, held["down_proj"])
    if name in OWN:
        ids = token_ids()
        with torch.inference_mode():
            # What was 16 bit in the files stays so in Transformers from 5.23 on, whatever the dtype asked for.
            want, got = theirs.float()(input_ids=ids).logits, packed(input_ids=ids).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


# --- What was loaded, and how ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_stay_packed(checkpoint: Checkpoints, pair: Any, name: str) -> None:
    _, model, _ = pair(name)
    opened = Checkpoint.open(checkpoint(name))
    for layer, fused in zip(opened.layers, fused_of(model), strict=True):
        stored = opened.spec(layer).local_experts * opened.spec(layer).expert_bytes
        assert stored <= fused.packed.nbytes <= 1.01 * stored  # zero points are held in bytes, and input scales too
    named = (*model.state_dict(), *dict(model.named_parameters()))
    assert not [key for key in named if ".experts." in key]
    assert not [key for key, _ in model.named_buffers() if "reserved" in key]
    assert not model.training
    assert model.config.quantization_config.to_dict() == family(name).config["quantization_config"]


def test_the_dtype_is_the_checkpoints_own(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("mixtral"), tmp_path / "c")
    assert load(path, device="cpu")[0].dtype == torch.float16
    patch_config(path, torch_dtype=None)
    assert load(path, device="cpu")[0].dtype == torch.bfloat16


def test_other_matrices_that_are_quantized_are_said_once_with_their_bytes(
    checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "polymoe"):
        model, _ = load(checkpoint("nemotron-h"), device="cpu")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "polymoe"]
    quantized = re.compile(r".*(in_proj|out_proj|shared_experts\.(up|down)_proj)\.weight")
    matrices = [value for key, value in model.state_dict().items() if quantized.fullmatch(key)]
    count = sum(m.numel() for m in matrices)
    assert f"{len(matrices)} matrices outside the experts are stored as fp8_tensor and run as bfloat16" in said
    assert f"{(count + 4 * len(matrices)) / 2**20:.1f} MiB stored, {2 * count / 2**20:.1f} MiB in memory" in said
    caplog.clear()
    with caplog.at_level(logging.WARNING, "polymoe"):
        load(checkpoint("kimi-k2"), device="cpu")  # nothing but experts
    assert not [record for record in caplog.records if record.name == "polymoe"]


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
    """With a stand-in for the kernel, and for the GPU that Transformers asks for."""
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


def test_a_device_map_places_layers_and_counts_packed_experts(
    checkpoint: Checkpoints, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    path, (_, plain, _) = checkpoint("qwen3"), pair("qwen3")
    model, _ = load(path, device_map={"": "cpu"}, dtype=torch.float32)
    with torch.inference_mode():
        assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)

    class Enough(Exception):
        pass

    chosen: dict[str, Any] = {}

    def stop(self: Any, model: Any, load_config: Any) -> None:
        chosen.update(load_config.device_map)
        raise Enough

    monkeypatch.setattr(PackedQuantizer, "read_others", stop)
    layer = sum(p.numel() * 2 for p in plain.model.layers[0].parameters()) + fused_of(plain)[0].packed.nbytes
    with pytest.raises(Enough):
        load(path, device_map="sequential", max_memory={0: int(3.5 * layer), 1: int(3.5 * layer), "cpu": 0})
    places = [chosen[f"model.layers.{i}"] for i in range(4)]
    assert places == [0, 0, 0, 1] or places == [0, 0, 1, 1], chosen


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v4", "llama-4"])
def test_runs_on_several_gpus(checkpoint: Checkpoints, name: str) -> None:
    path = checkpoint(name)
    names = [n for n, _ in load(path, device="cpu")[0].named_children()]
    model, _ = load(path, device_map="balanced", backend="reference", dtype=torch.float32)
    assert {fused.device.index for fused in fused_of(model)} == set(range(torch.cuda.device_count())), names
    one, _ = load(path, device="cuda:0", backend="reference", dtype=torch.float32)
    ids = token_ids().cuda()
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids).logits.cpu(), one(input_ids=ids).logits.cpu())


def test_a_vision_tower_is_kept_and_works(pair: Any) -> None:
    expected, packed, _ = pair("llama-4")
    image, pixels = packed.config.image_token_id, torch.randn(1, 3, 28, 28)
    words = token_ids(1).clamp(max=12)
    ids = words.index_fill(1, torch.tensor([2]), image)  # 28 x 28 pixels are one token
    with torch.inference_mode():
        want = expected(input_ids=ids, pixel_values=pixels).logits
        got, without = packed(input_ids=ids, pixel_values=pixels).logits, packed(input_ids=words).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert not torch.allclose(got[0, -1], without[0, -1], atol=1e-4)


def test_an_adapter_beside_the_model_is_left_to_transformers(
    checkpoint: Checkpoints, pair: Any, tmp_path: Path
) -> None:
    """Its tensors are not the model's; with peft installed Transformers attaches it to the layers it names."""
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "c")
    _, plain, _ = pair("qwen3")
    rank, hidden, rows = 2, 256, 256
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {f"{at}.lora_A.weight": torch.randn(rank, hidden), f"{at}.lora_B.weight": torch.randn(rows, rank)}
    save_file(adapter, path / "adapter_model.safetensors", {"format": "pt"})
    described = {
        "base_model_name_or_path": str(path), "peft_type": "LORA", "r": rank, "lora_alpha": rank,
        "target_modules": ["layers.0.self_attn.q_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(described))
    model, _ = load(path, device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        difference = (model(token_ids()).logits - plain(token_ids()).logits).abs().max()
    assert (difference > 1e-3) == transformers.utils.is_peft_available()


# --- install() ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["kimi-k2", "nemotron-h", "mixtral", "kimi-k2.5", "kimi-k2 under compression_config"])
def test_from_pretrained_packs_once_installed(checkpoint: Checkpoints, pair: Any, name: str) -> None:
    path = checkpoint(name)
    config = AutoConfig.from_pretrained(path)
    model = auto_class(config).from_pretrained(path, dtype=torch.float32)
    _, expected, _ = pair(name)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=token_ids()).logits, expected(input_ids=token_ids()).logits)


@pytest.mark.usefixtures("installed")
def test_models_of_other_families_load_as_ever(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, dtype="float32"
    )
    plain = LlamaForCausalLM(config)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    weight = "model.layers.0.mlp.up_proj.weight"
    state[weight], state[f"{weight}_scale_inv"] = state[weight].to(torch.float8_e4m3fn), torch.full((1, 1), 2.0)
    config.save_pretrained(tmp_path)
    patch_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not isinstance(model.hf_quantizer, PackedQuantizer) if hasattr(model, "hf_quantizer") else True
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight.float(), 2 * state[weight].float())


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [True, False])
def test_a_family_that_transformers_lacks(tmp_path: Path, quantized: bool) -> None:
    described = checkpoint_config("deepseek-v4-fp4") | {"model_type": "deepseek_v41"}
    if not quantized:
        del described["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(
        UnsupportedProblem, match="deepseek_v41 in Transformers: expected a family that Transformers has"
    ) as e:
        load(tmp_path, device="cpu")
    assert "install a version of Transformers with a model for deepseek_v41" in str(e.value)


def test_a_family_without_a_row(tmp_path: Path) -> None:
    described = checkpoint_config("qwen3-fp8") | {"model_type": "qwen3_next"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedProblem, match="qwen3_next in Transformers: expected a family with a row"):
        load(tmp_path, device="cpu")


def test_tensors_count_more_than_the_config_and_say_so_once(checkpoint: Checkpoints, pair: Any, tmp_path: Path) -> None:
    """The config keeps shared experts in 16 bit and calls experts INT4; the files have all of them in NVFP4."""
    path = shutil.copytree(checkpoint("glm-4"), tmp_path / "c")
    _, plain, _ = pair("glm-4")
    described = json.loads((path / "config.json").read_text())["quantization_config"]
    described["ignore"].append("re:.*shared_experts.*")
    patch_config(path, quantization_config=described)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = load(path, device="cpu", dtype=torch.float32)
    (said,) = [str(w.message) for w in caught if "The tensors count" in str(w.message)]
    assert "9 matrices outside the experts differ from the config" in said
    assert "config: bf16, plain; tensors: nvfp4" in said
    with torch.inference_mode():
        assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)

    described["config_groups"]["group_0"]["weights"] |= {"type": "int", "strategy": "group", "group_size": 32}
    described["config_groups"]["group_0"]["input_activations"] = None
    described["ignore"].append(r"re:.*layers\.0\.mlp\..*")  # so that experts alone are at odds
    patch_config(path, quantization_config=described)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = load(path, device="cpu", dtype=torch.float32)
    said = [str(w.message) for w in caught if "The tensors count" in str(w.message) and "mlp.experts" in str(w.message)]
    assert len(said) == 1, said
    with torch.inference_mode():
        assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)


def one_file(path: Path, target: Path) -> Path:
    """A copy with all tensors in one file, for damage."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: value for shard in sorted(path.glob("*.safetensors")) for name, value in load_file(shard).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


SHARED = "model.layers.1.mlp.shared_experts.up_proj"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda t: [t.pop(k) for k in list(t) if k.startswith(SHARED)], CheckpointError, rf"{SHARED}\.weight"),
        (lambda t: t.pop(f"{SHARED}.weight_scale_inv"), FormatError, rf"{SHARED}\.weight: expected a scale beside"),
        (
            lambda t: t.update({f"{SHARED}.weight_scale_inv": torch.ones(3, 7)}),
            FormatError,
            rf"{SHARED}\.weight_scale_inv",
        ),
        (lambda t: t[f"{SHARED}.weight_scale_inv"].fill_(torch.nan), FormatError, rf"{SHARED} scales"),
        (
            lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"),
            CheckpointError,
            "e_score_correction_bias",
        ),
        (
            lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"),
            CheckpointError,
            r"experts\.3\.up_proj\.weight",
        ),
    ],
    ids=["shared expert", "its scale", "its scale's shape", "its scale is NaN", "router bias", "expert"],
)
def test_what_is_missing_or_wrong_is_named(
    checkpoint: Checkpoints, tmp_path: Path, change: Any, error: Any, says: str
) -> None:
    whole = one_file(checkpoint("deepseek-v3"), tmp_path / "whole")
    with pytest.raises(error, match=says):
        load(damaged(whole, tmp_path / "damaged", change), device="cpu")


def test_packed_words_without_their_scales(checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = one_file(checkpoint("mixtral"), tmp_path / "whole")
    path = damaged(whole, tmp_path / "damaged", lambda t: t.pop("model.layers.0.self_attn.q_proj.scales"))
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.scales: expected this tensor"):
        load(path, device="cpu")


def test_a_device_and_a_device_map_contradict(checkpoint: Checkpoints) -> None:
    with pytest.raises(ArgumentError, match="give only one of them"):
        load(checkpoint("qwen3"), device="cpu", device_map="auto")
