"""Workloads of benchmarks: named layer shapes of real models with random weights, or a layer of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.known_models import known_models
from polymoe.errors import ArgumentError, CheckpointNotFound, FormatError, nearest
from polymoe.formats import FORMATS, Encoding, PerGroup, QuantTensor
from polymoe.formats.elements import CODE_DTYPES, E2M1_VALUES, encode_scale
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import FP8_GROUP128, FP8_TOKEN, MXFP8, UNQUANTIZED, ActivationQuantization
from polymoe.problem.activations import Activation, SwiGLU
from polymoe.problem.scale_range import measure_scales
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The experts of one layer of a model, as one GPU holds them.

    Attributes:
        name: used by ``--case`` and in records; changed sizes are part of it: ``deepseek-v4-flash[E=16]``.
        hidden, intermediate, experts, top_k: H, F on this GPU, E, A. An expert-parallel rank has its share of E, and A
            is the mean number of a token's experts on it, as where an all-to-all distributes the rows.
        format: the checkpoint's own format, a key of ``FORMATS``.
        activation, bias: as in the model.
        tp: tensor parallel size; F is the share of one rank.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    format: str
    activation: Activation = field(default_factory=SwiGLU)
    bias: bool = False
    tp: int = 1

    def changed(
        self,
        *,
        hidden: int | None = None,
        intermediate: int | None = None,
        experts: int | None = None,
        top_k: int | None = None,
        bias: bool | None = None,
    ) -> Case:
        """Return the case with other sizes or bias, which become part of its name. A token has at most E experts.

        Raises:
            ArgumentError: if ``top_k`` is larger than E.
        """
        number = self.experts if experts is None else experts
        if top_k is not None and top_k > number:
            raise ArgumentError("top_k", expected=f"at most {number}, the number of experts", got=str(top_k))
        wanted = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k, "bias": bias}
        new = {name: value for name, value in wanted.items() if value is not None and value != getattr(self, name)}
        letters = {"hidden": "H", "intermediate": "F", "experts": "E", "top_k": "A"}
        texts = [f"{letters[n]}={v}" if n in letters else "bias" if v else "no bias" for n, v in new.items()]
        case = replace(self, **new, name=self.name + (f"[{', '.join(texts)}]" if texts else ""))  # type: ignore[arg-type]
        return replace(case, top_k=min(case.top_k, case.experts))

    def problem(self, format: str | None = None, activations: ActivationQuantization | str | None = None) -> Problem:
        """The case as a Problem with bfloat16 inputs; format and activations default to the case's own.

        Raises:
            ArgumentError: for an unknown format or activation mode, or sizes that are not positive or not the format's.
        """
        name = self.format if format is None else format
        if name not in FORMATS:
            raise ArgumentError("format", expected="the name of a format", got=repr(name), hint=nearest(name, FORMATS))
        encoding = FORMATS[name].encoding
        spec = ExpertsSpec(
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            gate=encoding if self.activation.gated else None,
            up=encoding,
            down=encoding,
            bias=self.bias,
        )
        for projection in spec.encodings:
            try:
                encoding.codes_shape(*spec.matrix_shape(projection))
            except FormatError as error:
                where = f"{projection} of {self.name}, {error.where}"
                raise ArgumentError(where, expected=error.expected, got=error.got) from None
        mode = ActivationQuantization.of(activations or default_activations(spec))
        return Problem(spec=spec, activation=self.activation, top_k=self.top_k, activations=mode, tp=self.tp)


def _case(name: str, model: str, format: str | None = None, tp: int = 1, ep: int = 1) -> Case:
    """The experts of a known model's first layer that has some, in its own format or another, on one rank."""
    checkpoint = known_models()[model].checkpoint()
    spec = checkpoint.spec(checkpoint.layers[0], tp=tp)
    return Case(
        name=name,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        experts=spec.experts // ep,
        top_k=checkpoint.moe.top_k // ep,
        format=format or spec.format,
        activation=checkpoint.moe.activation,
        bias=spec.bias,
        tp=tp,
    )


def _wide(name: str, experts: int) -> Case:
    """A few whole experts of DeepSeek-V3; each row that reaches the rank is a token with one expert."""
    return replace(_case(name, "deepseek-ai/DeepSeek-V3"), experts=experts, top_k=1)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            _case("deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash"),
            _case("gpt-oss-120b", "openai/gpt-oss-120b"),
            _case("gpt-oss-20b", "openai/gpt-oss-20b"),
            _case("deepseek-v3", "deepseek-ai/DeepSeek-V3"),
            _case("deepseek-v3-tp8", "deepseek-ai/DeepSeek-V3", tp=8),
            _case("deepseek-v3-ep8", "deepseek-ai/DeepSeek-V3", ep=8),
            # Wide expert parallelism (docs/scale.md): a rank's experts, with copies that balance it; T are its rows.
            _wide("deepseek-v3-ep32", experts=9),
            _wide("deepseek-v3-ep72", experts=4),
            _wide("deepseek-v3-ep320", experts=1),
            _case("kimi-k2", "moonshotai/Kimi-K2-Thinking"),
            _case("kimi-k2-tp8", "moonshotai/Kimi-K2-Thinking", tp=8),
            _case("nemotron-3-super", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"),
            _case("glm-4.7", "nvidia/GLM-4.7-NVFP4"),
            _case("qwen3-235b", "Qwen/Qwen3-235B-A22B", "int4_g128"),
            _case("qwen3-235b-tp4-bf16", "Qwen/Qwen3-235B-A22B", tp=4),
            _case("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", "fp8_tensor"),
        )
    }
)
"""Named cases."""


