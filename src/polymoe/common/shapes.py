"""Dimension legend and integer helpers (leaf: imports no other module of polymoe).

A tensor's name ends in its dimensions, one letter each, outermost first:

====== ============================================================
letter dimension
====== ============================================================
``T``  tokens in this call
``E``  experts
``A``  experts active per token (the router's top-k)
``R``  routed rows, ``T * A``
``H``  hidden width of the experts' input and output
``F``  intermediate ("feed-forward") width of one expert
``G``  groups along a row that share one scale
``N``  rows of a weight matrix (output features)
``K``  columns of a weight matrix (input features, contracted)
====== ============================================================

So ``x_TH`` is a batch of token vectors, ``gate_EFH`` every expert's gate projection. ``N`` and ``K`` name the two
axes of any one weight matrix where it does not matter which projection it is.
"""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``, for ``b > 0``: ``ceil_div(2880, 128) == 23``."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of ``b`` not below ``a``, for ``b > 0``: ``round_up(2880, 128) == 2944``."""
    return ceil_div(a, b) * b
