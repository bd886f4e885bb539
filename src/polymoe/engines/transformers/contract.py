"""The contract with Transformers: every private part that polymoe uses, with the signature that it relies on.

Transformers changes these without notice. What is not as listed here is refused by name, before a model is loaded,
and not found by wrong numbers or an error somewhere else. ``tests/engines/transformers/test_contract.py`` checks that
the list is complete.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from polymoe.checkpoint.architectures.interface import NEWEST, require_experts, unsupported
from polymoe.problem.call import DTYPES

__all__ = ["NEWEST", "PARTS", "PrivatePart", "checked_call", "require_contract", "require_experts", "unsupported"]


@dataclass(frozen=True, slots=True)
class PrivatePart:
    """One private part of Transformers.

    Attributes:
        path: module and name, such as ``"transformers.modeling_utils.get_hf_quantizer"``.
        leading: names of the first positional parameters, in order; None for what is not called.
        keywords: names of parameters that it takes by name.
        more: whether it may need further parameters.
    """

    path: str
    leading: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()
    more: bool = False

    def __str__(self) -> str:
        if self.leading is None and not self.keywords:
            return self.path
        names = [*(self.leading or ()), *(f"{name}=" for name in self.keywords)]
        return f"{self.path}({', '.join(names)})"

    def difference(self) -> str | None:
        """What the installed version has instead; None if it is as expected."""
        module, names = self.path, []
        while True:
            try:
                found: Any = importlib.import_module(module)
                break
            except ImportError:
                module, _, name = module.rpartition(".")
                names.insert(0, name)
        for name in names:
            if not hasattr(found, name):
                return f"no {name} in {module}"
            found, module = getattr(found, name), f"{module}.{name}"
        if self.leading is None and not self.keywords:
            return None
        signature = inspect.signature(found)
        return None if self._fits(signature) else f"{self.path}{signature}"

    def _fits(self, signature: inspect.Signature) -> bool:
        parameters = list(signature.parameters.values())
        leading = self.leading or ()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = {p.name for p in parameters if p.default is p.empty and p.kind not in variable}
        return (
            tuple(positional[: len(leading)]) == leading
            and all(name in signature.parameters or any_keyword for name in self.keywords)
            and (self.more or needed <= {*leading, *self.keywords})
        )


_QUANTIZER = "transformers.quantizers.base.HfQuantizer"

PARTS = (
    # load and install
    PrivatePart(
        "transformers.modeling_utils.get_hf_quantizer",
        ("config", "quantization_config", "device_map", "weights_only", "user_agent"),
    ),
    PrivatePart(
        "transformers.modeling_utils.PreTrainedModel._load_pretrained_model",
        ("model", "state_dict", "checkpoint_files", "load_config"),
    ),
    PrivatePart("transformers.modeling_utils.PreTrainedModel._keys_to_ignore_on_load_missing"),
    PrivatePart("transformers.modeling_utils.LoadStateDictConfig", keywords=("hf_quantizer", "device_mesh")),
    PrivatePart("transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING"),
    PrivatePart("transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING"),
    PrivatePart("transformers.quantizers.auto.AutoHfQuantizer.from_config", ("quantization_config",)),
    PrivatePart("transformers.quantizers.base.get_keys_to_not_convert", ("model",)),
    PrivatePart(_QUANTIZER, ("quantization_config",)),
    PrivatePart(f"{_QUANTIZER}._convert_model_for_quantization", ("self", "model")),
    PrivatePart(f"{_QUANTIZER}._process_model_before_weight_loading", ("self", "model")),
    PrivatePart(f"{_QUANTIZER}._process_model_after_weight_loading", ("self", "model")),
    PrivatePart(f"{_QUANTIZER}.update_weight_conversions", ("self", "weight_conversions"), more=True),
    PrivatePart(f"{_QUANTIZER}.param_element_size", ("self", "model", "param_name", "param")),
    PrivatePart(f"{_QUANTIZER}.validate_environment", ("self",)),
    PrivatePart(f"{_QUANTIZER}.is_serializable", ("self",)),
    PrivatePart(f"{_QUANTIZER}.is_trainable"),
    PrivatePart(f"{_QUANTIZER}.is_compileable"),
    PrivatePart("transformers.utils.quantization_config.QuantizationConfigMixin"),
    PrivatePart("transformers.utils.logging.tqdm"),
    # names of model families
    PrivatePart("transformers.models.auto.configuration_auto.CONFIG_MAPPING.register", ("key", "value")),
    PrivatePart("transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content"),
    PrivatePart("transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING"),
    PrivatePart("transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    # tokenizers
    PrivatePart("transformers.tokenization_utils_base.PreTrainedTokenizerBase"),
    PrivatePart("transformers.utils.chat_template_utils.get_json_schema", ("func",)),
    # experts
    PrivatePart("transformers.integrations.moe.ExpertsInterface.register", ("key", "value")),
    PrivatePart("transformers.integrations.moe.ExpertsInterface._global_mapping"),
    PrivatePart(
        "transformers.integrations.moe.grouped_mm_experts_forward",
        ("self", "hidden_states", "top_k_index", "top_k_weights"),
    ),
    PrivatePart(
        "transformers.integrations.moe.use_experts_implementation",
        ("experts_class",),
        ("is_concatenated", "is_transposed", "has_bias", "has_gate"),
    ),
    # decoding and continuous batching
    PrivatePart("transformers.StaticCache", ("config", "max_cache_len")),
    PrivatePart("transformers.AttentionInterface.register", ("key", "value")),
    PrivatePart(
        "transformers.generation.continuous_batching.PagedAttentionCache.update",
        ("self", "key_states", "value_states", "layer_idx"),
        more=True,
    ),
    PrivatePart(
        "transformers.ContinuousBatchingConfig",
        keywords=("use_cuda_graph", "use_async_batching", "q_padding_interval_size", "max_memory_percent"),
    ),
)
"""What loading and running models rely on. What only ``polymoe serve`` uses is in the test."""


def require_contract() -> None:
    """Check the installed version of Transformers; warn, once, if it is newer than :data:`NEWEST`.

    Raises:
        UnsupportedProblem: naming the first part that is not as expected.
    """
    found = _difference()
    if found is not None:
        raise unsupported(*found)


@cache
def _difference() -> tuple[str, str] | None:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version > NEWEST:
        warnings.warn(
            f"Transformers {transformers.__version__} is newer than {_dotted(NEWEST)}, the newest that polymoe is "
            "tested with",
            stacklevel=4,
        )
    differences = ((str(part), part.difference()) for part in PARTS)
    return next(((part, got) for part, got in differences if got is not None), None)


def checked_call(where: str, args: tuple[Any, ...], others: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, expert ids and routing weights of a call of an experts module, the weights in float32.

    Raises:
        UnsupportedProblem: if Transformers hands over other arguments, in another order or of other dtypes.
    """
    if len(args) == 3 and not others:
        x_TH, ids_TA, weights_TA = args
        right = (
            isinstance(x_TH, Tensor)
            and isinstance(ids_TA, Tensor)
            and isinstance(weights_TA, Tensor)
            and x_TH.dtype in DTYPES
            and x_TH.dim() == 2
            and ids_TA.dtype in (torch.int64, torch.int32)
            and ids_TA.dim() == 2
            and weights_TA.dtype in DTYPES
            and weights_TA.shape == ids_TA.shape
        )
        if right:
            return x_TH, ids_TA, weights_TA.float()
    got = [_described(arg) for arg in args] + [f"{name}={_described(arg)}" for name, arg in others.items()]
    expected = "x [T, H] in 16 or 32 bit, expert ids [T, A] as int64 or int32, routing weights [T, A] in 16 or 32 bit"
    raise unsupported(f"{where}({expected})", f"({', '.join(got)})")


def _described(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"{argument.dtype} {list(argument.shape)}".removeprefix("torch.")
    return type(argument).__name__


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
