"""``python -m worker.squad``: one rank of a training run.

Exit code 1 is a failure, 2 a usage error, and 143 a stop by SIGTERM during training, with a checkpoint.
"""

from __future__ import annotations

from ..runtime.process import leave
from .job import main

if __name__ == "__main__":
    leave(main())
