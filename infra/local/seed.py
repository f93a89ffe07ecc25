"""cloud-init's NoCloud seed: what EC2's metadata would tell a node at its first boot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED_TARGET = "/var/lib/cloud/seed/nocloud"


@dataclass(frozen=True)
class Seed:
    """An instance's identity and user data.

    A new instance id makes cloud-init run again on a clone of an image: new host keys, new host name.
    """

    instance_id: str
    hostname: str
    public_key: str
    user_data: bytes

    def meta_data(self) -> str:
        """Return the `meta-data` file as JSON, which is also YAML."""
        values: dict[str, Any] = {"instance-id": self.instance_id}
        values["local-hostname"] = self.hostname
        if self.public_key:
            values["public-keys"] = [self.public_key.strip()]
        return json.dumps(values, indent=2) + "\n"

    def write(self, folder: Path) -> None:
        """Write the seed's two files, for root only: user data can contain secrets."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "meta-data").write_text(self.meta_data())
        (folder / "user-data").write_bytes(self.user_data or b"#cloud-config\n{}\n")


def hostname_of(address: str) -> str:
    """Return EC2's host name for an address: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/hostname-types.html"""
    return f"ip-{address.replace('.', '-')}"
