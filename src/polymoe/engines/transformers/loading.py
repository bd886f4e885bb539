"""load, install and PolymoeConfig: models of Transformers with packed experts.

Transformers builds the model, loads everything that is not an expert, and runs it. Its experts modules are replaced
before it reads any weight, so that expert tensors stay in their memory-mapped files until
:func:`polymoe.load_experts` packs them, layer by layer. Other quantized matrices become 16-bit floats.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import modeling_utils
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.architectures.interface import has_interface
from polymoe.checkpoint.config import quantization_source
from polymoe.checkpoint.families import families_of
from polymoe.checkpoint.quantized import require_format
from polymoe.common.units import format_ranges
from polymoe.common.untrusted import reading
from polymoe.engines.transformers.contract import require_contract
from polymoe.engines.transformers.dense_quantizer import check_dense
from polymoe.engines.transformers.experts_interface import (
    INTERFACE_NAME,
    interface_name,
    note_groups,
    register,
    unregister,
)
from polymoe.engines.transformers.families import (
    TRANSFORMERS_FAMILIES,
    register_names,
    registered_names,
    require_model,
    unregister_names,
    use_own_name,
)
from polymoe.engines.transformers.model_config import check_tokens, generation_config, model_config
from polymoe.engines.transformers.quantizer import PackedConfig, PackedQuantizer
from polymoe.engines.transformers.tokenizer import load_tokenizer, vocabulary_size
from polymoe.engines.transformers.weights import model_from_tensors
from polymoe.errors import ArgumentError, CheckpointError, PolymoeError, UnsupportedProblem, quoted
from polymoe.explanation import explain
from polymoe.explanation.offload import offload_of
from polymoe.formats.extremes import extremes, is_finite
from polymoe.problem.call import DTYPES

modeling: Any = modeling_utils
log = getLogger("polymoe")


def require_gpu(name: str, device: str, hint: str) -> None:
    """Raise ArgumentError for the argument ``name`` if :func:`load` would put a model on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        raise ArgumentError(name, expected="a GPU", got="a model on the CPU", hint=hint)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str | None = None,
    backend: str = "auto",
    role: str = "mixed",
    dense: str = "16bit",
    expert_memory: str | None = None,
    experts: str | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """A model of Transformers with packed experts, for inference, and its tokenizer. No parameter requires a gradient.

    The experts of an unquantized checkpoint are not packed unless ``experts`` says how: they run by
    ``experts_implementation="polymoe"``.

    Args:
        path: a checkpoint's directory or a Hub id.
        device: "cpu", "cuda", "cuda:1", or "auto": the GPU if there is one. For several GPUs, leave it at "auto" and
            give ``device_map="auto"``.
        dtype: of everything but the experts, such as ``torch.bfloat16`` or "bfloat16"; None and "auto" are the
            checkpoint's.
        backend: "auto", or the name of the backend to use.
        role: token counts for which the experts' layout is chosen: "decode" (1 to 256), "prefill" (from 1024) or
            "mixed" (both). The model takes any token count in every role. Experts that are not packed keep their
            layout.
        dense: what quantized matrices outside the experts become: "16bit" floats, or the result of Transformers'
            own quantizer ("transformers", for ``quant_method`` fp8 only).
        expert_memory: GPU memory for experts: "16GiB", "auto" (what the other weights and 8,192 tokens of context
            leave, on one device), or "32slots" in each layer. All experts lie in host memory then, and those used last
            also on the GPU (:class:`~polymoe.layer.offload.OffloadedExperts`); device maps count slots, and two whole
            layers on each GPU. None: all lie on the GPU.
        experts: a format to which experts in 16 bits are quantized while loading, one at a time, on the layer's device:
            "mxfp4", "nvfp4", "int4_g32", "int4_g128", "fp8_block128" or "mxfp8".
        kwargs: for Transformers' ``from_pretrained``, such as ``device_map``, which distributes layers over devices.

    Raises:
        CheckpointError: for a path without a checkpoint, or one that cannot be read.
        UnsupportedProblem: for a model that Transformers does not have or whose experts polymoe does not run, if no
            backend runs them here, or for a version of Transformers whose private parts are not as expected.
        ArgumentError: for an unknown device, backend or role, or an argument that contradicts packing.
    """
    require_contract()
    _require_arguments(path, device, expert_memory, kwargs)
    dtype, device_map = _given_dtype(dtype), kwargs.get("device_map")
    target = _device(device if device_map is None else _first_of(device_map))
    # Errors of the checkpoint, its family and the backend are raised here, before anything large is read.
    hub = {name: kwargs.pop(name) for name in _HUB_ARGUMENTS if name in kwargs}
    checkpoint = Checkpoint.open(os.fspath(path), config_only=True, experts=experts, **hub)
    quantized = checkpoint.quantization.quantized or experts is not None
    check_dense(dense, checkpoint.quantization.method)
    if expert_memory is not None and not quantized:
        hint = 'experts="int4_g32" quantizes them while loading'
        got = "experts that are not packed"
        raise ArgumentError("load(expert_memory=...)", expected="quantized experts", got=got, hint=hint)
    require_model(checkpoint.model_type)
    explanation = explain(
        checkpoint, device=str(target), backend=backend, role=role, dtype=DTYPES[dtype or torch.bfloat16]
    )
    if expert_memory is not None:
        free = torch.cuda.mem_get_info(target)[0] if target.type == "cuda" else None
        expert_memory = f"{offload_of(explanation, expert_memory, memory_bytes=free).slots}slots"
    for row in explanation.rows:
        row.selection.require(f"{path}, layers {format_ranges(row.layers)}")
    with Checkpoint.open(os.fspath(path), experts=experts, **hub) as checkpoint:
        for part in checkpoint.parts:
            for layer in part.layers:
                part.weights(layer)  # raises if a tensor of its experts is missing
        place = str(target) if device_map is None else None
        how = {"backend": backend, "role": role, "dense": dense, "device": place, "expert_memory": expert_memory}
        model, tokenizer = _built(checkpoint, dtype, how if quantized else None, backend, kwargs)
        model = model.to(target) if device_map is None else model
        # Packed experts are not trained, and most backends have no backward: a plain call must not record gradients.
        model.requires_grad_(False)
        _require_finite_experts(model, checkpoint.name)
        check_tokens(model, vocabulary_size(tokenizer), checkpoint.name)
        if dense == "16bit":  # Transformers' own quantizer leaves dtypes that only its kernels take
            _compute_once(model, checkpoint.name)
        if checkpoint.files.has("adapter_config.json"):
            log.warning("%s: the adapter beside the weights is not loaded: model.load_adapter(path) does", path)
    return model, tokenizer


