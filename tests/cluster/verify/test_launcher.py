"""The launcher check: what counts as success, and the failure otherwise."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.verify.launcher import check_launcher, launcher_command
from provision.host import Result
from tests.fakes import FakeHost

_GOOD = "hello 0 torch 2.13.0+cpu\n"


class Head(FakeHost):
    """A head whose mpirun returns a fixed result."""

    def __init__(self, code: int, stdout: str, stderr: str = "") -> None:
        super().__init__("node0", [])
        self.done = Result(code, stdout, stderr)

    def run(self, command: str, **options: object) -> Result:
        mpirun = "/opt/spr-cluster/venv/bin/mpirun -f /home/ubuntu/hosts -n 2 -ppn 1"
        assert f"timeout -k 5 120 {mpirun}" in command
        assert "export I_MPI_ROOT=/opt/spr-cluster/venv" in command, "as a job starts it"
        assert options["check"] is False
        return self.done


@pytest.mark.parametrize(
    ("head", "node", "found"),
    [
        (Head(0, f"hello 1 torch 2.13.0+cpu\n{_GOOD}"), "", "a rank on each of 2 nodes, torch 2.13.0+cpu"),
        (Head(0, f"{_GOOD}hello 1 error libc10.so: no\n"), "node1", "no torch: libc10.so: no"),
        (Head(124, _GOOD), "cluster", "mpirun did not finish within 120 s"),
        (
            Head(255, "", "[mpiexec] Unable to run bstrap_proxy on node1 (pid 7)\n"),
            "cluster",
            "0 of 2 nodes answered: mpirun can't start on node1: does the head reach it over SSH?",
        ),
        (Head(1, _GOOD, "Killed\n"), "cluster", "1 of 2 nodes answered: exit code 1: Killed"),
        (Head(0, _GOOD), "cluster", "1 of 2 nodes answered"),
        (Head(7, ""), "cluster", "0 of 2 nodes answered: exit code 7: no output"),
    ],
)  # fmt: skip
def test_mpirun_must_start_a_rank_with_torch_on_each_node(
    head: Head, node: str, found: str
) -> None:
    (result,) = check_launcher(head, ["node0", "node1"])

    assert (result.node, result.found) == (node or "cluster", found)
    assert result.verdict == ("fail" if node else "ok")
    assert bool(result.remedy) is bool(node)


@pytest.mark.parametrize(
    ("torch", "expected"), [("", "error No module named"), ("x = 1", "error two lines\n")]
)
def test_the_program_of_the_ranks_reports_torch_and_exits_with_0(
    tmp_path: Path, torch: str, expected: str
) -> None:
    if torch:
        (tmp_path / "torch.py").write_text("raise OSError('two\\nlines')")
    program = shlex.split(launcher_command(1).partition(" -c ")[2])[0]
    program = f"import sys; sys.path.append({str(tmp_path)!r}); {program}"

    argv = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(argv, env={"PMI_RANK": "3"}, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"hello 3 {expected}")
