"""The launcher's proof: what counts as one, and what is said where there is none."""

from __future__ import annotations

import pytest

from jobs.hello import hello_command, say_hello
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


def test_a_rank_on_every_node_is_the_proof() -> None:
    hello = say_hello(Head(0, "hello ip-10 2.13.0+cpu\nhello ip-11 2.13.0+cpu\n"), NODES)

    assert hello.error is None
    assert hello.said == {"ip-10": "2.13.0+cpu", "ip-11": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (Head(124, "hello ip-10 2.13.0\n"), "mpirun did not end within 120 s"),
        (
            Head(255, "", "[mpiexec] Unable to run bstrap_proxy on node1 (pid 7)\n"),
            "0 of 2 nodes spoke: mpirun can't start on node1: does the head reach it over SSH?",
        ),
        (
            Head(1, "hello ip-10 2.13.0\n", "ModuleNotFoundError: No module named 'torch'\n"),
            "1 of 2 nodes spoke: exit code 1: ModuleNotFoundError: No module named 'torch'",
        ),
        (Head(0, "hello ip-10 2.13.0\n"), "1 of 2 nodes spoke"),
        (Head(7, ""), "0 of 2 nodes spoke: exit code 7: no output"),
    ],
)
def test_anything_less_is_an_error_with_its_cause(head: Head, error: str) -> None:
    assert say_hello(head, NODES).error == error


def test_mpirun_gets_a_deadline_and_a_jobs_environment() -> None:
    command = hello_command(3)

    assert "timeout -k 5 120 /opt/spr-cluster/venv/bin/mpirun" in command
    assert "export I_MPI_ROOT=/opt/spr-cluster/venv" in command
