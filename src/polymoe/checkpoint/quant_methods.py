"""QUANT_METHODS: one parser for each ``quant_method``, from its description in a config to a QuantizationConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from polymoe.checkpoint.config_reader import MOST_WIDTH, ConfigReader
from polymoe.checkpoint.families import ModelFamily
from polymoe.checkpoint.patterns import compile_regexes
from polymoe.checkpoint.scheme import NamedSchemes, QuantizationConfig, Scheme, exact_or_regex, matcher
from polymoe.errors import CheckpointError, nearest, quoted
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup, PerTensor
from polymoe.formats.encoding import Granularity, ScaleDtype
from polymoe.problem.activation_quantization import (
    ACTIVATIONS,
    FP8_GROUP128,
    FP8_STATIC,
    FP8_TOKEN,
    UNQUANTIZED,
    ActivationQuantization,
)

_ForModules = tuple[Callable[[str], bool], Callable[[], Scheme]]
"""Which modules have a scheme, and the function that makes it."""

MOST_GROUPS = 1_000
"""``config_groups`` of one checkpoint: at most a handful in use."""

NVFP4, MXFP4, MXFP8 = (FORMATS[name].encoding for name in ("nvfp4", "mxfp4", "mxfp8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs of a parser: the description, and the config around it."""

    keys: ConfigReader
    text: ConfigReader
    side: ConfigReader
    family: ModelFamily
    scale_dtype: ScaleDtype  # scales stored in the model's own dtype
    nothing: QuantizationConfig

    def quantization(self, default: Callable[[], Scheme]) -> QuantizationConfig:
        """One scheme for all modules but those that the description lists as not quantized."""
        return replace(self.nothing, ignored=_skipped(self.keys), default=default)


def _skipped(keys: ConfigReader) -> Callable[[str], bool]:
    """Return a matcher for the modules that a config lists as not quantized, under any of the list's names."""
    names = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")
    lists = [matcher(items, keys.place(name)) for name in names if (items := keys.items(name, str))]
    return lambda module: any(matches(module) for matches in lists)


def _mxfp4(context: Context) -> QuantizationConfig:
    return context.quantization(lambda: Scheme("gpt_oss", MXFP4))


def _mxfp8(context: Context) -> QuantizationConfig:
    """MXFP8 as MiniMax-M3 declares it. Its ``weight_block_size`` says nothing: MXFP8 has groups of 32."""
    return context.quantization(lambda: Scheme("minimax_mxfp8", MXFP8, ACTIVATIONS["mxfp8"]))


def _fp8(context: Context) -> QuantizationConfig:
    """FP8 with or without blocks; DeepSeek-V4 also declares its FP4 experts under this method."""
    keys, family = context.keys, context.family
    quantization = context.quantization(partial(_fp8_scheme, keys, family.fp8_dialect, family.fp8_scale))
    experts: Callable[[], Scheme] | None = None
    if family.fp8_dialect == "deepseek_v4":
        expert_dtype = keys.text("expert_dtype") or context.text.text("expert_dtype") or "fp4"
        if expert_dtype == "fp4":
            activations = quantization.default().activations
            experts = partial(Scheme, "deepseek_v4", MXFP4, activations)
        elif expert_dtype != "fp8":
            raise keys.error("expert_dtype", "fp4 or fp8", expert_dtype)
    repacked = keys.text("moe_quant_algo") or context.text.text("moe_quant_algo")
    layers = _modelopt_layers(keys, context)
    if repacked and not layers:
        experts = partial(_modelopt_scheme, ConfigReader({**keys.config, "quant_algo": repacked}, keys.where))
    targets = ((matcher(["experts"], keys.where), experts),) if experts else ()
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
    keys, where = context.keys, context.keys.place("config_groups")
    by_name, by_class = list[_ForModules](), list[_ForModules]()
    patterns: list[tuple[str, Callable[[], Scheme]]] = []
    for group in keys.part("config_groups", most=MOST_GROUPS).parts():
        make = partial(_compressed_scheme, group, context.scale_dtype)
        targets = group.items("targets", str) or ()
        patterns += [(target[3:], make) for target in targets if target.startswith("re:")]
        if names := [target for target in targets if not target.startswith("re:")]:
            by_name.append((exact_or_regex(names, where), make))
        if "Linear" in targets or "FusedMoE" in targets:
            by_class.append((lambda _: True, make))
    regexes = compile_regexes([pattern for pattern, _ in patterns], where)
    by_pattern = list(zip(regexes, [make for _, make in patterns], strict=True))
    if not by_name + by_pattern + by_class:
        raise keys.error("config_groups", "groups with targets", keys.config.get("config_groups"))
    ignored = exact_or_regex(keys.items("ignore", str) or (), keys.place("ignore"))
    return replace(context.nothing, ignored=ignored, targets=(*by_name, *by_pattern, *by_class))


