"""Weight formats: what stored bytes mean, and how floats are quantized to them. Uses torch only.

:data:`FORMATS` names the usual ones; :func:`format_of` finds the class for any encoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from polymoe.formats.base import Format
from polymoe.formats.encoding import Encoding, Granularity, PerChannel, PerGroup, PerTensor
from polymoe.formats.float16 import Float16
from polymoe.formats.fp8 import Fp8
from polymoe.formats.int4 import Int4
from polymoe.formats.mxfp4 import Mxfp4
from polymoe.formats.nvfp4 import Nvfp4
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
    by_element = {"bf16": Float16, "fp16": Float16, "e4m3": Fp8, "int4": Int4}
    kind = by_element.get(encoding.element) or (Nvfp4 if encoding.global_scale else Mxfp4)
    return kind(encoding)


_ROWS = (
    Float16(Encoding(element="bf16")),
    Float16(Encoding(element="fp16")),
    Fp8(Encoding(element="e4m3", granularity=PerTensor(), scale_dtype="float32")),
    Fp8(Encoding(element="e4m3", granularity=PerChannel(), scale_dtype="float32")),
    Fp8(Encoding(element="e4m3", granularity=PerGroup(128, 128), scale_dtype="float32")),
    Fp8(Encoding(element="e4m3", granularity=PerGroup(1, 32), scale_dtype="e8m0")),
    Mxfp4(Encoding(element="e2m1", granularity=PerGroup(1, 32), scale_dtype="e8m0")),
    Nvfp4(Encoding(element="e2m1", granularity=PerGroup(1, 16), scale_dtype="e4m3", global_scale=True)),
    Int4(Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype="bfloat16")),
    Int4(Encoding(element="int4", granularity=PerGroup(1, 128), scale_dtype="bfloat16")),
)

FORMATS: Mapping[str, Format] = MappingProxyType({f.name: f for f in _ROWS})
"""The usual formats by name: ``FORMATS["mxfp4"].quantize(w_NK)``."""
