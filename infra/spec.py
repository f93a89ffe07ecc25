"""The cluster options in one table: model field, command-line option, and tag in the record."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from infra.errors import UsageError
from infra.instance_types import DEFAULT_INSTANCE_TYPE, check_type_name, is_metal
from infra.s3_url import check_prefixes
from infra.words import explain_invalid, parse_duration, render_duration

DEFAULT_NAME = "spr"
CLUSTER_NAME = r"[a-z][a-z0-9-]{0,31}"
CLUSTER_NAME_RULE = "at most 32 lowercase letters, digits, and hyphens, starting with a letter"
_BAKER_NAME = re.compile(r"bake-[0-9a-f]{12}(?:-[0-9a-f]{8})?")
AUTO = "auto"
EICE, SSM = "eice", "ssm"
# The value ends up in a command line, so it must not look like an option to a shell or OpenSSH.
_JUMP = re.compile(
    r"(?:[a-z_][a-z0-9_.-]{0,31}@)?[a-z0-9][a-z0-9.-]{0,180}(?::(\d{1,5}))?", re.ASCII | re.I
)
# What EC2, IAM, and EventBridge Scheduler accept.
_LABEL = re.compile(r"[\w .:/=+@-]+")
_MOST_LABELS = 10
_SUBNET = re.compile(r"subnet-[0-9a-f]{1,17}")
_PROXY = re.compile(r"http://[a-z0-9]([a-z0-9.-]{0,180}[a-z0-9])?:(\d{1,5})/?", re.ASCII | re.I)
LONGEST_TTL = timedelta(days=30)
KMS_KEY = r"^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[a-zA-Z0-9-]+$"
# gp3: https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html
_BASE_IOPS, _IOPS_PER_GIB, _IOPS_PER_MIB_S = 3000, 500, 4
_METAL_MIB_S = _BASE_IOPS // _IOPS_PER_MIB_S


def baker_name(recipe: str, packages: str) -> str:
    """Return the name of the cluster with which `bake` makes an image, from both digests."""
    return f"bake-{recipe}" + (f"-{packages[:8]}" if packages else "")


def is_baker(cluster: str) -> bool:
    """Return whether `bake` chose a cluster's name."""
    return bool(_BAKER_NAME.fullmatch(cluster))


def or_other_name(cluster: str) -> str:
    """Return ``choose another --name, or `` for hints; "" for `bake`, which has no such option."""
    return "" if is_baker(cluster) else "choose another --name, or "


@dataclass(frozen=True)
class ClusterOption:
    """How a field of :class:`ClusterSpec` appears on the command line and in the cluster's record.

    Flag and tag default to the field's name; ``tag=None`` means not recorded. With a ``const``, the
    flag takes no argument and sets this value. A field that is ``None`` becomes an empty tag; if
    ``write`` returns ``None``, there is no tag.
    """

    help: str = ""
    metavar: str | None = None
    expected: str = ""
    """Valid values in words, for messages."""
    flag: str = ""
    parse: Callable[[str], Any] = str
    """Parses the argument. Numbers and durations need none, and durations no ``write``."""
    const: bool | None = None
    tag: str | None = ""
    write: Callable[[Any], str | None] = str
    read: Callable[[str], Any] | None = None
    """Parses the tag; by default ``parse``."""
    fixed: bool = False
    """Whether the value can't change while the cluster exists."""


def _switch(
    help_: str, flag: str = "", *, yes: str = "yes", no: str = "no", **more: Any
) -> ClusterOption:
    """Return the option of a Boolean field; a negative flag such as ``--no-…`` sets it to false."""
    negative = flag.startswith(("--no-", "--allow-no-"))
    return ClusterOption(
        help_,
        flag=flag,
        const=not negative,
        write=lambda value: yes if value else no,
        read=lambda text: text == yes,
        **more,
    )