def _compressed_scheme(group: ConfigReader, scale_dtype: ScaleDtype) -> Scheme:
    keys, inputs = group.part("weights"), group.part("input_activations")
    bits, kind = keys.integer("num_bits", most=64), keys.word("type", "int", "float", default="int")
    strategy, size = keys.text("strategy"), keys.config.get("group_size")
    symmetric = keys.flag("symmetric", True)
    if keys.config.get("actorder") in ("group", True):
        raise keys.error("actorder", "columns in natural order: null or weight", keys.config["actorder"])
    if (kind, bits) == ("int", 4) and not inputs.config and strategy in ("group", "channel", ""):
        grouped = PerGroup(1, keys.width("group_size")) if size not in (None, -1) else PerChannel()
        encoding = Encoding(element="int4", granularity=grouped, scale_dtype=scale_dtype, zero_points=not symmetric)
        return Scheme("ct_int4", encoding)
    if (kind, bits, strategy) == ("float", 4, "tensor_group"):
        return Scheme("ct_nvfp4", replace(NVFP4, granularity=PerGroup(1, keys.width("group_size", default=16))))
    if (kind, bits, strategy) == ("float", 4, "group"):
        return Scheme("ct_mxfp4", replace(MXFP4, granularity=PerGroup(1, keys.width("group_size", default=32))))
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel", "block"):
        granularities: dict[str, Granularity] = {
            "tensor": PerTensor(),
            "channel": PerChannel(),
            "block": PerGroup(*(keys.block("block_structure") or (128, 128))),
        }
        encoding = Encoding(element="e4m3", granularity=granularities[strategy], scale_dtype=scale_dtype)
        return Scheme("ct_float", encoding, _compressed_activations(inputs))
    if (kind, bits, strategy, size) == ("float", 8, "group", 32):
        return Scheme("ct_mxfp8", MXFP8, _compressed_activations(inputs))
    raise CheckpointError(
        keys.where,
        expected="int 4 bit by group or channel without quantized inputs, float 4 bit by group or tensor_group, "
        "or float 8 bit by tensor, channel, block or groups of 32",
        got=f"{kind} {bits} bit by {quoted(strategy)}" + (" with quantized inputs" if inputs.config else ""),
    )


def _compressed_activations(inputs: ConfigReader) -> ActivationQuantization:
    if not inputs.config:
        return UNQUANTIZED
    if not inputs.config.get("dynamic"):
        return FP8_STATIC
    columns = inputs.width("group_size") if inputs.text("strategy") == "group" else 0
    return {128: FP8_GROUP128, 32: ACTIVATIONS["mxfp8"]}.get(columns, FP8_TOKEN)


def _modelopt(context: Context) -> QuantizationConfig:
    """ModelOpt in both syntaxes: in ``config.json``, or under ``quantization`` as in ``hf_quant_config.json``."""
    nested = context.keys.part("quantization")
    keys = nested if nested.config else context.keys
    listed = replace(context.nothing, layers=_modelopt_layers(keys, context), ignored=_skipped(keys))
    if _algorithm(keys) != "MIXED_PRECISION":
        return replace(listed, default=partial(_modelopt_scheme, keys))
    if not listed.layers:
        raise keys.error("quantized_layers", "the scheme of each layer, for MIXED_PRECISION", None)
    return listed


