"""The door to a machine, against a real SSH server on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import paramiko
import pytest

from infra.errors import ConnectionLostError, HostError, HostKeyError
from provision.host import Login, TextSink, wait_until_reachable
from provision.host_keys import pin_host_keys, pinned_host_keys
from provision.ssh import LINE_BYTES, SshHost, whole_lines
from tests.fakes import FakeClock
from tests.provision.sshd import Server, serving
from tests.provision.test_jump import relay

ADDRESS = "127.0.0.9"


def text_of(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.get_base64()}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(Server(paramiko.ECDSAKey.generate())) as server:
        monkeypatch.setattr("provision.ssh._PORT", server.port)
        yield server


@pytest.fixture
def host(login: Login) -> SshHost:
    return SshHost("node0", ADDRESS, login, alias="i-0a")


def test_the_first_key_is_pinned_under_the_alias_and_then_required(
    server: Server, login: Login
) -> None:
    # The address had belonged to another machine.
    old = text_of(paramiko.ECDSAKey.generate())
    pin_host_keys(login.known_hosts, "i-old", [old])
    for _ in range(2):
        host = SshHost("node0", ADDRESS, login, alias="i-0a")
        assert host.run("true").exit_code == 0
        host.close()

    assert login.known_hosts.read_text() == f"i-old {old}\ni-0a {text_of(server.key)}\n"
    assert server.logins == ["ubuntu", "ubuntu"]


def test_a_changed_key_ends_the_connection_before_the_login(server: Server, login: Login) -> None:
    expected = text_of(paramiko.ECDSAKey.generate())
    pin_host_keys(login.known_hosts, "i-0a", [expected])

    with pytest.raises(HostKeyError) as caught:
        SshHost("node0", ADDRESS, login, alias="i-0a", region="eu-west-1").run("true")

    assert server.logins == []
    assert pinned_host_keys(login.known_hosts, "i-0a") == (expected,)
    text = str(caught.value)
    assert text.startswith(f"[node0] {ADDRESS} shows another SSH host key than i-0a had: ")
    assert text.count("SHA256:") == 2
    look = "aws ec2 get-console-output --region eu-west-1 --instance-id i-0a"
    forget = f"ssh-keygen -R i-0a -f '{login.known_hosts}'"
    for part in (server.key.fingerprint, "It is harmless if", look, forget):
        assert part in text


def test_one_of_several_pinned_keys_is_enough_but_not_one_of_another_type(
    server: Server, login: Login
) -> None:
    """Somebody in between has no key of the pinned type; or paramiko does not know the type."""
    longer = text_of(paramiko.ECDSAKey.generate(bits=384))
    for pinned in ("ssh-new AAAA", longer):
        pin_host_keys(login.known_hosts, "i-0a", [pinned])
        expected = rf"key than i-0a had: .*, expected {pinned.split()[0]} "
        with pytest.raises(HostKeyError, match=expected):
            SshHost("node0", ADDRESS, login, alias="i-0a").run("true")
        assert pinned_host_keys(login.known_hosts, "i-0a") == (pinned,)
    assert server.logins == []

    pinned_keys = [longer, "ssh-ed25519 AAAA", "ssh-new AAAA", text_of(server.key)]
    pin_host_keys(login.known_hosts, "i-0a", pinned_keys)
    assert SshHost("node0", ADDRESS, login, alias="i-0a").run("true").exit_code == 0


def test_a_rejected_login_is_retried_during_the_first_boot_and_named_at_the_deadline(
    server: Server, host: SshHost
) -> None:
    server.accepts = False
    heard: list[str] = []

    def hear(_: float, reason: str) -> None:
        heard.append(reason)
        server.accepts = len(heard) > 2

    with pytest.raises(HostError, match="timed out after 1 min: SSH rejects") as caught:
        wait_until_reachable(host, clock=FakeClock(), deadline_s=60)
    assert "authorized_keys" in str(caught.value.hint)
    wait_until_reachable(host, clock=FakeClock(), on_wait=hear)

    assert all("SSH rejects the cluster's key" in reason for reason in heard)
    assert len(heard) == 3


def test_a_broken_connection_is_not_a_failed_command(server: Server, host: SshHost) -> None:
    server.loses = True

    with pytest.raises(ConnectionLostError, match=r"\[node0\] the connection broke"):
        host.run("sleep 1")

    server.loses = False
    assert host.run("true").exit_code == 0
    with pytest.raises(ConnectionLostError, match=r"\[node0\] copying /tmp/file: "):
        host.put(b"", "/tmp/file")


def test_a_refused_session_is_tried_again_in_the_same_connection(
    server: Server, host: SshHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says = "\u20ac" * 10_000  # characters that end in another piece

    def follow() -> str:
        heard: list[str] = []
        host.run("cat", on_text=heard.append)
        return "\n".join(heard)

    reads: list[Callable[[], str]] = [
        lambda: host.run("cat").stdout,
        follow,
        lambda: b"".join(host.download("cat")).decode(),
    ]
    for read in reads:
        server.refuses = 2

        assert read() == server.says

        assert (server.refuses, len(server.logins)) == (0, 1)

    server.stays = True
    stream = host.open_stream("tail")
    monkeypatch.setattr("provision.ssh.CONNECT_TIMEOUT_S", 0.3)
    server.refuses = 1000
    with pytest.raises(ConnectionLostError, match="rohibited"):
        host.run("true")
    stream.send("a beat\n")  # others run on


@pytest.mark.parametrize("proxied", [False, True])
def test_a_machine_that_is_cut_off_is_noticed(
    server: Server, login: Login, monkeypatch: pytest.MonkeyPatch, *, proxied: bool
) -> None:
    proxy = relay(server.port) if proxied else ()
    host = SshHost("node0", ADDRESS, login, alias="i-0a", proxy=proxy)
    monkeypatch.setattr("provision.ssh._KEEPALIVE_S", 0.1)
    monkeypatch.setattr("provision.ssh._LOST_S", 2)
    server.stays = True
    stream = host.open_stream("tail")
    reader = threading.Thread(target=lambda: list(stream), daemon=True)
    reader.start()
    reader.join(3)
    assert reader.is_alive(), "it lost a machine that answers"

    cut_off = threading.Event()
    server.transports[0].packetizer.read_message = cut_off.wait
    if proxied:
        reader.join(2.5)
        assert reader.is_alive(), "an upload may delay the answer"
    reader.join(20)
    cut_off.set()
    host.close()
    assert not reader.is_alive()


def test_a_file_transfer_that_gets_no_answer_ends(
    server: Server, host: SshHost, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provision.ssh._LOST_S", 5)
    begun = threading.Event()

    def begin(*_: object) -> bool:
        begun.set()
        return True

    monkeypatch.setattr(server, "check_channel_subsystem_request", begin)
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(host.upload, login.key_file, "/tmp/file")
        assert begun.wait(20)
        assert host.run("true").exit_code == 0
        assert copied.running(), "the command waited for it"
        with pytest.raises(ConnectionLostError, match="copying /tmp/file: no answer for 5 s"):
            copied.result()


def test_followed_output_comes_in_lines_as_a_terminal_shows_them(
    server: Server, host: SshHost
) -> None:
    server.says = "one\r\n 10%\r 100%\n" + "x" * LINE_BYTES + "yz\n\nthe last"
    heard: list[str] = []

    host.run("work", on_text=heard.append)

    assert "\n".join(heard).split("\n") == ["one", " 100%", "x" * LINE_BYTES, "yz", "", "the last"]


def test_the_work_for_a_line_grows_with_its_length() -> None:
    """Pieces that are searched or copied again with each block take minutes, and gigabytes."""
    block = b"x" * 1000
    taken = sum(len(line) for line in whole_lines(block for _ in range(100_000)))
    assert taken == 100_000_000


def test_a_command_ends_in_time(server: Server, host: SshHost) -> None:
    server.stays = True
    sinks: list[TextSink | None] = [None, lambda _: None]
    for on_text in sinks:
        with pytest.raises(HostError, match=r"`work` did not finish within 0.1 s"):
            host.run("work", timeout_s=0.1, on_text=on_text)


def test_a_machine_without_ssh_is_named(host: SshHost, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((ADDRESS, 0)) as server:
        # Listens, and says nothing that SSH would say.
        monkeypatch.setattr("provision.ssh._PORT", server.getsockname()[1])
        monkeypatch.setattr("provision.ssh.CONNECT_TIMEOUT_S", 0.5)
        for use in (lambda: host.run("true"), lambda: host.put(b"", "/tmp/file")):
            with pytest.raises(HostError, match=r"\[node0\] no SSH at 127.0.0.9: "):
                use()


@pytest.mark.parametrize(
    ("exit_code", "error"),
    [(0, None), (1, r"`work` ended with 1: no output"), (-1, "the connection broke")],
)
def test_what_a_command_sends_arrives_and_its_failure_comes_at_the_end(
    server: Server, host: SshHost, exit_code: int, error: str | None
) -> None:
    server.says, server.exit_code = "model" * 100_000, exit_code
    chunks = host.download("work")

    found = bytearray()
    with pytest.raises(HostError, match=error) if error else nullcontext():
        for chunk in chunks:
            found += chunk
    assert found.decode() == server.says


def test_a_file_is_private_before_it_has_content(
    host: SshHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's own key is written so."""
    file = MagicMock()
    file.__enter__.return_value = file
    sftp = SimpleNamespace(open=lambda *_: file)
    monkeypatch.setattr(host, "_open_files", lambda: sftp)

    host.put(b"secret", "/home/ubuntu/.ssh/id")

    changes = [each for each in file.method_calls if each[0] in ("chmod", "write")]
    assert changes == [call.chmod(0o600), call.write(b"secret")]


