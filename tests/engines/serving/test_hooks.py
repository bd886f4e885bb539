"""An installed engine that lacks a name, a parameter or an attribute is found out before anything is patched."""

from __future__ import annotations

import pytest

from polymoe.engines.serving.hooks import Hook, missing_hooks

HERE = "polymoe.engines.serving"


@pytest.mark.parametrize(
    ("hook", "lack"),
    [
        (Hook(f"{HERE}.hooks", "missing_hooks", ("hooks",)), ()),
        (Hook(f"{HERE}.hooks", "Hook", ("module", "uses")), ()),
        (Hook(f"{HERE}.settings", "EngineSettings.read", ("cls", "environ")), ()),
        (Hook(f"{HERE}.settings", "EngineSettings", ("mode", "includes")), ()),
        (Hook(f"{HERE}.nothing", "missing_hooks", ()), (f"{HERE}.nothing.missing_hooks",)),
        (Hook(f"{HERE}.settings", "EngineSettings.write", ()), (f"{HERE}.settings.EngineSettings.write",)),
        (Hook(f"{HERE}.hooks", "missing_hooks", ("hooks", "more")), (f"{HERE}.hooks.missing_hooks(more)",)),
        (Hook(f"{HERE}.settings", "EngineSettings", ("mode", "x", "y")), (f"{HERE}.settings.EngineSettings(x, y)",)),
    ],
)
def test_what_is_missing_is_named(hook: Hook, lack: tuple[str, ...]) -> None:
    assert missing_hooks([hook]) == lack
