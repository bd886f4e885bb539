"""Transformers with packed experts: :func:`load` for one model, :func:`install` for whatever loads models afterwards.

Transformers builds the model, loads everything that is not an expert, and runs it. Its experts modules are replaced
before it reads any weight, so that expert tensors stay in their memory-mapped files until
:func:`polymoe.load_experts` packs them, layer by layer.

A model family is one row of :data:`FAMILIES`. That suffices where, as in gpt-oss, nothing but the experts is quantized
and the experts module is called as ``experts(hidden_states_TH, top_k_index_TA, top_k_weights_TA)``: so does every model
in Transformers 5 that takes part in its experts interface.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from polymoe.checkpoint import Checkpoint
from polymoe.errors import ArgumentError, CheckpointError, MissingDependency, UnsupportedProblem
from polymoe.experts import DTYPES, FusedExperts, load_experts
from polymoe.explanation import explain, layer_ranges

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
        AutoQuantizationConfig,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils import logging
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise MissingDependency(
        "polymoe.engines.transformers", expected="transformers 5.16 or newer", got=str(error),
        hint="pip install 'polymoe[transformers]'",
    ) from error  # fmt: skip

from polymoe.engines.transformers_experts import INTERFACE_NAME, interface_name, register, unregister

__all__ = ["FAMILIES", "Family", "PackedExperts", "PackedQuantizer", "install", "load", "uninstall"]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family in Transformers whose checkpoints come with quantized experts.

    Attributes:
        model_type: the config's ``model_type``.
        quant_method: the checkpoint's ``quant_method``; in these checkpoints the experts alone are quantized.
        experts: class name of the experts module, one in each layer that has experts.
    """

    model_type: str
    quant_method: str
    experts: str


FAMILIES = (Family("gpt_oss", "mxfp4", "GptOssExperts"),)
"""Every supported pair of family and quantization."""


class PackedExperts(nn.Module):
    """What stands in a model for one layer's experts module: the same call, packed weights.

    It has no parameters and adds nothing to the model's state dict: a checkpoint is loaded into it as a whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused: FusedExperts | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]`` from ``[T, H]``, expert ids ``[T, A]`` and routing weights ``[T, A]`` of any float dtype."""
        if self.fused is None:
            raise AssertionError("PackedExperts called before its weights were loaded")
        return self.fused(hidden_states, top_k_index, top_k_weights.float())