class ClusterOptions(BaseModel):
    """The options that a user chooses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, ClusterOption(expected=CLUSTER_NAME_RULE, tag=None)] = Field(
        default=DEFAULT_NAME, pattern=f"^{CLUSTER_NAME}$"
    )
    nodes: Annotated[
        int,
        ClusterOption(
            "nodes, including the head (default: unchanged, or 1)",
            None,
            "a whole number from 1 to 256",
        ),
    ] = Field(default=1, ge=1, le=256)
    # The record stores them in one tag of at most 256 characters.
    instance_types: Annotated[
        tuple[str, ...],
        ClusterOption(
            f"EC2 types in order of preference: a,b,c (default: {DEFAULT_INSTANCE_TYPE})",
            "TYPES",
            "1 to 12 EC2 types separated by commas",
            flag="--instance-type",
            parse=lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
            write=" ".join,
            read=lambda text: tuple(text.split()),
        ),
    ] = Field(default=(DEFAULT_INSTANCE_TYPE,), min_length=1, max_length=12)
    """In order of preference; all nodes have the same type."""
    stack: Annotated[
        str, ClusterOption("software, see `stacks` (default: upstream)", "NAME", fixed=True)
    ] = ""
    bake: Annotated[
        Literal["head", "none"],
        ClusterOption(
            "without an image: `head` installs the software on the head and starts the workers from its "
            "image; `none` installs it on all nodes, then makes the image (default: none on AWS for up to "
            "32 nodes, else head)",
            "WAY",
            "head or none",
        ),
    ] = "head"
    ttl: Annotated[
        timedelta,
        ClusterOption(
            "nodes shut down after this time (default: 8h); see `extend`",
            None,
            "from 1m to 30d",
        ),
    ] = Field(default=timedelta(hours=8), ge=timedelta(minutes=1), le=LONGEST_TTL)
    grace: Annotated[
        timedelta,
        ClusterOption(
            "then they wait this long for `fetch` of results that are nowhere else (default: 30m)",
            None,
            "from 0m to 24h",
        ),
    ] = Field(default=timedelta(minutes=30), ge=timedelta(0), le=timedelta(hours=24))
    max_time: Annotated[
        timedelta | None,
        ClusterOption(
            "jobs with --max-time or --budget may extend the cluster's life to this time",
            "DURATION",
            "from 1m to 30d",
        ),
    ] = Field(default=None, ge=timedelta(minutes=1), le=LONGEST_TTL)
    budget: Annotated[
        float | None,
        ClusterOption(
            "and to this many US dollars, for all nodes at their highest price",
            "USD",
            "US dollars, above 0 and at most 1000000",
            write="{:.10g}".format,
        ),
    ] = Field(default=None, gt=0, le=1_000_000)
    idle_timeout: Annotated[
        timedelta | None,
        ClusterOption(
            "also shut down after this time without a job or SSH session",
            None,
            "from 5m to 30d",
        ),
    ] = Field(default=None, ge=timedelta(minutes=5), le=LONGEST_TTL)
    second_guard: Annotated[
        bool,
        ClusterOption(
            "also have EventBridge Scheduler terminate each machine 10 min after its deadline, in case "
            "it never boots (free; needs `iam-policy --second-guard`)",
            const=True,
            write=lambda value: "yes" if value else None,
            read=bool,
        ),
    ] = False
    """See :mod:`infra.ec2.termination_schedule`."""
    bucket: Annotated[
        str | None,
        ClusterOption(
            "nodes may read and write this prefix, and nothing else in S3 (needs `iam-policy --bucket`)",
            "s3://BUCKET/PREFIX",
            fixed=True,
        ),
    ] = None
    read_from: Annotated[
        tuple[str, ...],
        ClusterOption(
            "further prefixes that nodes may read: s3://A/x,s3://C",
            "URLS",
            parse=lambda text: tuple(url.strip() for url in text.split(",") if url.strip()),
            write=lambda urls: " ".join(urls) or None,
            read=lambda text: tuple(text.split()),
            fixed=True,
        ),
    ] = ()
    instance_profile: Annotated[
        str | None,
        ClusterOption(
            "give nodes this instance profile, instead of a role made for --bucket",
            "NAME",
            "an instance profile's name",
            fixed=True,
        ),
    ] = Field(default=None, pattern=r"^[A-Za-z0-9_+=,.@-]{1,128}$")
    bucket_kms_key: Annotated[
        str | None,
        ClusterOption(
            "nodes may also use the KMS key with which that bucket encrypts",
            "ARN",
            "arn:aws:kms:REGION:ACCOUNT:key/ID",
            fixed=True,
        ),
    ] = Field(default=None, pattern=KMS_KEY)
    permissions_boundary: Annotated[
        str | None,
        ClusterOption(
            "permissions boundary of the roles for --bucket and --second-guard",
            "ARN",
            "the ARN of a managed policy",
            fixed=True,
        ),
    ] = Field(
        default=None,
        pattern=r"^arn:aws[a-z-]*:iam::(\d{12}|aws):policy/[A-Za-z0-9_+=,.@/-]{1,180}$",
    )
    market: Annotated[
        Literal["on-demand", "spot", "spot-or-on-demand"],
        ClusterOption(
            "on-demand, spot (cheaper, but EC2 can reclaim the machines), or spot-or-on-demand, which buys "
            "on demand if spot has no capacity (default: on-demand)",
            "MARKET",
            write=lambda market: market.replace("-or-", " "),
            read=lambda text: text.replace(" ", "-or-"),
        ),
    ] = "on-demand"
    max_price: Annotated[
        float | None,
        ClusterOption(
            "maximum price per spot machine and hour",
            "USD",
            "US dollars per machine and hour, above 0 and at most 1000",
            write="{:g}".format,
        ),
    ] = Field(default=None, gt=0, le=1000)
    placement_group: Annotated[
        bool, _switch("do not place the machines close together", "--no-placement-group")
    ] = True
    private: Annotated[
        bool,
        _switch(
            "no public addresses: reach machines from inside the VPC or with --jump; installing software "
            "requires a NAT gateway or --proxy",
            fixed=True,
        ),
    ] = False
    jump: Annotated[
        str | None,
        ClusterOption(
            "reach private addresses through jump host [user@]host[:port], known to OpenSSH; "
            "`eice`, an EC2 Instance Connect Endpoint; `ssm`, Session Manager; or `none`",
            "WAY",
        ),
    ] = None
    proxy: Annotated[
        str | None,
        ClusterOption("HTTP proxy of the nodes, also for jobs; or `none`", "http://HOST:PORT"),
    ] = None
    # The record stores them in one tag of at most 256 characters.
    subnet_ids: Annotated[
        tuple[str, ...],
        ClusterOption(
            "subnets of one VPC in order of preference: a,b,c (default: each zone's default subnet)",
            "IDS",
            "an ID such as subnet-0123456789abcdef0, or up to 10 separated by commas",
            flag="--subnet-id",
            parse=lambda text: tuple(dict.fromkeys(map(str.strip, text.split(",")))),
            write=" ".join,
            read=lambda text: tuple(text.split()),
            tag="subnet",
            fixed=True,
        ),
    ] = Field(default=(), max_length=10)
    capacity_reservation: Annotated[
        str | None,
        ClusterOption(
            "buy only in this On-Demand Capacity Reservation, or `none` (default: prefer zones whose open "
            "reservations have room)",
            "ID",
            "an ID such as cr-0123456789abcdef0, or none",
        ),
    ] = Field(default=None, pattern="^cr-[0-9a-f]{8,17}$")
    volume_gib: Annotated[
        int,
        ClusterOption(
            "each node's disk in GiB (default: 100)", None, "from 20 to 16384 GiB", fixed=True
        ),
    ] = Field(default=100, ge=20, le=16384)
    volume_throughput: Annotated[
        int | None,
        ClusterOption(
            "the disk's MiB/s (default: 750 on bare metal, otherwise 125)",
            "MIB_S",
            "from 125 to 2000 MiB/s",
            fixed=True,
        ),
    ] = Field(default=None, ge=125, le=2000)
    volume_iops: Annotated[
        int | None,
        ClusterOption(
            "the disk's IOPS (default: 3000)",
            "N",
            "from 3000 to 80000 IOPS",
            fixed=True,
        ),
    ] = Field(default=None, ge=_BASE_IOPS, le=80000)
    volume_init_rate: Annotated[
        int | None,
        ClusterOption(
            "copy the image to new disks at 100 to 300 MiB/s, billed per GiB (default: load each block "
            "when it is first read)",
            "MIB_S",
            "from 100 to 300 MiB/s",
        ),
    ] = Field(default=None, ge=100, le=300)
    labels: Annotated[
        tuple[tuple[str, str], ...],
        ClusterOption(
            "tag every resource; repeatable",
            "KEY=VALUE",
            flag="--tag",
            tag=None,
            fixed=True,
        ),
    ] = ()
    """The user's own tags. The security group's record them."""
    amx_required: Annotated[
        bool,
        _switch(
            "continue if the processor has no AMX",
            "--allow-no-amx",
            yes="required",
            no="optional",
            tag="amx",
        ),
    ] = True

    @field_validator("instance_types")
    @classmethod
    def _type_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check_type_name(name) for name in names))

    @field_validator("jump")
    @classmethod
    def _jump(cls, jump: str | None) -> str | None:
        return parse_jump(jump) if jump and jump != "none" else None

    @field_validator("proxy")
    @classmethod
    def _proxy(cls, url: str | None) -> str | None:
        return parse_proxy(url) if url and url != "none" else None

    @field_validator("subnet_ids")
    @classmethod
    def _subnets(cls, ids: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_SUBNET.fullmatch, ids)):
            raise ValueError(f"not subnets: {ids}")
        return ids

    @field_validator("capacity_reservation", mode="before")
    @classmethod
    def _reservation(cls, id_: Any) -> Any:
        return None if id_ == "none" else id_

    @field_validator("bucket")
    @classmethod
    def _bucket(cls, url: str | None) -> str | None:
        return check_prefixes((url,), "--bucket")[0] if url else None

    @field_validator("read_from")
    @classmethod
    def _read_from(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return check_prefixes(urls, "--read-from")

    @model_validator(mode="after")
    def _possible_role(self) -> ClusterOptions:
        if self.bucket_kms_key and not (self.bucket and self.makes_role):
            raise UsageError("--bucket-kms-key: it is for the role of --bucket")
        return self

    @field_validator("labels")
    @classmethod
    def _labels(cls, labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(check_labels(labels).items()))

    @model_validator(mode="after")
    def _possible_reservation(self) -> ClusterOptions:
        if self.capacity_reservation and self.spot:
            raise UsageError(
                f"--capacity-reservation: it is for on-demand machines, not for --market {self.market}",
                hint="omit one of them; --capacity-reservation none stops using it",
            )
        return self

    @model_validator(mode="after")
    def _possible_disk(self) -> ClusterOptions:
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
    def makes_role(self) -> bool:
        """Whether `up` makes the nodes' role: see :mod:`infra.iam.instance_profile`."""
        return bool(self.bucket or self.read_from) and self.instance_profile is None

    @property
    def disk(self) -> str:
        """The disk as text, such as ``100 GiB encrypted gp3``."""
        speeds = {"MiB/s": self.volume_throughput, "IOPS": self.volume_iops}
        more = "".join(f", {value} {unit}" for unit, value in speeds.items() if value)
        return f"{self.volume_gib} GiB encrypted gp3{more}"

    @property
    def disk_speed(self) -> dict[str, int | None]:
        """The disk's IOPS and MiB/s as keyword arguments for :mod:`infra.cost.prices`."""
        return {"iops": self.volume_iops, "mibps": self.volume_throughput}

    @property
    def workers(self) -> int:
        return self.nodes - 1

    @property
    def spot(self) -> bool:
        return self.market != "on-demand"

    @property
    def on_demand_allowed(self) -> bool:
        """Whether to buy on demand if spot has no capacity or is too expensive."""
        return self.market == "spot-or-on-demand"


