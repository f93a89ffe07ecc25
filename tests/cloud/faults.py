"""Injected faults of the embedded cloud: slow machines, full zones, throttling, lost responses.

They come from a TOML file. The server applies them through :class:`ActiveFaults`.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import botocore.session
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from infra.errors import UsageError
from infra.files import parse_toml, read_text
from infra.local.api.policy import Policy, Request
from infra.local.api.runtime import Conditions, Runtime
from infra.words import explain_invalid, nearest
from tests.cloud.policies import parse_known_policy

Profile = Literal["instant", "fast", "metal", "unkind"]
Market = Literal["spot", "on-demand", "*"]
Fate = Literal[
    "never-boots",
    "no-guest",
    "dies",
    "no-room",
    "no-key",
    "no-storage",
    "no-ssh",
    "no-amx",
    "impaired",
    "slow-checks",
    "spot-notice",
    "stops",
]

_SERVICES = (
    "ec2",
    "iam",
    "organizations",
    "pricing",
    "s3",
    "scheduler",
    "ssm",
    "sts",
    "service-quotas",
)
# AWS's HTTP statuses for retryable error codes; all other codes are client errors:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
_STATUS = {
    "InternalError": 500,
    "InternalFailure": 500,
    "InsufficientInstanceCapacity": 500,
    "InsufficientCapacity": 500,
    "RequestLimitExceeded": 503,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
    "Unavailable": 503,
}


@functools.cache
def known_actions() -> frozenset[str]:
    """Return the API actions that the embedded cloud serves."""
    session = botocore.session.get_session()
    return frozenset(
        name for service in _SERVICES for name in session.get_service_model(service).operation_names
    )


def _known_action(action: str) -> str:
    # A rule for an unknown action would silently do nothing.
    if action != "*" and action not in known_actions():
        raise ValueError(f"an API action or '*'{nearest(action, known_actions())}")
    return action


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("an absolute path")
    return path


Action = Annotated[str, AfterValidator(_known_action)]
Seconds = Annotated[float, Field(ge=0, le=86400)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Times(_Section):
    """How long a boot, an image, and a termination take, in seconds."""

    boot_s: float
    image_s: float
    terminate_s: float


# On AWS, bare metal takes about 20 minutes to boot, 60 for an image, and 5 to terminate; "metal" is 60
# times faster.
_METAL = Times(boot_s=20, image_s=60, terminate_s=5)
PROFILES: dict[Profile, Times] = {
    "instant": Times(boot_s=0, image_s=0, terminate_s=0),
    "fast": Times(boot_s=0.3, image_s=0.3, terminate_s=0.2),
    "metal": _METAL,
    "unkind": _METAL,
}


class Quota(_Section):
    """The maximum number of running vCPUs per market."""

    on_demand_vcpus: int = Field(default=4096, ge=0)
    spot_vcpus: int = Field(default=4096, ge=0)


class Spot(_Section):
    """The spot market. A ``usd_per_hour`` of 0 means a share of the list price.

    EC2 refuses a maximum price below the spot price. Without the ``service_linked_role``, a purchase
    requires permission to create it. EC2 reclaims the instances in ``interrupt``, with ``notice_s``
    seconds of notice.
    """

    usd_per_hour: float = Field(default=0, ge=0)
    service_linked_role: bool = True
    interrupt: tuple[str, ...] = ()
    notice_s: Seconds = 120


class Ebs(_Section):
    """The customer-managed key that encrypts new disks; callers need permission to use it."""

    kms_key: str = ""


class Pricing(_Section):
    """The price list: ``factor`` times the default prices, without types that match ``unlisted``."""

    factor: float = Field(default=1, gt=0)
    unlisted: tuple[str, ...] = ()


class CapacityRule(_Section):
    """Capacity for ``free`` matching machines; with ``group``, only machines in placement groups match."""

    zone: str = "*"
    instance_type: str = "*"
    market: Market = "*"
    group: bool = False
    free: int = Field(ge=0)

    def matches(self, pool: Any) -> bool:
        """Return whether this rule applies to a :class:`tests.cloud.capacity.CapacityPool`."""
        return (
            fnmatch.fnmatchcase(pool.zone, self.zone)
            and fnmatch.fnmatchcase(pool.instance_type, self.instance_type)
            and self.market in ("*", pool.market)
            and (pool.grouped or not self.group)
        )


class ReservationRule(_Section):
    """A capacity reservation of the account; an open one serves any matching launch."""

    id: str = Field(pattern="^cr-[0-9a-f]{17}$")
    zone: str
    instance_type: str
    count: int = Field(ge=1)
    match: Literal["open", "targeted"] = "open"
    platform: str = "Linux/UNIX"
    state: Literal["active", "expired", "cancelled"] = "active"
    interruptible: bool = False


class ThrottleRule(_Section):
    """The fraction of calls that EC2 rejects with RequestLimitExceeded, or S3, if named, with SlowDown."""

    action: Action = "*"
    rate: float = Field(ge=0, le=1)


class ErrorRule(_Section):
    """After ``after`` calls, ``times`` calls fail; with ``effect``, they take effect before they fail."""

    action: Action = "*"
    code: str = "InternalError"
    status: int | None = Field(default=None, ge=400, le=599)
    message: str = "An injected fault"
    times: int = Field(default=1, ge=1)
    after: int = Field(default=0, ge=0)
    effect: bool = False

    @property
    def http_status(self) -> int:
        return self.status or (500 if self.effect else _STATUS.get(self.code, 400))


class MachineRule(_Section):
    """The fate of the n-th machine launched from now on in a zone, or of all.

    ``after_s`` starts once it runs.
    """

    n: Annotated[int, Field(ge=0)] | Literal["*"] = "*"
    zone: str = "*"
    fate: Fate
    after_s: Seconds = 0


class Console(_Section):
    """Console output: without ``latest``, only available ``delay_s`` seconds after the launch."""

    latest: bool = True
    delay_s: Seconds = 0


class Disk(_Section):
    """Disks created from an image: ``first_read_mib_s`` is the speed of reading a block the first time.

    It applies to simulated machines, not to containers.
    """

    first_read_mib_s: float | None = Field(default=None, gt=0)


class NetworkFaults(_Section):
    """The network between the caller and the machines: routes, Block Public Access, ACLs, and port 22.

    ``excluded`` exempts the default VPC from Block Public Access. ``--jump eice`` needs
    ``connect_endpoint``, and ``--jump ssm`` needs ``host_management``. The VPC has interface endpoints for
    ``endpoints``, such as ``ssm``. ``caller`` is the caller's range as EC2 sees it; by default, the real one.
    """

    internet_gateway: bool = True
    nat: bool = False
    firewall: bool = False
    block_public_access: Literal["off", "block-bidirectional", "block-ingress"] = "off"
    excluded: bool = False
    connect_endpoint: bool = True
    host_management: bool = True
    endpoints: tuple[str, ...] = ()
    acl: Literal["open", "no-ssh", "no-answers", "no-downloads"] = "open"
    ssh: Literal["open", "blocked"] = "open"
    caller: str = ""

    @property
    def cuts_ssh(self) -> bool:
        """Whether the faults block SSH to public addresses, regardless of security groups."""
        closed = self.block_public_access != "off" and not self.excluded
        closed |= self.acl in ("no-ssh", "no-answers") or self.ssh == "blocked"
        return closed or not self.internet_gateway or self.nat


class Iam(_Section):
    """The caller's IAM policy file; IAM sees the tags of new resources after ``tag_delay_s``."""

    policy: Annotated[Path, AfterValidator(_absolute)]
    tag_delay_s: Seconds = 0


