"""load and install: models of Transformers with packed experts.

Transformers builds the model, loads everything that is not an expert, and runs it. Its experts modules are replaced
before it reads any weight, so that expert tensors stay in their memory-mapped files until
:func:`polymoe.load_experts` packs them, layer by layer. Other quantized matrices become 16-bit floats.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, modeling_utils
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from polymoe.call import DTYPES
from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.config import quantization_source
from polymoe.engines.transformers.dense_quantizer import check_dense
from polymoe.engines.transformers.experts_interface import INTERFACE_NAME, interface_name, register, unregister
from polymoe.engines.transformers.families import (
    FAMILIES,
    auto_class,
    register_names,
    registered_names,
    require_family,
    require_model,
    unregister_names,
    use_own_name,
)
from polymoe.engines.transformers.quantizer import PackedConfig, PackedQuantizer
from polymoe.errors import ArgumentError, CheckpointError
from polymoe.explanation import explain, layer_ranges

modeling: Any = modeling_utils

__all__ = ["install", "load", "uninstall"]


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    role: str = "mixed",
    dense: str = "16bit",
    **kwargs: Any,
) -> tuple[Any, Any]:
    """A model of Transformers with packed experts, in evaluation mode, and its tokenizer.

    The experts of an unquantized checkpoint are not packed: they run by ``experts_implementation="polymoe"``.

    Args:
        path: a checkpoint's directory or a Hub id.
        device: "cpu", "cuda", "cuda:1", or "auto": the GPU if there is one. For several GPUs, leave it at "auto" and
            give ``device_map="auto"``.
        dtype: of everything but the experts; None is the checkpoint's.
        backend: "auto", or the name of the backend to use.
        role: token counts for which the experts' layout is chosen: "decode" (1 to 256), "prefill" (from 1024) or
            "mixed" (both). The model takes any token count in every role. Experts that are not packed keep their
            layout.
        dense: what quantized matrices outside the experts become: "16bit" floats, or the result of Transformers'
            own quantizer ("transformers", for ``quant_method`` fp8 only).
        kwargs: for Transformers' ``from_pretrained``, such as ``device_map``, which spreads whole layers over devices.

    Raises:
        CheckpointError: for a path without a checkpoint, or one that cannot be read.
        UnsupportedProblem: for a family that Transformers does not have or that has no row in
            :data:`~polymoe.engines.transformers.families.FAMILIES`, or if no backend runs its experts here.
        ArgumentError: for an unknown device, backend or role, or an argument that contradicts packing.
    """
    for name, instead in _INSTEAD.items():
        if kwargs.get(name):
            raise ArgumentError(f"load({name}=...)", got=repr(kwargs[name]), hint=instead)
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError("dtype", expected=" or ".join(map(str, DTYPES)), got=str(dtype))
    device_map = kwargs.get("device_map")
    if device_map is not None and device != "auto":
        raise ArgumentError("load(device_map=...)", got=f"device={str(device)!r} as well", hint="give only one of them")
    target = _device(device if device_map is None else _first_of(device_map))
    if Path(path).is_file():
        raise CheckpointError(str(path), expected="a directory or a Hub id", got="a file")
    # Errors of the checkpoint, its family and the backend are raised here, before anything large is read.
    checkpoint = Checkpoint.open(Path(path), config_only=True, revision=kwargs.get("revision"))
    quantized = checkpoint.quantization.method != "none"
    check_dense(dense, checkpoint.quantization.method)
    if quantized:
        require_family(checkpoint.model_type)
    else:
        require_model(checkpoint.model_type)
    explanation = explain(
        checkpoint, device=str(target), backend=backend, role=role, dtype=DTYPES[dtype or torch.bfloat16]
    )
    for row in explanation.rows:
        row.selection.require(f"{path}, layers {layer_ranges(row.layers)}")
    hub_arguments = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    with registered_names():
        config = use_own_name(AutoConfig.from_pretrained(path, trust_remote_code=False, **hub_arguments))
        if quantized:
            source = quantization_source(checkpoint.files.config, checkpoint.files.side)
            place = str(target) if device_map is None else None
            _request_packing(config, source, backend=backend, role=role, dense=dense, device=place)
        else:
            register()
            kwargs["experts_implementation"] = interface_name(backend)
        dtype = dtype or config.dtype or config.get_text_config().dtype or torch.bfloat16
        model, loaded = _from_pretrained(path, config, dtype=dtype, output_loading_info=True, **kwargs)
        tokenizer = _tokenizer(path, hub_arguments)
    # Transformers initializes missing tensors at random, and only warns.
    absent = sorted({*loaded["missing_keys"], *(str(key) for key in loaded["mismatched_keys"])})
    if absent:
        raise CheckpointError(
            str(path),
            expected="every tensor of the model, in its shape",
            got=f"none for {', '.join(absent[:5])}" + (f" and {len(absent) - 5} more" if len(absent) > 5 else ""),
            hint="the checkpoint is incomplete, or its config belongs to another model",
        )
    return model.to(target) if device_map is None else model, tokenizer


def _from_pretrained(path: str | os.PathLike[str], config: Any, **kwargs: Any) -> Any:
    try:
        return auto_class(config).from_pretrained(path, config=config, trust_remote_code=False, **kwargs)
    except (SafetensorError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            str(path),
            expected="complete safetensors files",
            got=str(error),
            hint="a file is missing, truncated or damaged; download it again",
        ) from error


def _request_packing(config: Any, source: Mapping[str, Any], **options: Any) -> None:
    """Make ``from_pretrained`` with this config use a :class:`PackedQuantizer`."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[INTERFACE_NAME] = PackedConfig
    AUTO_QUANTIZER_MAPPING[INTERFACE_NAME] = PackedQuantizer
    config.quantization_config = {"quant_method": INTERFACE_NAME, "source": dict(source), **options}


