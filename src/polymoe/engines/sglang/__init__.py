"""polymoe in SGLang: a general plug-in that runs the experts of every layer that polymoe can run.

SGLang calls :func:`register`, the entry point ``sglang.srt.plugins``, once in each of its processes. The layer, the
router, shared experts, parallel groups and reductions stay SGLang's. SGLang's quantization method still creates and
loads the tensors; polymoe packs them, layer by layer, and computes.
"""

from __future__ import annotations

from typing import Any

from polymoe.engines.hooks import missing_hooks
from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.sglang.hooks import HOOKS, INIT
from polymoe.errors import PolymoeError

__all__ = ["register"]


def register() -> None:
    """Register polymoe's hooks with SGLang.

    Nothing is registered if ``POLYMOE=0``, or if this SGLang lacks something that the plug-in needs; then the log says
    what.

    Raises:
        ArgumentError: for an environment variable that says nothing.
        UnsupportedProblem: if something is missing and ``POLYMOE=require``.
    """
    try:
        settings = EngineSettings.read()
        if settings.mode == "off":
            return
        log = LayerLog("SGLang", "sglang.polymoe", settings, ("--moe-runner-backend",))
        lacking = missing_hooks(HOOKS)
        if lacking:
            from sglang.version import __version__  # pyright: ignore

            log.lacking(__version__, lacking, "0.5.17 to 0.5.23")
            return
        from polymoe.engines.sglang.plugin import install

        install(settings, log)
    except PolymoeError as error:
        # SGLang only logs it and continues, so it is raised once more where the first layer is made.
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore

        failure = error

        def fail(*_: Any, **__: Any) -> None:
            raise failure

        HookRegistry.register(INIT, fail, HookType.BEFORE)
        raise
