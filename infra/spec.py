"""The validated options of a cluster."""

from __future__ import annotations

import ipaddress
import re
from datetime import timedelta
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from infra.errors import UsageError
from infra.instance_types import DEFAULT_INSTANCE_TYPE, check_type_name
from infra.words import explain_invalid

CLUSTER_NAME = r"[a-z][a-z0-9-]{0,31}"
CLUSTER_NAME_RULE = "at most 32 lowercase letters, digits, and hyphens, starting with a letter"
AUTO = "auto"
EICE, SSM = "eice", "ssm"
# It becomes part of a command line: nothing that a shell or OpenSSH could take for an option.
_JUMP = re.compile(
    r"(?:[a-z_][a-z0-9_.-]{0,31}@)?[a-z0-9][a-z0-9.-]{0,180}(?::(\d{1,5}))?", re.ASCII | re.I
)
DEFAULT_VOLUME_GIB = 100
DEFAULT_TTL = timedelta(hours=8)
LONGEST_TTL = timedelta(days=30)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(m|h|d)", re.ASCII)
# gp3: https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html
_BASE_IOPS, _IOPS_PER_GIB, _IOPS_PER_MIB_S = 3000, 500, 4
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


class ClusterSpec(BaseModel):
    """The desired cluster. ``volume_gib`` is each node's root disk; ``max_price`` is in USD/hour."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=f"^{CLUSTER_NAME}$")
    nodes: int = Field(default=1, ge=1, le=256)
    stack: str
    # The record stores them in one tag of at most 256 characters.
    instance_types: tuple[str, ...] = Field(
        default=(DEFAULT_INSTANCE_TYPE,), min_length=1, max_length=12
    )
    """In order of preference; all nodes have the same type."""
    ssh_cidrs: tuple[str, ...] = Field(min_length=1)
    """The ranges that may use SSH."""
    caller: str = ""
    """The one among them that is this machine's address, and follows it."""
    subnet_id: str | None = Field(default=None, pattern="^subnet-[0-9a-f]+$")
    volume_gib: int = Field(default=DEFAULT_VOLUME_GIB, ge=20, le=16384)
    volume_throughput: int | None = Field(default=None, ge=125, le=2000)
    """In MiB/s; by default gp3's 125."""
    volume_iops: int | None = Field(default=None, ge=_BASE_IOPS, le=80000)
    volume_init_rate: int | None = Field(default=None, ge=100, le=300)
    """MiB/s at which EC2 loads a new disk from its image; by default when blocks are first read."""
    ttl: timedelta = Field(default=DEFAULT_TTL, ge=timedelta(minutes=1), le=LONGEST_TTL)
    idle_timeout: timedelta | None = Field(default=None, ge=timedelta(minutes=5), le=LONGEST_TTL)
    amx_required: bool = True
    spot: bool = False
    max_price: float | None = Field(default=None, gt=0, le=1000)
    on_demand_allowed: bool = False
    """Buy on demand if spot has no capacity or is too expensive."""
    placement_group: bool = True
    private: bool = False
    """The machines have no public addresses."""
    jump: str | None = None
    """How machines are reached from outside: ``[user@]host[:port]``, ``eice``, ``ssm``, or directly."""
    bake: Literal["head", "none"] = "head"
    """Without an image: install the head and copy it, or install all nodes at once."""
    second_guard: bool = False
    """Machines are also terminated from outside: see :mod:`infra.ec2.termination_schedule`."""

    @field_validator("instance_types")
    @classmethod
    def _type_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check_type_name(name) for name in names))

    @field_validator("ssh_cidrs")
    @classmethod
    def _networks(cls, cidrs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(_parse_cidr, cidrs)))

    @field_validator("jump")
    @classmethod
    def _jump(cls, jump: str | None) -> str | None:
        return jump and parse_jump(jump)

    @model_validator(mode="after")
    def _possible_disk(self) -> ClusterSpec:
        iops = self.volume_iops or _BASE_IOPS
        if iops > self.volume_gib * _IOPS_PER_GIB:
            raise UsageError(
                f"--volume-iops {iops}: at most {self.volume_gib * _IOPS_PER_GIB} with --volume-gib "
                f"{self.volume_gib} ({_IOPS_PER_GIB} per GiB)"
            )
        if (self.volume_throughput or 0) * _IOPS_PER_MIB_S > iops:
            raise UsageError(
                f"--volume-throughput {self.volume_throughput}: at most {iops // _IOPS_PER_MIB_S} with "
                f"{iops} IOPS",
                hint=f"add --volume-iops {(self.volume_throughput or 0) * _IOPS_PER_MIB_S}",
            )
        return self

    @property
    def disk(self) -> str:
        """The disk in words."""
        speeds = {"MiB/s": self.volume_throughput, "IOPS": self.volume_iops}
        more = "".join(f", {value} {unit}" for unit, value in speeds.items() if value)
        return f"{self.volume_gib} GiB encrypted gp3{more}"

    @property
    def disk_speed(self) -> dict[str, int | None]:
        """The disk's IOPS and MiB/s, as :mod:`infra.cost.prices` counts them."""
        return {"iops": self.volume_iops, "mibps": self.volume_throughput}

    @property
    def workers(self) -> int:
        return self.nodes - 1