def _require_arguments(
    path: str | os.PathLike[str], device: torch.device | str, expert_memory: str | None, kwargs: Mapping[str, Any]
) -> None:
    """Check the arguments of :func:`load` that contradict packing or each other."""
    for name, instead in _INSTEAD.items():
        if kwargs.get(name):
            raise ArgumentError(f"load({name}=...)", got=repr(kwargs[name]), hint=instead)
    device_map = kwargs.get("device_map")
    if device_map is not None and device != "auto":
        raise ArgumentError("load(device_map=...)", got=f"device={str(device)!r} as well", hint="give only one of them")
    if isinstance(device_map, Mapping) and "disk" in map(str, device_map.values()):
        raise UnsupportedProblem("load(device_map=...)", expected="GPUs or the CPU", got="disk")
    if expert_memory == "auto" and device_map is not None:
        raise ArgumentError("load(expert_memory=...)", expected="32slots or 16GiB with a device_map", got="'auto'")
    if (file := Path(path)).is_file() and file.suffix == ".json":
        raise CheckpointError(str(path), expected="a directory or a Hub id", got="a file")


def _built(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    packing: Mapping[str, Any] | None,
    backend: str,
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    """The model, by ``from_pretrained`` with ``kwargs``, and the tokenizer. ``packing`` is how quantized experts are
    packed; None runs those of an unquantized checkpoint by ``experts_implementation``."""
    with registered_names():
        config = use_own_name(model_config(checkpoint))
        tokenizer = load_tokenizer(checkpoint.files.directory, config=config)
        if packing is None:
            register()
            kwargs["experts_implementation"] = interface_name(backend)
            tensors = checkpoint.all_tensors()
        else:
            source = quantization_source(checkpoint.files.config, checkpoint.files.side)
            _request_packing(config, source, checkpoint=checkpoint, **packing)
            tensors = checkpoint.dense_tensors(as_stored=packing["dense"] != "16bit")
        dtype = dtype or _dtype(config, checkpoint.name)
        kwargs.setdefault("generation_config", generation_config(checkpoint))
        model = model_from_tensors(config, tensors, checkpoint.name, dtype=dtype, **kwargs)
        note_groups(model)
    return model, tokenizer


def _given_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that an argument names; None for the checkpoint's."""
    if dtype is None or dtype == "auto":
        return None
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or named not in DTYPES:
        names = [str(known).removeprefix("torch.") for known in DTYPES]
        raise ArgumentError("dtype", expected=f"auto, {', '.join(names[:-1])} or {names[-1]}", got=repr(dtype))
    return named


def _dtype(config: Any, where: str) -> torch.dtype:
    """The dtype that a checkpoint's config names, or bfloat16."""
    dtype = config.dtype or config.get_text_config().dtype or torch.bfloat16
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        known = " or ".join(map(str, DTYPES))
        raise CheckpointError(f"{where}: config.json: dtype", expected=known, got=quoted(dtype))
    return dtype


def _require_finite_experts(model: Any, where: str) -> None:
    """Refuse NaN and infinity in experts in 16 bits, as packing refuses them: all are read, once, where they lie."""
    found = {
        f"{name}.{parameter}": extremes(value.to_local() if isinstance(value, DTensor) else value)
        for name, module in model.named_modules()
        if has_interface(module)
        for parameter, value in module.named_parameters(recurse=False)
        if value.device.type != "meta"  # offloaded until it runs
    }
    for name, (low, high) in found.items():
        if not is_finite(low.dtype, float(low), float(high)):
            hint = f"a file is damaged, or a number is too large for {low.dtype}"
            raise CheckpointError(f"{where}: {name}", expected="finite numbers", got="NaN or infinity", hint=hint)


def _compute_once(model: Any, where: str) -> None:
    """Compute two tokens, so that numbers of the config that contradict each other are found here."""
    # Modules that are offloaded have their parameters on "meta", until they run.
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    with reading(where, "a model that computes a token", hint=_CONTRADICTION), torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    if bool(logits.isnan().any()):
        raise CheckpointError(where, expected="logits that are numbers", got="NaN", hint=f"run in {model.dtype}")


def _request_packing(config: Any, source: Mapping[str, Any], **options: Any) -> None:
    """Make ``from_pretrained`` with this config use a :class:`PackedQuantizer`."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[INTERFACE_NAME] = PackedConfig
    AUTO_QUANTIZER_MAPPING[INTERFACE_NAME] = PackedQuantizer
    config.quantization_config = {"quant_method": INTERFACE_NAME, "source": dict(source), **options}


class PolymoeConfig(QuantizationConfigMixin):
    """A quantization config for one ``from_pretrained``, which packs the checkpoint's experts as they are stored::

        model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b", quantization_config=PolymoeConfig())

    :func:`install` does this for all models. Unlike :func:`load`, both let Transformers open the checkpoint's files.

    Args:
        backend, role, experts: as for :func:`load`.
        expert_memory: as there, but not "auto".

    Raises:
        ArgumentError: for another format or ``expert_memory``; by ``from_pretrained`` for slots that do not fit.
        CheckpointError, UnsupportedProblem: by ``from_pretrained``, for a checkpoint that is not quantized, unless
            ``experts`` says how, or without experts that polymoe runs.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        role: str = "mixed",
        experts: str | None = None,
        expert_memory: str | None = None,
        **_: Any,
    ) -> None:
        require_contract()
        if expert_memory == "auto":
            hint = "polymoe.load finds out what other weights leave"
            raise ArgumentError("expert_memory", expected="32slots, 16GiB or 512MiB", got="'auto'", hint=hint)
        self.quant_method = INTERFACE_NAME  # type: ignore[assignment]
        self.backend, self.role, self.expert_memory = backend, role, expert_memory
        self.experts = None if experts is None else require_format(experts)
        register_names()
        if not _hooked():
            _hook(None)


