"""What keeps private keys out of an image, run for real in a folder, in a session like sshd's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from infra.wait import wait_until
from provision.bake import _render_seal
from tests.provision.machine import Machine

IDENTITY = {
    "/etc/machine-id": "0123456789abcdef\n",
    "/etc/munge/munge.key": "what the cluster's daemons share\n",
    "/etc/ssh/ssh_host_ed25519_key": "-----BEGIN OPENSSH PRIVATE KEY-----\nhost\n",
    "/etc/ssh/ssh_host_ed25519_key.pub": "ssh-ed25519 AAAA\n",
    "/home/ubuntu/.ssh/spr-cluster": "-----BEGIN OPENSSH PRIVATE KEY-----\nnodes\n",
    "/home/ubuntu/.ssh/own key": "-----BEGIN RSA PRIVATE KEY-----\nby hand\n",
    "/home/ubuntu/.ssh/authorized_keys": "ssh-ed25519 AAAA\n",
    "/home/ubuntu/.aws/credentials": "aws_secret_access_key = x\n",
    "/home/ubuntu/.aws/sso/cache/token.json": "{}\n",
    "/home/ubuntu/.cache/huggingface/token": "hf_x\n",
    "/root/.netrc": "password x\n",
}
OTHERS = {"/etc/ssh/sshd_config": "Port 22\n", "/home/ubuntu/hosts": "node0\n"}
# One unit, and a file with its number for as long as it runs.
_SYSTEMD_RUN = """
while [[ "$1" == --* ]]; do post=${1#--property=ExecStopPost=}; shift; done
setsid bash -c '"$@" & echo $! >UNIT; wait; '"$post"'; rm -f UNIT' unit "$@" </dev/null &>/dev/null &
for i in {1..100}; do [ -s UNIT ] && exit 0; sleep 0.02; done; exit 1
"""
_SYSTEMCTL = """
[ ! -s UNIT ] || kill "$(cat UNIT)"
for i in {1..100}; do [ -e UNIT ] || exit 0; sleep 0.02; done; exit 1
"""
UNSEAL = "sh /run/spr-cluster/unseal"


@pytest.fixture
def node(machine: Machine) -> Machine:
    """A head node."""
    for path, text in {**IDENTITY, **OTHERS}.items():
        machine.path(path).parent.mkdir(parents=True, exist_ok=True)
        machine.path(path).write_text(text)
        machine.path(path).chmod(0o640)
    unit = machine.root / "unit"
    machine.replace("apt-get")
    machine.replace("systemd-run", _SYSTEMD_RUN.replace("UNIT", str(unit)))
    machine.replace("systemctl", _SYSTEMCTL.replace("UNIT", str(unit)))
    (machine.folder / "bin/sshd").symlink_to(shutil.which("bash") or "/bin/bash")
    return machine


@contextmanager
def session(node: Machine, token: str, limit_s: int = 60) -> Iterator[subprocess.Popen[str]]:
    """An SSH session in which the disk was sealed; it ends with the block."""
    script = _render_seal(token).replace("limit_s=900", f"limit_s={limit_s}")
    process = subprocess.Popen(
        # The name is what the script knows it by; `read` holds the session open.
        [
            f"{node.folder}/bin/sshd",
            "-c",
            'bash -c "$0" && echo sealed || echo failed; read',
            node.move(script),
        ],
        env=node.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sealed\n"
        try:
            yield process
        finally:
            process.kill()


def there(node: Machine) -> dict[str, str]:
    """What an image would hold now, of the identity."""
    found = {path: node.path(path) for path in IDENTITY if node.path(path).exists()}
    return {path: file.read_text() for path, file in found.items() if file.stat().st_size}


def unseal(node: Machine, token: str) -> str:
    done = node.shell(f"{UNSEAL} {token}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until("it", lambda: True if condition() else None, deadline_s=60, every_s=0.1)


def test_a_sealed_disk_has_no_private_keys_until_it_is_unsealed(node: Machine) -> None:
    gone = ["/root/.bash_history", "/home/ubuntu/.bash_history", "/var/lib/apt/lists/list"]
    for path in gone:
        node.path(path).parent.mkdir(parents=True, exist_ok=True)
        node.path(path).write_text("x")
    # A second name of a key's blocks, as a copy of the disk has them.
    blocks = node.folder / "blocks"
    blocks.hardlink_to(node.path("/home/ubuntu/.ssh/spr-cluster"))

    with session(node, "abc"):
        assert there(node) == {}
        assert b"PRIVATE KEY" not in blocks.read_bytes(), "only deleted, and not overwritten"
        assert not any(node.path(path).exists() for path in gone)
        assert "apt-get clean" in node.calls
        assert node.path("/etc/machine-id").exists()  # an empty one is what makes systemd write it
        assert {path: node.path(path).read_text() for path in OTHERS} == OTHERS
        # The rest of the disk has no copy of them.
        texts = [
            p.read_text() for p in node.root.rglob("*") if p.is_file() and "run" not in p.parts
        ]
        assert not any("PRIVATE KEY" in text for text in texts)

        assert unseal(node, "abc") == "unbroken"
        assert there(node) == IDENTITY
        assert {node.path(path).stat().st_mode & 0o777 for path in IDENTITY} == {0o640}
        # Once is enough.
        assert unseal(node, "abc") == "broken"


def test_the_end_of_the_session_or_of_its_time_breaks_the_seal(node: Machine) -> None:
    with session(node, "abc") as process:
        assert there(node) == {}
        process.kill()
        process.wait(60)
        wait_for(lambda: there(node) == IDENTITY)
        assert unseal(node, "abc") == "broken"
    with session(node, "def", limit_s=1) as process:
        wait_for(lambda: there(node) == IDENTITY)
        assert process.poll() is None
        assert unseal(node, "def") == "broken"


def test_a_session_that_ends_while_it_seals_loses_nothing(node: Machine) -> None:
    # What it began goes on without the session, and the watcher sees its end at the same time.
    slow = node.move(_render_seal("abc")).replace("\n: >", "\nsleep 1.2\n: >")
    process = subprocess.Popen(
        [f"{node.folder}/bin/sshd", "-c", 'bash -c "$0"; exit', slow], env=node.environment()
    )
    wait_for(lambda: any(call.startswith("systemd-run") for call in node.calls))
    process.kill()
    process.wait(60)
    wait_for(lambda: [call.split()[0] for call in node.calls].count("sync") == 2)
    wait_for(lambda: not node.path("/run/spr-cluster/sealed").exists())

    assert there(node) == IDENTITY
    assert unseal(node, "abc") == "broken"


def test_a_key_created_while_sealed_is_kept_and_breaks_the_seal(node: Machine) -> None:
    with session(node, "abc"):
        node.path("/home/ubuntu/.ssh/spr-cluster").write_text("newer\n")

        assert unseal(node, "abc") == "broken"
        assert there(node) == {**IDENTITY, "/home/ubuntu/.ssh/spr-cluster": "newer\n"}


def test_a_second_seal_loses_nothing_of_the_first(node: Machine) -> None:
    with session(node, "abc"), session(node, "def"):
        assert there(node) == {}
        assert unseal(node, "abc") == "broken"
        assert there(node) == {}
        assert unseal(node, "def") == "unbroken"
        assert there(node) == IDENTITY


def test_sealing_outside_an_ssh_session_is_rejected(node: Machine) -> None:
    # A parent of every process that is no session.
    node.replace("awk", "echo 1")
    done = node.shell(_render_seal("abc"))

    assert done.returncode == 1
    assert "not in an SSH session" in done.stderr
    assert there(node) == IDENTITY
