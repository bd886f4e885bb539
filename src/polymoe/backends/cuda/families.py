"""Which kernel families run a problem, by its weights and activations. Their rows are in
:mod:`polymoe.kernels.cuda.spec`."""

from __future__ import annotations

from functools import cache

from polymoe.formats import FORMATS, Encoding, PerChannel, PerTensor
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, KernelFamily
from polymoe.kernels.cuda.targets import TARGETS, Target
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ACTIVATIONS, ActivationQuantization
from polymoe.problem.tensors import ExpertsSpec


@cache
def weight_format(encoding: Encoding) -> str | None:
    """Return the name of the kernels' format for this encoding, or None.

    A global scale per expert is always optional. Scales of INT4 may be bfloat16 or float16, those of FP8 of any dtype;
    the layout converts them. MXFP8's are E8M0. Kernels for one scale per row also take one for the matrix.
    """
    granularity = PerChannel() if encoding.granularity == PerTensor() else encoding.granularity
    for name in dict.fromkeys(name for family in KERNEL_FAMILIES.values() for name in family.formats):
        own = FORMATS[name.removesuffix("_zp")].encoding
        same = (own.element, own.granularity, name.endswith("_zp")) == (
            encoding.element,
            granularity,
            encoding.zero_points,
        )
        dtypes = {"bfloat16", "float16"} if own.element == "int4" else {own.scale_dtype}
        if same and (encoding.scale_dtype in dtypes or own.scale_dtype == "float32"):
            return name
    return None


def activations_of(family: KernelFamily) -> tuple[ActivationQuantization, ...]:
    """Return the quantizations of x and h that a family supports."""
    return tuple(ACTIVATIONS[name] for name in family.activations)


def architectures_of(family: KernelFamily) -> tuple[tuple[int, int], ...]:
    """Return the compute capabilities of the GPUs that a family is compiled for."""
    return tuple(c for t in TARGETS.values() if family.name in t.families for c in t.capabilities)


def layout_on(family: KernelFamily, target: Target, spec: ExpertsSpec) -> str:
    """Return the name of the layout of a family's weights on a target's GPUs."""
    formats = (family.formats.get(weight_format(encoding) or "") for encoding in spec.encodings.values())
    converts = any(format is not None and target.converts(format) for format in formats)
    return family.cvt_layout if family.cvt_layout and converts else family.layout


def families_for(problem: Problem, capability: tuple[int, int] | None = None) -> list[KernelFamily]:
    """Return the families that support all of the problem's weights and its activations, in the order of the table.

    Beside families with fast accumulation, which are for many rows, come those that run the same without it. With a
    compute capability, only those that are compiled for its GPUs.
    """
    formats = {weight_format(encoding) for encoding in problem.spec.encodings.values()}
    modes = {problem.activations, problem.activations.promoted}
    found = [
        family
        for family in KERNEL_FAMILIES.values()
        if modes & {*activations_of(family)}
        and formats <= set(family.formats)
        and (capability is None or capability in architectures_of(family))
    ]
    return found if any(problem.activations in activations_of(family) for family in found) else []
