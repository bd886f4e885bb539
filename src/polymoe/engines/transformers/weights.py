"""Models of Transformers from tensors that polymoe reads, instead of files that Transformers opens.

``from_pretrained`` accepts a state dict without a path: it then opens no file, follows no index, and knows of no
adapters, kernels or generation code beside the weights. The state dict is a mapping whose tensors are views of mapped
files, so that nothing is read twice or kept.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from polymoe.checkpoint.architectures.config import model_class
from polymoe.checkpoint.dense_tensors import DenseTensors
from polymoe.common.units import first_few
from polymoe.common.untrusted import reading
from polymoe.engines.hooks import wrap
from polymoe.engines.transformers.families import PackedExperts, refuse_expert_tensors
from polymoe.errors import ArgumentError, CheckpointError


def model_from_tensors(config: Any, tensors: DenseTensors, where: str, **kwargs: Any) -> Any:
    """A model in evaluation mode, of a config of Transformers.

    Args:
        where: the checkpoint's name, for the model and for errors.
        kwargs: for ``from_pretrained``.

    Raises:
        ArgumentError: for one of ``kwargs`` that neither ``from_pretrained`` nor the model knows.
        CheckpointError: if Transformers cannot build the model, or if a tensor is missing or has another shape.
    """
    watch_loading()
    try:
        with reading(where, "a model that Transformers can build and fill", hint=_HINT):
            model, loaded = model_class(config).from_pretrained(
                None, config=config, state_dict=tensors, trust_remote_code=False, output_loading_info=True, **kwargs
            )
    except CheckpointError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in kwargs:
            raise
        expected = "arguments of polymoe.load or of Transformers' from_pretrained"
        raise ArgumentError(unknown[1], expected=expected, got="one that neither knows") from error
    _require_all(where, loaded["missing_keys"], loaded["mismatched_keys"])
    model.name_or_path = model.config.name_or_path = where
    return model


def watch_loading() -> None:
    """Make Transformers' loading of weights show ``read_others`` of a quantizer that has it, and stop when a tensor of
    :func:`model_from_tensors` is missing.

    A quantizer of Transformers can change modules, and names and conversions of tensors, but not which tensors there
    are. And Transformers makes up missing tensors, in sizes that the config says: a config must not fill the memory.
    Nothing changes for other models.
    """
    wrap(PreTrainedModel, "_load_pretrained_model", _load)


def _load(
    theirs: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    whole = state_dict.where if isinstance(state_dict, DenseTensors) else ""
    read_others: Callable[..., Any] | None = getattr(load_config.hf_quantizer, "read_others", None)
    # Once for each model: what is loaded into it later is an adapter.
    adapter = False
    if read_others is not None and load_config.hf_quantizer.dense_tensors is None:
        quantizer = load_config.hf_quantizer
        state_dict, checkpoint_files = read_others(model, load_config, state_dict), None
        load_config = dataclasses.replace(load_config, hf_quantizer=quantizer.dense)  # None: nothing is quantized
    elif any(isinstance(module, PackedExperts) for module in model.modules()):
        adapter = True
        refuse_expert_tensors(_names(state_dict, checkpoint_files))
    loaded = theirs(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    if adapter:
        refuse_expert_tensors(loaded[0].unexpected_keys)
    if whole:
        info = loaded[0]
        for name, reason in sorted(info.conversion_errors.items()):
            raise CheckpointError(name, expected="tensors that fit together", got=reason.strip(), hint=_HINT)
        _require_all(whole, _made_up(model, info.missing_keys), info.mismatched_keys)
    return loaded


def _names(state_dict: Mapping[str, Any] | None, files: Iterable[str] | None) -> Iterator[str]:
    """Names of the tensors that Transformers is about to load, as far as files say them without being loaded."""
    yield from state_dict or ()
    for file in files or ():
        if str(file).endswith(".safetensors"):
            with safe_open(file, "pt") as tensors:
                yield from tensors.keys()


def _made_up(model: Any, missing: set[str]) -> set[str]:
    """The missing tensors that are not tied to others, and that the model does not do without."""
    tied = model.all_tied_weights_keys
    excused = {name for name, source in tied.items() if source not in missing}
    excused |= {source for name, source in tied.items() if name not in missing}
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    return {name for name in missing - excused if not any(pattern.search(name) for pattern in optional)}


def _require_all(where: str, missing: set[str], mismatched: set[tuple[str, Any, Any]]) -> None:
    if missing:
        raise CheckpointError(
            where,
            expected="every tensor of the model",
            got=f"none for {first_few(sorted(missing))}",
            hint="the checkpoint is incomplete, or its config belongs to another model",
        )
    for name, stored, expected in sorted(mismatched, key=str):
        raise CheckpointError(f"{where}: {name}", expected=f"shape {list(expected)}", got=str(list(stored)), hint=_HINT)


_HINT = "config.json belongs to another model, or a tensor is damaged"
