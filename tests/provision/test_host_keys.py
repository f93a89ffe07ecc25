from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from infra.ec2.key_pair import fingerprint
from infra.errors import HostError, HostKeyError
from provision.host_keys import (
    check_pinned_keys,
    parse_console_host_keys,
    pin_host_keys,
    pinned_host_keys,
    scan_host_keys,
)
from tests.provision.machine import Machine, ShellHost


def make_key() -> str:
    key = paramiko.ECDSAKey.generate()
    return f"{key.get_name()} {key.get_base64()}"


ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIM3iQVfB55ulroNS42WWE0SI7hn7ehoshIx8OORXsy7f"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGgBvCJitPIXQSgy09kCWmMX/4uwnvBB1wR+ldqAoI6g"
ECDSA = make_key()
BEGIN, END = "-----BEGIN SSH HOST KEY KEYS-----", "-----END SSH HOST KEY KEYS-----"


@pytest.mark.parametrize("prefix", ["", "[   12.345678] cloud-init[812]: ", "<14>ec2: "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_keys_on_a_console(prefix: str, end: str) -> None:
    audit = "[   12.4] audit: type=1400 apparmor"
    block = [BEGIN, f"{ECDSA} root@ip-172-31-0-4", audit, f"{ED25519} root@ip-172-31-0-4", END]
    marks = [line.replace("KEY KEYS", "KEY FINGERPRINTS") for line in (BEGIN, END)]
    lines = [marks[0], "256 SHA256:I5Pl5GE7KI7 root@a (ECDSA)", marks[1], *block, f"{OTHER} b@c"]

    assert parse_console_host_keys(end.join(prefix + line for line in lines)) == (ECDSA, ED25519)


def test_the_last_complete_block_counts_without_interrupted_lines() -> None:
    first, second = f"{BEGIN}\n{OTHER}\n{END}\n", f"{BEGIN}\n{ED25519}\n{END}\n"

    assert parse_console_host_keys(first + second) == (ED25519,)
    # A console's memory ends somewhere, and a boot may not be over.
    assert parse_console_host_keys(first + f"{BEGIN}\n{ED25519}\n") == (OTHER,)
    assert parse_console_host_keys(first + f"{BEGIN}\n{END}\n") == (OTHER,)
    assert parse_console_host_keys(f"{OTHER}\n{END}\n") == parse_console_host_keys("") == ()
    cut = [ED25519[:40], ED25519[:-9] + "=" + ED25519[-9:], ED25519.replace("ed25519", "rsa", 1)]
    assert parse_console_host_keys("\n".join([BEGIN, *cut, ECDSA, END])) == (ECDSA,)


@pytest.mark.parametrize("at", [0, 3, 11, 30, len(ED25519)])
def test_a_block_whose_line_of_the_pinned_key_is_cut_tells_nothing(at: int) -> None:
    """Without its type, the pinned key would look intercepted."""
    message = "[   12.4] EXT4-fs: mounted"
    lines = [f"{ED25519[:at]}{message}", ED25519[at:]]
    block = "\n".join([BEGIN, ECDSA, *lines, END])

    whole = (ECDSA, ED25519)
    assert parse_console_host_keys(block, (ED25519,)) == (() if at else whole)
    # What it shows of the pinned type counts, and so does a block without a cut.
    assert parse_console_host_keys(block, (make_key(),))[0] == ECDSA
    assert parse_console_host_keys(f"{BEGIN}\n{ECDSA}\n{END}", (ED25519,)) == (ECDSA,)


def test_keys_are_pinned_by_alias(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    assert pinned_host_keys(file, "i-0a") == ()

    pin_host_keys(file, "i-0a", [ED25519])
    pin_host_keys(file, "i-0b", [OTHER, ECDSA, OTHER])

    assert file.read_text() == f"i-0a {ED25519}\ni-0b {OTHER}\ni-0b {ECDSA}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert pinned_host_keys(file, "i-0b") == (OTHER, ECDSA)
    assert pinned_host_keys(file, "i-0") == ()

    before = file.stat().st_ino
    pin_host_keys(file, "i-0b", [OTHER, ECDSA])
    assert file.stat().st_ino == before
    pin_host_keys(file, "i-0a", [OTHER])
    assert pinned_host_keys(file, "i-0a") == (OTHER,)
    assert pinned_host_keys(file, "i-0b") == (OTHER, ECDSA)
    # Concurrent writers lose no key.
    names = [f"i-{n}" for n in range(40)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: pin_host_keys(file, name, [ED25519]), names))
    assert all(pinned_host_keys(file, name) == (ED25519,) for name in names)
    assert {path.name for path in tmp_path.iterdir()} == {"known_hosts", ".known_hosts.lock"}


def test_the_head_scans_its_neighbors(machine: Machine) -> None:
    answer = (
        f"echo '# 172.31.0.4:22 SSH-2.0'; echo '172.31.0.4 {ED25519}'; echo '172.31.0.6 {OTHER}'"
    )
    machine.replace("ssh-keyscan", answer)

    seen = scan_host_keys(ShellHost(machine), ["172.31.0.6", "172.31.0.5", "172.31.0.4"])

    assert seen == {"172.31.0.6": OTHER, "172.31.0.4": ED25519}
    assert machine.calls == ["ssh-keyscan -T 10 -t ed25519 172.31.0.6 172.31.0.5 172.31.0.4"]
    assert scan_host_keys(ShellHost(machine), []) == {}
    assert len(machine.calls) == 1
    for code in (0, 1):  # no answer
        machine.replace("ssh-keyscan", f"exit {code}")
        assert scan_host_keys(ShellHost(machine), ["172.31.0.4"]) == {}
    machine.replace("ssh-keyscan", "exit 127")
    with pytest.raises(HostError, match=r"\[node0\] ssh-keyscan failed with exit code 127"):
        scan_host_keys(ShellHost(machine), ["172.31.0.4"])


@pytest.mark.parametrize(
    ("pinned", "seen", "fine"),
    [
        ((ED25519,), (ED25519,), True),
        ((ED25519,), (ECDSA, ED25519), True),
        ((ECDSA, ED25519), (ED25519,), True),
        ((OTHER,), (ED25519,), False),
        ((OTHER, ECDSA), (ECDSA, ED25519), False),
        # Somebody in between showed only the type that the head is not asked for.
        ((ECDSA,), (ED25519,), False),
        ((), (ED25519,), False),
        (("ssh-ed25519 AAAAA",), (ED25519,), False),  # shown as "damaged"
    ],
)
def test_pinned_keys_must_match_those_seen_elsewhere(
    tmp_path: Path, pinned: tuple[str, ...], seen: tuple[str, ...], fine: bool
) -> None:
    file = tmp_path / "known_hosts"
    if fine:
        check_pinned_keys("node1", "i-0a", pinned, seen, file)
        return
    said = r"^\[node1\] the SSH host key pinned here for i-0a is not the node's"
    with pytest.raises(HostKeyError, match=said) as caught:
        check_pinned_keys("node1", "i-0a", pinned, seen, file)
    text = str(caught.value)
    assert all(fingerprint(key) in text for key in (*pinned, *seen))
    assert f"ssh-keygen -R i-0a -f '{file}'" in text


def test_damaged_host_keys_refuse_every_connection(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_bytes(b"i-0a ssh-ed25519 \xff\n")

    for use in (
        lambda: pinned_host_keys(file, "i-0a"),
        lambda: pin_host_keys(file, "i-0b", [OTHER]),
    ):
        with pytest.raises(HostKeyError, match=r"known_hosts: not UTF-8 \(byte 17\)") as caught:
            use()
        assert str(caught.value.hint).startswith(f"remove the file {file}: ")
    assert file.read_bytes() == b"i-0a ssh-ed25519 \xff\n"
