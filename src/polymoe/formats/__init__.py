"""Weight formats: what stored bytes mean, and how floats are quantized to them. Uses torch only.

:data:`FORMATS` names the usual ones; :func:`format_of` makes one of any encoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from polymoe.formats.base import Format
from polymoe.formats.encoding import Encoding, Granularity, PerChannel, PerGroup, PerTensor
from polymoe.formats.tensor import QuantTensor

__all__ = [
    "FORMATS",
    "Encoding",
    "Format",
    "Granularity",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "QuantTensor",
    "format_of",
]


def format_of(encoding: Encoding) -> Format:
    """Return the format that quantizes to ``encoding``, also for encodings without a row in :data:`FORMATS`."""
    return Format(encoding)


_ROWS = (
    Encoding(element="bf16"),
    Encoding(element="fp16"),
    Encoding(element="e4m3", granularity=PerTensor(), scale_dtype="float32"),
    Encoding(element="e4m3", granularity=PerChannel(), scale_dtype="float32"),
    Encoding(element="e4m3", granularity=PerGroup(128, 128), scale_dtype="float32"),
    Encoding(element="e4m3", granularity=PerGroup(1, 32), scale_dtype="e8m0"),
    Encoding(element="e2m1", granularity=PerGroup(1, 32), scale_dtype="e8m0"),
    Encoding(element="e2m1", granularity=PerGroup(1, 16), scale_dtype="e4m3", global_scale=True),
    Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype="bfloat16"),
    Encoding(element="int4", granularity=PerGroup(1, 128), scale_dtype="bfloat16"),
)

FORMATS: Mapping[str, Format] = MappingProxyType({e.name: Format(e) for e in _ROWS})
"""The usual formats by name: ``FORMATS["mxfp4"].quantize(w_NK)``."""
