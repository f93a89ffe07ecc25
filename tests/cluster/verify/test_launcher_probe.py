"""The launcher's proof: what counts as one, and what is said where there is none."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.verify.launcher_probe import hello_command, say_hello
from provision.host import Result
from tests.fakes import FakeHost

NODES = ["node0", "node1"]


class Head(FakeHost):
    """A head on which mpirun ends in a certain way."""

    def __init__(self, code: int, stdout: str, stderr: str = "") -> None:
        super().__init__("node0", [])
        self.done = Result(code, stdout, stderr)

    def run(self, command: str, **options: object) -> Result:
        assert "mpirun -f /home/ubuntu/hosts -n 2 -ppn 1" in command
        assert options["check"] is False
        return self.done


_GOOD = "hello 0 torch 2.13.0+cpu\n"


def test_a_rank_on_every_node_is_the_proof() -> None:
    hello = say_hello(Head(0, f"hello 1 torch 2.13.0+cpu\n{_GOOD}"), NODES)

    assert (hello.error, hello.errors) == (None, {})
    assert hello.torch == {"node0": "2.13.0+cpu", "node1": "2.13.0+cpu"}


def test_a_node_without_torch_is_named() -> None:
    hello = say_hello(Head(0, f"{_GOOD}hello 1 error libc10.so: cannot open\n"), NODES)

    assert hello.torch == {"node0": "2.13.0+cpu"}
    assert hello.errors == {"node1": "libc10.so: cannot open"}
    assert hello.error is None


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (Head(124, _GOOD), "mpirun did not end within 120 s"),
        (
            Head(255, "", "[mpiexec] Unable to run bstrap_proxy on node1 (pid 7)\n"),
            "0 of 2 nodes spoke: mpirun can't start on node1: does the head reach it over SSH?",
        ),
        (
            Head(1, _GOOD, "Segmentation fault\n"),
            "1 of 2 nodes spoke: exit code 1: Segmentation fault",
        ),
        (Head(0, _GOOD), "1 of 2 nodes spoke"),
        (Head(7, ""), "0 of 2 nodes spoke: exit code 7: no output"),
    ],
)
def test_anything_less_is_an_error_with_its_cause(head: Head, error: str) -> None:
    assert say_hello(head, NODES).error == error


@pytest.mark.parametrize(("torch", "told"), [("", "error No module named"), ("x = 1", "error ")])
def test_the_ranks_program_tells_of_torch_and_ends_well(
    tmp_path: Path, torch: str, told: str
) -> None:
    if torch:
        (tmp_path / "torch.py").write_text("raise OSError('two\\nlines')")
    program = shlex.split(hello_command(1).partition(" -c ")[2])[0]

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
    assert done.stdout.startswith(f"hello 3 {told}")
    assert not torch or done.stdout == "hello 3 error two lines\n"


def test_mpirun_gets_a_deadline_and_a_jobs_environment() -> None:
    command = hello_command(3)

    assert "timeout -k 5 120 /opt/spr-cluster/venv/bin/mpirun" in command
    assert "export I_MPI_ROOT=/opt/spr-cluster/venv" in command
