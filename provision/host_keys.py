"""SSH host keys, pinned on this machine by instance id and compared with the console and the head.

A key has OpenSSH's format, ``type base64``. Addresses can't identify machines: EC2 may reassign an
address within minutes, but never an instance id.
"""

from __future__ import annotations

import fcntl
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from infra.ec2.key_pair import fingerprint, is_public
from infra.errors import HostError, HostKeyError, UsageError
from infra.files import read_text, write_private
from provision.host import Host

# A block that begins again was not complete.
_BEGIN, _END = "-----BEGIN SSH HOST KEY KEYS-----", "-----END SSH HOST KEY KEYS-----"
_BLOCK = re.compile(rf"{_BEGIN}((?:(?!{_BEGIN}).)*?){_END}", re.DOTALL)
# Anywhere in a line: a console may prefix the time and the program's name.
_KEY = re.compile(r"(?:^|\s)((?:ssh|ecdsa|sk)-[\w@.-]+) (AAAA[A-Za-z0-9+/]+={0,2})(?=\s|$)")
_SCAN_TIMEOUT_S = 10


def parse_console_host_keys(text: str, pinned: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the host keys of the last complete block that cloud-init wrote to the console.

    A block with a line that is no key, but without any key of a pinned type, may have lost that one.
    https://docs.cloud-init.io/en/latest/reference/modules.html#keys-to-console
    """
    last: tuple[str, ...] = ()
    for block in _BLOCK.findall(text):
        found = [_KEY.search(line) for line in block.split("\n")[1:-1]]
        texts = [" ".join(match.groups()) if match else "" for match in found]
        # Kernel messages may cut a console line short.
        keys = tuple(filter(is_public, texts))
        types, others = ({key.split()[0] for key in each} for each in (keys, pinned))
        is_cut = len(keys) < len(texts)
        if keys and not (is_cut and others and types.isdisjoint(others)):
            last = keys
    return last


def pinned_host_keys(known_hosts: Path, alias: str) -> tuple[str, ...]:
    """Return the keys pinned for an alias in file order; empty if there is no file."""
    return tuple(key for name, key in _read(known_hosts) if name == alias)


def pin_host_keys(known_hosts: Path, alias: str, keys: Iterable[str]) -> None:
    """Replace an alias's pinned keys. Readers see either the old file or the new one."""
    # Opened for writing: NFS locks no other file exclusively (flock(2)).
    with known_hosts.with_name(f".{known_hosts.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one writer at a time, among all threads and processes
        entries = _read(known_hosts)
        others = [(name, key) for name, key in entries if name != alias]
        wanted = others + [(alias, key) for key in dict.fromkeys(keys)]
        if wanted != entries:
            write_private(known_hosts, "".join(f"{name} {key}\n" for name, key in wanted))


def _read(known_hosts: Path) -> list[tuple[str, str]]:
    try:
        text = read_text(known_hosts, "")
    except UsageError as error:
        raise HostKeyError(
            known_hosts.parent.name,
            f"the pinned SSH host keys can't be read: {error.message}",
            hint=f"remove the file {known_hosts}: then the nodes' keys are pinned again, as at the first "
            "contact, and that of the head is compared with its console",
        ) from None
    return _parse(text)


def _parse(text: str) -> list[tuple[str, str]]:
    """Return names and keys in the format of known_hosts."""
    fields = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return [(f[0], f"{f[1]} {f[2]}") for f in fields if len(f) >= 3]


def scan_host_keys(head: Host, addresses: Sequence[str]) -> dict[str, str]:
    """Return ed25519 keys by private address, as the head sees them; silent addresses are missing."""
    if not addresses:
        return {}
    scan = f"ssh-keyscan -T {_SCAN_TIMEOUT_S} -t ed25519 {shlex.join(addresses)} 2>/dev/null"
    # Newer versions exit with 1 if no address answered: https://man.openbsd.org/ssh-keyscan
    done = head.run(scan, timeout_s=_SCAN_TIMEOUT_S * (2 + len(addresses) // 64), check=False)
    if done.exit_code not in (0, 1):
        raise HostError(head.name, f"ssh-keyscan failed with exit code {done.exit_code}")
    found = dict(_parse(done.stdout))
    return {address: found[address] for address in addresses if address in found}


def check_pinned_keys(
    node: str, alias: str, pinned: Sequence[str], seen: Sequence[str], known_hosts: Path
) -> None:
    """Compare a node's pinned keys with those seen on its console or by the head.

    Raises :class:`HostKeyError` if a key of the same type differs, or if no key matches: a man in the
    middle could withhold exactly the type that is seen elsewhere.
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
        f"the SSH host key pinned here for {alias} is not the node's: pinned {here}; the node's {there}",
        hint="The connections since the first contact may have been intercepted: do not use the "
        "node; terminate it, and continue from another network. If the node's keys in /etc/ssh were "
        f"regenerated on purpose, remove the old one: ssh-keygen -R {alias} -f '{known_hosts}'",
    )