def _hook(default: Mapping[str, str] | None) -> None:
    """Let :func:`_choose_quantizer` see every choice of a quantizer, and the model's config."""
    modeling.get_hf_quantizer = functools.partial(_choose_quantizer, modeling.get_hf_quantizer, default)


def _hooked() -> bool:
    chooser = modeling.get_hf_quantizer
    return isinstance(chooser, functools.partial) and chooser.func is _choose_quantizer


def install(*, backend: str = "auto", role: str = "mixed") -> None:
    """Make every later ``from_pretrained`` of this process pack quantized experts, as :func:`load` does.

    That includes pipelines, ``transformers serve`` and lm-eval. ``quantization_config=Mxfp4Config(dequantize=True)``
    and the like still dequantize, and other models load as before. ``experts_implementation="polymoe"`` is
    registered too. A second call replaces backend and role.

    A command starts a process of its own, so it has to be installed there::

        python -c "from polymoe.engines.transformers import install; install()
        from transformers.cli.transformers import main; main()" serve path/to/checkpoint
    """
    require_contract()
    uninstall()
    register()
    register_names()
    _hook({"backend": backend, "role": role})


def uninstall() -> None:
    """Undo :func:`install`: Transformers loads as before. Models that are already loaded stay packed."""
    unregister()
    unregister_names(row.model_type for row in TRANSFORMERS_FAMILIES if row.same_as)
    if _hooked():
        modeling.get_hf_quantizer = modeling.get_hf_quantizer.args[0]