class PackedQuantizer(HfQuantizer):
    """Transformers' hooks around loading: experts modules out before it, packed experts in after it.

    Args:
        quantization_config: the checkpoint's own, which the loaded model keeps.
        backend, role: as in :func:`polymoe.load_experts`.
        device: where experts are packed; None is the device of the layer they belong to.
    """

    def __init__(
        self,
        quantization_config: QuantizationConfigMixin,
        *,
        backend: str = "auto",
        role: str = "mixed",
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(quantization_config, **kwargs)
        self.backend = backend
        self.role = role
        self.device = device
        self.directory = Path()
        self.modules: dict[str, int] = {}

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        model_type, method = model.config.model_type, self.quantization_config.quant_method
        family = _family(model_type, str(getattr(method, "value", method)))
        if not checkpoint_files:
            raise ArgumentError("from_pretrained", expected="a checkpoint in files", got="a state dict")
        if kwargs.get("use_kernels"):
            raise ArgumentError(
                "from_pretrained(use_kernels=True)",
                expected="polymoe's experts or the Hub's kernels",
                got="both",
                hint="the Hub's kernel for this layer reads unpacked experts; leave use_kernels out",
            )
        self.directory = Path(checkpoint_files[0]).parent
        self.modules = {
            name: int(re.findall(r"\.(\d+)\.", f".{name}")[-1])
            for name, module in model.named_modules()
            if type(module).__name__ == family.experts
        }
        for name in self.modules:
            model.set_submodule(name, PackedExperts())
        # Transformers calls the files' expert tensors unexpected now; they are not.
        model._keys_to_ignore_on_load_unexpected |= {
            re.sub(r"\d+", r"\\d+", re.escape(name)) + r"\." for name in self.modules
        }

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if getattr(model, "tp_size", None):
            raise UnsupportedProblem(
                "polymoe in Transformers", expected="a model on one device", got=f"tp_size={model.tp_size}"
            )
        checkpoint = Checkpoint.open(self.directory)
        for name, layer in logging.tqdm(self.modules.items(), desc="Packing experts"):
            sibling = next(model.get_submodule(name.rpartition(".")[0]).parameters())
            device = torch.device(self.device) if self.device else sibling.device
            if device.type == "meta":
                raise UnsupportedProblem(
                    name, expected="a layer on a device", got="a layer offloaded to CPU or disk",
                    hint="give a device_map without offloading",
                )  # fmt: skip
            model.get_submodule(name).fused = load_experts(
                checkpoint, layer=layer, device=device, backend=self.backend, role=self.role, dtype=model.dtype
            )

    def is_serializable(self) -> bool:  # type: ignore[override]
        """Raises: a packed model has no expert tensors to save.

        Raises:
            UnsupportedProblem: always.
        """
        raise UnsupportedProblem(
            "save_pretrained", expected="a model with plain experts", got="packed experts",
            hint=f"copy {self.directory}: its experts are unchanged",
        )  # fmt: skip

    @property
    def is_trainable(self) -> bool:  # type: ignore[override]
        """False: packed experts have no gradient."""
        return False


class _Request(QuantizationConfigMixin):
    """What :func:`load` puts in place of the checkpoint's quantization config, to reach :class:`PackedQuantizer`."""

    def __init__(self, source: dict[str, Any], backend: str, role: str, device: str, **_: Any) -> None:
        self.quant_method = INTERFACE_NAME  # type: ignore[assignment]
        self.source, self.backend, self.role, self.device = source, backend, role, device


def _requested(request: _Request, **kwargs: Any) -> PackedQuantizer:
    own = AutoQuantizationConfig.from_dict(request.source)
    return PackedQuantizer(own, backend=request.backend, role=request.role, device=request.device, **kwargs)


def _installed(builtin: type[HfQuantizer], backend: str, role: str, config: Any, **kwargs: Any) -> HfQuantizer:
    """In the place of Transformers' own quantizer, which still does what only it can."""
    if getattr(config, "dequantize", False) or not kwargs.get("pre_quantized", True):
        return builtin(config, **kwargs)
    return PackedQuantizer(config, backend=backend, role=role, **kwargs)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    role: str = "mixed",
    **kwargs: Any,
) -> tuple[Any, Any]:
    """A model with packed experts, in evaluation mode, and its tokenizer; both Transformers' own.

    Experts of an unquantized checkpoint are not packed: they run by ``experts_implementation="polymoe"``.

    Args:
        path: a checkpoint's directory or a Hub id.
        device: "cpu", "cuda", "cuda:1", or "auto": the GPU if there is one.
        dtype: of everything but the experts; None is the checkpoint's.
        backend: "auto", or the name of one, which is then used or refused.
        role: token counts that choose the experts' layout: "decode" (1 to 256), "prefill" (from 1024) or "mixed".
            The model takes any number in each role. Experts that are not packed lie as they are in every role.
        kwargs: for ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        CheckpointError: for a path without a checkpoint, or one that cannot be read.
        UnsupportedProblem: for a family without a row in :data:`FAMILIES`, or if no backend runs its experts here.
        ArgumentError: for an unknown device, backend or role, or an argument that contradicts packing.
    """
    for name, instead in _INSTEAD.items():
        if kwargs.get(name):
            raise ArgumentError(f"load({name}=...)", got=repr(kwargs[name]), hint=instead)
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError("dtype", expected=" or ".join(map(str, DTYPES)), got=str(dtype))
    target = _device(device)
    if Path(path).is_file():
        raise CheckpointError(str(path), expected="a directory or a Hub id", got="a file")
    # Whatever is wrong with checkpoint, family or backend shows here, before anything large is read.
    checkpoint = Checkpoint.open(Path(path), config_only=True, revision=kwargs.get("revision"))
    quantized = checkpoint.quantization.method != "none"
    if quantized:
        _family(checkpoint.model_type, checkpoint.quantization.method)
    explanation = explain(
        checkpoint, device=str(target), backend=backend, role=role, dtype=DTYPES[dtype or torch.bfloat16]
    )
    for row in explanation.rows:
        row.selection.require(f"{path}, layers {layer_ranges(row.layers)}")
    shared = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    config = AutoConfig.from_pretrained(path, **shared)
    if not quantized:
        register()
        kwargs["experts_implementation"] = interface_name(backend)
    else:
        AUTO_QUANTIZATION_CONFIG_MAPPING[INTERFACE_NAME] = _Request
        AUTO_QUANTIZER_MAPPING[INTERFACE_NAME] = _requested
        config.quantization_config = {
            "quant_method": INTERFACE_NAME, "source": checkpoint.config["quantization_config"],
            "backend": backend, "role": role, "device": str(target),
        }  # fmt: skip
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype or "auto", output_loading_info=True, **kwargs
        )
    except (SafetensorError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            str(path), expected="complete safetensors files", got=str(error),
            hint="a file is missing, truncated or damaged; download it again",
        ) from error  # fmt: skip
    model, loaded = found
    # Transformers makes up what it does not find, with a warning.
    absent = sorted({*loaded["missing_keys"], *(str(key) for key in loaded["mismatched_keys"])})
    if absent:
        raise CheckpointError(
            str(path), expected="every tensor of the model, in its shape", got=f"none for {', '.join(absent[:5])}"
            + (f" and {len(absent) - 5} more" if len(absent) > 5 else ""),
            hint="the checkpoint is incomplete, or its config is another model's",
        )  # fmt: skip
    return model.to(target), _tokenizer(path, shared)


