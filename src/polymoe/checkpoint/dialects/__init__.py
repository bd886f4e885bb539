"""Dialects: how each tool stores a weight matrix; reading and writing are exact inverses.

:data:`DIALECTS` lists them; :func:`choose` finds the one that fits the existing tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from polymoe.checkpoint.dialects.base import Dialect, headers_of, stored_as
from polymoe.checkpoint.dialects.float import Fp8Dialect, Mxfp8Dialect, Plain
from polymoe.checkpoint.dialects.fp4 import ByWeight, Fp4
from polymoe.checkpoint.dialects.int4 import Awq, CompressedInt4, Gptq
from polymoe.checkpoint.files import Header
from polymoe.errors import CheckpointError, FormatError
from polymoe.formats import Encoding

__all__ = ["DIALECTS", "SUFFIXES", "Dialect", "choose", "headers_of", "require", "stored_as"]

DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        Plain("plain"),
        Fp8Dialect("deepseek", "weight_scale_inv"),
        ByWeight(
            "deepseek_v4",
            Fp8Dialect("deepseek_v4_fp8", "scale"),
            Fp4("deepseek_v4_fp4", scale="scale", code_dtype="I8", scale_dtype="F8_E8M0"),
        ),
        Fp4("gpt_oss", codes="blocks", scale="scales", scale_dtype="U8", blocked=True),
        Fp8Dialect("ct_float", "weight_scale", scalar=(1,), calibrated=True),
        CompressedInt4("ct_int4"),
        Fp4("ct_mxfp4", codes="weight_packed", scale_dtype="U8"),
        Fp4(
            "ct_nvfp4",
            codes="weight_packed",
            global_scale="weight_global_scale",
            input="input_global_scale",
            divides=True,
        ),
        Mxfp8Dialect("ct_mxfp8", "weight_scale"),
        Fp8Dialect("quark_fp8", "weight_scale", calibrated=True),
        Fp4("quark_mxfp4", scale_dtype="U8"),
        Fp8Dialect("modelopt_fp8", "weight_scale", calibrated=True),
        Mxfp8Dialect("modelopt_mxfp8", "weight_scale"),
        Mxfp8Dialect("minimax_mxfp8", "weight_scale_inv"),
        Fp4("modelopt_nvfp4", global_scale="weight_scale_2", input="input_scale"),
        Gptq("gptq"),
        Gptq("gptq_v2", subtracted=0),
        Awq("awq"),
    )
}
"""Dialects by name."""

SUFFIXES: tuple[str, ...] = tuple(sorted({suffix for d in DIALECTS.values() for suffix in d.suffixes}))
"""Every suffix of any dialect."""


def choose(
    headers: Mapping[str, Header],
    shape: tuple[int, int] | None,
    configured: str,
    hint: Encoding | None = None,
    allowed: Collection[str] | None = None,
) -> tuple[Dialect, Encoding]:
    """Return dialect and encoding of the ``[N, K]`` matrix stored under ``headers``: the configured dialect if it fits,
    else the first one that does, because tensors take precedence over the config.

    Args:
        headers: headers of the existing tensors, by suffix.
        shape: required shape of the matrix; None to take it from the tensors.
        configured: the dialect that the config names.
        hint: the encoding that the config names.
        allowed: names of the dialects to consider, None for all.

    Raises:
        CheckpointError: if a tensor of the configured dialect is missing and no other dialect fits.
        FormatError: if a tensor has a wrong dtype or shape.
    """
    named = DIALECTS[configured]
    known = [d for d in DIALECTS.values() if allowed is None or d.name in allowed]
    fitting = [d for d in known if set(d.required) <= set(headers) <= set(d.suffixes)]
    failure: FormatError | None = None
    for dialect in sorted(fitting, key=lambda d: d is not named):
        try:
            return dialect, dialect.detect(headers, shape or dialect.shape(headers), hint)
        except FormatError as error:
            failure = failure or error
    require(named, headers)
    suffixes = sorted(headers, key=lambda suffix: (suffix in named.suffixes, suffix))  # those that do not belong first
    raise failure or FormatError(
        suffixes[0],
        expected=f"tensors of dialect {configured if allowed is None else ' or '.join(d.name for d in known)}",
        got=f"{', '.join(suffixes)}" + (f" of dialect {configured}" if suffixes[0] in named.suffixes else ""),
    )


def require(dialect: Dialect, suffixes: Collection[str]) -> None:
    """Raise CheckpointError for the first tensor that ``dialect`` needs and ``suffixes`` lacks."""
    for suffix in dialect.required:
        if suffix not in suffixes:
            raise CheckpointError(
                suffix,
                expected=f"this tensor, as dialect {dialect.name} needs it",
                got=f"only {', '.join(sorted(suffixes))}" if suffixes else "none of its tensors",
                hint="weights mean nothing without all their parts: fetch the missing tensor or shard",
            )
