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
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.console.output import printable
from infra.errors import HangupError, HostError, JobError
from jobs.places.launcher import JobEnd
from jobs.places.plan import JobPaths
from jobs.places.queue.job_output import JobOutput, explain, note_silence, stop_job
from jobs.places.queue.session import JobSession
from jobs.places.queue.slurm import SlurmLauncher
from jobs.worker.runtime.events import mark_of, render_event
from jobs.worker.supervisor.watch import LogWatch
from provision.host import Host
from provision.ssh import LINE_BYTES, whole_lines
from tests.fakes import FakeHost
from tests.harness.hostile_text import HOSTILE
from tests.jobs.context import job_context
from tests.jobs.places.this_machine import wait_for

PATHS = JobPaths("squad-1")
DONE = JobEnd("succeeded", 0)

# A command that follows a job, as `train` does: the launcher is a stand-in that writes what it does.
_FOLLOWER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import jobs.__main__ as cli
from cluster.cli import status
from jobs.cli.shared.job_display import JobDisplay
from cluster.console.display import make_progress
from jobs.places.launcher import JobEnd
from jobs.places.queue.job_output import JobOutput
from jobs.places.plan import JobPaths
from jobs.places.queue.session import JobSession
from tests.jobs.context import job_context

LOG = Path(sys.argv[1])

class Launcher:
    flags = "--name bert"
    head = SimpleNamespace(close=lambda: None)
    def follow(self, paths, on_text, *_):
        LOG.write_text("following\\n")
        for number in range(int(sys.argv[2])):
            time.sleep(0.05)
            on_text("a line")
        LOG.write_text("ended\\n")
        return JobEnd("succeeded", 0)
def run(args):
    progress = make_progress()
    display = JobDisplay(progress)
    output = JobOutput(display.event, display.log)
    with progress.phase("Train"):
        session = JobSession(job_context({}), Launcher(), JobPaths("squad-1"))
        return session.watch(output, Path("here"), is_limited=False, kept=("", False)).exit_code