def _modelopt_layers(keys: ConfigReader, context: Context) -> NamedSchemes:
    """Return schemes by module name, from the side file if the config has none."""
    layers = keys.part("quantized_layers")
    if not layers.config:
        layers = context.side.part("quantization").part("quantized_layers")
    for name, layer in layers.config.items():
        if not isinstance(layer, Mapping):
            raise layers.error(name, "an object", layer)
    return NamedSchemes(layers.config, lambda name: _modelopt_scheme(layers.part(name)))


def _algorithm(keys: ConfigReader) -> str:
    return keys.text("quant_algo").upper()


def _modelopt_scheme(keys: ConfigReader) -> Scheme:
    algorithm = _algorithm(keys)
    group = PerGroup(1, keys.width("group_size", default=16))
    schemes = {
        "FP8": Scheme("modelopt_fp8", FORMATS["fp8_tensor"].encoding, FP8_STATIC),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme("ct_float", FORMATS["fp8_channel"].encoding, FP8_TOKEN),
        "FP8_PB_WO": Scheme("ct_float", FORMATS["fp8_block128"].encoding),
        "MXFP8": Scheme("modelopt_mxfp8", MXFP8, ACTIVATIONS["mxfp8"]),
        "NVFP4": Scheme("modelopt_nvfp4", replace(NVFP4, granularity=group)),
    }
    aliases = {"FP8_BLOCK_SCALES": "FP8_PB_WO", "W4A16_NVFP4": "NVFP4"}
    scheme = schemes.get(aliases.get(algorithm, algorithm))
    if scheme is None:
        known = nearest(algorithm, [*schemes, *aliases, "MIXED_PRECISION"])
        raise keys.error("quant_algo", "a known algorithm", algorithm, hint=known)
    return scheme


def _gptq(context: Context) -> QuantizationConfig:
    """GPTQ; in ``dynamic``, ``-:regex`` excludes modules and ``+:regex`` overrides keys for them."""
    keys, where = context.keys, context.keys.place("dynamic")
    rules = keys.mapping("dynamic")
    regexes = compile_regexes([rule.removeprefix("-:").removeprefix("+:") for rule in rules], where)
    left_out, others = [], []
    for (rule, changed), matches in zip(rules.items(), regexes, strict=True):
        if rule.startswith("-:"):
            left_out.append(matches)
        elif isinstance(changed, Mapping):
            changed_keys = ConfigReader({**keys.config, **changed}, keys.where)
            others.append((matches, partial(_gptq_scheme, changed_keys, context.scale_dtype)))
    left_out.append(_skipped(keys))
    return replace(
        context.nothing,
        ignored=lambda module: any(matches(module) for matches in left_out),
        targets=tuple(others),
        default=partial(_gptq_scheme, keys, context.scale_dtype),
    )


