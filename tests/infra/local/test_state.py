"""The state folder: snapshots survive crashes, locks do not."""

from __future__ import annotations

import fcntl
import os
import pickle
from pathlib import Path

import pytest

from infra.errors import CloudError, UsageError
from infra.local import state
from infra.local.state import (
    ServerAddress,
    StateFolder,
    load_snapshot,
    machine_lock,
    save_snapshot,
)
from jobs.__main__ import main
from tests.infra.local.fakes import state_folder


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    folder = state_folder(tmp_path)
    folder.create()
    return folder


def test_only_the_user_can_read_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path))
    folder = StateFolder.of_user()
    folder.create()
    assert folder.root == tmp_path / ".local-cloud"
    assert folder.root.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "other"))
    assert StateFolder.of_user().key != folder.key


def test_credentials_are_made_once_for_the_user_alone(folder: StateFolder) -> None:
    made = folder.credentials()

    assert folder.credentials() == made
    assert len(set(made)) == 2
    assert len(made[1]) >= 32
    assert folder.credentials_file.stat().st_mode & 0o777 == 0o600
    other = StateFolder(folder.root.with_name("other"))
    other.create()
    assert other.credentials() != made


@pytest.fixture
def strange(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    """The folder that the environment names; its snapshot is code that leaves a trace."""
    folder.snapshot.write_bytes(pickle.dumps(Trap(folder.root.parent / "trace")))
    monkeypatch.setenv("SPR_CLUSTER_LOCAL_CLOUD", str(folder.root))
    return folder


class Trap:
    """Leaves a trace where it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def check_refused(folder: StateFolder, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        StateFolder.of_user()
    assert "SPR_CLUSTER_LOCAL_CLOUD" in str(caught.value.hint)
    with pytest.raises(UsageError, match=reason):
        load_snapshot(folder.snapshot)
    assert not (folder.root.parent / "trace").exists()
    assert main(["local", "reset"]) == 2
    assert folder.snapshot.exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o710, 0o702])
def test_a_folder_that_others_can_enter_is_refused(strange: StateFolder, mode: int) -> None:
    strange.root.chmod(mode)

    check_refused(strange, f"mode {mode:o}")


def test_another_users_folder_and_a_link_are_refused(
    strange: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        own = os.geteuid()
        patch.setattr(os, "geteuid", lambda: own + 1)
        check_refused(strange, "belongs to another user")

    link = strange.root.with_name("link")
    link.symlink_to(strange.root)
    monkeypatch.setenv("SPR_CLUSTER_LOCAL_CLOUD", str(link))
    check_refused(StateFolder(link), "symbolic link")


def test_a_snapshot_is_saved_and_loaded(folder: StateFolder) -> None:
    assert load_snapshot(folder.snapshot) == {}
    save_snapshot(folder.snapshot, {"us-east-1": ["state"]})
    assert load_snapshot(folder.snapshot) == {"us-east-1": ["state"]}
    assert [p.name for p in folder.root.iterdir()] == ["ec2.pickle"]


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"format": 1})])
def test_a_broken_snapshot_is_an_error_with_a_remedy(folder: StateFolder, content: bytes) -> None:
    folder.snapshot.write_bytes(content)
    with pytest.raises(CloudError, match="can't be read") as caught:
        load_snapshot(folder.snapshot)
    assert "local reset" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (("99.0", 7), r"written by moto 99\.0 in format 7"),
        (("5.0", 1), r"in format 1, this is .* with format 8"),
    ],
)
def test_a_snapshot_of_another_release_is_not_loaded(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, saved: tuple[str, int], message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(state, "snapshot_release", lambda: saved)
        save_snapshot(folder.snapshot, {})
    with pytest.raises(CloudError, match=message) as caught:
        load_snapshot(folder.snapshot)
    assert "local reset" in str(caught.value.hint)


def test_a_server_is_alive_while_it_holds_its_lock(folder: StateFolder) -> None:
    assert not folder.is_server_alive()
    with folder.server_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder.is_server_alive()
    assert not folder.is_server_alive()


def test_the_locks_of_a_machine_follow_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with machine_lock("base"):
        assert (tmp_path / ".spr-cluster").stat().st_mode & 0o777 == 0o700
    (tmp_path / ".spr-cluster/network.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic"), machine_lock("network"):
        pass
    assert not (tmp_path / "victim").exists()


def test_an_address_is_written_and_read(folder: StateFolder) -> None:
    for content in ("", "{}", "[]", '{"pid": "x", "port": 1}'):
        folder.server_file.write_text(content)
        assert ServerAddress.read(folder) is None
    ServerAddress(7, 4321).write(folder)
    assert ServerAddress.read(folder) == ServerAddress(7, 4321)
    assert ServerAddress(7, 4321).url == "http://127.0.0.1:4321"


def test_a_damaged_snapshot_is_not_unpickled(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_snapshot(folder.snapshot, {})
    monkeypatch.setattr(pickle, "load", lambda _: pytest.fail("unpickled"))
    folder.snapshot.write_bytes(folder.snapshot.read_bytes()[:-1])
    with pytest.raises(CloudError, match="damaged, or from another release"):
        load_snapshot(folder.snapshot)