def _tokenizer(path: str | os.PathLike[str], shared: Mapping[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, **shared)
    except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
        raise CheckpointError(f"{path}: tokenizer", expected="one that Transformers reads", got=str(error)) from error


def install(*, backend: str = "auto", role: str = "mixed") -> None:
    """Let every later ``from_pretrained`` of this process pack the experts of the families it knows.

    So do pipelines, ``transformers serve`` and lm-eval. ``quantization_config=Mxfp4Config(dequantize=True)`` still
    dequantizes. Also registers ``experts_implementation="polymoe"``. Calling it again changes backend and role only.

    A command line starts in a process of its own, so it is installed there::

        python -c "from polymoe.engines.transformers import install; install()
        from transformers.cli.transformers import main; main()" serve path/to/checkpoint
    """
    uninstall()
    register()
    for method in {family.quant_method for family in FAMILIES}:
        AUTO_QUANTIZER_MAPPING[method] = functools.partial(_installed, AUTO_QUANTIZER_MAPPING[method], backend, role)


def uninstall() -> None:
    """Undo :func:`install`: Transformers loads as it did before. Models that are loaded already stay packed."""
    unregister()
    for method, entry in AUTO_QUANTIZER_MAPPING.items():
        if isinstance(entry, functools.partial) and entry.func is _installed:
            AUTO_QUANTIZER_MAPPING[method] = entry.args[0]


_HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "token")
_INSTEAD: Mapping[str, str] = {
    "config": "load() reads the checkpoint's own",
    "device_map": "device=... puts the whole model on one device; for several, call install() and from_pretrained",
    "output_loading_info": "load() raises for tensors that are missing",
    "quantization_config": "load() packs what the checkpoint holds; to dequantize, call from_pretrained",
    "subfolder": "name the subfolder's own path",
    "trust_remote_code": "polymoe runs no code from a checkpoint",
}


def _family(model_type: str, quant_method: str) -> Family:
    for family in FAMILIES:
        if (family.model_type, family.quant_method) == (model_type, quant_method):
            return family
    raise UnsupportedProblem(
        "polymoe in Transformers",
        expected="a quantized checkpoint of " + ", ".join(f"{f.model_type} ({f.quant_method})" for f in FAMILIES),
        got=f"{model_type} ({quant_method})",
        hint="polymoe.load_experts and polymoe.explain read its experts by themselves",
    )


def _device(device: torch.device | str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ArgumentError("device", expected="auto, cpu, cuda or cuda:N", got=repr(device)) from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", expected="a CUDA device", got="none in this machine", hint='device="cpu"')
    return target