class ClusterChange(ClusterOptions):
    """The options that a user gives for a new cluster or an existing one, which keeps the others."""

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, apart from the name, by field."""
        return {key: getattr(self, key) for key in self.model_fields_set - {"name"}}


class ClusterSpec(ClusterOptions):
    """The desired cluster: the user's options, and the addresses that may use SSH."""

    ssh_cidrs: tuple[str, ...] = Field(min_length=1)
    caller: str = ""
    """The range in ``ssh_cidrs`` that tracks this machine's address."""

    @field_validator("ssh_cidrs")
    @classmethod
    def _networks(cls, cidrs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(_parse_cidr, cidrs)))


def _options() -> dict[str, ClusterOption]:
    found = {}
    for key, field in ClusterOptions.model_fields.items():
        (option,) = (each for each in field.metadata if isinstance(each, ClusterOption))
        name = key.replace("_", "-")
        tag = None if option.tag is None else option.tag or name
        option = replace(option, flag=option.flag or f"--{name}", tag=tag)
        kinds = {field.annotation, *get_args(field.annotation)}
        if timedelta in kinds:
            parse = partial(parse_duration, option=option.flag)
            option = replace(option, parse=parse, write=render_duration)
        elif numbers := {int, float} & kinds:
            option = replace(option, parse=numbers.pop())
        found[key] = option
    return found


