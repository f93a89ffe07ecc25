"""How bad the embedded cloud's day is: slow machines, full zones, throttling, lost answers.

A TOML file, validated here into frozen values; :mod:`infra.local.faults_in_force` acts by them.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from infra.errors import UsageError
from infra.validation import explain_invalid, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Profile = Literal["instant", "fast", "metal"]
Market = Literal["spot", "on-demand", "*"]
Fate = Literal[
    "never-boots", "dies", "no-ssh", "no-amx", "impaired", "spot-notice", "stops"
]  # fmt: skip

_SERVICES = ("ec2", "ssm", "sts", "service-quotas")
# AWS's own statuses of the codes that are worth trying again; everything else is the caller's fault:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
_STATUS = {
    "InternalError": 500,
    "InternalFailure": 500,
    "InsufficientInstanceCapacity": 500,
    "InsufficientCapacity": 500,
    "RequestLimitExceeded": 503,
    "ServiceUnavailable": 503,
    "Unavailable": 503,
}


@functools.cache
def known_actions() -> frozenset[str]:
    """The API actions that the tool can meet here."""
    import botocore.session

    session = botocore.session.get_session()
    return frozenset(
        name for service in _SERVICES for name in session.get_service_model(service).operation_names
    )


def _known_action(action: str) -> str:
    # A rule for an action that does not exist would never act, and nobody would notice.
    if action != "*" and action not in known_actions():
        raise ValueError(f"an API action or '*'{nearest(action, known_actions())}")
    return action


Action = Annotated[str, AfterValidator(_known_action)]
Seconds = Annotated[float, Field(ge=0, le=86400)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Times(_Section):
    """Seconds that EC2 takes for a boot, an image, a termination."""

    boot_s: float
    image_s: float
    terminate_s: float


# Bare metal takes about 20 minutes to boot, 60 for an image, 5 to end; "metal" is 60 times faster.
PROFILES: dict[Profile, Times] = {
    "instant": Times(boot_s=0, image_s=0, terminate_s=0),
    "fast": Times(boot_s=0.3, image_s=0.3, terminate_s=0.2),
    "metal": Times(boot_s=20, image_s=60, terminate_s=5),
}


class Quota(_Section):
    """vCPUs that may run at the same time, per market."""

    on_demand_vcpus: int = Field(default=4096, ge=0)
    spot_vcpus: int = Field(default=4096, ge=0)


class Spot(_Section):
    """What a spot machine costs now: a lower highest price is refused."""

    usd_per_hour: float = Field(default=0, ge=0)


class CapacityRule(_Section):
    """``free`` machines fit in all where the rule matches; ``group``: only into placement groups."""

    zone: str = "*"
    instance_type: str = "*"
    market: Market = "*"
    group: bool = False
    free: int = Field(ge=0)

    def matches(self, zone: str, instance_type: str, market: str, *, grouped: bool) -> bool:
        """Whether this rule is about such a machine."""
        return (
            fnmatch.fnmatchcase(zone, self.zone)
            and fnmatch.fnmatchcase(instance_type, self.instance_type)
            and self.market in ("*", market)
            and (grouped or not self.group)
        )


class ThrottleRule(_Section):
    """The share of calls that are answered with RequestLimitExceeded."""

    action: Action = "*"
    rate: float = Field(ge=0, le=1)


class ErrorRule(_Section):
    """``times`` calls fail after ``after`` good ones; ``effect``: they act, and the answer is lost."""

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
    """What becomes of the n-th machine launched from now on, or of all; ``after_s`` once it runs."""

    n: int | str = "*"
    fate: Fate
    after_s: Seconds = 0

    @field_validator("n")
    @classmethod
    def _number_or_all(cls, n: int | str) -> int | str:
        if n != "*" and not (isinstance(n, int) and n >= 0):
            raise ValueError("a whole number from 0 on, or '*'")
        return n


class Iam(_Section):
    """The policy of the tool's own user, a file."""

    policy: Path

    @field_validator("policy")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("an absolute path")
        return path


class Faults(_Section):
    """Everything that a faults file can say; the default is a perfect day."""

    seed: int = 0
    profile: Profile = "instant"
    boot_s: Seconds | None = None
    image_s: Seconds | None = None
    terminate_s: Seconds | None = None
    visibility_s: Seconds = 0
    quota: Quota = Quota()
    spot: Spot = Spot()
    capacity: tuple[CapacityRule, ...] = ()
    throttle: tuple[ThrottleRule, ...] = ()
    error: tuple[ErrorRule, ...] = ()
    machine: tuple[MachineRule, ...] = ()
    iam: Iam | None = None

    @property
    def times(self) -> Times:
        """The profile's times, less what the file says otherwise."""
        asked = {name: getattr(self, name) for name in Times.model_fields}
        overrides = {name: value for name, value in asked.items() if value is not None}
        return PROFILES[self.profile].model_copy(update=overrides)


def parse_faults(text: str, source: str = "faults") -> Faults:
    """A faults file's values; raises :class:`UsageError` naming the key, the value and what fits."""
    try:
        return Faults.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: not TOML: {error}") from None
    except ValidationError as error:
        raise UsageError(f"{source}: {explain_invalid(error, Faults)}") from None


def read_faults(path: Path) -> tuple[Faults, str | None]:
    """A faults file and the text of the policy that it names; raises :class:`UsageError`."""
    try:
        faults = parse_faults(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} can't be read: {why}") from None
    return faults, read_policy(faults.iam.policy) if faults.iam else None


def read_policy(path: Path) -> str:
    """The text of an IAM policy, which must be one; raises :class:`UsageError`."""
    try:
        text = path.read_text()
        policy = json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"IAM policy {path} can't be read: {error}") from None
    if not (isinstance(policy, Mapping) and "Statement" in policy):
        raise UsageError(f"IAM policy {path}: expected an object with a Statement")
    return text