def test_only_the_clusters_key_is_tried_whatever_the_users_files_say(
    server: Server, host: SshHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may have so many keys that the server refuses before it sees ours."""
    other: Any = paramiko.ECDSAKey.generate()
    monkeypatch.setattr(paramiko.Agent, "get_keys", lambda _: (other,))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    other.write_private_key_file(str(tmp_path / ".ssh/id_ecdsa"))
    # For the user's own programs.
    (tmp_path / ".fabric.yaml").write_text("gateway: nowhere.invalid")
    server.accepts = False

    with pytest.raises(HostError, match="SSH rejects"):
        host.run("true")
    assert len(server.logins) == 1


def test_a_stream_yields_lines_until_its_command_or_connection_ends(
    server: Server, host: SshHost
) -> None:
    server.says = "first\nsecond \u00e9\nlast"
    stream = host.open_stream("work")
    stream.send("a beat\n")

    assert list(stream) == ["first", "second \u00e9", "last"]
    server.loses = True
    stream = host.open_stream("work")
    assert list(stream) == []
    with pytest.raises(ConnectionLostError, match=r"\[node0\] the connection broke"):
        stream.send("a beat\n")
    assert server.logins == ["ubuntu"]
    server.loses = False
    assert list(host.open_stream("work")) == ["first", "second \u00e9", "last"]
    assert len(server.logins) == 2


def test_closing_a_stream_ends_a_reader_in_another_thread(server: Server, host: SshHost) -> None:
    server.stays = True
    stream = host.open_stream("work")
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()

    stream.close()

    reader.join(60)
    assert not reader.is_alive()
