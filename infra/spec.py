"""What the user asked for, validated: one frozen value from the command line to the last call."""

from __future__ import annotations

import ipaddress
import re
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from infra.catalogue import DEFAULT_INSTANCE_TYPE, InstanceType, find_instance_type
from infra.errors import UsageError

CLUSTER_NAME = r"[a-z][a-z0-9-]{0,31}"
CLUSTER_NAME_RULE = "lower-case letters, digits and hyphens, at most 32, a letter first"
DEFAULT_TTL = timedelta(hours=8)
_TTL = re.compile(r"(\d+(?:\.\d+)?)(m|h|d)")
_TTL_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


class ClusterSpec(BaseModel):
    """A cluster as wished for. ``volume_gib`` is each node's root disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=f"^{CLUSTER_NAME}$")
    nodes: int = Field(ge=1, le=256)
    stack: str
    instance_type: str = DEFAULT_INSTANCE_TYPE
    ssh_cidr: str
    subnet_id: str | None = None
    volume_gib: int = Field(default=100, ge=20, le=16384)
    ttl: timedelta = Field(default=DEFAULT_TTL, ge=timedelta(minutes=1), le=timedelta(days=30))
    amx_required: bool = True

    @field_validator("instance_type")
    @classmethod
    def _known_type(cls, name: str) -> str:
        return find_instance_type(name).name

    @field_validator("ssh_cidr")
    @classmethod
    def _ipv4_network(cls, cidr: str) -> str:
        try:
            return str(ipaddress.IPv4Network(cidr))
        except ValueError as error:
            raise UsageError(
                f"--ssh-cidr {cidr!r}: {error}", hint="an IPv4 range such as 203.0.113.7/32"
            ) from None

    @property
    def machine(self) -> InstanceType:
        return find_instance_type(self.instance_type)

    @property
    def workers(self) -> int:
        return self.nodes - 1


_EXPECTED = {
    "name": CLUSTER_NAME_RULE,
    "nodes": "a whole number from 1 to 256",
    "volume_gib": "from 20 to 16384 GiB",
    "ttl": "from 1m to 30d",
}


def build_spec(**wishes: Any) -> ClusterSpec:
    """Validate what the user gave; raises :class:`UsageError` naming the option and what fits it."""
    try:
        return ClusterSpec(**wishes)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        option = "--" + key.replace("_", "-")
        expected = _EXPECTED.get(key, first["msg"])
        raise UsageError(f"{option} {wishes.get(key)!s}: expected {expected}") from None


def parse_ttl(text: str) -> timedelta:
    """A duration such as ``90m``, ``8h`` or ``2d``; raises :class:`UsageError` otherwise."""
    match = _TTL.fullmatch(text.strip())
    if not match:
        raise UsageError(f"--ttl {text!r}: expected a duration such as 90m, 8h or 2d")
    try:
        return timedelta(**{_TTL_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        raise UsageError(f"--ttl {text}: expected {_EXPECTED['ttl']}") from None
