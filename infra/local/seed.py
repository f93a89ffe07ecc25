"""What a node knows about itself: cloud-init's NoCloud seed, and the files of EC2's instance metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.local.state import write_atomically

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
    metadata: Mapping[str, str]
    """Values by their paths, such as ``placement/availability-zone``."""

    def meta_data(self) -> str:
        """Return the `meta-data` file as JSON, which is also YAML."""
        values: dict[str, Any] = {"instance-id": self.instance_id}
        values["local-hostname"] = self.hostname
        if self.public_key:
            values["public-keys"] = [self.public_key.strip()]
        return json.dumps(values, indent=2) + "\n"

    def write(self, folder: Path) -> None:
        """Write the seed's files, for root only: user data can contain secrets."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "meta-data").write_text(self.meta_data())
        (folder / "user-data").write_bytes(self.user_data or b"#cloud-config\n{}\n")
        for name, value in self.metadata.items():
            write_metadata(folder, name, value)


def write_metadata(folder: Path, name: str, value: str) -> None:
    """Change a value of the instance metadata. The node sees it at once: the seed is mounted there."""
    path = folder / "metadata/latest/meta-data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, value.encode())


def hostname_of(address: str) -> str:
    """Return EC2's host name for an address: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/hostname-types.html"""
    return f"ip-{address.replace('.', '-')}"


def metadata_of(instance: Any, market: str) -> dict[str, str]:
    """Return a new instance's metadata: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html"""
    zone = str(instance.placement.zone)  # moto's instance; the command line must not import moto
    return {
        "ami-id": instance.image_id,
        "instance-id": instance.id,
        "instance-life-cycle": market,
        "instance-type": instance.instance_type,
        "local-ipv4": instance.private_ip,
        "placement/availability-zone": zone,
        "placement/region": zone[:-1],
    }