OPTIONS = _options()
"""All options by field name, with flag and tag filled in."""


def require_spot(options: ClusterOptions) -> None:
    """Raise :class:`UsageError` if there is a maximum price without a spot market."""
    if options.max_price and not options.spot:
        raise UsageError("--max-price requires --market spot; on-demand prices are fixed")


def require_role(options: ClusterOptions) -> None:
    """Raise :class:`UsageError` if there is a permissions boundary without a role."""
    if options.permissions_boundary and not (options.makes_role or options.second_guard):
        raise UsageError(
            "--permissions-boundary: it is for the roles of --bucket, --read-from, and --second-guard"
        )


T = TypeVar("T", bound=ClusterOptions)


def default_throughput(instance_types: Iterable[str]) -> int | None:
    """Return the MiB/s of a new cluster's disks; ``None`` for EBS's least.

    With the least, bare metal, which trains models of billions of weights, takes minutes for a checkpoint.
    """
    return _METAL_MIB_S if any(map(is_metal, instance_types)) else None


def build_spec(**options: Any) -> ClusterSpec:
    """Validate options. Raises :class:`UsageError` with the option, its value, and what was expected."""
    return _validate(ClusterSpec, options)


def validate_options(**options: Any) -> ClusterChange:
    """Return the options that a user gave. Raises :class:`UsageError` for invalid ones."""
    return _validate(ClusterChange, options)


