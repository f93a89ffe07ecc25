"""The state folder: snapshots survive crashes, locks do not."""

from __future__ import annotations

import os
import pickle
from importlib.metadata import version
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


def test_a_folder_of_others_or_that_they_can_enter_and_a_link_are_refused(
    strange: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in (0o770, 0o710, 0o702):
        strange.root.chmod(mode)
        check_refused(strange, f"mode {mode:o}")
    strange.root.chmod(0o700)
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


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"format": 1}), None])
def test_a_damaged_snapshot_is_an_error_with_a_remedy_and_is_not_unpickled(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    save_snapshot(folder.snapshot, {})
    cut_off = folder.snapshot.read_bytes()[:-1]
    folder.snapshot.write_bytes(cut_off if content is None else content)
    monkeypatch.setattr(pickle, "load", lambda _: pytest.fail("unpickled"))
    with pytest.raises(CloudError, match=r"can't be read: .*damaged") as caught:
        load_snapshot(folder.snapshot)
    assert "local reset" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (("99.0", 8), r"written by moto 99\.0 in format 8"),
        ((version("moto"), 1), "in format 1, this is .* with format 8"),
    ],
)
def test_a_snapshot_of_another_release_is_not_loaded(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, saved: tuple[str, int], message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(state, "snapshot_release", lambda: saved)
        save_snapshot(folder.snapshot, {})
    with pytest.raises(CloudError, match=message):
        load_snapshot(folder.snapshot)


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
