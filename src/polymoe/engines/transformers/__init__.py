"""Transformers with packed experts: :func:`load` for one model, :func:`install` for all that are loaded later.

The modules, each of which imports only from those below it (``tests/test_imports.py``):

.. code-block:: text

    chat               conversations, for ``polymoe chat``
    generator          answers to batches of prompts, for ``polymoe run``
    loading            load, install, uninstall, PolymoeConfig
    without_polymoe    the same checkpoints as Transformers alone loads them, to compare with
    quantizer          the hooks that Transformers calls around loading
    refit              new weights for a packed model, in place
    weights            models from tensors that polymoe reads, instead of files
    dense_quantizer    Transformers' own quantizer for what is not an expert
    experts_interface  ``experts_implementation="polymoe"`` for unquantized models
    families           one row a model family
    decode_graph       a decode step as one CUDA graph
    paged_attention    attention for continuous batching
    tokenizer          tokenizers from copies of the files that were checked
    model_config       config and generation config without what names code
    replies            answer, reasoning and tool calls in generated tokens
    chat_template      chat templates with a limit on time and memory
    untrusted          exceptions of libraries as errors of the checkpoint
    contract           private parts of Transformers that all of these use
"""

from __future__ import annotations

from polymoe.common.install_command import packages_of

with packages_of("transformers", "polymoe.engines.transformers"):
    import transformers as _transformers  # noqa: F401

from polymoe.engines.transformers.experts_interface import register
from polymoe.engines.transformers.families import TRANSFORMERS_FAMILIES, PackedExperts, TransformersFamily
from polymoe.engines.transformers.loading import PolymoeConfig, install, load, uninstall
from polymoe.engines.transformers.quantizer import PackedQuantizer
from polymoe.engines.transformers.refit import refit
from polymoe.engines.transformers.tokenizer import load_tokenizer

__all__ = [
    "TRANSFORMERS_FAMILIES",
    "Family",
    "PackedExperts",
    "PackedQuantizer",
    "PolymoeConfig",
    "TransformersFamily",
    "install",
    "load",
    "load_tokenizer",
    "refit",
    "uninstall",
]

Family = TransformersFamily
"""The former name of :class:`TransformersFamily`."""

register()  # a name alone, which changes no model that does not ask for it
