"""An engine's quantization method, with polymoe's computation in place of its own."""

from __future__ import annotations

from typing import Any

__all__ = ["derived_method"]


def derived_method(method: Any, base: type[Any], **attributes: Any) -> Any:
    """Return an object with the state of ``method``, of a class derived from ``base`` and from the method's own.

    The class has the name of the method's own, because loaders look at it.

    Args:
        method: the engine's, which is not used any more.
        base: what replaces the method's own functions. Its attributes are not hidden by those of the method.
        attributes: of the object.
    """
    theirs = type(method)
    kind: Any = type(theirs.__name__, (base, theirs), {"__module__": theirs.__module__})
    ours = object.__new__(kind)  # __init__ chooses a backend; and what a Module has is in its __dict__ too
    state = {name: value for name, value in method.__dict__.items() if name not in vars(base)}
    ours.__dict__.update(state, **attributes)
    return ours
