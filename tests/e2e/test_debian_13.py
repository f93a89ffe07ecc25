"""Jobs on Debian 13, whose Slurm, systemd, and sessions are like those of Ubuntu 24.04 on AWS.

Its Python is another one, and PyPI's torch for that brings gigabytes for GPUs: an empty one stands in. With
`--base debian13`, all end-to-end tests run there with the real one.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.wait import wait_until
from tests.e2e.conftest import CommandLine, LiveCluster, podman
from tests.provision.package_index import make_wheel

# Another base image, and an installation from the packages: in `make test-full`.
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1200)]
_TORCH = "2.13.0+cpu"


@pytest.fixture(scope="module")
def pair(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    cli = CommandLine(tmp_path_factory.mktemp("debian13"), programs)
    wheels = tmp_path_factory.mktemp("wheels")
    wheels.chmod(0o755)  # the node's user reads it
    torch = wheels / f"torch-{_TORCH}-py3-none-any.whl"
    torch.write_bytes(make_wheel("torch", _TORCH))
    with zipfile.ZipFile(torch, "a") as archive:
        archive.writestr("torch/__init__.py", f'__version__ = "{_TORCH}"\n')
    cli.run("local", "reset", "--keep-base", "--base", "debian13")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", f"{os.environ.get('PIP_FIND_LINKS', '')} {wheels}")
        try:
            # Without an image made before: the head is installed, and the worker is its copy.
            yield LiveCluster(cli, cli.json("up", "--nodes", "2", "--cloud", "local"))
        finally:
            cli.run("local", "reset", "--keep-base", check=None)


def test_a_job_runs_on_all_nodes(pair: LiveCluster, tmp_path: Path) -> None:
    found = pair.cli.ssh("node1", ". /etc/os-release; echo $VERSION_CODENAME; sinfo --version")
    assert found.split()[:2] == ["trixie", "slurm-wlm"]
    argv = ("run", "--folder=none", f"--results={tmp_path}", "--", "sh", "-c")
    said = pair.cli.run(*argv, "echo rank $RANK of $WORLD_SIZE on $(hostname)").stderr
    for rank, host in enumerate(pair.hostnames):
        assert f"rank {rank} of 2 on {host}" in said


def test_a_copy_of_the_head_is_its_own_machine(pair: LiveCluster) -> None:
    identity = "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub"
    found = {pair.cli.ssh(name, identity) for name in pair.names}
    assert len(found) == 2
    # The head has its own back after the image was made of it.
    assert all(re.match(r"[0-9a-f]{32}\nssh-ed25519 ", text) for text in found)


def test_shared_memory_outlives_the_last_session(pair: LiveCluster) -> None:
    def ask(command: str) -> str:
        """Run a command as root without a session."""
        return podman("exec", pair.container("node1"), "sh", "-c", command).strip()

    def read_state() -> str | None:
        state = ask("loginctl show-user ubuntu --property=State --value 2>&1 || true")
        return None if state in ("active", "closing") else state

    pair.cli.ssh("node1", "echo kept > /dev/shm/of-a-job")
    # With cgroups version 1, systemd in a container does not see a session's last process end.
    ask("systemctl stop 'session-*.scope'")
    # logind removes a user's shared memory 10 s after the last session.
    wait_until("end of the user's sessions", read_state, deadline_s=30, every_s=0.5)
    assert ask("cat /dev/shm/of-a-job || true") == "kept"
