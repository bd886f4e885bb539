"""QUANT_METHODS: one parser for each ``quant_method``, from its description in a config to a QuantizationConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from polymoe.activation_quantization import FP8_GROUP128, FP8_STATIC, FP8_TOKEN, UNQUANTIZED, ActivationQuantization
from polymoe.checkpoint.config_reader import ConfigReader
from polymoe.checkpoint.families import ModelFamily
from polymoe.checkpoint.scheme import QuantizationConfig, Scheme, exact_or_regex, matcher, without_root
from polymoe.errors import CheckpointError, nearest
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup, PerTensor
from polymoe.formats.encoding import Granularity, ScaleDtype

__all__ = ["QUANT_METHODS", "Context"]

NVFP4, MXFP4 = FORMATS["nvfp4"].encoding, FORMATS["mxfp4"].encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs of a parser: the description, and the config around it."""

    keys: ConfigReader
    text: Mapping[str, Any]
    side: Mapping[str, Any]
    family: ModelFamily
    scale_dtype: ScaleDtype  # scales stored in the model's own dtype
    nothing: QuantizationConfig


def _skipped(keys: ConfigReader) -> Callable[[str], bool]:
    """Return a matcher for the modules that a config lists as not quantized, under any of the list's names."""
    names = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")
    return matcher(item for name in names for item in keys.items(name, str) or ())


def _mxfp4(context: Context) -> QuantizationConfig:
    scheme = Scheme("gpt_oss", MXFP4)
    return replace(context.nothing, ignored=_skipped(context.keys), default=lambda: scheme)


def _fp8(context: Context) -> QuantizationConfig:
    """FP8 with or without blocks; DeepSeek-V4 also declares its FP4 experts under this method."""
    keys, family = context.keys, context.family
    quantization = replace(
        context.nothing,
        ignored=_skipped(keys),
        default=partial(_fp8_scheme, keys, family.fp8_dialect, family.fp8_scale),
    )
    experts: Callable[[], Scheme] | None = None
    if family.fp8_dialect == "deepseek_v4":
        expert_dtype = keys.config.get("expert_dtype") or context.text.get("expert_dtype") or "fp4"
        if expert_dtype == "fp4":
            activations = quantization.default().activations
            experts = partial(Scheme, "deepseek_v4", MXFP4, activations)
        elif expert_dtype != "fp8":
            raise keys.error("expert_dtype", "fp4 or fp8", expert_dtype)
    repacked = keys.config.get("moe_quant_algo") or context.text.get("moe_quant_algo")
    layers = _modelopt_layers(keys, context)
    if repacked and not layers:
        experts = partial(_modelopt_scheme, ConfigReader({**keys.config, "quant_algo": repacked}, keys.where))
    targets = ((matcher(["experts"]), experts),) if experts else ()
    return replace(quantization, layers=layers, targets=targets)


def _fp8_scheme(keys: ConfigReader, dialect: str, scale_dtype: ScaleDtype) -> Scheme:
    static = keys.word("activation_scheme", "dynamic", "static", default="dynamic") == "static"
    block = keys.block("weight_block_size")
    if block is None:
        return Scheme("modelopt_fp8", FORMATS["fp8_tensor"].encoding, FP8_STATIC if static else FP8_TOKEN)
    encoding = Encoding(element="e4m3", granularity=PerGroup(*block), scale_dtype=scale_dtype)
    return Scheme(dialect, encoding, FP8_GROUP128 if block[1] == 128 and not static else UNQUANTIZED)


def _compressed_tensors(context: Context) -> QuantizationConfig:
    """``config_groups`` whose targets are module names, ``re:`` patterns or class names, in this order of
    precedence."""
    keys = context.keys
    named: list[tuple[Callable[[str], bool], Callable[[], Scheme]]] = []
    by_pattern, by_class = list(named), list(named)
    for name, group in keys.mapping("config_groups").items():
        if not isinstance(group, Mapping):
            raise keys.error(f"config_groups.{name}", "an object", group)
        group_keys = ConfigReader(group, f"{keys.where}.config_groups.{name}")
        make = partial(_compressed_scheme, group_keys, context.scale_dtype)
        for target in group_keys.items("targets", str) or ():
            if target.startswith("re:"):
                by_pattern.append((exact_or_regex([target]), make))
            elif target in ("Linear", "FusedMoE"):
                by_class.append((lambda _: True, make))
            else:
                named.append((exact_or_regex([target]), make))
    if not named + by_pattern + by_class:
        raise keys.error("config_groups", "groups with targets", keys.config.get("config_groups"))
    ignored = exact_or_regex(keys.items("ignore", str) or ())
    return replace(context.nothing, ignored=ignored, targets=(*named, *by_pattern, *by_class))


