"""polymoe in vLLM: a general plug-in that runs the experts of every layer that polymoe can run.

vLLM calls :func:`register`, the entry point ``vllm.general_plugins``, once in each of its processes. The layer, the
router, shared experts, parallel groups and reductions stay vLLM's. vLLM's quantization method still creates and loads
the tensors; polymoe packs them, layer by layer, and computes.
"""

from __future__ import annotations

from polymoe.engines.serving.settings import EngineSettings

__all__ = ["register"]


def register() -> None:
    """Patch vLLM's choice of a method for a layer's experts. Calls after the first do nothing.

    Nothing is patched if ``POLYMOE=0``, or if this vLLM lacks something that the plug-in needs; then the log says what.

    Raises:
        ArgumentError: for an environment variable that says nothing.
        UnsupportedProblem: if something is missing and ``POLYMOE=require``.
    """
    settings = EngineSettings.read()
    if settings.mode != "off":
        from polymoe.engines.vllm.plugin import install

        install(settings)
