"""Ranks of a tiny job as forks of one process that has already loaded torch: a run takes a second.

``python -m tests.jobs.worker.forked_ranks`` reads lists of :class:`Run` as lines of JSON, runs one
after another, and prints their exit codes. They are processes like mpirun's, and are killed as such.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.worker.training.options import TrainOptions

SHAPE = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
# So that the random states count.
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "qa_dropout": 0.1}
_ENVIRON = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True)
class Run:
    """One run: each rank's arguments (``RANK`` is replaced by its number), and its fate.

    ``rank`` gets ``signal`` ``at`` its N-th (``step``) optimizer ``step``, or when it brings a file to
    the ``disk`` for the N-th time; with ``full`` that is full then, and no signal comes. ``loss`` is
    what every step from N on seems to have.
    """

    argv: list[str]
    ranks: int = 2
    rank: int = 0
    at: str = ""
    step: int = 0
    signal: int = signal.SIGKILL
    loss: float | None = None
    full: bool = False
    task: str = "squad"


@dataclass(frozen=True)
class Ran:
    """``codes`` and printed ``texts`` of the ranks."""

    codes: list[int]
    texts: list[str]


def run_forked(runs: Sequence[tuple[TrainOptions, dict[str, Any]]]) -> list[Ran]:
    """Run one after another, in a separate process."""
    wanted = [asdict(Run(options.to_argv(), task=options.task, **more)) for options, more in runs]
    environ = {**os.environ, **_ENVIRON}
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({"environ": environ, "runs": wanted}))
    server.stdin.write("\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the process that forks the ranks has ended: {server.wait()}"
    return [Ran(**each) for each in json.loads(answer)]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks: it loads torch once for all tests."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.worker.forked_ranks"],
        cwd=_REPOSITORY,
        env=os.environ | _ENVIRON,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end_server() -> None:
    """End the process that forks, if there is one."""
    if _server.cache_info().currsize:
        with _server() as server:
            server.kill()
        _server.cache_clear()


def main() -> None:
    """Run what each line of standard input describes."""
    import torch.utils.tensorboard  # noqa: F401 - before the forks
    import transformers.models.distilbert.modeling_distilbert  # noqa: F401

    from jobs.worker.training import run as job  # noqa: F401

    for line in sys.stdin:
        wanted = json.loads(line)
        os.environ.clear()
        os.environ.update(wanted["environ"])
        print(json.dumps([asdict(_run(Run(**each))) for each in wanted["runs"]]), flush=True)


def _run(run: Run) -> Ran:
    from tests.jobs.worker.training.test_run import free_port

    port = free_port()
    pids, printed = [], []
    for rank in range(run.ranks):
        end, descriptor = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_rank(run, rank, port, descriptor)
        os.close(descriptor)
        pids.append(pid)
        printed.append(end)
    # A rank's copier of its log, through which it prints, ends after the rank.
    with ThreadPoolExecutor(run.ranks) as pool:
        texts = list(pool.map(_read_all, printed))
    return Ran([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], texts)


def _read_all(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8") as printed:
        return printed.read()


def _be_rank(run: Run, rank: int, port: int, descriptor: int) -> None:
    """Become a rank; does not return."""
    code = 99
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= {"PMI_RANK": str(rank), "PMI_SIZE": str(run.ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = _work(run, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _work(run: Run, rank: int) -> int:
    import torch

    from jobs.worker.runtime import steps
    from jobs.worker.tasks import TASKS
    from jobs.worker.training import checkpoints, loop, model
    from jobs.worker.training import run as job
    from jobs.worker.training.optimizer_step import Step, take_step

    gc.disable()  # like `python -m worker.tasks`
    torch.set_num_threads(1)
    steps.TALK_SECONDS = 0.0  # after every step
    model.SCRATCH_SHAPE, model.SCRATCH_DROPOUT = SHAPE, DROPOUT
    seen = {"step": 0, "disk": 0}

    def hit(what: str) -> None:
        seen[what] += 1
        if (rank, run.at, run.step) == (run.rank, what, seen[what]):
            if run.full:
                raise OSError(28, "No space left on device")
            os.kill(os.getpid(), run.signal)

    to_disk = checkpoints._to_disk

    def take(*arguments: Any) -> Step:
        assert gc.isenabled()
        hit("step")
        taken = take_step(*arguments)
        if run.loss is not None and seen["step"] >= run.step:
            return taken._replace(loss=run.loss)
        return taken

    def bring(descriptor: int) -> None:
        hit("disk")
        to_disk(descriptor)

    # As a mapping: a module does not offer to others what it imports.
    vars(loop)["take_step"] = take
    checkpoints._to_disk = bring
    return job.run_task(TASKS[run.task], [word.replace("RANK", str(rank)) for word in run.argv])


if __name__ == "__main__":
    main()