class Faults(_Section):
    """The contents of a faults file; by default there are no faults."""

    seed: int = 0
    account: str = Field(default="", pattern=r"^(\d{12})?$")
    """The account of the caller's credentials; "" means the embedded cloud's own."""
    caller: str = Field(default="user/spr-cluster", pattern=r"^[a-z-]+(/[\w+=,.@-]+)*$")
    """The part of the caller's ARN after the account, such as ``assumed-role/Admin/ann``."""
    profile: Profile = "instant"
    boot_s: Seconds | None = None
    image_s: Seconds | None = None
    terminate_s: Seconds | None = None
    visibility_s: Seconds = 0
    role_visibility_s: Seconds = 0
    page_size: int = Field(default=0, ge=0)
    quota: Quota = Quota()
    spot: Spot = Spot()
    ebs: Ebs = Ebs()
    pricing: Pricing = Pricing()
    capacity: tuple[CapacityRule, ...] = ()
    reservation: tuple[ReservationRule, ...] = ()
    throttle: tuple[ThrottleRule, ...] = ()
    error: tuple[ErrorRule, ...] = ()
    machine: tuple[MachineRule, ...] = ()
    disk: Disk = Disk()
    console: Console = Console()
    network: NetworkFaults = NetworkFaults()
    iam: Iam | None = None

    @model_validator(mode="before")
    @classmethod
    def _make_unkind(cls, values: Any) -> Any:
        if values.get("profile") != "unkind":
            return values
        machines = values.get("machine", [])
        if isinstance(machines, list):
            machines = [*machines, _SLOW_CHECKS]
        return {**_UNKIND, **values, "machine": machines}

    @property
    def times(self) -> Times:
        """The profile's times, unless the file overrides them."""
        asked = {name: getattr(self, name) for name in Times.model_fields}
        overrides = {name: value for name, value in asked.items() if value is not None}
        return PROFILES[self.profile].model_copy(update=overrides)


