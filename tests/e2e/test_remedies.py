"""Faults of nodes that a user can cause, and the remedy that the tool prints for each: it cures them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TWO, LiveCluster, ssh_two
from tests.e2e.test_interrupted import read_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_TALK = "sed -i '1i echo welcome' ~/.bashrc; sudo usermod --shell /bin/dash ubuntu"
_QUIET = "sed -i 1d ~/.bashrc; sudo usermod --shell /bin/bash ubuntu"


@pytest.fixture
def talking(two: LiveCluster) -> Iterator[LiveCluster]:
    """Nodes whose ``~/.bashrc`` prints, and whose login shell is not bash."""
    for node in two.names:
        ssh_two(two, node, _TALK)
    yield two
    for node in two.names:
        ssh_two(two, node, _QUIET)


def test_repair_starts_a_queue_daemon_again_as_the_waiting_job_says(
    talking: LiveCluster, tmp_path: Path
) -> None:
    cli, given = talking.cli, ("--folder", "none", "--results", str(tmp_path / "results"))
    ssh_two(talking, "node1", "sudo systemctl stop slurmd")
    down = "for i in $(seq 100); do sinfo -hN -n node1 -o %T | grep down && exit; sleep 0.5; done"
    assert "down" in ssh_two(talking, "node0", down)
    config = cli.home / "two" / "ssh_config"
    moved = config.read_text().replace(f"{cli.home}/", "/another machine/")
    assert "/another machine/" in moved
    config.write_text(moved)

    job = cli.start("run", *TWO, *given, "--", "hostname")
    read_until(job, "`spr-cluster repair` restarts or replaces it")
    assert "node1 not in the queue" in cli.run("repair", *TWO, "--yes").stderr
    rest, _ = job.communicate(timeout=120)

    assert job.returncode == 0, rest
    assert set(talking.hostnames) <= set(rest.split()), rest
    (tmp_path / "data").write_text("5\n")
    cli.run("cp", *TWO, str(tmp_path / "data"), "node1:")
    assert ssh_two(talking, "node1", "cat data; rm data") == "5\n"
