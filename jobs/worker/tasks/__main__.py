"""``python -m worker.tasks NAME OPTIONS [--resume]``: one rank of a training run, with the user's variables.

OPTIONS is the task's :class:`..training.options.TrainOptions` as JSON, wherever the rank runs: under mpirun,
in a pod, or on another Slurm cluster.

Exit code 1 is a failure, and 143 a stop by SIGTERM during training, with a checkpoint.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
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

    kind = TASKS[sys.argv[1]]
    options = kind.Options.from_json(sys.argv[2])
    if "--resume" in sys.argv[3:]:
        options = replace(options, resume=True)
    return run_task(kind, options)


if __name__ == "__main__":
    leave(main())
