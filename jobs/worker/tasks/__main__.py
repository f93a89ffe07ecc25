"""``python -m worker.tasks NAME``: one rank of a training run, with the user's variables.

Exit code 1 is a failure, 2 a usage error, and 143 a stop by SIGTERM during training, with a checkpoint.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from ..runtime.errors import WorkerError
from ..runtime.events import Events, take_mark
from ..runtime.process import VARIABLES, leave, read_words


def main() -> int:
    """Run a task; returns its exit code."""
    if Path(VARIABLES).exists():
        try:
            words = read_words(Path(VARIABLES))
        except WorkerError as error:
            Events(mark=take_mark()).error(error.message, error.hint)
            return 1
        os.environ.update(dict(word.split("=", 1) for word in words))
    # The clients of --report-to, after the stack's packages: they replace none.
    if Path("packages").is_dir():
        sys.path.append(str(Path("packages").absolute()))
    # Loading torch, transformers, and a model leaves hardly any garbage. Without collection, it takes a
    # fifth less time. train_task enables it again.
    gc.disable()
    # Libraries read some of the variables when they are imported.
    from ..training.run import run_task
    from . import TASKS

    return run_task(TASKS[sys.argv[1]], sys.argv[2:])


if __name__ == "__main__":
    leave(main())
