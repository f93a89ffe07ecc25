"""``python -m jobs`` is ``spr-cluster``."""

from __future__ import annotations

import sys

from jobs.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
