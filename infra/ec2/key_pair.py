"""A cluster's SSH key pair. The private key never leaves this machine."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from infra.ec2 import tags
from infra.errors import UsageError
from infra.files import read_text

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client


@dataclass(frozen=True)
class KeyPair:
    """An ed25519 key pair in OpenSSH's formats."""

    private: str = field(repr=False)
    public: str


def generate_key_pair(comment: str) -> KeyPair:
    """Generate a key pair; the comment appears in ``authorized_keys`` files."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return KeyPair(private, f"{public} {comment}")


def fingerprint(key: str) -> str:
    """Return OpenSSH's short form of a public key, such as ``SHA256:…``; "" for no key."""
    if not key:
        return ""
    try:
        digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    except ValueError:  # no base64
        return "damaged"
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def read_public(path: Path) -> str:
    """Return a private key file's public half (type and base64), or "" without a valid key."""
    try:
        key = load_ssh_private_key(read_text(path).encode(), None)
    except (UsageError, ValueError, TypeError, UnsupportedAlgorithm):
        return ""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def is_public(key: str) -> bool:
    """Return whether a text is one public key in OpenSSH's format."""
    try:
        load_ssh_public_key(key.encode() if key.isprintable() else b"")
    except (ValueError, UnsupportedAlgorithm):
        return False
    return True


def check_public(text: str, what: str) -> None:
    """Raise :class:`UsageError` unless a text is one public key in OpenSSH's format."""
    if not is_public(text):
        found = "this is a private key, which must not leave its machine; " * ("PRIVATE" in text)
        why = f"{found}expected one public key in OpenSSH's format: ssh-ed25519 AAAA…"
        raise UsageError(f"{what}: {why}")


def import_key_pair(ec2: EC2Client, cluster: str, public: str, labels: Mapping[str, str]) -> None:
    """Upload the public half to EC2. ``labels`` become tags."""
    known = tags.resource_tags(cluster, "key", **labels)
    ec2.import_key_pair(
        KeyName=tags.resource_name(cluster),
        PublicKeyMaterial=public.encode(),
        TagSpecifications=tags.tag_specifications(["key-pair"], known),
    )
