"""The contract with Transformers: every private part that polymoe uses, with the signature that it relies on.

Transformers changes these without notice. What is not as listed here is refused by name, before a model is loaded,
and not found by wrong numbers or an error somewhere else. ``tests/engines/transformers/test_contract.py`` checks that
the list is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from polymoe.checkpoint.architectures.interface import NEWEST, unsupported
from polymoe.engines.hooks import Hook, differences
from polymoe.problem.call import DTYPES

_MODELING, _MOE = "transformers.modeling_utils", "transformers.integrations.moe"

HOOKS = (
    # load and install
    Hook(_MODELING, "get_hf_quantizer(config, quantization_config, device_map, weights_only, user_agent)"),
    Hook(_MODELING, "PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config)"),
    Hook(_MODELING, "PreTrainedModel._keys_to_ignore_on_load_missing"),
    Hook(_MODELING, "LoadStateDictConfig: hf_quantizer, device_mesh"),
    Hook("transformers.quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING"),
    Hook("transformers.quantizers.auto", "AUTO_QUANTIZER_MAPPING"),
    Hook("transformers.quantizers.auto", "AutoHfQuantizer.from_config(quantization_config)"),
    Hook("transformers.quantizers.base", "get_keys_to_not_convert(model)"),
    Hook("transformers.quantizers.base", "HfQuantizer(quantization_config)"),
    Hook("transformers.quantizers.base", "HfQuantizer._convert_model_for_quantization(self, model)"),
    Hook("transformers.quantizers.base", "HfQuantizer._process_model_before_weight_loading(self, model)"),
    Hook("transformers.quantizers.base", "HfQuantizer._process_model_after_weight_loading(self, model)"),
    Hook("transformers.quantizers.base", "HfQuantizer.update_weight_conversions(self, weight_conversions, ...)"),
    Hook("transformers.quantizers.base", "HfQuantizer.param_element_size(self, model, param_name, param)"),
    Hook("transformers.quantizers.base", "HfQuantizer.adjust_max_memory(self, max_memory)"),
    Hook("transformers.quantizers.base", "HfQuantizer.validate_environment(self)"),
    Hook("transformers.quantizers.base", "HfQuantizer.is_serializable(self)"),
    Hook("transformers.quantizers.base", "HfQuantizer.is_trainable"),
    Hook("transformers.quantizers.base", "HfQuantizer.is_compileable"),
    Hook("transformers.utils.quantization_config", "QuantizationConfigMixin"),
    Hook("transformers.utils.logging", "tqdm"),
    # names of model families
    Hook("transformers.models.auto.configuration_auto", "CONFIG_MAPPING.register(key, value)"),
    Hook("transformers.models.auto.configuration_auto", "CONFIG_MAPPING._extra_content"),
    Hook("transformers.models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    Hook("transformers.models.auto.modeling_auto", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    # tokenizers
    Hook("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
    Hook("transformers.utils.chat_template_utils", "get_json_schema(func)"),
    # experts
    Hook(_MOE, "ExpertsInterface.register(key, value)"),
    Hook(_MOE, "ExpertsInterface._global_mapping"),
    Hook(_MOE, "grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)"),
    Hook(_MOE, "use_experts_implementation(experts_class, is_concatenated=, is_transposed=, has_bias=, has_gate=)"),
    # decoding and continuous batching
    Hook("transformers", "StaticCache(config, max_cache_len)"),
    Hook("transformers", "AttentionInterface.register(key, value)"),
    Hook(
        "transformers.generation.continuous_batching",
        "PagedAttentionCache.update(self, key_states, value_states, layer_idx, ...)",
    ),
    Hook(
        "transformers",
        "ContinuousBatchingConfig(use_cuda_graph=, use_async_batching=, q_padding_interval_size=, max_memory_percent=)",
    ),
)
"""What loading and running models rely on. What only ``polymoe serve`` uses is in the test."""


def require_contract() -> None:
    """Raise UnsupportedProblem for the first part of the installed Transformers that is not as expected; warn, once, if
    it is newer than :data:`NEWEST`."""
    found = _difference()
    if found is not None:
        raise unsupported(*found)


@cache
def _difference() -> tuple[str, str] | None:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version > NEWEST:
        warnings.warn(
            f"Transformers {transformers.__version__} is newer than {'.'.join(map(str, NEWEST))}, the newest that "
            "polymoe is tested with",
            stacklevel=4,
        )
    return next(((str(part), got) for part, got in differences(HOOKS)), None)


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
