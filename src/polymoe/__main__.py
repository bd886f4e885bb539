"""``python -m polymoe`` is the ``polymoe`` command."""

from __future__ import annotations

from polymoe.cli import main

main()
