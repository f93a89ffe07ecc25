import subprocess
from pathlib import Path

import pytest

from jobs.worker.supervisor.commands import LOW_PRIORITY


def run(words: str) -> str:
    """Run a command at low priority in its own session; return its output."""
    argv = ["sh", "-c", f"{LOW_PRIORITY} {words}"]
    return subprocess.run(
        argv, capture_output=True, text=True, check=True, start_new_session=True
    ).stdout


def test_low_priority_within_a_session() -> None:
    assert run("nice") == "19\n"


def test_low_priority_where_sessions_have_none() -> None:
    words = LOW_PRIORITY.replace("/proc/self/autogroup", "/proc/self/no-such-file")
    done = subprocess.run(["sh", "-ec", f"({words} nice)"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "19\n", "")


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroup")
def test_low_priority_among_sessions() -> None:
    assert run("cat /proc/self/autogroup").endswith("nice 19\n")
