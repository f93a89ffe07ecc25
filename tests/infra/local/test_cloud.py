"""Opening, stopping, and removing the embedded cloud, without podman."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from cluster.cli.local import ResetRequest, run_reset
from cluster.local_files import ClusterFiles, cluster_names
from infra.errors import CloudError, UsageError
from infra.local import cloud
from infra.local.machines.base_image import BaseImage
from infra.local.machines.podman import CLOUD_LABEL, ContainerSpec
from infra.local.state import ServerAddress, StateFolder
from jobs.__main__ import main
from tests.infra.local.fakes import BASE, Endpoint, FakePodman, state_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path))
    folder = state_folder(tmp_path)
    folder.create()
    return folder


@pytest.fixture
def installed_podman(monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """The podman that open, stop, and reset use."""
    podman = FakePodman()
    monkeypatch.setattr(cloud, "open_podman", lambda _: podman)
    monkeypatch.setattr(cloud, "_has_podman", lambda: True)
    monkeypatch.setattr(cloud, "check_prerequisites", lambda: None)
    monkeypatch.setattr(cloud, "check_root", lambda: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(cloud, "ensure_base_image", lambda *_: BASE)
    return podman


def add_node(podman: FakePodman, key: str, image: str = BASE.reference) -> None:
    labels = {CLOUD_LABEL: key}
    name = f"spr-{key}-i-1"
    podman.run(ContainerSpec(name, image, "h", f"spr-{key}", "172.31.0.4", (0,), labels))
    podman.create_network(f"spr-{key}", "172.31.0.0/16", "172.31.0.1", labels)


@pytest.fixture
def stubborn_server(folder: StateFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like this cloud's server and ignores SIGTERM."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, "infra.local.api.server", str(folder.root), "us-east-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def test_a_private_folder_of_packages_is_refused_before_anything_is_started(
    folder: StateFolder,
    installed_podman: FakePodman,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "wheels").mkdir(0o700)
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path}/wheels")
    monkeypatch.setattr(cloud, "ensure_base_image", lambda *_: pytest.fail("something was started"))
    with pytest.raises(UsageError, match=f"pip's source {tmp_path}/wheels"):
        cloud.open_local_cloud("us-east-1")


def test_reset_removes_this_cloud_and_no_other(
    folder: StateFolder, installed_podman: FakePodman
) -> None:
    (folder.images / "ami-1" / "etc").mkdir(parents=True)
    installed_podman.image_names.add("unrelated:1")
    add_node(installed_podman, folder.key)
    assert cloud.status().resources.images == ("ami-1",)
    add_node(installed_podman, "other")
    cloud.reset(keep_base=False)

    assert list(installed_podman.state) == ["spr-other-i-1"]
    assert [n.name for n in installed_podman.network_list] == ["spr-other"]
    # The other cloud still needs the base image.
    assert installed_podman.image_names == {BASE.reference, "unrelated:1"}
    assert not folder.root.exists()


def test_the_last_cloud_removes_the_base_image_unless_it_is_kept(
    folder: StateFolder, installed_podman: FakePodman
) -> None:
    for keep_base, left in ((True, {BASE.reference}), (False, set())):
        add_node(installed_podman, folder.key)
        cloud.reset(keep_base=keep_base)
        assert installed_podman.image_names == left
        assert bool(installed_podman.pruned) is not keep_base


def test_the_next_cloud_starts_from_the_base_that_reset_was_given(
    folder: StateFolder, installed_podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ensure(_podman: object, _progress: object, base: str) -> BaseImage:
        raise CloudError(f"built {base}")

    monkeypatch.setattr(cloud, "ensure_base_image", ensure)
    for base, options in (("debian13", {"base": "debian13"}), ("ubuntu", {})):
        cloud.reset(keep_base=True, **options)
        with pytest.raises(CloudError, match=f"^built {base}$"):
            cloud.open_local_cloud("us-east-1")


def test_reset_works_twice_and_on_a_broken_folder_whose_server_it_finds_by_its_command_line(
    folder: StateFolder, installed_podman: FakePodman, stubborn_server: subprocess.Popen[bytes]
) -> None:
    assert cloud.status().running
    folder.snapshot.write_bytes(b"broken")
    folder.server_file.write_text("broken")
    for _ in range(2):
        cloud.reset(keep_base=False)
        assert not folder.root.exists()
    assert stubborn_server.wait(50) == -9
    found = cloud.status()
    assert not found.running
    assert found.resources == cloud.LocalResources()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs chroot")
def test_a_server_of_a_container_is_not_this_clouds(
    folder: StateFolder, installed_podman: FakePodman, tmp_path: Path
) -> None:
    code = "import os, sys; os.chroot(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path), "infra.local.api.server"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, str(folder.root)], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert not cloud.status().running


def test_stop_stops_and_keeps_everything(folder: StateFolder, installed_podman: FakePodman) -> None:
    add_node(installed_podman, folder.key)
    add_node(installed_podman, "other")
    for _ in range(2):
        cloud.stop()
    assert folder.suspended.read_text() == f"spr-{folder.key}-i-1\n"
    running = {name: c.running for name, c in installed_podman.state.items()}
    assert running == {f"spr-{folder.key}-i-1": False, "spr-other-i-1": True}
    found = cloud.status().resources
    assert [i.state for i in found.instances] == ["stopped"]
    assert found.networks == {f"spr-{folder.key}": "172.31.0.0/16"}

    installed_podman.start(f"spr-{folder.key}-i-1")
    shutil.rmtree(folder.root)
    cloud.stop()
    assert not installed_podman.state[f"spr-{folder.key}-i-1"].running


def test_a_running_server_is_reused(
    folder: StateFolder,
    installed_podman: FakePodman,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cloud, "_server_pids", lambda _: [os.getpid()])
    monkeypatch.setattr(cloud, "recipe_hash", lambda _: BASE.reference.rpartition(":")[2])
    with endpoint.serve(folder, installed_podman):
        ServerAddress(os.getpid(), int(endpoint.url.rsplit(":", 1)[1])).write(folder)
        opened = cloud.open_local_cloud("us-east-1")
        assert opened.endpoint_url == endpoint.url
        assert opened.caller_cidr() == "172.31.0.1/32"
        assert not opened.billed
        # Another region has its own network.
        assert cloud.open_local_cloud("eu-west-1").caller_cidr() == "172.30.0.1/32"
        with pytest.raises(UsageError, match="unknown region 'nowhere-1'"):
            cloud.open_local_cloud("nowhere-1")
        installed_podman.refuse = "network"
        with pytest.raises(CloudError, match=r"can't open eu-west-2: .*: podman network: refused"):
            cloud.open_local_cloud("eu-west-2")
        assert cloud.status().pid == os.getpid()


@pytest.mark.parametrize("obstacle", ["", "instance", "snapshot", "base"])
def test_a_server_of_another_base_is_restarted_if_that_disturbs_nothing(
    folder: StateFolder,
    installed_podman: FakePodman,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    obstacle: str,
) -> None:
    ended: list[signal.Signals] = []

    def end(_: StateFolder, how: signal.Signals) -> None:
        ended.append(how)
        monkeypatch.setattr(cloud, "recipe_hash", lambda _: BASE.reference.rpartition(":")[2])

    monkeypatch.setattr(cloud, "_end_server", end)
    monkeypatch.setattr(cloud, "_server_pids", lambda _: [os.getpid()])
    if obstacle == "snapshot":
        monkeypatch.setattr(cloud, "snapshot_release", lambda: ("0.1", 6))
    if obstacle == "instance":
        add_node(installed_podman, folder.key)
    if obstacle == "base":
        failing = Mock(side_effect=CloudError("offline"))
        monkeypatch.setattr(cloud, "ensure_base_image", failing)
    with endpoint.serve(folder, installed_podman):
        ServerAddress(os.getpid(), int(endpoint.url.rsplit(":", 1)[1])).write(folder)
        opened = cloud.open_local_cloud("us-east-1")
    # Images of one base must not pass for those of another.
    assert opened.base == BASE.reference.rpartition(":")[2]
    assert ended == ([] if obstacle else [signal.SIGTERM])


def test_reset_forgets_clusters_with_the_folder_but_not_before_podman_removed_them(
    folder: StateFolder,
    installed_podman: FakePodman,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_node(installed_podman, folder.key)
    folder.snapshot.touch()
    files = ClusterFiles.of("mine")
    files.remember("local", "us-east-1", folder=str(folder.root))
    installed_podman.refuse = "rm"
    assert main(["local", "reset"]) == 1
    said = capsys.readouterr().err
    assert "podman rm: refused" in said
    assert "run `spr-cluster local reset` again" in said
    assert folder.snapshot.exists()
    assert cluster_names() == ["mine"]

    installed_podman.refuse = ""
    removed = shutil.rmtree

    def interrupt(path: Path, **options: Any) -> None:
        removed(path, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_reset(ResetRequest())
    assert cluster_names() == []
    files.remember("local", "us-east-1", folder=str(folder.root))
    assert main(["local", "reset", "--base", "debian13"]) == 0
    assert cluster_names() == []


@pytest.mark.parametrize("action", ["stop", "reset"])
def test_other_users_are_told_that_the_cloud_is_roots(
    folder: StateFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    action: str,
) -> None:
    monkeypatch.setattr(cloud, "_has_podman", lambda: False)
    user = os.geteuid() or 1000
    if os.geteuid() == 0:
        os.chown(folder.root, user, user)
        monkeypatch.setattr(os, "geteuid", lambda: user)
    assert main(["local", action]) == 2
    assert "needs root" in capsys.readouterr().err
    assert folder.root.exists()
    assert main(["local", "status"]) == 0
    assert "use sudo" in capsys.readouterr().out


def test_a_command_says_that_it_waits_for_another_one(
    folder: StateFolder, installed_podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "ensure_base_image", Mock(side_effect=CloudError("reached")))
    other, progress = ExitStack(), MagicMock()
    other.enter_context(folder.command_lock())
    progress.phase.return_value.__enter__.side_effect = lambda *_: other.close()
    with pytest.raises(CloudError, match="reached"):
        cloud.open_local_cloud("us-east-1", progress)
    (said,) = progress.phase.call_args.args
    assert said == "embedded cloud: another command is starting or stopping it"


def test_podman_on_another_system_is_not_this_clouds(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr(shutil, "which", lambda _: "/opt/homebrew/bin/podman")
    monkeypatch.setattr(cloud, "open_podman", lambda _: pytest.fail("podman was called"))
    assert cloud.status().resources == cloud.LocalResources()


def test_a_server_that_does_not_start_reports_why(
    folder: StateFolder, installed_podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(folder.root / "python"))
    program = folder.root / "python"
    program.write_text("#!/bin/sh\necho 'error: no luck' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(CloudError, match="did not start: error: no luck") as caught:
        cloud.open_local_cloud("us-east-1")
    assert "server.log" in str(caught.value.hint)