def _gptq_scheme(keys: ConfigReader, scale_dtype: ScaleDtype) -> Scheme:
    if keys.flag("desc_act", False):
        hint = "reordered columns do not share scales in memory; quantize again without desc_act"
        raise keys.error("desc_act", "false", True, hint=hint)
    dialect = keys.word("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    encoding = _int4_encoding(keys, ("bits",), ("group_size",), scale_dtype, zero_points=not keys.flag("sym", True))
    return Scheme(dialect, encoding)


def _awq(context: Context) -> QuantizationConfig:
    return context.quantization(partial(_awq_scheme, context.keys, context.scale_dtype))


def _awq_scheme(keys: ConfigReader, scale_dtype: ScaleDtype) -> Scheme:
    version = keys.text("version") or "gemm"
    if version.lower() != "gemm":
        raise keys.error("version", "gemm", version)
    bits, group_size = ("bits", "w_bit"), ("group_size", "q_group_size")
    zero_points = keys.flag("zero_point", True)
    return Scheme("awq", _int4_encoding(keys, bits, group_size, scale_dtype, zero_points=zero_points))


def _auto_round(context: Context) -> QuantizationConfig:
    """AutoRound's files in the dialects of GPTQ and AWQ. ``block_name_to_quantize`` names what is quantized, and
    ``extra_config`` has other keys for some modules."""
    keys = context.keys
    keys.word("data_type", "int", default="int")
    packing = keys.word("packing_format", "auto_round:auto_gptq", "auto_round:auto_awq", default="auto_round:auto_gptq")

    def scheme(changed: Mapping[str, object]) -> Scheme:
        merged = {**keys.config, **changed}
        if packing.endswith("awq"):
            merged = {"zero_point": not ConfigReader(merged, keys.where).flag("sym", True), **merged}
            return _awq_scheme(ConfigReader(merged, keys.where), context.scale_dtype)
        return _gptq_scheme(ConfigReader(merged, keys.where), context.scale_dtype)

    left_out, others = list[str](), list[_ForModules]()
    where = keys.place("extra_config")
    for name, part in ((name, keys.part("extra_config").part(name)) for name in keys.mapping("extra_config")):
        if part.integer("bits", default=4, most=64) >= 16:
            left_out.append(name)
        elif part.config:
            others.append((matcher([name], where), partial(scheme, part.config)))
    blocks = keys.config.get("block_name_to_quantize")
    listed = ConfigReader({"blocks": blocks.split(",") if isinstance(blocks, str) else blocks}, keys.where)
    named = tuple(name.strip() for name in listed.items("blocks", str) or ())
    skipped, excluded = _skipped(keys), matcher(left_out, where)
    return replace(
        context.nothing,
        ignored=lambda module: (
            skipped(module)
            or excluded(module)
            or (bool(named) and not any(f"{module}.".startswith(f"{name}.") for name in named))
        ),
        targets=tuple(others),
        default=partial(scheme, {}),
    )


def _quark(context: Context) -> QuantizationConfig:
    """AMD Quark: one description for all layers, others by globs in ``layer_quant_config``, and ``exclude``."""
    keys = context.keys
    layers = keys.part("layer_quant_config")
    others = [
        (matcher([name], layers.where), partial(_quark_scheme, layers.part(name), context.scale_dtype))
        for name in keys.mapping("layer_quant_config")
    ]
    return replace(
        context.nothing,
        ignored=matcher(keys.items("exclude", str) or (), keys.place("exclude")),
        targets=tuple(others),
        default=partial(_quark_scheme, keys.part("global_quant_config"), context.scale_dtype),
    )


def _quark_scheme(keys: ConfigReader, scale_dtype: ScaleDtype) -> Scheme:
    weights, inputs = keys.part("weight"), keys.part("input_tensors")
    found = (weights.text("dtype"), weights.text("qscheme"), weights.config.get("group_size"))
    if found == ("fp4", "per_group", 32) and weights.text("scale_format") in ("", "e8m0"):
        return Scheme("quark_mxfp4", MXFP4)
    if found[:2] in (("fp8_e4m3", "per_tensor"), ("fp8_e4m3", "per_channel")):
        granularity = PerTensor() if found[1] == "per_tensor" else PerChannel()
        encoding = Encoding(element="e4m3", granularity=granularity, scale_dtype=scale_dtype)
        static = bool(inputs.config) and not inputs.flag("is_dynamic", False)
        activations = (FP8_STATIC if static else FP8_TOKEN) if inputs.config else UNQUANTIZED
        return Scheme("quark_fp8", encoding, activations)
    raise CheckpointError(
        weights.where,
        expected="fp4 by groups of 32 with e8m0 scales, or fp8_e4m3 per_tensor or per_channel",
        got=" ".join(quoted(part) for part in found if part is not None),
    )


def _int4_encoding(
    keys: ConfigReader,
    bits: tuple[str, ...],
    group_size: tuple[str, ...],
    scale_dtype: ScaleDtype,
    *,
    zero_points: bool,
) -> Encoding:
    if (count := keys.integer(*bits, most=64)) != 4:
        raise keys.error(bits[0], "4", count)
    size = keys.integer(*group_size, least=-1, most=MOST_WIDTH)
    granularity = PerGroup(1, size) if size > 0 else PerChannel()
    return Encoding(element="int4", granularity=granularity, scale_dtype=scale_dtype, zero_points=zero_points)


QUANT_METHODS: Mapping[str, Callable[[Context], QuantizationConfig]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "quark": _quark,
}
"""Parsers by ``quant_method``."""
