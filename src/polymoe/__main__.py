"""``polymoe`` and ``python -m polymoe``: the command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: import the command line and run it. Ctrl-C ends the import without a traceback too."""
    try:
        from polymoe.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
