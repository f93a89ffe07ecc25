"""Each rank's own log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from jobs.worker.runtime.output import new_file

_RANK = """
import os, signal, sys, threading
from pathlib import Path
from worker.runtime.output import keep_log

told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
keep_log(Path(sys.argv[1]), 0, append=False)
# At once: it may be just starting.
os.kill(int(Path("/proc/thread-self/children").read_text()), signal.SIGTERM)
print("step 1", flush=True)
# Not signal.pause, for which the signal may come too early.
if told.wait(60):
    print("a checkpoint is saved")
"""


def test_a_signal_to_all_processes_of_a_job_costs_no_line(
    node: Path, node_environ: dict[str, str]
) -> None:
    """As Slurm's: it finds processes by their parents, or by their cgroup."""
    argv = [sys.executable, "-c", _RANK, str(node)]
    with subprocess.Popen(argv, env=node_environ, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        lines = [rank.stdout.readline()]
        children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
        for pid in (*map(int, children), rank.pid):
            os.kill(pid, signal.SIGTERM)
        lines += rank.stdout.readlines()

    assert len(children) == 1
    assert rank.returncode == 0
    assert lines == ["step 1\n", "a checkpoint is saved\n"]
    assert (node.with_name(f"{node.name}.state") / "logs/rank-0.log").read_text() == "".join(lines)


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with new_file(pipe) as path:
        assert path == pipe
    assert pipe.is_fifo()