def case_named(name: str) -> Case:
    """The case of that name.

    Raises:
        ArgumentError: for an unknown name, with the nearest one.
    """
    if name not in CASES:
        raise ArgumentError("case", expected="the name of a case", got=repr(name), hint=nearest(name, CASES))
    return CASES[name]


def default_activations(spec: ExpertsSpec) -> ActivationQuantization:
    """E4M3 for FP8 weights, with scales as fine as theirs; 16 bit for all other formats."""
    if {e.element for e in spec.encodings.values()} != {"e4m3"}:
        return UNQUANTIZED
    if spec.up.name == "mxfp8":
        return MXFP8
    return FP8_GROUP128 if isinstance(spec.up.granularity, PerGroup) else FP8_TOKEN


@dataclass(frozen=True, slots=True)
class Workload:
    """A problem, its weights (on the device, or copied there expert by expert), and its name in records."""

    case: str
    problem: Problem
    weights: ExpertWeights

    @classmethod
    def of_case(
        cls,
        case: Case,
        device: torch.device,
        format: str | None = None,
        activations: ActivationQuantization | str | None = None,
    ) -> Workload:
        """Return a case with random weights; raises like :meth:`Case.problem`."""
        problem = case.problem(format, activations)
        return cls(case.name, problem, random_weights(problem, device))

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        layer: int | None,
        device: torch.device,
        activations: ActivationQuantization | str | None = None,
        *,
        tp: int = 1,
        ep: int = 1,
    ) -> Workload:
        """Return a layer of a checkpoint (None: the first with experts in its files), or the first rank's part of it.
        The default activations are the checkpoint's own for FP8 weights and 16 bit for all other formats.

        Raises:
            CheckpointError: if the layer does not exist or cannot be read.
        """
        if layer is None:
            if not checkpoint.layers_here:
                raise CheckpointNotFound(checkpoint.name, expected="a layer's experts", got="none in its files")
            layer = checkpoint.layers_here[0]
        fp8 = {e.element for e in checkpoint.spec(layer).encodings.values()} == {"e4m3"}
        mode = ActivationQuantization.of(activations or (checkpoint.recipe(layer) if fp8 else UNQUANTIZED))
        problem = checkpoint.problem(layer, tp=tp, ep=ep, activations=mode)
        weights = checkpoint.weights(layer, tp=tp, ep=ep)
        name = f"{checkpoint.name.rstrip('/').split('/')[-1]}:layer{layer}"
        problem = replace(problem, scales=measure_scales(weights, device, name))
        return cls(name, problem, ExpertWeights(problem.spec, lambda e: weights.expert(e).to(device)))

    def batch_invariant(self) -> Workload:
        """Return the batch-invariant variant of the workload, which its name mentions."""
        problem = replace(self.problem, batch_invariant=True)
        return replace(self, case=f"{self.case}[batch invariant]", problem=problem)


def random_weights(problem: Problem, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Return experts with random codes and scales, created on ``device`` one at a time and identical at each reading.

    Nothing is quantized: codes are drawn as they are stored, and scales so that outputs are about as large as inputs.
    """
    spec = problem.spec

    def read(e: int) -> Expert:
        g = torch.Generator(device).manual_seed(seed * spec.experts + e)
        parts: dict[str, object] = {
            p: _random_matrix(encoding, *spec.matrix_shape(p), g) for p, encoding in spec.encodings.items()
        }
        for p in spec.encodings if spec.bias else ():
            parts[f"{p}_bias"] = torch.randn(spec.matrix_shape(p)[0], generator=g, device=device).bfloat16() / 8
        if problem.activations.static:
            parts |= {n: torch.tensor(0.02, device=device) for n in ("gate_up_input_scale", "down_input_scale")}
        return Expert(**{"gate": None, **parts})  # type: ignore[arg-type]

    return ExpertWeights(spec, read)


_INT4_VALUES = range(-8, 8)
_E4M3_SIZE = 64.0  # standard deviation of random E4M3 codes; the largest E4M3 number is 448


def _random_matrix(encoding: Encoding, rows: int, columns: int, g: torch.Generator) -> QuantTensor:
    size, shape = columns**-0.5, encoding.codes_shape(rows, columns)
    dtype = CODE_DTYPES[encoding.element]
    if encoding.bits == 4:
        codes = torch.randint(256, shape, generator=g, dtype=dtype, device=g.device)
        values = E2M1_VALUES if encoding.element == "e2m1" else _INT4_VALUES
        size /= (sum(v * v for v in values) / 16) ** 0.5
    else:
        unit = size if encoding.granularity is None else _E4M3_SIZE
        codes = torch.randn(shape, generator=g, device=g.device).mul_(unit).to(dtype)
        size /= unit
    if encoding.granularity is None or encoding.scale_dtype is None:
        return QuantTensor(codes, encoding)
    assert not encoding.zero_points, "no format in FORMATS has zero points"
    spread = 0.5 + torch.rand(encoding.granularity.scale_shape(rows, columns), generator=g, device=g.device)
    if encoding.global_scale:
        scales = spread.to(torch.float8_e4m3fn)
        return QuantTensor(codes, encoding, scales, global_scale=torch.tensor(size, device=g.device))
    return QuantTensor(codes, encoding, encode_scale(spread * size, encoding.scale_dtype))
