"""Machines without public addresses: over a proxy command, and over a jump host with a real OpenSSH."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paramiko
import pytest

from infra.errors import JumpError, NoAnswerError, UsageError
from provision.host import Login, Result
from provision.jump import Gateway, Proxy, proxy_argv, require_way
from provision.run_on_nodes import on_all
from provision.ssh import SshHost
from tests.provision.sshd import Server, serving

ADDRESS = "127.0.0.9"
# Connects its input and output with a port, as `ssh -W` and the AWS CLI do; like an endpoint, it has only
# so many connections at a time: each holds one of as many names.
_RELAY = """
import os, select, socket, sys
slot = socket.socket(socket.AF_UNIX)
for number in range(int(sys.argv[2])):
    try:
        slot.bind(f"\\0spr-cluster-test-{sys.argv[1]}-{number}")
        break
    except OSError:
        continue
else:
    sys.exit("the endpoint has no free connection")
target = socket.create_connection(("127.0.0.9", int(sys.argv[1])))
while True:
    for side in select.select([0, target], [], [])[0]:
        content = os.read(0, 65536) if side == 0 else target.recv(65536)
        if not content:
            sys.exit()
        target.sendall(content) if side == 0 else os.write(1, content)
"""


@pytest.fixture
def machine() -> Iterator[Server]:
    with serving(Server(paramiko.ECDSAKey.generate())) as server:
        yield server


def relay(port: int, most: int = 20) -> list[str]:
    return [sys.executable, "-S", "-c", _RELAY, str(port), str(most)]


def test_a_machine_is_reached_over_a_proxy_command(machine: Server, login: Login) -> None:
    host = SshHost("node0", "10.0.0.5", login, alias="i-0a", proxy=relay(machine.port))

    assert host.run("true").exit_code == 0
    host.close()
    assert host.run("true").exit_code == 0

    process = host._proxy._process if host._proxy else None
    host.close()
    assert process is not None
    assert process.returncode is not None, "the command runs on"
    known = login.known_hosts.read_text()
    assert known == f"i-0a {machine.key.get_name()} {machine.key.get_base64()}\n"
    assert machine.logins == ["ubuntu", "ubuntu"]


@pytest.fixture
def inside() -> Iterator[Server]:
    """A machine from which the others, all of them itself, are reached."""
    server = Server(paramiko.ECDSAKey.generate())
    with serving(server):
        server.forwards = server.port
        yield server


def test_more_machines_than_an_endpoint_has_connections_are_reached(
    inside: Server, login: Login
) -> None:
    gateway, proxy = Gateway(), relay(inside.port, most=8)
    hosts = [
        SshHost(f"node{n}", f"10.0.0.{n}", login, alias="i-0a", proxy=proxy, gateway=gateway)
        for n in range(12)
    ]

    answers = on_all("reaching", hosts, lambda host: host.run("true"))

    assert all(isinstance(answer, Result) for answer in answers.values())
    assert {address for address, _ in inside.forwarded} == {f"10.0.0.{n}" for n in range(12)}
    for host in hosts:
        host.close()
    gateway.close()


def test_only_a_machine_that_another_one_does_not_reach_is_at_fault(
    inside: Server, login: Login
) -> None:
    gateway, proxy = Gateway(), relay(inside.port, most=1)
    first, second = (
        SshHost(f"node{n}", f"10.0.0.{n}", login, alias="i-0a", proxy=proxy, gateway=gateway)
        for n in range(2)
    )
    first.run("true")
    assert gateway.name == "node0"

    inside.forwards = -1
    with pytest.raises(NoAnswerError, match=r"no SSH at 10.0.0.1 from node0: ") as caught:
        second.run("true")
    assert not isinstance(caught.value, JumpError)
    inside.forwards = 0
    with pytest.raises(JumpError, match=r"no SSH at 10.0.0.1 over `"):
        second.run("true")
    inside.forwards = inside.port
    second.run("true")
    assert gateway.name == "node1"
    # An endpoint ends connections after an hour.
    for transport in inside.transports:
        transport.close()
    first.close()
    first.run("true")
    assert gateway.name == "node0"

    first.close()
    gateway.close()
    with taken(inside.port), pytest.raises(JumpError, match="the endpoint has no free connection"):
        first.run("true")


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Somebody else uses the only connection of the endpoint."""
    with socket.socket(socket.AF_UNIX) as slot:
        slot.bind(f"\0spr-cluster-test-{port}-0")
        yield


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no such endpoint')"], ": no such endpoint"),
        (["/no/such/aws"], "No such file or directory"),
    ],
)
def test_a_proxy_command_that_ends_is_named_with_its_last_words(
    login: Login, argv: list[str], why: str
) -> None:
    with pytest.raises(NoAnswerError, match=why) as caught:
        SshHost("node0", "10.0.0.5", login, alias="i-0a", proxy=argv).run("true")
    assert caught.value.message.startswith("[node0] no SSH at 10.0.0.5 over `")
    assert caught.value.hint


def test_a_proxy_that_ignores_its_end_is_killed() -> None:
    proxy = Proxy(["sh", "-c", "trap '' TERM; printf x; while sleep 1; do :; done"])
    assert proxy.socket.recv(1) == b"x"

    proxy.close(patience_s=0.1)

    assert proxy._process.returncode == -9


