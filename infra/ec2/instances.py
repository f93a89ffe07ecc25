"""EC2 instances: description, waiting, tags, and termination. :mod:`infra.ec2.purchase` buys them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.clients import patient, unless
from infra.ec2 import tags
from infra.errors import CloudError, DeadlineError
from infra.instance_types import is_metal
from infra.wait import BOOT_DEADLINE_S, TERMINATE_DEADLINE_S, Clock, wait_until

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import FilterTypeDef, InstanceTypeDef

HEAD, WORKER = "head", "worker"
ALIVE = ("pending", "running", "stopping", "stopped")
DYING = (*ALIVE, "shutting-down")
ENDED = frozenset({"terminated"})
# EC2 bills a machine until it shuts down:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
UNBILLED = ENDED | {"shutting-down"}
_FILTER_VALUES = 200
_ANY_STATE = (*DYING, "terminated")
_WAIT_EVERY_S = 15.0
# EC2's reason if the caller has no permission to use the disk's key:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/troubleshooting-launch.html
_NO_KEY = "Client.InternalError: Client error on launch"
# Its reason if the account's disks would have more storage than their quota allows.
_NO_STORAGE = "Client.VolumeLimitExceeded"
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
_GRANT_TO_SPOT = (
    "; on spot, EC2's own role may also need the key: aws kms create-grant --key-id ARN "
    "--grantee-principal arn:aws:iam::ACCOUNT:role/aws-service-role/spot.amazonaws.com/"
    "AWSServiceRoleForEC2Spot --operations Decrypt Encrypt GenerateDataKey "
    "GenerateDataKeyWithoutPlaintext CreateGrant DescribeKey ReEncryptFrom ReEncryptTo"
)
# EC2's reason if an API call terminated the machine, unlike a spot interruption or a failure:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_BY_CALL = "Client.UserInitiatedShutdown"
_SAME_START = timedelta(minutes=1)
# StateTransitionReason may say when: https://repost.aws/knowledge-center/ec2-instance-reboot-stop-terminate
_WHEN = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


@dataclass(frozen=True)
class Instance:
    """A machine as EC2 describes it."""

    id: str
    state: str
    role: str
    private_ip: str
    public_ip: str
    launch_index: int
    launch_time: datetime
    instance_type: str
    zone: str
    tags: dict[str, str] = field(repr=False)
    reason: str = ""
    image_id: str = ""
    subnet_id: str = ""
    vpc_id: str = ""
    spot_request: str = ""
    ena_express: bool = False
    left: datetime | None = None
    """When it last began to stop or to shut down, if EC2 says so."""
    first_launch: datetime | None = None
    """When it was bought; ``launch_time`` is that of its last start."""

    @staticmethod
    def from_aws(instance: InstanceTypeDef) -> Instance:
        labels = tags.from_aws(instance.get("Tags"))
        return Instance(
            id=instance["InstanceId"],
            state=instance["State"]["Name"],
            role=labels.get(tags.ROLE, ""),
            private_ip=instance.get("PrivateIpAddress", ""),
            public_ip=instance.get("PublicIpAddress", ""),
            launch_index=instance.get("AmiLaunchIndex", 0),
            launch_time=instance["LaunchTime"],
            instance_type=instance["InstanceType"],
            zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
            tags=labels,
            reason=instance.get("StateReason", {}).get("Message", ""),
            image_id=instance.get("ImageId", ""),
            subnet_id=instance.get("SubnetId", ""),
            vpc_id=instance.get("VpcId", ""),
            spot_request=instance.get("SpotInstanceRequestId", ""),
            ena_express=any(
                interface.get("Attachment", {}).get("EnaSrdSpecification", {}).get("EnaSrdEnabled")
                for interface in instance.get("NetworkInterfaces", [])
            ),
            left=_parse_when(instance.get("StateTransitionReason", "")),
            first_launch=_find_first_launch(instance),
        )

    @property
    def place(self) -> tuple[str, str]:
        """Type and zone; the same for all nodes of a cluster."""
        return self.instance_type, self.zone

    @property
    def rank(self) -> int | None:
        """Its rank in the cluster, unless it became the head; ``None`` if its tag does not say it."""
        with suppress(ValueError):
            return tags.parse_rank(self.tags.get(tags.RANKS, ""), self.launch_index)
        return None

    @property
    def is_metal(self) -> bool:
        """Whether it is bare metal, which is slow to boot."""
        return is_metal(self.instance_type)

    @property
    def is_stopped(self) -> bool:
        """Whether it is off, with its disk: no timer runs."""
        return self.state in ("stopping", "stopped")

    @property
    def expires(self) -> datetime | None:
        """When the machine shuts itself down, from its tag; ``None`` if that is missing or invalid."""
        return self._time(tags.EXPIRES)

    @property
    def latest(self) -> datetime | None:
        """When it shuts itself down in any case, from its tag."""
        return self._time(tags.LATEST)

    def _time(self, label: str) -> datetime | None:
        # A user may have changed it.
        with suppress(ValueError):
            return tags.parse_time(self.tags.get(label, ""))
        return None

    @property
    def why_gone(self) -> str:
        """Why it no longer runs; "" if it is pending or running."""
        if self.state in ("pending", "running"):
            return ""
        return f"{self.id} is {self.state}" + (f" ({self.reason})" if self.reason else "")

    @property
    def was_terminated(self) -> bool:
        """Whether an API call terminated it, rather than EC2 or the machine itself."""
        return self.state in ("shutting-down", "terminated") and self.reason.startswith(_BY_CALL)

    @property
    def was_restarted(self) -> bool:
        """Whether it was stopped for a time that EC2 does not tell, and started again."""
        first = self.first_launch
        return first is not None and self.launch_time - first > _SAME_START

    def hours(self, now: datetime) -> float:
        """Return the hours from its purchase until now, or until it was stopped: it ran no longer."""
        end = min(self.left, now) if self.is_stopped and self.left else now
        begun = min(self.first_launch or self.launch_time, self.launch_time)
        return max(0.0, (end - begun).total_seconds() / 3600)

    def stopped_hours(self, now: datetime) -> float:
        """Return the hours since it was stopped, in which only its disk is billed; 0 if it runs."""
        end = self.left if self.is_stopped and self.left else now
        return max(0.0, (now - end).total_seconds() / 3600)


def _find_first_launch(instance: InstanceTypeDef) -> datetime | None:
    """Return since when a machine has its first network interface, which it keeps when it is stopped."""
    attached = (each.get("Attachment", {}) for each in instance.get("NetworkInterfaces", []))
    return next((each.get("AttachTime") for each in attached if each.get("DeviceIndex") == 0), None)


def _parse_when(text: str) -> datetime | None:
    """Return the time in a reason such as ``User initiated (2026-11-29 23:31:21 GMT)``."""
    found = _WHEN.search(text)
    if not found:
        return None
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)


def describe_instances(
    ec2: EC2Client, filters: Sequence[FilterTypeDef], states: Iterable[str] = ALIVE
) -> tuple[Instance, ...]:
    """Return the matching machines in launch order."""
    state_filter: FilterTypeDef = {"Name": "instance-state-name", "Values": list(states)}
    pages = ec2.get_paginator("describe_instances").paginate(Filters=[*filters, state_filter])
    found = [
        Instance.from_aws(instance)
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    ]
    return tuple(sorted(found, key=lambda i: (i.launch_time, i.launch_index, i.id)))


def describe_by_id(ec2: EC2Client, ids: Sequence[str]) -> tuple[Instance, ...]:
    """Return the machines with these ids, in this order, without those that EC2 does not list.

    Uses a filter, because one unknown id in ``InstanceIds`` would fail the whole call.
    """
    found = [i for some in _by_id(ids) for i in describe_instances(ec2, some, _ANY_STATE)]
    return tuple(sorted(found, key=lambda instance: ids.index(instance.id)))


def _by_id(ids: Sequence[str]) -> list[list[FilterTypeDef]]:
    """Split ids into filters of at most 200 values, which is EC2's limit."""
    parts = [ids[first : first + _FILTER_VALUES] for first in range(0, len(ids), _FILTER_VALUES)]
    return [[{"Name": "instance-id", "Values": part}] for part in parts]


