"""What mpirun's failures mean."""

from __future__ import annotations

import pytest

from provision.install import explain_mpi_failure


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "[mpiexec@a] Error: Unable to run bstrap_proxy on node2 (pid 7)",
            "mpirun can't start on node2",
        ),
        ("python: error: libmpi.so.12: cannot open shared object file: No such", "libmpi.so.12"),
        (
            "[proxy:0:1@ip-172-31-0-11] HYD_spawn (../hydra_spawn.c:132): unable to bind process",
            "mpirun can't pin a rank on ip-172-31-0-11",
        ),
        ("=   KILLED BY SIGNAL: 9 (Killed)", "a rank was killed by signal 9 (Killed)"),
        ("all is well", None),
    ],
)
def test_the_cause_that_mpirun_names_is_reported(line: str, told: str | None) -> None:
    explained = explain_mpi_failure(["first", line])
    assert explained is None if told is None else told in str(explained)


def test_a_killed_rank_is_named_with_its_node() -> None:
    lines = [
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
        "=   RANK 1 PID 4973 RUNNING AT node1",
        "=   KILLED BY SIGNAL: 9 (Killed)",
    ]
    assert explain_mpi_failure(lines) == "rank 1 on node1 was killed by signal 9 (Killed)"