def _compressed_scheme(group: ConfigReader, scale_dtype: ScaleDtype) -> Scheme:
    weights, inputs = group.mapping("weights"), group.mapping("input_activations")
    keys = ConfigReader(weights, f"{group.where}.weights")
    bits, kind = keys.integer("num_bits"), keys.word("type", "int", "float", default="int")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    symmetric = keys.flag("symmetric", True)
    if weights.get("actorder") in ("group", True):
        raise keys.error("actorder", "columns in natural order: null or weight", weights["actorder"])
    if (kind, bits) == ("int", 4) and not inputs and strategy in ("group", "channel", None):
        grouped = PerGroup(1, keys.integer("group_size")) if size not in (None, -1) else PerChannel()
        encoding = Encoding(element="int4", granularity=grouped, scale_dtype=scale_dtype, zero_points=not symmetric)
        return Scheme("ct_int4", encoding)
    if (kind, bits, strategy) == ("float", 4, "tensor_group"):
        return Scheme("ct_nvfp4", replace(NVFP4, granularity=PerGroup(1, keys.integer("group_size", default=16))))
    if (kind, bits, strategy) == ("float", 4, "group"):
        return Scheme("ct_mxfp4", replace(MXFP4, granularity=PerGroup(1, keys.integer("group_size", default=32))))
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel", "block"):
        granularities: dict[str, Granularity] = {
            "tensor": PerTensor(),
            "channel": PerChannel(),
            "block": PerGroup(*(keys.block("block_structure") or (128, 128))),
        }
        encoding = Encoding(element="e4m3", granularity=granularities[strategy], scale_dtype=scale_dtype)
        return Scheme("ct_float", encoding, _compressed_activations(inputs))
    raise CheckpointError(
        f"{group.where}.weights",
        expected="int 4 bit by group or channel without quantized inputs, float 4 bit by group or tensor_group, "
        "or float 8 bit by tensor, channel or block",
        got=f"{kind} {bits} bit by {strategy}" + (" with quantized inputs" if inputs else ""),
    )


def _compressed_activations(inputs: Mapping[str, Any]) -> ActivationQuantization:
    if not inputs:
        return UNQUANTIZED
    if not inputs.get("dynamic"):
        return FP8_STATIC
    return FP8_GROUP128 if inputs.get("strategy") == "group" and inputs.get("group_size") == 128 else FP8_TOKEN


def _modelopt(context: Context) -> QuantizationConfig:
    """ModelOpt in both syntaxes: in ``config.json``, or under ``quantization`` as in ``hf_quant_config.json``."""
    nested = context.keys.mapping("quantization")
    keys = ConfigReader(nested, f"{context.keys.where}.quantization") if nested else context.keys
    layers = _modelopt_layers(keys, context)
    skipped = _skipped(keys)
    if _algorithm(keys) == "MIXED_PRECISION":
        if not layers:
            raise keys.error("quantized_layers", "the scheme of each layer, for MIXED_PRECISION", None)
        return replace(context.nothing, layers=layers, ignored=skipped)
    return replace(context.nothing, layers=layers, ignored=skipped, default=partial(_modelopt_scheme, keys))


def _modelopt_layers(keys: ConfigReader, context: Context) -> dict[str, Callable[[], Scheme]]:
    """Return schemes by module name, from the side file if the config has none."""
    layers = keys.mapping("quantized_layers")
    if not layers:
        layers = ConfigReader(ConfigReader(context.side, "hf_quant_config.json").mapping("quantization")).mapping(
            "quantized_layers"
        )
    for name, layer in layers.items():
        if not isinstance(layer, Mapping):
            raise keys.error(f"quantized_layers.{name}", "an object", layer)
    return {
        without_root(name): partial(_modelopt_scheme, ConfigReader(layer, f"{keys.where}.quantized_layers.{name}"))
        for name, layer in layers.items()
    }


