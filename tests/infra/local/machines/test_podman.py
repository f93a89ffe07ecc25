"""podman's command line: its arguments and failures."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import CloudError
from infra.local.machines import podman as podman_module
from infra.local.machines.podman import (
    Container,
    ContainerSpec,
    Mount,
    Podman,
    node_ulimits,
    open_podman,
    run_arguments,
)

SPEC = ContainerSpec(
    name="spr-0a-i-1",
    image="localhost/base:1",
    hostname="ip-172-31-0-4",
    network="spr-0a-us-east-1",
    address="172.31.0.4",
    cpus=(2, 3),
    labels={"key": "value"},
    mounts=(Mount(Path("/srv/wheels"), "/srv/wheels"),),
)


def fake_podman(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "podman"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(podman_module, "choose_runtime", list)


def test_a_container_runs_as_a_machine() -> None:
    arguments = run_arguments(SPEC)
    assert arguments[-2:] == ["localhost/base:1", "/sbin/init"]
    assert {
        "--systemd=always",
        "--ip=172.31.0.4",
        "--mac-address=02:42:ac:1f:00:04",
        "--hostname=ip-172-31-0-4",
        "--network-alias=ip-172-31-0-4",
        "--cpuset-cpus=2,3",
        "--no-hosts",
        "--label=key=value",
        "--volume=/srv/wheels:/srv/wheels:ro",
    } <= set(arguments)
    assert "--privileged" not in arguments


def test_a_node_can_start_from_a_folder_that_stays_unchanged() -> None:
    arguments = run_arguments(replace(SPEC, image=Path("/my images/ami-1")))
    assert arguments[-3:] == ["--rootfs", "/my images/ami-1:O", "/sbin/init"]


@pytest.mark.parametrize(
    ("hard", "expected"), [(20000, "5000:5000"), (resource.RLIM_INFINITY, None), (10**9, None)]
)
def test_limits_stay_below_the_callers(
    monkeypatch: pytest.MonkeyPatch, hard: int, expected: str | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    nofile, nproc = node_ulimits()[1::2]
    assert nofile == f"nofile={expected or '65536:65536'}"
    assert nproc == f"nproc={expected or '32768:32768'}"


def test_a_failure_carries_podmans_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_podman(tmp_path, monkeypatch, "echo first >&2; echo 'Error: no such image' >&2; exit 125")
    with pytest.raises(CloudError, match="podman start a: Error: no such image") as caught:
        Podman().call("start", "a")
    assert caught.value.code == "InternalError"


def test_a_hanging_podman_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_podman(tmp_path, monkeypatch, "exec sleep 60")
    with pytest.raises(CloudError, match="no answer"):
        Podman().call("ps", timeout_s=0.2)


def test_containers_are_read_from_podmans_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = """[
      {"Names": ["a"], "State": "running", "Pid": 7, "ExitCode": 0, "Labels": {"k": "v"}},
      {"Names": ["b"], "State": "exited", "Pid": 0, "ExitCode": 130, "Labels": null}
    ]"""
    fake_podman(tmp_path, monkeypatch, f"cat <<'END'\n{listing}\nEND")
    assert Podman().containers("k=v") == [
        Container("a", True, 7, 0, {"k": "v"}),
        Container("b", False, 0, 130, {}),
    ]


def test_removing_nothing_does_not_call_podman(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_podman(tmp_path, monkeypatch, f"touch {tmp_path}/called")
    podman = Podman()
    podman.remove([])
    podman.remove_networks([])
    assert not (tmp_path / "called").exists()
    podman.remove(["a"])
    assert (tmp_path / "called").exists()


@pytest.mark.parametrize(("backend", "own"), [("netavark", False), ("cni", True)])
def test_netavark_is_used_without_changing_the_hosts_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, own: bool
) -> None:
    fake_podman(
        tmp_path,
        monkeypatch,
        f'[ "$1" = info ] && echo {backend} && exit; cat "${{CONTAINERS_CONF:-/dev/null}}"',
    )
    monkeypatch.delenv("CONTAINERS_CONF", raising=False)
    configuration = open_podman(tmp_path / "state").call("version")
    assert ('network_backend = "netavark"' in configuration) is own


# Disks and host keys


def inspected_podman(monkeypatch: pytest.MonkeyPatch, pid: int) -> Podman:
    """podman with one container."""
    monkeypatch.setattr(podman_module, "choose_runtime", list)
    podman = Podman()
    inspected = [{"State": {"Pid": pid}, "Mounts": [{"Destination": "/etc/config"}]}]
    monkeypatch.setattr(podman, "call", lambda *_: json.dumps(inspected))
    return podman


@pytest.mark.parametrize(
    ("ended", "more", "told"),
    [
        (False, "", ""),
        (False, "cp: error writing '/b': No space left on device", "No space left on device"),
        (True, "", "No such file or directory"),
    ],
)
def test_a_file_that_a_running_node_deletes_during_the_copy_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool, more: str, told: str
) -> None:
    program = tmp_path / "cp"
    line = "cp: cannot stat '/proc/1/root/./home/ubuntu/a.tmp': No such file or directory"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{line}\n{more}\nEND\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    failing = pytest.raises(CloudError, match=f"^can't copy the disk: cp: .*{told}$")
    with subprocess.Popen(["sleep", "0" if ended else "60"]) as process:
        if ended:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        podman = inspected_podman(monkeypatch, process.pid)
        with failing if told else nullcontext():
            podman.copy_disk("c", tmp_path / "disk")
        process.kill()


@pytest.mark.parametrize("is_link", [True, False])
def test_a_copy_of_a_disk_loses_our_files_and_the_host_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    host, disk = tmp_path / "host", tmp_path / "disk"
    host.mkdir()
    (host / "config").write_text("[profile mine]")

    def copy(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        (disk / "root").mkdir()
        if is_link:
            (disk / "root/.aws").symlink_to(host)
            (disk / "etc").symlink_to(host)
        else:
            for name in ("root/.aws", "etc"):
                shutil.copytree(host, disk / name)
            (disk / "home/ubuntu/.aws").mkdir(parents=True)
            (disk / "home/ubuntu/.aws/config").symlink_to("missing")
        return subprocess.CompletedProcess([], 0, "", "")

    podman = inspected_podman(monkeypatch, os.getpid())
    monkeypatch.setattr(subprocess, "run", copy)
    podman.copy_disk("c", disk)
    assert (host / "config").exists()
    assert not (disk / "home/ubuntu/.aws/config").is_symlink()
    assert [name for name in ("root/.aws", "etc") if (disk / name / "config").exists()] == (
        ["root/.aws", "etc"] if is_link else []
    )


def test_host_keys_are_read_once_the_first_boot_has_created_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podman_module, "choose_runtime", list)
    podman, made = Podman(), "var/lib/cloud/made"
    disk = tmp_path / "7" / "root"
    keys = disk / "etc" / "ssh"
    keys.mkdir(parents=True)
    (keys / "ssh_host_rsa_key.pub").write_text("ssh-rsa AAAA root@a\n")
    (keys / "ssh_host_ed25519_key.pub").write_text("ssh-ed25519 AAAB root@a\n")
    (keys / "ssh_host_ed25519_key").write_text("private")
    outside = tmp_path / "outside"
    outside.write_text("a file of the host")
    (keys / "ssh_host_evil_key.pub").symlink_to(outside)

    def read(pid: int) -> tuple[str, ...]:
        return podman.host_keys(pid, made, proc=tmp_path)

    assert read(7) == ()
    (disk / made).parent.mkdir(parents=True)
    (disk / made).touch()
    assert read(7) == ("ssh-ed25519 AAAB root@a", "ssh-rsa AAAA root@a")
    assert read(8) == ()
