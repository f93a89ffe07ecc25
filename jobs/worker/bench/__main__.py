"""``python -m worker.bench``: one rank of a measurement. Exit code 1 is a failure, 2 a usage error."""

from __future__ import annotations

from ..runtime.process import leave
from .job import main

if __name__ == "__main__":
    leave(main())