def _tokenizer(path: str | os.PathLike[str], hub_arguments: Mapping[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, **hub_arguments)
    except Exception as error:  # tokenizers raises a plain Exception for a file that it cannot read
        raise CheckpointError(f"{path}: tokenizer", expected="one that Transformers reads", got=str(error)) from error


def install(*, backend: str = "auto", role: str = "mixed") -> None:
    """Make every later ``from_pretrained`` of this process pack the experts of the families that polymoe knows.

    That includes pipelines, ``transformers serve`` and lm-eval. ``quantization_config=Mxfp4Config(dequantize=True)``
    and the like still dequantize, and models of other families load as before. ``experts_implementation="polymoe"`` is
    registered too. A second call replaces backend and role.

    A command starts a process of its own, so it has to be installed there::

        python -c "from polymoe.engines.transformers import install; install()
        from transformers.cli.transformers import main; main()" serve path/to/checkpoint
    """
    uninstall()
    register()
    register_names()
    # Here Transformers chooses a quantizer, and has the model's config.
    modeling.get_hf_quantizer = functools.partial(_choose_quantizer, modeling.get_hf_quantizer, backend, role)


def uninstall() -> None:
    """Undo :func:`install`: Transformers loads as before. Models that are already loaded stay packed."""
    unregister()
    unregister_names(row.model_type for row in FAMILIES if row.same_as)
    if installed():
        modeling.get_hf_quantizer = modeling.get_hf_quantizer.args[0]


def installed() -> bool:
    """Whether :func:`install` is in effect in this process."""
    chooser = modeling.get_hf_quantizer
    return isinstance(chooser, functools.partial) and chooser.func is _choose_quantizer


def _choose_quantizer(
    theirs: Callable[..., Any],
    backend: str,
    role: str,
    config: Any,
    quantization_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces Transformers' choice of a quantizer, which is called for everything that is not packed."""
    found = _described(config)
    packs = any(row.model_type == config.model_type for row in FAMILIES) and not kwargs.get("gguf_file")
    if packs and found and not any(getattr(c, "dequantize", False) for c in (quantization_config, found)):
        source = found if isinstance(found, Mapping) else found.to_dict()
        if source.get("quant_method") != INTERFACE_NAME:
            _request_packing(config, source, backend=backend, role=role)
        quantization_config = None
    use_own_name(config)
    return theirs(config, quantization_config, *args, **kwargs)


def _described(config: Any) -> Any:
    """The quantization that a config of Transformers describes, wherever it is: a dict, or Transformers' own class."""
    parts = (config, config.get_text_config())
    found = (getattr(part, key, None) for key in ("quantization_config", "compression_config") for part in parts)
    return next((description for description in found if description), None)


_HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "token")
_INSTEAD: Mapping[str, str] = {
    "config": "load() reads the checkpoint's own",
    "output_loading_info": "load() raises for tensors that are missing",
    "quantization_config": "load() packs what the checkpoint holds; to dequantize, call from_pretrained",
    "subfolder": "give the subfolder's own path",
    "trust_remote_code": "polymoe runs no code from a checkpoint",
}


def _first_of(device_map: Any) -> torch.device | str:
    """A device of a ``device_map``: a GPU if it names one."""
    if not isinstance(device_map, Mapping):
        return "auto" if device_map in ("auto", "balanced", "balanced_low_0", "sequential") else device_map
    places = sorted({str(place) for place in device_map.values()} - {"disk"}, key=lambda place: place == "cpu")
    return f"cuda:{places[0]}" if places and places[0].isdecimal() else places[0] if places else "cpu"


def _device(device: torch.device | str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ArgumentError("device", expected="auto, cpu, cuda or cuda:N", got=repr(device)) from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "device", expected="a CUDA device", got="no CUDA device in this machine", hint='device="cpu"'
        )
    return target
