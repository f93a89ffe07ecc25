"""Following a job from a terminal that closes, and a job that says nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.errors import HangupError, JobError
from jobs.launch.follow import JobOutput, explain, note_silence, run_command
from jobs.launch.launcher import HeadLauncher
from jobs.launch.mpirun import LaunchCommand
from jobs.launch.plan import JobPaths
from tests.fakes import FakeHost

PATHS = JobPaths("squad-1")
COMMAND = LaunchCommand(("mpirun",), {})

# A command that follows a job, as `train` does: the launcher is a stand-in that writes what it does.
_FOLLOWER = """
import sys, time
from pathlib import Path
import jobs.cli as cli
from cluster.cli import status
from jobs.cli.job_display import JobDisplay
from cluster.cli.display import make_progress
from jobs.launch.follow import JobOutput, note_silence, run_command
from jobs.launch.mpirun import LaunchCommand
from jobs.launch.plan import JobPaths
from tests.fakes import FakeHost

LOG = Path(sys.argv[1])

class Launcher:
    flags = "--name bert"
    def start(self, command, paths):
        pass
    def follow(self, paths, on_line):
        LOG.write_text("following\\n")
        for number in range(int(sys.argv[2])):
            time.sleep(0.05)
            on_line("a line")
        LOG.write_text("ended\\n")
        return 0
    def cancel(self, paths, grace_s):
        LOG.write_text("cancelled\\n")
        return ()
    def disconnect(self):
        pass

def run(args):
    progress = make_progress()
    display = JobDisplay(progress)
    output = JobOutput(display.event, display.log)
    with progress.phase("Train"):
        return run_command(Launcher(), LaunchCommand(("x",), {}), JobPaths("squad-1"), output, 120)

status.run = run
sys.exit(cli.main(["status"]))
"""


@dataclass
class StandIn:
    """A launcher whose parts meet what a test says."""

    follow_: Callable[[Callable[[str], None]], int] = lambda _: 0
    cancels: list[Callable[[], tuple[str, ...]]] = field(default_factory=list)
    graces: list[int] = field(default_factory=list)
    flags: str = "--name bert"

    def running_job(self) -> str | None:
        return None

    def start(self, command: LaunchCommand, paths: JobPaths) -> None:
        return None

    def follow(self, paths: JobPaths, on_line: Callable[[str], None]) -> int:
        return self.follow_(on_line)

    def cancel(self, paths: JobPaths, grace_s: int) -> tuple[str, ...]:
        self.graces.append(grace_s)
        return self.cancels.pop(0)() if self.cancels else ()

    def disconnect(self) -> None:
        return None

    def why_gone(self) -> str:
        return ""


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: object) -> Any:
        raise error

    return act


def follow(launcher: StandIn, log: list[str]) -> int:
    return run_command(launcher, COMMAND, PATHS, JobOutput(lambda _: None, log.append), 120)


@pytest.fixture
def follower(tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[bytes], int, Path]]:
    """Starts a command on a terminal of its own; returns it with the terminal and its log."""

    def begin(lines: int, *, ignores: bool = False) -> tuple[subprocess.Popen[bytes], int, Path]:
        terminal, end = pty.openpty()

        def enter() -> None:
            os.setsid()
            fcntl.ioctl(end, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)

        log = tmp_path / "log"
        process = subprocess.Popen(
            [sys.executable, "-c", _FOLLOWER, str(log), str(lines)],
            stdin=end,
            stdout=end,
            stderr=end,
            cwd=Path(__file__).parents[3],
            preexec_fn=enter,
        )
        os.close(end)
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return process, terminal, log

    return begin


def test_a_job_goes_on_when_its_terminal_closes(follower: Any) -> None:
    process, terminal, log = follower(1200)
    os.close(terminal)

    assert process.wait(30) == 129
    assert log.read_text() == "following\n"


def test_a_command_that_ignores_the_hang_up_follows_to_the_end(follower: Any) -> None:
    """`nohup`, and `trap '' HUP`: even the display's terminal may be gone."""
    process, terminal, log = follower(60, ignores=True)
    os.close(terminal)

    process.wait(30)
    assert log.read_text() == "ended\n"