_EXPECTED = {
    "name": CLUSTER_NAME_RULE,
    "nodes": "a whole number from 1 to 256",
    "subnet_id": "an ID such as subnet-0123456789abcdef0",
    "volume_gib": "from 20 to 16384 GiB",
    "volume_throughput": "from 125 to 2000 MiB/s",
    "volume_iops": "from 3000 to 80000 IOPS",
    "volume_init_rate": "from 100 to 300 MiB/s",
    "ttl": "from 1m to 30d",
    "idle_timeout": "from 5m to 30d",
    "max_price": "US dollars per machine and hour, above 0 and at most 1000",
    "bake": "head or none",
    "instance_types": "1 to 12 EC2 types separated by commas",
}


def build_spec(**options: Any) -> ClusterSpec:
    """Validate options. Raises :class:`UsageError` with the option, its value, and what was expected."""
    try:
        return ClusterSpec(**options)
    except ValidationError as error:
        message = explain_invalid(error, ClusterSpec, expected=_EXPECTED, render=_render_option)
        raise UsageError(message) from None


def _render_option(key: str, value: Any) -> str:
    """Return an option and its value as typed on the command line."""
    several = ("instance_types", "ssh_cidrs")
    option = "--" + (key.removesuffix("s") if key in several else key).replace("_", "-")
    if isinstance(value, timedelta):
        value = render_duration(value)
    elif isinstance(value, tuple):
        value = ",".join(map(str, value))
    elif isinstance(value, str) and not value.isprintable():
        value = repr(value)
    return f"{option} {value:g}" if isinstance(value, float) else f"{option} {value or repr(value)}"


def parse_ssh_cidr(text: str) -> tuple[str, ...]:
    """Return the normalized ranges of ``--ssh-cidr``, and :data:`AUTO` for this machine's address.

    Raises :class:`UsageError` for anything else.
    """
    words = [word.strip() for word in text.split(",")]
    return tuple(dict.fromkeys(AUTO if word == AUTO else _parse_cidr(word) for word in words))


def _parse_cidr(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise UsageError(
            f"--ssh-cidr: {text!r} is not an IPv4 or IPv6 range{_nearest_range(text)}",
            hint="use ranges such as 203.0.113.7/32 or 2001:db8::7/128, separated by commas, or auto "
            "for this machine's address",
        ) from None


def _nearest_range(text: str) -> str:
    """Return the range that an address with a wrong prefix is in."""
    try:
        return f"; did you mean {ipaddress.ip_network(text, strict=False)}?"
    except ValueError:
        return ""


def parse_jump(text: str) -> str:
    """Return a valid ``--jump``. Raises :class:`UsageError`."""
    match = _JUMP.fullmatch(text)
    if not match or not 0 < int(match[1] or 22) < 65536:
        raise UsageError(
            f"--jump {text!r}: expected [user@]host[:port], {EICE}, or {SSM}",
            hint=f"{EICE} is an EC2 Instance Connect Endpoint, {SSM} is Session Manager",
        )
    return text


def parse_duration(text: str, option: str) -> timedelta:
    """Parse a duration such as ``90m``, ``8h``, or ``2d``. Raises :class:`UsageError`."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{option} {text!r}: expected a duration such as 90m, 8h, or 2d")
    try:
        return timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        raise UsageError(f"{option} {text}: expected at most 30d") from None


def render_duration(time: timedelta) -> str:
    """Render a duration for :func:`parse_duration`, in the largest whole unit."""
    minutes = time.total_seconds() / 60
    for unit, size in (("d", 1440), ("h", 60)):
        if minutes >= size and minutes % size == 0:
            return f"{minutes / size:.0f}{unit}"
    # Fixed-point, because parse_duration reads no exponents.
    return f"{minutes:.5f}".rstrip("0").rstrip(".") + "m"
