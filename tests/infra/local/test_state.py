"""The state folder: snapshots survive crashes, locks do not."""

from __future__ import annotations

import fcntl
import pickle
from pathlib import Path

import pytest

from infra.errors import CloudError
from infra.local import state
from infra.local.state import ServerAddress, StateFolder, load_snapshot, save_snapshot
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


def test_a_snapshot_is_saved_and_loaded(folder: StateFolder) -> None:
    assert load_snapshot(folder) == {}
    save_snapshot(folder, {"us-east-1": ["state"]})
    assert load_snapshot(folder) == {"us-east-1": ["state"]}
    assert [p.name for p in folder.root.iterdir()] == ["ec2.pickle"]


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"format": 1})])
def test_a_broken_snapshot_is_an_error_with_a_remedy(folder: StateFolder, content: bytes) -> None:
    folder.snapshot.write_bytes(content)
    with pytest.raises(CloudError, match="can't be read") as caught:
        load_snapshot(folder)
    assert "local reset" in str(caught.value.hint)


def test_a_snapshot_of_another_moto_is_not_loaded(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_snapshot(folder, {})
    monkeypatch.setattr(state, "version", lambda _: "99.0")
    with pytest.raises(CloudError, match=r"this is 99\.0"):
        load_snapshot(folder)


def test_a_snapshot_of_an_older_release_is_not_loaded(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_FORMAT", 1)
    save_snapshot(folder, {})
    monkeypatch.undo()
    with pytest.raises(CloudError, match=r"in format 1, this is .* with format 3") as caught:
        load_snapshot(folder)
    assert "local reset" in str(caught.value.hint)


def test_a_server_is_alive_while_it_holds_its_lock(folder: StateFolder) -> None:
    assert not folder.is_server_alive()
    with folder.server_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder.is_server_alive()
    assert not folder.is_server_alive()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"pid": "x", "port": 1}'])
def test_a_broken_address_is_ignored(folder: StateFolder, content: str) -> None:
    folder.server_file.write_text(content)
    assert ServerAddress.read(folder) is None


def test_an_address_is_written_and_read(folder: StateFolder) -> None:
    ServerAddress(7, 4321).write(folder)
    assert ServerAddress.read(folder) == ServerAddress(7, 4321)
    assert ServerAddress(7, 4321).url == "http://127.0.0.1:4321"
