"""Encodings under test: every row of FORMATS, and variants with other groups, scale dtypes and zero points."""

from __future__ import annotations

import pytest

from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup, PerTensor

ROWS = [f.encoding for f in FORMATS.values()]

VARIANTS = [
    *[Encoding(element="e2m1", granularity=PerGroup(1, k), scale_dtype="e8m0") for k in (16, 64, 128)],
    Encoding(element="e2m1", granularity=PerGroup(1, 32), scale_dtype="e4m3", global_scale=True),
    *[
        Encoding(element="e4m3", granularity=g, scale_dtype=s)
        for g in (PerTensor(), PerChannel(), PerGroup(128, 128))
        for s in ("bfloat16", "float16", "e8m0")
    ],
    Encoding(element="e4m3", granularity=PerGroup(32, 32), scale_dtype="e8m0"),
    Encoding(element="e4m3", granularity=PerGroup(1, 128), scale_dtype="float32"),
    Encoding(element="e4m3", granularity=PerGroup(1, 32), scale_dtype="float32"),
    *[Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype=s) for s in ("float32", "float16", "e8m0")],
    *[Encoding(element="int4", granularity=g, scale_dtype="bfloat16") for g in (PerGroup(1, 64), PerChannel())],
    *[
        Encoding(element="int4", granularity=PerGroup(1, k), scale_dtype=s, zero_points=True)
        for k in (32, 128)
        for s in ("float32", "bfloat16", "float16")
    ],
]


def label(encoding: Encoding) -> str:
    return f"{encoding.name}-{encoding.scale_dtype or 'plain'}"


ENCODINGS = [pytest.param(e, id=label(e)) for e in (*ROWS, *VARIANTS)]
