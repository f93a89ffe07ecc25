"""SSH host keys: pinned on this machine by instance id, learned from the console, seen from inside.

A key is written as in OpenSSH's files: ``type base64``. Addresses are not names here: EC2 gives an
address to another machine within minutes, an instance id never.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.errors import HostError, HostKeyError
from provision.host import Host

_BEGIN, _END = "-----BEGIN SSH HOST KEY KEYS-----", "-----END SSH HOST KEY KEYS-----"
# Wherever it stands in a line: a console puts the time and the program's name before it.
_KEY = re.compile(r"(?:^|\s)((?:ssh|ecdsa|sk)-[\w@.-]+) (AAAA[A-Za-z0-9+/]+={0,2})(?=\s|$)")
_SCAN_TIMEOUT_S = 10


def fingerprint(key: str) -> str:
    """OpenSSH's short form of a key, such as ``SHA256:…``."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def parse_console_host_keys(text: str) -> tuple[str, ...]:
    """The host keys that cloud-init wrote to the console; the last complete block counts.

    https://docs.cloud-init.io/en/latest/reference/modules.html#keys-to-console
    """
    last: tuple[str, ...] = ()
    block: list[str] | None = None
    for line in text.splitlines():
        if _BEGIN in line:
            block = []
        elif _END in line:
            last = tuple(block) if block else last
            block = None
        elif block is not None and (match := _KEY.search(line)) and _is_whole(*match.groups()):
            block.append(" ".join(match.groups()))
    return last


def _is_whole(kind: str, blob: str) -> bool:
    """Whether a key is complete and of its type; the kernel's messages may cut a console's line.

    It is a row of fields, each after its length: https://www.rfc-editor.org/rfc/rfc4253#section-6.6
    """
    try:
        rest = base64.b64decode(blob, validate=True)
    except binascii.Error:
        return False
    fields = []
    while len(rest) >= 4:
        end = 4 + int.from_bytes(rest[:4], "big")
        fields.append(rest[4:end])
        if end > len(rest):
            return False
        rest = rest[end:]
    return not rest and len(fields) > 1 and fields[0] == kind.encode()


def pinned_host_keys(known_hosts: Path, alias: str) -> tuple[str, ...]:
    """The keys pinned for an alias, in the order of the file; none where there is no file."""
    return tuple(key for name, key in _read(known_hosts) if name == alias)


def pin_host_keys(known_hosts: Path, alias: str, keys: Iterable[str]) -> None:
    """Pin an alias's keys in place of those that it had; other aliases keep theirs.

    Whoever reads the file meanwhile sees it as it was before or as it is after.
    """
    with _locked(known_hosts.with_name(f".{known_hosts.name}.lock")):
        entries = _read(known_hosts)
        others = [(name, key) for name, key in entries if name != alias]
        wanted = others + [(alias, key) for key in dict.fromkeys(keys)]
        if wanted != entries:
            _write(known_hosts, "".join(f"{name} {key}\n" for name, key in wanted))


def _read(known_hosts: Path) -> list[tuple[str, str]]:
    """The file's lines as alias and key."""
    text = known_hosts.read_text() if known_hosts.exists() else ""
    fields = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return [(f[0], f"{f[1]} {f[2]}") for f in fields if len(f) >= 3]


def _write(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time, of all threads and all processes."""
    # Opened for writing: NFS gives no other file an exclusive lock (flock(2)).
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def scan_host_keys(head: Host, addresses: Sequence[str]) -> dict[str, str]:
    """Machines' ed25519 keys by address, as the head sees them inside the private network.

    Addresses that do not answer are missing.
    """
    if not addresses:
        return {}
    scan = f"ssh-keyscan -T {_SCAN_TIMEOUT_S} -t ed25519 {shlex.join(addresses)} 2>/dev/null"
    # Newer versions end with 1 where no address answered: https://man.openbsd.org/ssh-keyscan
    done = head.run(scan, timeout_s=_SCAN_TIMEOUT_S * (2 + len(addresses) // 64), check=False)
    if done.exit_code not in (0, 1):
        raise HostError(head.name, f"ssh-keyscan ended with {done.exit_code}")
    lines = (line.split() for line in done.stdout.splitlines() if not line.startswith("#"))
    found = {f[0]: f"{f[1]} {f[2]}" for f in lines if len(f) >= 3}
    return {address: found[address] for address in addresses if address in found}


def check_pinned_keys(
    node: str, alias: str, pinned: Sequence[str], seen: Sequence[str], known_hosts: Path
) -> None:
    """Compare a node's pinned keys with those that it shows elsewhere: its console, the head.

    Raises :class:`HostKeyError` where a key of the same type differs, or none is the same: somebody
    in between could have held back just the type that is seen elsewhere.
    """
    types = {key.split()[0] for key in seen}
    wrong = [key for key in pinned if key.split()[0] in types and key not in seen]
    if set(pinned) & set(seen) and not wrong:
        return
    here, there = (
        ", ".join(f"{key.split()[0]} {fingerprint(key)}" for key in keys) or "none"
        for keys in (pinned, seen)
    )
    raise HostKeyError(
        node,
        f"this machine knows {alias} by another SSH host key than the node has: here {here}; "
        f"there {there}",
        hint="Somebody may have stood between this machine and the node since their first contact: "
        "do not use the node; end it, and go on from another network. It is innocent where the "
        "node's keys in /etc/ssh were made anew on purpose: then forget the old one: "
        f"ssh-keygen -R {alias} -f '{known_hosts}'",
    )
