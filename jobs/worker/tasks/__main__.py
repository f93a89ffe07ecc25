"""``python -m worker.tasks NAME``: one rank of a training run.

Exit code 1 is a failure, 2 a usage error, and 143 a stop by SIGTERM during training, with a checkpoint.
"""

from __future__ import annotations

import sys

from ..runtime.process import leave
from ..training.run import run_task
from . import TASKS

if __name__ == "__main__":
    leave(run_task(TASKS[sys.argv[1]], sys.argv[2:]))
