"""What is kept on this machine: a key, host keys, an ssh configuration, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from cluster.local_files import ClusterFiles, cluster_names, home, machine_id, remembered_cloud
from infra.errors import UsageError
from infra.files import write_private


@pytest.mark.parametrize("name", ["..", "/etc", "", "*", ".local-cloud", "a/b", "a\n", "ä"])
def test_no_name_leads_out_of_the_home_folder(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        ClusterFiles.of(name)


def test_the_home_folder_is_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh reads the paths in its configuration anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPR_CLUSTER_HOME", "state")
    assert ClusterFiles.of("bert").key == tmp_path / "state/bert/id_ed25519"


def test_the_cloud_is_in_the_first_line_of_the_ssh_configuration() -> None:
    files = ClusterFiles.of("bert")
    for foreign in (None, "", "Host node0\n", "# spr-cluster lives in: aws\n", "\xff"):
        if foreign is not None:
            write_private(files.ssh_config, foreign)
        assert remembered_cloud("bert") is None
    files.ssh_config.unlink()

    files.remember("aws", "eu-west-1")
    assert remembered_cloud("bert") == ("aws", "eu-west-1")
    files.remember("aws", "us-east-1")  # without anything new to say it stays
    assert remembered_cloud("bert") == ("aws", "eu-west-1")
    files.remember("aws", "us-east-1", "Host node0\n")

    assert remembered_cloud("bert") == ("aws", "us-east-1")
    assert files.ssh_config.read_text().endswith("\nHost node0\n")
    assert files.ssh_config.stat().st_mode & 0o777 == 0o600
    assert files.folder.stat().st_mode & 0o777 == 0o700


def test_clusters_are_listed_by_their_embedded_cloud() -> None:
    assert cluster_names() == []
    for name, folder in (("zeta", "/a b"), ("bert", "/a b"), ("other", "/a"), ("bought", "")):
        ClusterFiles.of(name).remember("local" if folder else "aws", "us-east-1", folder=folder)

    assert cluster_names("/a b") == ["bert", "zeta"]
    assert cluster_names("/a") == ["other"]
    assert cluster_names() == ["bert", "bought", "other", "zeta"]


def test_remove_deletes_the_files_and_can_keep_the_cloud() -> None:
    files = ClusterFiles.of("bert")
    write_private(files.key, "key")
    write_private(files.known_hosts, "hosts")
    files.remember("aws", "us-east-1")

    files.remove(keep_cloud=True)
    assert [path.name for path in files.folder.iterdir()] == ["ssh_config"]
    assert remembered_cloud("bert") == ("aws", "us-east-1")
    files.remove()
    files.remove()
    assert not files.folder.exists()


def test_one_command_at_a_time_changes_a_cluster() -> None:
    files = ClusterFiles.of("bert")
    home().mkdir()
    lock = str(home() / ".bert.lock")
    hold = ["flock", "--no-fork", lock, "sh", "-c", "echo held; exec sleep 60"]
    with subprocess.Popen(hold, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with ClusterFiles.of("zeta").lock():
            pass
        with pytest.raises(UsageError) as caught, files.lock():
            raise AssertionError("two at a time")
        assert "Ctrl-C" in str(caught.value)
        # The kernel frees the lock of a process that is killed.
        other.kill()
        other.wait(timeout=30)
    with files.lock():
        assert not files.folder.exists(), "a lock must not look like a cluster"


def test_the_command_that_uses_a_cluster_is_known() -> None:
    files = ClusterFiles.of("bert")
    assert files.user() is None
    with files.lock("up"):
        assert files.user() == ("up", os.getpid())
        assert files.user() == ("up", os.getpid()), "a look frees no lock"
        with pytest.raises(UsageError, match=f"PID {os.getpid()}"), files.lock():
            raise AssertionError("a look frees no lock")
    assert files.user() is None


def test_a_process_that_was_killed_uses_no_cluster() -> None:
    files = ClusterFiles.of("bert")
    with subprocess.Popen(["true"]) as ended:
        ended.wait(timeout=30)
    with files.lock():
        pass
    for left in (f"{ended.pid} up", f"{os.getpid()} up", "", "x"):
        files.folder.with_name(".bert.lock").write_text(left)
        assert files.user() is None


def test_a_machine_keeps_its_id_or_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine_id()
    kept = home() / ".machine-id"
    assert first == kept.read_text() == machine_id()
    kept.write_text("")
    assert machine_id() == kept.read_text() != ""
    assert [path.name for path in home().iterdir()] == [".machine-id"]
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(kept))
    assert machine_id() == socket.gethostname(), "nothing can be written there"
