"""The embedded cloud for real: podman's containers, OpenSSH, cloud-init, pip, and the way back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.aws.clients import Clients, connect
from infra.ec2.images import find_ubuntu_image, wait_until_available
from infra.ec2.key_pair import generate_key_pair
from infra.files import write_private
from infra.local.cloud import LocalStatus, open_local_cloud, reset, status, stop
from infra.local.state import StateFolder
from infra.wait import Silent, wait_until
from jobs.__main__ import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# 2: with a warning. A container can't set its host name, which podman has set.
_FIRST_BOOT = "cloud-init status --wait || [ $? = 2 ]"
USER_DATA = """\
#cloud-config
write_files:
  - path: /etc/greeting
    content: hello
runcmd:
  - [touch, /ran]
"""


class Machine:
    """An instance, and OpenSSH's own client to it."""

    def __init__(self, session: Session, instance: Any) -> None:
        self.id: str = instance["InstanceId"]
        self.address: str = instance["PublicIpAddress"]
        self._session = session

    def ssh(self, command: str, *, check: bool = True) -> str:
        known_hosts = self._session.folder / f"known-hosts-{self.id}"
        options = {
            "UserKnownHostsFile": known_hosts,
            "StrictHostKeyChecking": "accept-new",
            "BatchMode": "yes",
            "ConnectTimeout": 5,
        }
        done = subprocess.run(
            [
                *("ssh", "-i", str(self._session.key)),
                *(f"-o{key}={value}" for key, value in options.items()),
                *(f"ubuntu@{self.address}", command),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{command}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip() if done.returncode == 0 else f"exit {done.returncode}"

    def wait_for_ssh(self) -> Machine:
        wait_until(
            f"SSH to {self.address}",
            lambda: True if self.ssh("true", check=False) == "" else None,
            deadline_s=120,
            every_s=0.5,
        )
        return self

    def state(self) -> str:
        answer = self._session.clients.ec2.describe_instances(InstanceIds=[self.id])
        return str(answer["Reservations"][0]["Instances"][0]["State"]["Name"])

    def wait_for_state(self, wanted: str) -> None:
        wait_until(
            f"{self.id} {wanted}",
            lambda: True if self.state() == wanted else None,
            deadline_s=60,
            every_s=0.5,
        )


class Session:
    """An embedded cloud of this module's own, with a key of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "key"
        pair = generate_key_pair("test")
        write_private(self.key, pair.private)
        self.clients = self.open()
        self.clients.ec2.import_key_pair(KeyName="key", PublicKeyMaterial=pair.public.encode())

    def open(self) -> Clients:
        self.clients = connect(open_local_cloud("us-east-1"))
        return self.clients

    def run(self, count: int = 1, **wishes: Any) -> list[Machine]:
        image = find_ubuntu_image(self.clients.ssm, self.clients.ec2, "24.04")
        request: dict[str, Any] = {
            "ImageId": image.id,
            "InstanceType": "r7iz.metal-16xl",
            "MinCount": count,
            "MaxCount": count,
            "KeyName": "key",
            **wishes,
        }
        answer = self.clients.ec2.run_instances(**request)
        ids = [i["InstanceId"] for i in answer["Instances"]]
        shown = self.clients.ec2.describe_instances(InstanceIds=ids)["Reservations"][0]
        return [Machine(self, instance).wait_for_ssh() for instance in shown["Instances"]]


def leftovers(key: str) -> str:
    """Everything that podman and the process table still have of an embedded cloud."""
    found = [
        line
        for command in (
            ["podman", "ps", "--all", "--format", "{{.Names}}"],
            ["podman", "network", "ls", "--format", "{{.Name}}"],
            ["podman", "images", "--format", "{{.Repository}}"],
        )
        for line in subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()
        if key in line
    ]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_line = process.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if (
            "infra.local.api.server" in command_line
            and str(StateFolder.of_user().root) in command_line
        ):
            found.append(command_line)
    return "\n".join(found)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Spaces and quotes, as a user's folder may have them.
    return tmp_path_factory.mktemp('it\'s a "home"')


@pytest.fixture(autouse=True)
def _same_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(home))


@pytest.fixture(scope="module")
def session(
    home: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPR_CLUSTER_HOME", str(home))
        reset(keep_base=True, base=pytestconfig.getoption("--base"))
        try:
            yield Session(tmp_path_factory.mktemp("session"))
        finally:
            reset(keep_base=True)


@pytest.fixture(scope="module")
def pair(home: Path, session: Session) -> list[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPR_CLUSTER_HOME", str(home))
        return session.run(2, UserData=USER_DATA)


def test_user_data_is_applied_and_nodes_reach_each_other_by_name(pair: list[Machine]) -> None:
    for machine, other in (pair, reversed(pair)):
        assert machine.ssh(_FIRST_BOOT).endswith("status: done")
        assert machine.ssh("cat /etc/greeting; ls /ran") == "hello/ran"
        assert machine.ssh("systemctl is-system-running --wait") == "running"
        assert machine.ssh("sudo whoami") == "root"
        assert machine.ssh("hostname") == f"ip-{machine.address.replace('.', '-')}"
        name = other.ssh("hostname")
        assert machine.ssh(f"getent ahostsv4 {name} | head -1").split()[0] == other.address
        banner = machine.ssh(f"timeout 10 bash -c 'exec 3<>/dev/tcp/{name}/22; head -1 <&3'")
        assert banner.startswith("SSH-2.0-OpenSSH")


def test_pip_on_a_node_works_as_on_this_machine(pair: list[Machine]) -> None:
    listed = pair[0].ssh(
        "python3 -m venv /tmp/v && cd /tmp && "
        "v/bin/pip download --quiet --no-deps --no-input iniconfig && ls iniconfig*"
    )
    assert listed.startswith("iniconfig-")
    assert pair[0].ssh("sudo /tmp/v/bin/pip config list") == pair[0].ssh(
        "/tmp/v/bin/pip config list"
    )


def test_clones_of_an_image_have_different_identities(
    session: Session, pair: list[Machine]
) -> None:
    parent, ec2 = pair[0], session.clients.ec2
    parent.ssh("echo installed > ~/software && sync")
    image_id = ec2.create_image(InstanceId=parent.id, Name="with-software", NoReboot=True)[
        "ImageId"
    ]
    assert parent.ssh("cat ~/software") == "installed"
    image = wait_until_available(ec2, image_id, Silent())
    (clone,) = session.run(ImageId=image_id)

    assert clone.ssh("cat ~/software") == "installed"
    key = "cat /etc/ssh/ssh_host_ed25519_key.pub | cut -d' ' -f2"
    assert clone.ssh(key) != parent.ssh(key)
    assert clone.ssh("hostname") != parent.ssh("hostname")
    assert clone.ssh(_FIRST_BOOT).endswith("status: done")
    assert clone.ssh("test -e /etc/pip.conf && echo here") == "here"

    ec2.terminate_instances(InstanceIds=[clone.id])
    ec2.deregister_image(ImageId=image_id)
    (snapshot_id,) = image.snapshot_ids
    ec2.delete_snapshot(SnapshotId=snapshot_id)
    assert image_id not in str(status().resources.images)


def test_a_machine_stops_starts_reboots_and_ends_by_its_own_shutdown(session: Session) -> None:
    (machine,) = session.run(InstanceInitiatedShutdownBehavior="terminate")
    machine.ssh("echo kept > ~/file")
    session.clients.ec2.stop_instances(InstanceIds=[machine.id])
    assert machine.state() == "stopped"
    session.clients.ec2.start_instances(InstanceIds=[machine.id])
    assert machine.wait_for_ssh().ssh("cat ~/file") == "kept"
    boot = machine.ssh("systemctl show --property=UserspaceTimestampMonotonic")
    machine.ssh("sudo reboot", check=False)

    def booted_again() -> bool | None:
        now = machine.ssh("systemctl show --property=UserspaceTimestampMonotonic", check=False)
        return True if now.startswith("UserspaceTimestamp") and now != boot else None

    wait_until("reboot from inside", booted_again, deadline_s=90, every_s=0.5)
    assert machine.state() == "running"
    assert machine.id in leftovers(StateFolder.of_user().key)
    machine.ssh("sudo shutdown -h now", check=False)
    machine.wait_for_state("terminated")
    assert machine.id not in leftovers(StateFolder.of_user().key)


def test_a_killed_server_comes_back_with_the_same_instances(
    session: Session, pair: list[Machine]
) -> None:
    pid = status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    session.open()
    assert status().pid not in (None, pid)
    assert [machine.state() for machine in pair] == ["running", "running"]
    assert pair[0].ssh("cat /etc/greeting") == "hello"


def test_stop_suspends_and_the_next_command_resumes(
    session: Session, pair: list[Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    stop()
    assert not status().running
    assert {i.state for i in status().resources.instances} == {"stopped"}
    session.open()
    assert [machine.wait_for_ssh().state() for machine in pair] == ["running", "running"]

    assert main(["local", "status", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["running"] is True
    assert {i["id"] for i in result["resources"]["instances"]} == {m.id for m in pair}


def test_reset_leaves_nothing_even_after_the_worst(
    session: Session, pair: list[Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = StateFolder.of_user()
    before: LocalStatus = status()
    assert before.resources.instances
    assert folder.key in leftovers(folder.key)
    folder.snapshot.write_bytes(b"broken")
    folder.server_file.write_text("broken")
    for _ in range(2):
        assert main(["local", "reset", "--keep-base"]) == 0
        assert "not running" in capsys.readouterr().out
        assert leftovers(folder.key) == ""
        assert not folder.root.exists()
    assert status().resources.base_images == before.resources.base_images
