import subprocess
from pathlib import Path

import pytest

from jobs.worker.supervisor.commands import LOW_PRIORITY, Running


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


@pytest.mark.parametrize(
    ("argv", "limit_s", "printed", "why"),
    [
        (["head", "-c", "99999", "/dev/zero"], 60, "\0" * 99999, ""),  # more than a pipe takes
        (["sh", "-c", "echo a; echo b >&2; echo c >&2; exit 3"], 60, "a", "c"),
        (["sh", "-c", "exit 3"], 60, "", "exit code 3"),
        (["sleep", "60"], 0, "", "it took longer than 0 min"),
        (["no-such-program"], 60, "", "env: 'no-such-program': No such file or directory"),
    ],
    ids=["long", "says why", "silent", "slow", "missing"],
)
def test_a_command_beside_the_loop(argv: list[str], limit_s: float, printed: str, why: str) -> None:
    found = Running(argv, limit_s).wait()
    assert (found.printed, found.why.translate({0x2018: "'", 0x2019: "'"})) == (printed, why)
