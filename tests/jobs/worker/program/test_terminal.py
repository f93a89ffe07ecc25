"""A program that runs in the user's SSH session while its rank waits."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.wait import wait_until
from tests.jobs.worker.program.test_program import begin

_TELL = (
    "import os, sys; print(sys.stdin.isatty(), os.path.basename(os.getcwd()), os.environ['RANK'], "
    "os.environ['SECRET'], 'PMI_RANK' in os.environ, sorted(os.sched_getaffinity(0)))"
)
_ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": "code", "MASTER_ADDR": "127.0.0.1"}


def begin_rank(node: Path, *program: str) -> subprocess.Popen[str]:
    """Start the rank and wait until it offers its program."""
    rank = begin(node, *program, own=("SECRET=s",), options=("--terminal",))
    offer = node / "terminal.pid"
    wait_until("offer", lambda: offer.exists() or None, deadline_s=30, every_s=0.05)
    return rank


def begin_session(node: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start what OpenSSH starts on the node; return it with the terminal's other end."""
    ours, theirs = pty.openpty()
    session = subprocess.Popen(
        [sys.executable, "-m", "worker.program.terminal"],
        cwd=node,
        env=_ENV,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    return session, ours


def wait_until_begun(node: Path) -> None:
    file = node / "terminal.pid"
    wait_until("session", lambda: file.read_text() or None, deadline_s=30, every_s=0.05)


def test_the_program_has_the_terminal_and_the_ranks_environment(node: Path) -> None:
    rank = begin_rank(node, sys.executable, "-c", f"{_TELL}; sys.exit(3)")
    assert (node / "terminal.json").stat().st_mode & 0o777 == 0o600
    session, terminal = begin_session(node)

    assert session.wait(30) == 3

    printed = os.read(terminal, 1000).decode()
    assert printed.split(" [")[0] == "True work 3 s False"
    out, _ = rank.communicate(timeout=30)
    assert rank.returncode == 3
    assert "ended with exit code 3" in out
    assert not (node / "terminal.json").exists(), "it contains the user's variables"
    late, other = begin_session(node)
    assert late.wait(30) == 1
    assert b"it has run already" in os.read(other, 1000)


@pytest.mark.parametrize("end", ["cancel", "hang up", "kill"])
def test_a_session_and_its_rank_end_together(node: Path, end: str) -> None:
    rank = begin_rank(node, "bash", "-i")  # which ignores SIGTERM
    session, _terminal = begin_session(node)
    wait_until_begun(node)
    hung_up = "bash ended with exit code 129, as after signal 1"
    killed = "the session of this program was killed"
    pid, number, code, reason = {
        "cancel": (rank.pid, signal.SIGTERM, 143, ""),
        "hang up": (session.pid, signal.SIGHUP, 129, hung_up),
        "kill": (session.pid, signal.SIGKILL, 1, killed),
    }[end]

    os.kill(pid, number)

    out, _ = rank.communicate(timeout=30)
    assert reason in out
    assert rank.returncode == code
    assert session.wait(30) in (129, -signal.SIGKILL)