def why_gone(ec2: EC2Client, instance_id: str) -> str:
    """Explain why a machine no longer runs; return "" if it runs or EC2 is unreachable."""
    try:
        found = describe_by_id(ec2, [instance_id])
    except (BotoCoreError, ClientError):
        return ""
    if not found:
        return f"EC2 no longer lists {instance_id}"
    return found[0].why_gone


def has_ended(ec2: EC2Client, instance_id: str) -> bool:
    """Return whether a machine has ended. A machine that EC2 does not list may be new."""
    try:
        return any(machine.why_gone for machine in describe_by_id(ec2, [instance_id]))
    except (BotoCoreError, ClientError):
        return False


def describe_impaired(ec2: EC2Client, ids: Iterable[str]) -> frozenset[str]:
    """Return the ids of the machines that fail an EC2 status check."""
    paginator = ec2.get_paginator("describe_instance_status")
    impaired = {
        status["InstanceId"]
        for check in ("instance-status.status", "system-status.status")
        for page in paginator.paginate(Filters=[{"Name": check, "Values": ["impaired"]}])
        for status in page["InstanceStatuses"]
        # moto ignores the filter.
        if "impaired" in (status[of].get("Status") for of in ("InstanceStatus", "SystemStatus"))
    }
    return frozenset(impaired & set(ids))


# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html
_SPOT_NOTICES = {
    "marked-for-termination",
    "marked-for-stop",
    "instance-terminated-by-price",
    "instance-terminated-no-capacity",
    "instance-terminated-capacity-oversubscribed",
}


def describe_spot_notices(ec2: EC2Client, machines: Iterable[Instance]) -> dict[str, str]:
    """Return EC2's notices for spot machines that it will reclaim, by instance id."""
    ids = sorted(i.id for i in machines if i.spot_request)
    paginator = ec2.get_paginator("describe_spot_instance_requests")
    return {
        request.get("InstanceId", ""): status.get("Message") or status["Code"]
        for some in _by_id(ids)
        for page in paginator.paginate(Filters=some)
        for request in page["SpotInstanceRequests"]
        if (status := request.get("Status", {})).get("Code", "") in _SPOT_NOTICES
    }


