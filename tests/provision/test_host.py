from __future__ import annotations

import socket
from pathlib import Path

import paramiko
import pytest

from infra.errors import HostError, HostKeyError, HostsError
from provision.host import Host, Login, Result, on_all, sudo, wait_until_reachable
from provision.ssh import SshHost, _LearnOnce, _Lines
from tests.fakes import FakeClock, FakeHost


def test_failures_on_many_machines_carry_every_outcome() -> None:
    good = FakeHost("node0", [("true", "")])
    bad = [FakeHost(f"node{n}", [("true", HostError(f"node{n}", f"broken {n}"))]) for n in (1, 2)]

    with pytest.raises(HostsError) as caught:
        on_all("checking", [good, *bad], lambda host: host.run("true"))

    assert caught.value.outcomes == {"node1": "broken 1", "node2": "broken 2"}
    assert str(caught.value).startswith("checking failed on 2 of 3 nodes:\n  [node1] broken 1")


def test_results_come_by_name_in_the_order_of_the_machines() -> None:
    hosts = [FakeHost(f"node{n}", [("hostname", str(n))]) for n in range(5)]

    done = on_all("asking", hosts, lambda host: host.run("hostname").stdout)

    assert done == {f"node{n}": str(n) for n in range(5)}
    assert on_all("asking", [], lambda host: host.name) == {}


def test_a_machine_that_never_answers_is_given_up_at_its_deadline() -> None:
    host = FakeHost("node1", [("true", HostError("node1", "no SSH at 198.51.100.1"))])
    heard: list[str] = []

    with pytest.raises(
        HostError, match=r"\[node1\] SSH on node1: not within 40 min: .*no SSH at"
    ) as caught:
        wait_until_reachable(
            host, clock=FakeClock(), on_wait=lambda _, reason: heard.append(reason)
        )

    assert "[node1] no SSH at 198.51.100.1" in heard
    assert "--ssh-cidr" in str(caught.value.hint)


def test_a_changed_host_key_is_not_waited_out() -> None:
    host = FakeHost("node1", [("true", HostKeyError("node1", "another key"))])

    with pytest.raises(HostKeyError):
        wait_until_reachable(host, clock=FakeClock())
    assert len(host.commands) == 1


def test_the_first_host_key_is_pinned(tmp_path: Path) -> None:
    known_hosts = tmp_path / "known_hosts"
    client, key = paramiko.SSHClient(), paramiko.ECDSAKey.generate()

    _LearnOnce(known_hosts).missing_host_key(client, "198.51.100.1", key)

    assert known_hosts.read_text() == f"198.51.100.1 {key.get_name()} {key.get_base64()}\n"
    assert client.get_host_keys().check("198.51.100.1", key)
    assert not client.get_host_keys().check("198.51.100.1", paramiko.ECDSAKey.generate())


def test_lines_are_handed_on_whole() -> None:
    heard: list[str] = []
    lines = _Lines(heard.append)

    lines.write("one\r\ntw")
    lines.write("o\nthree")
    assert heard == ["one", "two"]
    lines.finish()
    assert heard == ["one", "two", "three"]


def test_a_machine_without_ssh_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "id"
    paramiko.ECDSAKey.generate().write_private_key_file(str(key))
    with socket.create_server(("127.0.0.9", 0)) as server:
        # Listens, and says nothing that SSH would say.
        monkeypatch.setattr("provision.ssh._PORT", server.getsockname()[1])
        monkeypatch.setattr("provision.ssh.CONNECT_TIMEOUT_S", 0.5)
        host: Host = SshHost("node0", "127.0.0.9", Login(key, tmp_path / "known_hosts"))
        with pytest.raises(HostError, match=r"\[node0\] no SSH at 127.0.0.9: "):
            host.run("true")
        with pytest.raises(HostError, match=r"\[node0\] no SSH at 127.0.0.9: "):
            host.put(b"", "/tmp/file")


def test_sudo_takes_any_script() -> None:
    assert sudo("echo 'a b'") == "sudo bash -c 'echo '\"'\"'a b'\"'\"''"
    assert Result(0, "", "").exit_code == 0