def installed() -> bool:
    """Whether :func:`install` is in effect in this process."""
    return _hooked() and modeling.get_hf_quantizer.args[1] is not None


def _choose_quantizer(
    theirs: Callable[..., Any],
    default: Mapping[str, str | None] | None,
    config: Any,
    quantization_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces Transformers' choice of a quantizer, which is called for everything that is not packed.

    ``default`` is how to pack where no :class:`PolymoeConfig` says it; None does not pack there.
    """
    found = _described(config)
    options = default
    if isinstance(quantization_config, PolymoeConfig):
        asked = quantization_config
        options = {name: getattr(asked, name) for name in ("backend", "role", "experts", "expert_memory")}
        _require_packable(config, found or asked.experts, kwargs.get("gguf_file"))
        found = found or {"quant_method": "none"}
        quantization_config = None
    if options is None or kwargs.get("gguf_file"):
        return theirs(config, quantization_config, *args, **kwargs)
    keeps = not any(getattr(c, "dequantize", False) for c in (quantization_config, found))
    if found and keeps:
        source = found if isinstance(found, Mapping) else found.to_dict()
        if source.get("quant_method") == INTERFACE_NAME:  # by load
            quantization_config = None
        elif _unpackable(config) is None:
            _request_packing(config, source, **options)
            quantization_config = None
    use_own_name(config)
    return theirs(config, quantization_config, *args, **kwargs)


def _require_packable(config: Any, found: Any, gguf_file: Any) -> None:
    if (error := _unpackable(config)) is not None:
        raise error
    if gguf_file:
        raise UnsupportedProblem("PolymoeConfig", expected="safetensors", got="a GGUF file")
    if not found:
        raise UnsupportedProblem(
            f"PolymoeConfig for {config.model_type}",
            expected="a checkpoint with quantized experts",
            got="none that is quantized",
            hint='PolymoeConfig(experts="mxfp4") quantizes them; '
            'polymoe.install(), then from_pretrained(..., experts_implementation="polymoe") runs 16-bit experts',
        )


def _unpackable(config: Any) -> PolymoeError | None:
    """Why the experts of a model cannot be packed, by its config; None if they can."""
    try:
        require_model(config.model_type)
        families_of(json.loads(config.to_json_string(use_diff=False)))
    except (CheckpointError, UnsupportedProblem) as error:
        return error
    return None


def _described(config: Any) -> Any:
    """The quantization that a config of Transformers describes, wherever it is: a dict, or Transformers' own class."""
    parts = (config, config.get_text_config())
    found = (getattr(part, key, None) for key in ("quantization_config", "compression_config") for part in parts)
    return next((description for description in found if description), None)


_CONTRADICTION = "numbers of config.json contradict each other or the weights"
_HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "token")
_INSTEAD: Mapping[str, str] = {
    "config": "load() reads the checkpoint's own",
    "gguf_file": "load() reads safetensors",
    "output_loading_info": "load() raises for tensors that are missing",
    "quantization_config": "load() packs what the checkpoint holds; to dequantize, call from_pretrained",
    "state_dict": "load() reads the checkpoint's own tensors",
    "subfolder": "give the subfolder's own path",
    "trust_remote_code": "polymoe runs no code from a checkpoint",
    "variant": "give a directory that has this variant alone",
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
