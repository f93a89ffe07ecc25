"""``python -m worker.tasks NAME``: one rank of a training run, with the user's variables.

Exit code 1 is a failure, 2 a usage error, and 143 a stop by SIGTERM during training, with a checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..runtime.process import VARIABLES, leave, read_words

if __name__ == "__main__":
    if Path(VARIABLES).exists():
        os.environ.update(dict(word.split("=", 1) for word in read_words(Path(VARIABLES))))
    # Libraries read some of them when they are imported.
    from ..training.run import run_task
    from . import TASKS

    leave(run_task(TASKS[sys.argv[1]], sys.argv[2:]))
