"""The server's process: what it does besides answering calls."""

from __future__ import annotations

import errno
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from infra.local.api import server
from infra.wait import wait_until
from tests.infra.local.fakes import FakeCloud, FakePodman

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_watch_outlives_a_full_disk_and_saves_afterward(
    fake_cloud: FakeCloud, podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_WATCH_S", 0.01)
    application, folder = fake_cloud.application, fake_cloud.folder
    (instance_id,) = fake_cloud.run(InstanceInitiatedShutdownBehavior="terminate")
    fake_cloud.clients.s3.create_bucket(Bucket="team")
    saves = Mock(side_effect=FULL)
    with monkeypatch.context() as patch:
        for module in ("application", "bucket_server"):
            patch.setattr(f"infra.local.api.{module}.save_snapshot", saves)
        threading.Thread(target=server.watch, args=(application,), daemon=True).start()
        podman.end(fake_cloud.container(instance_id), 130)
        wait_until("saves", lambda: saves.call_count > 3 or None, deadline_s=60, every_s=0.01)
        assert not folder.buckets.exists()
    wait_until("the buckets", lambda: folder.buckets.exists() or None, deadline_s=60, every_s=0.01)
    with application.lock, fake_cloud.endpoint.serve(folder, podman) as resumed:
        assert resumed.state_of(instance_id) == "terminated"


def test_a_server_whose_buckets_are_not_saved_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    codes: list[int] = []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(server, "watch", lambda _: None)
    lock, save = threading.Lock(), Mock(side_effect=[FULL, None])
    buckets = SimpleNamespace(lock=threading.RLock(), save=save)
    application: Any = SimpleNamespace(lock=lock, buckets=buckets)
    server.serve(Mock(), application)
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert (codes, lock.locked()) == ([], False)
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert codes == [0]
