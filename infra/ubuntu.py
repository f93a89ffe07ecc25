"""The Ubuntu releases that nodes can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Release = Literal["20.04", "22.04", "24.04"]


@dataclass(frozen=True)
class UbuntuRelease:
    """``python`` is its ``python3``, ``glibc_minor`` the x of glibc 2.x, ``disk`` that of its AMI."""

    python: str
    glibc_minor: int
    disk: str
    free_updates_ended: str = ""


# https://documentation.ubuntu.com/aws/aws-how-to/instances/find-ubuntu-images/
RELEASES: dict[str, UbuntuRelease] = {
    "20.04": UbuntuRelease("3.8", 31, "ebs-gp2", free_updates_ended="May 2025"),
    "22.04": UbuntuRelease("3.10", 35, "ebs-gp2"),
    "24.04": UbuntuRelease("3.12", 39, "ebs-gp3"),
}


def ubuntu_parameter(release: str) -> str:
    """The SSM parameter that holds the current AMI id of an Ubuntu release."""
    disk = RELEASES[release].disk
    return f"/aws/service/canonical/ubuntu/server/{release}/stable/current/amd64/hvm/{disk}/ami-id"
