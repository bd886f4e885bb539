"""Transformers with packed experts: :func:`load` for one model, :func:`install` for all that load later."""

from __future__ import annotations

from polymoe.errors import MissingDependency

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        "polymoe.engines.transformers", expected="transformers 5.16 or newer", got=str(error),
        hint="pip install 'polymoe[transformers]'",
    ) from error  # fmt: skip

from polymoe.engines.transformers.families import FAMILIES, Family, PackedExperts
from polymoe.engines.transformers.loading import install, load, uninstall
from polymoe.engines.transformers.quantizer import PackedQuantizer

__all__ = ["FAMILIES", "Family", "PackedExperts", "PackedQuantizer", "install", "load", "uninstall"]