# The "unkind" profile: AWS on an ordinary day. A faults file can override each section.
_UNKIND: dict[str, Any] = {
    "visibility_s": 3,
    "role_visibility_s": 10,
    "spot": {"service_linked_role": False},
    "pricing": {"factor": 1.1},
    "throttle": [{"rate": 0.1}],
    "disk": {"first_read_mib_s": 5},
    "console": {"latest": False, "delay_s": 60},
}
_SLOW_CHECKS = {"fate": "slow-checks", "after_s": 30}


def parse_faults(text: str, source: str = "faults") -> Faults:
    """Parse a faults file. Raises :class:`UsageError` with the key, its value, and valid values."""
    try:
        return Faults.model_validate(parse_toml(text, source))
    except ValidationError as error:
        table = Faults.model_fields.get(str(error.errors()[0]["loc"][0]))
        section: Any = table and table.annotation
        model = section if hasattr(section, "model_fields") else Faults
        raise UsageError(f"{source}: {explain_invalid(error, model)}") from None


def read_faults(path: Path) -> tuple[Faults, Policy | None]:
    """Read a faults file and its policy. Raises :class:`UsageError`."""
    faults = parse_faults(read_text(path), str(path))
    if faults.iam is None:
        return faults, None
    file = faults.iam.policy
    return faults, parse_known_policy(read_text(file), f"IAM policy {file}")


class ActiveFaults(Conditions):
    """Watches a faults file; if it becomes invalid, logs that and keeps the last valid faults."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None
        self._activate(Faults(), None)

    def _activate(self, faults: Faults, policy: Policy | None) -> None:
        """Activate these faults and reset all counts."""
        self.now = faults
        self.boot_s, self.image_s, self.terminate_s = faults.times.model_dump().values()
        self.price_factor, self.unlisted = faults.pricing.factor, faults.pricing.unlisted
        self.spot_usd = faults.spot.usd_per_hour
        self.policy = policy
        self._random = random.Random(faults.seed)
        self._calls: Counter[int] = Counter()
        self.launched = 0
        """The number of machines launched since the faults were activated."""

    def refresh(self) -> None:
        """Reload the file if it has changed; without a file, there are no faults."""
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            self._activate(Faults(), None)
            return
        try:
            self._activate(*read_faults(self._path))
        except UsageError as error:
            logging.error("faults unchanged: %s", error.message)

    def allows(self, request: Request) -> bool:
        """Return whether the policy allows a request; without a policy, all are allowed."""
        return self.policy is None or self.policy.allows(request)

    @property
    def tag_delay_s(self) -> float:
        return self.now.iam.tag_delay_s if self.now.iam else 0

    def is_throttled(self, action: str, *, named: bool = False) -> bool:
        """Return whether to throttle this call; every matching rule draws a random number.

        With ``named``, rules for all actions do not match.
        """
        actions = (action,) if named else ("*", action)
        rates = [rule.rate for rule in self.now.throttle if rule.action in actions]
        draws = [self._random.random() < rate for rate in rates]
        return any(draws)

    def find_error(self, action: str) -> ErrorRule | None:
        """Return the rule by which this call fails, if any. Later rules do not count the call."""
        for number, rule in enumerate(self.now.error):
            if rule.action not in ("*", action):
                continue
            count = self._calls[number]
            self._calls[number] += 1
            if rule.after <= count < rule.after + rule.times:
                return rule
        return None

    def next_fate(self, zone: str) -> MachineRule | None:
        """Count a machine that is being launched in a zone and return its fate, if any."""
        number, self.launched = self.launched, self.launched + 1
        rules = (rule for rule in self.now.machine if rule.zone in (zone, "*"))
        return next((rule for rule in rules if rule.n in (number, "*")), None)


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def faults_of(runtime: Runtime) -> ActiveFaults:
    """Return a server's faults."""
    assert isinstance(runtime.conditions, ActiveFaults)
    return runtime.conditions
