"""The launcher probe: what counts as success, and the error otherwise."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.verify.launcher import launcher_command, probe_launcher
from provision.host import Result
from tests.fakes import FakeHost

NODES = ["node0", "node1"]


class Head(FakeHost):
    """A head whose mpirun returns a fixed result."""

    def __init__(self, code: int, stdout: str, stderr: str = "") -> None:
        super().__init__("node0", [])
        self.done = Result(code, stdout, stderr)

    def run(self, command: str, **options: object) -> Result:
        assert "mpirun -f /home/ubuntu/hosts -n 2 -ppn 1" in command
        assert options["check"] is False
        return self.done


_GOOD = "hello 0 torch 2.13.0+cpu\n"


def test_a_rank_on_every_node_is_a_success() -> None:
    report = probe_launcher(Head(0, f"hello 1 torch 2.13.0+cpu\n{_GOOD}"), NODES)

    assert (report.error, report.errors) == (None, {})
    assert report.torch == {"node0": "2.13.0+cpu", "node1": "2.13.0+cpu"}


def test_a_node_without_torch_is_named() -> None:
    report = probe_launcher(Head(0, f"{_GOOD}hello 1 error libc10.so: cannot open\n"), NODES)

    assert report.torch == {"node0": "2.13.0+cpu"}
    assert report.errors == {"node1": "libc10.so: cannot open"}
    assert report.error is None


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (Head(124, _GOOD), "mpirun did not finish within 120 s"),
        (
            Head(255, "", "[mpiexec] Unable to run bstrap_proxy on node1 (pid 7)\n"),
            "0 of 2 nodes answered: mpirun can't start on node1: does the head reach it over SSH?",
        ),
        (
            Head(1, _GOOD, "Segmentation fault\n"),
            "1 of 2 nodes answered: exit code 1: Segmentation fault",
        ),
        (Head(0, _GOOD), "1 of 2 nodes answered"),
        (Head(7, ""), "0 of 2 nodes answered: exit code 7: no output"),
    ],
)
def test_anything_else_is_an_error_with_its_cause(head: Head, error: str) -> None:
    assert probe_launcher(head, NODES).error == error


@pytest.mark.parametrize(
    ("torch", "expected"), [("", "error No module named"), ("x = 1", "error ")]
)
def test_the_program_of_the_ranks_reports_torch_and_exits_with_0(
    tmp_path: Path, torch: str, expected: str
) -> None:
    if torch:
        (tmp_path / "torch.py").write_text("raise OSError('two\\nlines')")
    program = shlex.split(launcher_command(1).partition(" -c ")[2])[0]

    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.append({str(tmp_path)!r}); {program}",
        ],
        env={"PMI_RANK": "3"},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"hello 3 {expected}")
    assert not torch or done.stdout == "hello 3 error two lines\n"


def test_mpirun_gets_a_deadline_and_a_jobs_environment() -> None:
    command = launcher_command(3)

    assert "timeout -k 5 120 /opt/spr-cluster/venv/bin/mpirun" in command
    assert "export I_MPI_ROOT=/opt/spr-cluster/venv" in command