# A jump host


@pytest.fixture
def openssh(tmp_path: Path, login: Login, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's OpenSSH, with known hosts and a key of this test's own; returns the known hosts."""
    client = shutil.which("ssh")
    if client is None:
        pytest.skip("OpenSSH's client is not installed")
    known = tmp_path / "users_known_hosts"
    known.touch()
    config = tmp_path / "users_config"
    config.write_text(
        f"Host *\nUserKnownHostsFile {known}\nGlobalKnownHostsFile /dev/null\nIdentityFile "
        f"{login.key_file}\nIdentitiesOnly yes\nIdentityAgent none\n"
    )
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {client} -F {config} "$@"\n')
    (folder / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return known


@pytest.fixture
def jump(machine: Server) -> Iterator[Server]:
    server = Server(paramiko.ECDSAKey.generate(), forwards=machine.port)
    with serving(server, "127.0.0.8") as server:
        yield server


def over(jump: Server, login: Login) -> SshHost:
    argv = proxy_argv(f"me@127.0.0.8:{jump.port}", "i-0a", "10.0.0.5", "us-east-1")
    return SshHost("node0", "10.0.0.5", login, alias="i-0a", proxy=argv)


def test_a_machine_is_reached_over_a_jump_host(
    openssh: Path, jump: Server, machine: Server, login: Login
) -> None:
    key = f"{jump.key.get_name()} {jump.key.get_base64()}"
    openssh.write_text(f"[127.0.0.8]:{jump.port} {key}\n")
    host = over(jump, login)

    assert host.run("true").exit_code == 0
    host.close()

    assert set(jump.logins) == {"me"}
    assert [*jump.forwarded[0]] == ["10.0.0.5", 22]
    assert set(machine.logins) == {"ubuntu"}
    assert "i-0a" in login.known_hosts.read_text()
    # The user's OpenSSH may share a connection, at a path that must be short.
    with tempfile.TemporaryDirectory() as short:
        with openssh.with_name("users_config").open("a") as config:
            config.write(f"LogLevel QUIET\nControlPath {short}/shared\n")
        share = ["ssh", "-p", str(jump.port), "me@127.0.0.8"]
        subprocess.run([*share, "-fNM"], check=True)
        for jump.forwards in (0, -1):
            require_way(f"me@127.0.0.8:{jump.port}")
        subprocess.run([*share, "-O", "exit"], check=True)
    for jump.forwards, why in ((0, "administratively prohibited"), (-1, "connect failed")):
        with pytest.raises(JumpError, match=f"`: open failed: {why}") as caught:
            host.run("true")
        assert "me@127.0.0.8 lets this machine in" in str(caught.value.hint)
    jump.accepts = False
    with pytest.raises(UsageError, match=r"--jump me@127\S+: me@127\S+ Permission denied"):
        require_way(f"me@127.0.0.8:{jump.port}")


def test_a_jump_host_with_an_unknown_or_another_key_is_refused(
    openssh: Path, jump: Server, login: Login
) -> None:
    other = paramiko.ECDSAKey.generate()
    for known in ("", f"[127.0.0.8]:{jump.port} {other.get_name()} {other.get_base64()}\n"):
        openssh.write_text(known)
        with pytest.raises(NoAnswerError, match="Host key verification failed") as caught:
            over(jump, login).run("true")
        hint = str(caught.value.hint)
        assert "must know the jump host's key" in hint
        assert hint.endswith(f": ssh -p {jump.port} me@127.0.0.8")
        with pytest.raises(UsageError, match=r"--jump me@.*: Host key verification fai") as refused:
            require_way(f"me@127.0.0.8:{jump.port}")
        assert refused.value.hint == hint
    assert jump.logins == []


def test_an_endpoint_needs_an_aws_cli_that_opens_tunnels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def install(says: str) -> None:
        (tmp_path / "aws").write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / "aws").chmod(0o700)

    for says in ("aws-cli/2.12.0 Python/3.11.3 Linux/6.1 exe", "aws-cli/3.0.1 Python/3.14.0"):
        install(says)
        require_way("eice")
    for says in ("aws-cli/2.9.19 Python/3.11.2 Linux/6.1.0", "aws-cli/1.45.11 Python/3.11.7", ""):
        install(says)
        with pytest.raises(UsageError, match=f"can't open tunnels: {says}") as caught:
            require_way("eice")
        assert caught.value.hint == "install the AWS CLI version 2.12 or later"


def test_the_ways_to_a_private_machine() -> None:
    def way(jump: str) -> str:
        return " ".join(proxy_argv(jump, "i-0a", "10.0.0.5", "eu-west-1"))

    tunnel = "open-tunnel --instance-id i-0a --remote-port 22"
    session = "--document-name AWS-StartSSHSession --parameters portNumber=22"
    assert way("") == ""
    assert way("eice") == f"aws ec2-instance-connect {tunnel} --region eu-west-1"
    assert way("ssm") == f"aws ssm start-session --target i-0a {session} --region eu-west-1"
    over = "-W 10.0.0.5:22 -- jump.example.com"
    assert way("jump.example.com:2222").endswith(f" -p 2222 {over}")
    assert way("jump.example.com").endswith(f" {over}")
    assert "-p" not in way("jump.example.com"), "the user's own configuration has the port"