def test_a_hang_up_leaves_the_job_alone_and_says_how_to_come_back() -> None:
    launcher, log = StandIn(raising(HangupError())), list[str]()

    with pytest.raises(HangupError):
        follow(launcher, log)
    assert launcher.graces == []
    assert log[-1] == (
        "job squad-1 keeps running; `spr-cluster jobs --name bert` shows its state, "
        "`spr-cluster fetch squad-1 --name bert` downloads its results"
    )


def test_a_hang_up_does_not_shorten_the_time_to_save_a_checkpoint() -> None:
    """Ctrl-C, and then the terminal is closed; the head continues by itself."""
    launcher = StandIn(raising(KeyboardInterrupt()), [raising(HangupError())])

    with pytest.raises(HangupError):
        follow(launcher, [])
    assert launcher.graces == [120]


def test_nodes_out_of_reach_are_named_after_a_stop() -> None:
    launcher, log = StandIn(raising(KeyboardInterrupt()), [lambda: ("node1", "node3")]), list[str]()

    with pytest.raises(KeyboardInterrupt):
        follow(launcher, log)
    assert log[-2:] == [
        "node1, node3 can't be reached, and ranks may still be running there: `spr-cluster repair "
        "--name bert` replaces nodes that don't answer",
        "Job stopped on all nodes that can be reached",
    ]


def test_output_that_nobody_can_see_does_not_end_a_job() -> None:
    def follow_(on_line: Callable[[str], None]) -> int:
        for line in ("text", '@spr {"event": "phase", "name": "train"}'):
            on_line(line)
        return 0

    gone = raising(OSError(errno.EIO, "Input/output error"))
    output = JobOutput(gone, gone)
    assert run_command(StandIn(follow_), COMMAND, PATHS, output, 120) == 0
    assert output.lines == ["text"]


def test_a_job_without_output_is_noticed_once_per_doubled_time() -> None:
    log = list[str]()
    output = JobOutput(lambda _: None, log.append)
    deadline = time.monotonic() + 20

    with note_silence(output, minute_s=0.2):
        while len(log) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        output.add_line("at last")
        while len(log) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert log[:4] == [
        "no output for 1 min",
        "no output for 2 min",
        "at last",
        "no output for 1 min",
    ]
    noted = len(log)
    time.sleep(0.5)
    assert len(log) == noted


@pytest.mark.parametrize("content", ["", "killed\n", "\x00\x00"])
def test_a_damaged_exit_code_is_no_exit_code(content: str) -> None:
    head = FakeHost("node0", [("tail -n", ""), ("^cat ", content)])
    with pytest.raises(JobError, match="ended without an exit code"):
        HeadLauncher(head).follow(PATHS, lambda _: None)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "lost contact with node1: its node is down or cut off"),
        (
            [{"event": "start", "world_size": 3, "hosts": ["ip-4", "ip-5", "ip-6"]}],
            "lost contact with rank 1 on ip-5 (node1): its node is down or cut off",
        ),
        (
            [{"event": "start", "world_size": 4, "hosts": ["ip-4", "ip-5"]}],
            "lost contact with ranks 2 to 3 on ip-5 (node1): its node is down or cut off",
        ),
    ],
)
def test_a_node_that_mpirun_has_lost_is_named_with_its_ranks(
    events: list[dict[str, Any]], message: str
) -> None:
    lines = [
        "Connection to 172.31.0.5 closed by remote host.",
        "[mpiexec@ip-4] Error: Downstream from host node1 exited abnormally",
        "[mpiexec@ip-4] wait_proxies_to_terminate: downstream from host node1 exited with status 255",
    ]
    output = JobOutput(print, print, lines=lines, events=events)

    assert explain(255, output, "the log").message == message


def test_a_hang_up_during_the_start_promises_nothing() -> None:
    class Starting(HeadLauncher):
        def start(self, command: LaunchCommand, paths: JobPaths) -> None:
            raise HangupError

    said: list[str] = []
    output = JobOutput(lambda _: None, said.append)

    with pytest.raises(HangupError):
        run_command(
            Starting(FakeHost("node0", [])),
            LaunchCommand(("mpirun",), {}),
            JobPaths("squad-1"),
            output,
            10,
        )

    assert said[-1].startswith("job squad-1 may have started; `spr-cluster jobs")
