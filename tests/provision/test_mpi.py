"""What mpirun's failures mean."""

from __future__ import annotations

import pytest

from provision.install import explain_mpi_failure

_RANK = "=   RANK 1 PID 4973 RUNNING AT node1"
_KILLED = "=   KILLED BY SIGNAL: 9 (Killed)"
_NO_PROXY = "[mpiexec@a] Error: Unable to run bstrap_proxy on node2 (pid 7)"
_NOT_BOUND = "[proxy:0:1@ip-172-31-0-11] HYD_spawn (../hydra_spawn.c:132): unable to bind process"
_NO_LIBRARY = "python: error: libmpi.so.12: cannot open shared object file: No such"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([_NO_PROXY], "mpirun can't start on node2: does the head reach it over SSH?"),
        ([_NO_LIBRARY], _NO_LIBRARY),
        (
            [_NOT_BOUND],
            "mpirun can't pin a rank on ip-172-31-0-11: have its usable CPUs changed?",
        ),
        ([_KILLED], "a rank was killed by signal 9 (Killed)"),
        ([_RANK, _KILLED], "rank 1 on node1 was killed by signal 9 (Killed)"),
        (["all is well"], None),
    ],
)
def test_the_cause_that_mpirun_names_is_reported(lines: list[str], told: str | None) -> None:
    assert explain_mpi_failure(["first", *lines]) == told
