"""An installed engine that lacks a name, a parameter or an attribute is found out before anything is patched."""

from __future__ import annotations

import pytest

from polymoe.engines.hooks import Hook, missing_hooks

HERE = "polymoe.engines"
SETTINGS = f"{HERE}.serving.settings"


@pytest.mark.parametrize(
    ("hook", "lack"),
    [
        (Hook(f"{HERE}.hooks", "missing_hooks: hooks"), ()),
        (Hook(f"{HERE}.hooks", "Hook: module, uses"), ()),
        (Hook(f"{SETTINGS}", "EngineSettings.read: environ"), ()),
        (Hook(f"{SETTINGS}", "EngineSettings: mode, includes"), ()),
        (Hook("dataclasses", "Field: default_factory"), ()),
        (Hook("typing", "List"), ()),
        (Hook(f"{HERE}.nothing", "missing_hooks"), (f"{HERE}.nothing.missing_hooks",)),
        (Hook(f"{SETTINGS}", "EngineSettings.write"), (f"{SETTINGS}.EngineSettings.write",)),
        (Hook(f"{HERE}.hooks", "missing_hooks: hooks, more"), (f"{HERE}.hooks.missing_hooks (no more)",)),
        (Hook(f"{SETTINGS}", "EngineSettings: mode, x, y"), (f"{SETTINGS}.EngineSettings (no x, y)",)),
    ],
)
def test_what_is_missing_is_named(hook: Hook, lack: tuple[str, ...]) -> None:
    assert missing_hooks([hook]) == lack


class Called:
    """What a part is that polymoe calls or overrides."""

    def run(self, model: object, plan: object, *, device: object, more: object = None) -> None: ...

    def others(self, model: object, *args: object, **kwargs: object) -> None: ...


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("run(self, model, plan, device=)", True),
        ("run(self, model, plan, device=, more=)", True),
        ("run(self, model, plan=, device=)", True),
        ("run(self, plan, model, device=)", False),  # another order
        ("run(self, model, plan)", False),  # it needs a device
        ("run(self, model, plan, ...)", True),
        ("run(self, model, plan, device=, mesh=)", False),
        ("run(self, model, plan, device)", False),  # only by name
        ("others(self, model, mesh=)", True),
        ("others(self, model, args)", False),
    ],
)
def test_what_is_called_in_a_fixed_order(text: str, fits: bool) -> None:
    hook = Hook(__name__, f"Called.{text}")
    found = hook.difference()
    assert (found is None) == fits
    assert fits or str(found).startswith(f"{hook.path}(self, model")
