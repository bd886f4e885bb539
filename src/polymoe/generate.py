"""The former place of :class:`~polymoe.engines.transformers.generator.Generator`."""

from polymoe.engines.transformers.generator import Answer, Generator

__all__ = ["Answer", "Generator"]