def _validate(model: type[T], options: dict[str, Any]) -> T:
    try:
        return model(**options)
    except ValidationError as error:
        expected = {key: option.expected for key, option in OPTIONS.items()}
        message = explain_invalid(error, model, expected=expected, render=_render_option)
        raise UsageError(message) from None


def _render_option(key: str, value: Any) -> str:
    """Format an option and its value as typed on the command line."""
    option = OPTIONS[key].flag if key in OPTIONS else "--ssh-cidr"
    if isinstance(value, timedelta):
        value = render_duration(value)
    elif isinstance(value, tuple):
        value = ",".join(map(str, value))
    if isinstance(value, str) and not value.isprintable():
        value = repr(value)
    return f"{option} {value:g}" if isinstance(value, float) else f"{option} {value or repr(value)}"


def parse_proxy(url: str) -> str:
    """Return ``http://HOST:PORT``. Raises :class:`UsageError`, which never shows a password."""
    if "@" in url:
        raise UsageError(
            "--proxy: a login in its URL would be readable in the cluster's tags",
            hint="use a proxy that admits the subnet's addresses: http://HOST:PORT",
        )
    match = _PROXY.fullmatch(url)
    # Without a port, curl takes 1080 and Python 80.
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise UsageError(f"--proxy {url}: expected http://HOST:PORT")
    return url.rstrip("/")


def parse_labels(words: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse the values of ``--tag``. Raises :class:`UsageError`."""
    pairs = []
    names = {"name": "Name"}
    for word in words:
        key, found, value = word.partition("=")
        if not found:
            raise UsageError(f"--tag {word}: expected KEY=VALUE")
        if (other := names.setdefault(key.lower(), key)) != key:
            raise UsageError(f"--tag {word}: IAM ignores case, so this key is the same as {other}")
        pairs.append((key, value))
    return tuple(sorted(check_labels(pairs).items()))


def check_labels(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the user's tags. Raises :class:`UsageError` for one that AWS or this tool would refuse.

    https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html
    """
    labels: dict[str, str] = {}
    for key, value in pairs:
        shown = f"--tag {key}={value}"
        if key.lower().startswith(("aws:", "spr-cluster:")) or key == "Name":
            raise UsageError(f"{shown}: Name, aws:…, and spr-cluster:… are not for users")
        if not (_LABEL.fullmatch(key) and len(key) <= 128 and len(value) <= 256):
            raise UsageError(
                f"{shown}: expected a key of up to 128 characters and a value of up to 256"
            )
        if not _LABEL.fullmatch(value or "x"):
            raise UsageError(f"{shown}: use only letters, digits, spaces, and _ . : / = + - @")
        if labels.setdefault(key, value) != value:
            raise UsageError(f"{shown}: --tag gives {key} twice")
    if len(labels) > _MOST_LABELS:
        raise UsageError(f"--tag: at most {_MOST_LABELS}; a resource can have 50, with this tool's")
    return labels


def parse_ssh_cidr(text: str) -> tuple[str, ...]:
    """Parse ``--ssh-cidr`` into normalized ranges; :data:`AUTO` stands for this machine's address.

    Raises :class:`UsageError`.
    """
    words = [word.strip() for word in text.split(",")]
    return tuple(dict.fromkeys(AUTO if word == AUTO else _parse_cidr(word) for word in words))


def _parse_cidr(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        near = ""
        with suppress(ValueError):  # 10.1.0.0/16 for 10.1.2.3/16
            near = f"; did you mean {ipaddress.ip_network(text, strict=False)}?"
        raise UsageError(
            f"--ssh-cidr: {text!r} is not an IPv4 or IPv6 range{near}",
            hint="use ranges such as 203.0.113.7/32 or 2001:db8::7/128, separated by commas, or auto "
            "for this machine's address",
        ) from None


def parse_jump(text: str) -> str:
    """Validate ``--jump``. Raises :class:`UsageError`."""
    match = _JUMP.fullmatch(text)
    if not match or not 0 < int(match[1] or 22) < 65536:
        raise UsageError(
            f"--jump {text!r}: expected [user@]host[:port], {EICE}, {SSM}, or none",
            hint=f"{EICE} is an EC2 Instance Connect Endpoint, {SSM} is Session Manager",
        )
    return text
