"""Dialects: how each tool stores one weight matrix, and the exact way there and back.

:data:`DIALECTS` names them; :func:`choose` finds the one that fits the tensors which are there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from polymoe.checkpoint.dialects.base import Dialect, headers_of, stored_as
from polymoe.checkpoint.dialects.float import Fp8, Plain
from polymoe.checkpoint.dialects.fp4 import ByWeight, Fp4
from polymoe.checkpoint.dialects.int4 import Awq, CompressedInt4, Gptq
from polymoe.checkpoint.files import Header
from polymoe.errors import CheckpointError, FormatError
from polymoe.formats import Encoding

__all__ = ["DIALECTS", "SUFFIXES", "Dialect", "choose", "headers_of", "require", "stored_as"]

_E8M0 = torch.float8_e8m0fnu

DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        Plain("plain"),
        Fp8("deepseek", "weight_scale_inv"),
        ByWeight(
            "deepseek_v4",
            Fp8("deepseek_v4_fp8", "scale"),
            Fp4("deepseek_v4_fp4", scale="scale", code_dtype=torch.int8, scale_dtype=_E8M0),
        ),
        Fp4("gpt_oss", codes="blocks", scale="scales", scale_dtype=torch.uint8, blocked=True),
        Fp8("ct_float", "weight_scale", scalar=(1,), calibrated=True),
        CompressedInt4("ct_int4"),
        Fp4("ct_mxfp4", codes="weight_packed", scale_dtype=torch.uint8),
        Fp4(
            "ct_nvfp4",
            codes="weight_packed",
            global_scale="weight_global_scale",
            input="input_global_scale",
            divides=True,
        ),
        Fp8("modelopt_fp8", "weight_scale", calibrated=True),
        Fp4("modelopt_nvfp4", global_scale="weight_scale_2", input="input_scale"),
        Gptq("gptq"),
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
    """Dialect and encoding of the ``[N, K]`` matrix stored under ``headers``: the configured dialect if it fits,
    else the first that does, since tensors count more than what a config says of them.

    Args:
        headers: of the tensors that are there, by suffix.
        shape: what the matrix must be; None for whatever its tensors say.
        configured: the dialect that the config names.
        hint: the encoding that the config names.
        allowed: names of the dialects to consider, None for all.

    Raises:
        CheckpointError: a tensor that the configured dialect needs is not there, and no other dialect fits.
        FormatError: the tensors are there, but of a wrong dtype or shape.
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
    raise failure or FormatError(", ".join(sorted(headers)), expected=f"the tensors of dialect {configured}")


def require(dialect: Dialect, suffixes: Collection[str]) -> None:
    """Check that the tensors that ``dialect`` needs are among ``suffixes``; CheckpointError names the first missing."""
    for suffix in dialect.required:
        if suffix not in suffixes:
            raise CheckpointError(
                suffix,
                expected=f"this tensor, as dialect {dialect.name} needs it",
                got=f"only {', '.join(sorted(suffixes))}" if suffixes else "none of its tensors",
                hint="weights mean nothing without all their parts: fetch the missing tensor or shard",
            )
