"""``python -m hookrun``: the same as the console script `hookrun`."""

from __future__ import annotations

import sys

from hookrun.cli import main

if __name__ == "__main__":
    sys.exit(main())