status.run = run
sys.exit(cli.main(["status"]))
"""


@dataclass(frozen=True)
class StandIn(SlurmLauncher):
    """A launcher whose parts meet what a test says."""

    head: Host = field(default_factory=lambda: FakeHost("node0", []))
    flags: str = "--name bert"
    follow_: Callable[[Callable[[str], None], Callable[[str], None]], JobEnd] = lambda *_: DONE
    cancels: list[Callable[[], tuple[str, ...]]] = field(default_factory=list)
    graces: list[int] = field(default_factory=list)

    def follow(
        self,
        paths: JobPaths,
        on_text: Callable[[str], None],
        on_wait: Callable[[str], None],
        on_state: Callable[[str], None] = print,
    ) -> JobEnd:
        return self.follow_(on_text, on_wait)

    def cancel(self, paths: JobPaths, grace_s: int) -> tuple[str, ...]:
        self.graces.append(grace_s)
        return self.cancels.pop(0)() if self.cancels else ()


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: object) -> Any:
        raise error

    return act


def ignore(_: object) -> None:
    return None


def watch(launcher: StandIn, output: JobOutput, log: list[str] | None = None) -> JobEnd:
    session = JobSession(job_context({}, log=log), launcher, PATHS)
    return session.watch(output, Path("here"), is_limited=False, kept=("", False))


@pytest.mark.parametrize(
    ("lines", "ignores", "said"), [(1200, False, "following\n"), (20, True, "ended\n")]
)
def test_a_job_goes_on_when_its_terminal_closes(
    tmp_path: Path, lines: int, ignores: bool, said: str
) -> None:
    """A command that ignores it, as with `nohup`, follows to the end, also without a display."""
    terminal, end = pty.openpty()

    def enter() -> None:
        os.setsid()
        fcntl.ioctl(end, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)

    log, folder = tmp_path / "log", Path(__file__).parents[3]
    argv, streams = [sys.executable, "-c", _FOLLOWER, str(log), str(lines)], (end,) * 3
    with subprocess.Popen(argv, -1, None, *streams, cwd=folder, preexec_fn=enter) as process:
        os.close(end)
        wait_for(log.exists)
        os.close(terminal)
        code = process.wait(60)
    assert log.read_text() == said
    assert ignores or code == 129


@pytest.mark.parametrize("ends", [KeyboardInterrupt(), HangupError()], ids=["Ctrl-C", "hang-up"])
def test_the_end_of_a_command_leaves_its_job_alone_and_says_how_to_come_back(
    ends: KeyboardInterrupt,
) -> None:
    class Terminal(list[str]):
        """It is closed: it shows a line, and fails."""

        def append(self, line: str) -> None:
            super().append(line)
            raise OSError(errno.EIO, "Input/output error")

    launcher, log = StandIn(follow_=raising(ends)), Terminal()

    with pytest.raises(type(ends)):
        watch(launcher, JobOutput(ignore, ignore), log)
    assert launcher.graces == []
    assert log == [
        "job squad-1 continues without this command\n"
        "  to follow it: spr-cluster attach squad-1 --name bert\n"
        "  to end it:    spr-cluster cancel squad-1 --name bert"
    ]


_ASKED = (
    "stopping; a job that has begun to train saves a checkpoint first; press Ctrl-C again to stop "
    "immediately"
)


def test_a_second_ctrl_c_ends_a_job_at_once_and_nodes_out_of_reach_are_named() -> None:
    launcher, log = StandIn(), list[str]()
    launcher.cancels[:] = [raising(KeyboardInterrupt()), lambda: ("node1", "node3")]
    launcher.cancels.append(raising(HangupError()))
    assert stop_job(launcher, PATHS, 120, log.append) == ("node1", "node3")
    assert log == [
        _ASKED,
        "node1, node3 can't be reached, and ranks may still be running there: `spr-cluster repair "
        "--name bert` replaces nodes that don't answer",
        "Job stopped on all nodes that can be reached",
    ]
    # A closed terminal does not shorten the time to save a checkpoint: the head continues by itself.
    with pytest.raises(HangupError):
        stop_job(launcher, PATHS, 120, log.append)
    assert launcher.graces == [120, 0, 120]
    stop_job(launcher, PATHS, 10, log.append)
    assert log[3:] == [_ASKED, "Job stopped on all nodes"]


def test_a_job_that_can_not_be_ended_may_cost_money(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, log = StandIn(cancels=[raising(HostError("node0", "no SSH"))] * 2), list[str]()
    with pytest.raises(JobError, match="may still be running and costing money") as caught:
        stop_job(launcher, PATHS, 10, log.append)
    assert caught.value.hint == (
        "once the head is reachable: spr-cluster cancel squad-1 --name bert, or "
        "`spr-cluster down --name bert`"
    )
    monkeypatch.setattr(FakeHost, "why_gone", lambda _: "i-0a is terminated")
    stop_job(launcher, PATHS, 10, log.append)
    assert log == ["the job ended with its head node: i-0a is terminated"]


def test_output_that_nobody_can_see_does_not_end_the_following() -> None:
    def follow_(on_text: Callable[[str], None], on_wait: Callable[[str], None]) -> JobEnd:
        on_wait("Resources")
        for line in ("text", '@spr {"event": "phase", "name": "train"}'):
            on_text(line)
        return DONE

    gone = raising(OSError(errno.EIO, "Input/output error"))
    output = JobOutput(gone, gone)
    assert watch(StandIn(follow_=follow_), output) == DONE
    assert output.lines == ["text"]


def test_each_reason_for_a_wait_is_shown_once() -> None:
    def follow_(on_text: Callable[[str], None], on_wait: Callable[[str], None]) -> JobEnd:
        for reason in ("None", "Resources", "Resources", "None", "Priority", "Licenses"):
            on_wait(reason)
        on_text("runs")
        on_wait("Resources")
        return DONE

    log = list[str]()
    watch(StandIn(follow_=follow_), JobOutput(ignore, log.append))
    assert log == [
        "waiting in the queue: its nodes are in use",
        "waiting in the queue: other jobs are first",
        "waiting in the queue: Licenses",
        "runs",
    ]


def test_a_job_without_output_is_noticed_once_per_doubled_time() -> None:
    log, done = list[str](), threading.Event()

    def show(text: str) -> None:
        log.append(text)
        if len(log) == 3:
            output.add("at last")
        elif len(log) == 5:
            done.set()

    output, others = JobOutput(lambda _: None, show), {*threading.enumerate()}
    with note_silence(output, minute_s=0.1):
        (watcher,) = {*threading.enumerate()} - others
        assert done.wait(60)
    watcher.join(60)
    assert not watcher.is_alive()
    minutes = [f"no output for {number} min" for number in (1, 2, 4)]
    assert log[:5] == [*minutes, "at last", minutes[0]]


def test_a_failure_is_explained_by_its_end_and_the_ranks_own_hint() -> None:
    end = JobEnd("failed", 3, rank=1, host="b", message="NaN")
    said = {"event": "error", "rank": 1, "message": "NaN", "hint": "lower it"}

    known = explain(end, JobOutput(ignore, ignore, events=[said]), "the log is here")
    assert (known.message, known.hint) == ("rank 1 on b: NaN", "lower it; the log is here")
    # The job may have been followed from the middle.
    assert explain(end, JobOutput(ignore, ignore), "the log").hint == "the log"
    output = JobOutput(ignore, ignore, lines=["why", " "], events=[said])
    unknown = explain(JobEnd("failed", 9), output, "")
    assert unknown.message == "the job ended with exit code 9: why"
    # What an earlier attempt reported is over.
    output.add('@spr {"event": "restarted", "attempt": 2, "nodes": ["node1"]}')
    assert (output.lines, [each["event"] for each in output.events]) == ([], ["restarted"])


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_program_prints_is_text(text: bytes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(render_event({"event": "running"}, mark_of("squad-1")).encode() + b"\n" + text)
    watch = LogWatch(log, mark=mark_of("squad-1"))
    watch.poll()
    assert (watch.errors, watch.failed_at, watch.start) == ([], None, {})

    events, shown = list[Any](), list[str]()
    output = JobOutput(events.append, shown.append, "squad-1")
    text = log.read_bytes()
    blocks = (text[at : at + LINE_BYTES] for at in range(0, len(text), LINE_BYTES))
    for line in whole_lines(blocks):
        output.add(line)
    assert [each["event"] for each in events] == ["running"]
    assert shown
    assert max(map(len, shown)) <= LINE_BYTES
    assert all(printable(line).isprintable() for line in shown)
    assert explain(JobEnd("failed", 3), output, "").message