@dataclass(frozen=True)
class Boot:
    """The running machines, and by id the reasons why others do not run."""

    running: tuple[Instance, ...]
    failed: dict[str, str]
    spot: frozenset[str] = frozenset()

    def check_disks(self) -> None:
        """Raise :class:`CloudError` if EC2 could not make or encrypt a disk; retries would fail as well."""
        for id_, why in self.failed.items():
            if _NO_STORAGE in why:
                raise CloudError(
                    f"EC2 terminated {id_} at launch ({_NO_STORAGE}): its disk exceeds the account's quota",
                    code="VolumeLimitExceeded",
                    hint="request more storage for gp3 volumes (quota L-7A658B76) in the Service Quotas "
                    "console, delete unused volumes, or use fewer --nodes or a smaller --volume-gib",
                )
            if _NO_KEY in why:
                raise CloudError(
                    f"EC2 terminated {id_} at launch ({_NO_KEY}): these credentials have no permission "
                    "to use the key that encrypts new disks",
                    code="Client.InternalError",
                    hint="`aws ec2 get-ebs-default-kms-key-id` shows the key, `spr-cluster iam-policy "
                    "--kms-key ARN` prints the permissions; the key policy must allow them as well"
                    + (_GRANT_TO_SPOT if id_ in self.spot else ""),
                )


def wait_until_running(
    ec2: EC2Client,
    ids: Sequence[str],
    *,
    on_wait: Callable[[float, str], None] = lambda _seconds, _states: None,
    clock: Clock | None = None,
) -> Boot:
    """Wait up to 40 minutes until each machine runs or has failed.

    ``on_wait`` receives the elapsed seconds and a summary of states that names stragglers.
    """
    seen: dict[str, Instance] = {}

    def probe() -> bool | None:
        seen.update((i.id, i) for i in describe_by_id(ec2, ids))
        settled = (id_ in seen and seen[id_].state != "pending" for id_ in ids)
        return True if all(settled) else None

    late = ""
    try:
        wait_until(
            "boot",
            patient(probe),
            deadline_s=BOOT_DEADLINE_S,
            clock=clock,
            every_s=_WAIT_EVERY_S,
            on_wait=lambda passed: on_wait(passed, _summarize(ids, seen)),
        )
    except DeadlineError as error:
        late = str(error)
    running = tuple(seen[id_] for id_ in ids if id_ in seen and seen[id_].state == "running")
    known = {instance.id for instance in running}
    failed = {i: _why_not(seen.get(i), late) for i in ids if i not in known}
    return Boot(running, failed, frozenset(i for i in seen if seen[i].spot_request))


def _summarize(ids: Sequence[str], seen: dict[str, Instance]) -> str:
    states = {id_: seen[id_].state if id_ in seen else "not visible yet" for id_ in ids}
    counts = Counter(states.values())
    text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    stragglers = [id_ for id_, state in states.items() if state != "running"]
    if counts["running"] and len(stragglers) <= max(3, len(ids) // 4):
        text += f" ({', '.join(stragglers[:3])})"
    return text


def _why_not(instance: Instance | None, late: str) -> str:
    if instance is None:
        return f"EC2 does not list it; {late}"
    why = late if instance.state == "pending" else instance.reason
    return f"{instance.state}: {why or 'no reason given'}"


def terminate_instances(
    ec2: EC2Client,
    ids: Sequence[str],
    clock: Clock | None = None,
    on_wait: Callable[[float], None] | None = None,
    until: frozenset[str] = ENDED,
) -> None:
    """Terminate machines and wait until EC2 reports them terminated, or in one of the states ``until``."""
    if not ids:
        return
    unknown = {"InvalidInstanceID.NotFound"}
    done = unless(unknown, lambda: ec2.terminate_instances(InstanceIds=list(ids)))
    # EC2 rejects the whole call if one id is unknown.
    if not done and (shown := [instance.id for instance in describe_by_id(ec2, ids)]):
        ec2.terminate_instances(InstanceIds=shown)
    wait_until_ended(ec2, ids, clock, on_wait, until=until)


def wait_until_ended(
    ec2: EC2Client,
    ids: Sequence[str],
    clock: Clock | None = None,
    on_wait: Callable[[float], None] | None = None,
    *,
    until: frozenset[str] = ENDED,
    deadline_s: float = TERMINATE_DEADLINE_S,
) -> None:
    """Wait until EC2 lists machines in no other states than ``until``. Raises :class:`DeadlineError`."""

    def probe() -> bool | None:
        states = {instance.state for instance in describe_by_id(ec2, ids)}
        return True if states <= until else None

    what = f"termination of {', '.join(ids)}"
    wait_until(what, patient(probe), deadline_s=deadline_s, clock=clock, on_wait=on_wait)


def label_instances(ec2: EC2Client, ids: Sequence[str], labels: dict[str, str]) -> None:
    """Set tags on machines."""
    ec2.create_tags(Resources=list(ids), Tags=tags.to_aws(labels))