def _algorithm(keys: ConfigReader) -> str:
    return str(keys.config.get("quant_algo")).upper()


def _modelopt_scheme(keys: ConfigReader) -> Scheme:
    algorithm = _algorithm(keys)
    group = PerGroup(1, keys.integer("group_size", default=16))
    schemes = {
        "FP8": Scheme("modelopt_fp8", FORMATS["fp8_tensor"].encoding, FP8_STATIC),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme("ct_float", FORMATS["fp8_channel"].encoding, FP8_TOKEN),
        "FP8_PB_WO": Scheme("ct_float", FORMATS["fp8_block128"].encoding),
        "NVFP4": Scheme("modelopt_nvfp4", replace(NVFP4, granularity=group)),
    }
    aliases = {"FP8_BLOCK_SCALES": "FP8_PB_WO", "W4A16_NVFP4": "NVFP4"}
    scheme = schemes.get(aliases.get(algorithm, algorithm))
    if scheme is None:
        known = nearest(algorithm, [*schemes, *aliases, "MIXED_PRECISION"])
        raise CheckpointError(f"{keys.where}.quant_algo", expected="a known algorithm", got=repr(algorithm), hint=known)
    return scheme


def _gptq(context: Context) -> QuantizationConfig:
    """GPTQ; in ``dynamic``, ``-:regex`` excludes modules and ``+:regex`` overrides keys for them."""
    keys = context.keys
    rules = keys.mapping("dynamic")
    left_out = exact_or_regex([f"re:{rule[2:]}" for rule in rules if rule.startswith("-:")])
    others = tuple(
        (
            exact_or_regex([f"re:{rule.removeprefix('+:')}"]),
            partial(_gptq_scheme, ConfigReader({**keys.config, **changed}, keys.where), context.scale_dtype),
        )
        for rule, changed in rules.items()
        if not rule.startswith("-:") and isinstance(changed, Mapping)
    )
    skipped = _skipped(keys)
    return replace(
        context.nothing,
        ignored=lambda module: skipped(module) or left_out(module),
        targets=others,
        default=partial(_gptq_scheme, keys, context.scale_dtype),
    )


def _gptq_scheme(keys: ConfigReader, scale_dtype: ScaleDtype) -> Scheme:
    if keys.flag("desc_act", False):
        raise CheckpointError(
            f"{keys.where}.desc_act",
            expected="false",
            got="true",
            hint="reordered columns do not share scales in memory; quantize again without desc_act",
        )
    keys.word("checkpoint_format", "gptq", default="gptq")
    encoding = _int4_encoding(keys, ("bits",), ("group_size",), scale_dtype, zero_points=not keys.flag("sym", True))
    return Scheme("gptq", encoding)


def _awq(context: Context) -> QuantizationConfig:
    default = partial(_awq_scheme, context.keys, context.scale_dtype)
    return replace(context.nothing, ignored=_skipped(context.keys), default=default)


def _awq_scheme(keys: ConfigReader, scale_dtype: ScaleDtype) -> Scheme:
    version = str(keys.config.get("version") or "gemm").lower()
    if version != "gemm":
        raise keys.error("version", "gemm", version)
    bits, group_size = ("bits", "w_bit"), ("group_size", "q_group_size")
    zero_points = keys.flag("zero_point", True)
    return Scheme("awq", _int4_encoding(keys, bits, group_size, scale_dtype, zero_points=zero_points))


def _int4_encoding(
    keys: ConfigReader,
    bits: tuple[str, ...],
    group_size: tuple[str, ...],
    scale_dtype: ScaleDtype,
    *,
    zero_points: bool,
) -> Encoding:
    if keys.integer(*bits) != 4:
        raise keys.error(bits[0], "4", keys.integer(*bits))
    size = keys.integer(*group_size, least=-1)
    granularity = PerGroup(1, size) if size > 0 else PerChannel()
    return Encoding(element="int4", granularity=granularity, scale_dtype=scale_dtype, zero_points=zero_points)


QUANT_METHODS: Mapping[str, Callable[[Context], QuantizationConfig]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
"""Parsers by ``quant_method``."""
