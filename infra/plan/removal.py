"""Removal of resources, with retries while they are in use."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.clients import error_code, is_passing, retry
from infra.ec2.instances import ENDED, terminate_instances
from infra.errors import DeadlineError
from infra.plan.actions import Action, ActionKind
from infra.wait import TERMINATE_DEADLINE_S, Clock
from infra.words import spoken_duration

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

# EC2's errors while another resource still uses this one, usually for some minutes.
_STILL_HELD = {
    "DependencyViolation",
    "VolumeInUse",
    "IncorrectState",
    "InvalidParameterValue",
    "InvalidNetworkInterface.InUse",
    "InvalidPlacementGroup.InUse",
    "InvalidSnapshot.InUse",
}
_ALREADY_GONE = (".NotFound", ".Unavailable", ".Unknown")
_PARALLEL = 8


def remove(
    ec2: EC2Client,
    action: Action,
    clock: Clock | None = None,
    *,
    deadline_s: float = TERMINATE_DEADLINE_S,
    on_wait: Callable[[float], None] | None = None,
    until: frozenset[str] = ENDED,
) -> None:
    """Remove an action's resources and wait until they are gone. Skips missing ones.

    The wait for machines ends in one of the states ``until``.
    Raises :class:`DeadlineError`, which names the resource, if one is still in use at the deadline.
    """
    if action.kind is ActionKind.TERMINATE:
        terminate_instances(ec2, action.ids, clock, on_wait, until)
        return
    call = _removers(ec2)[action.kind]
    pool = ThreadPoolExecutor(min(_PARALLEL, len(action.ids)))
    try:
        list(pool.map(lambda id_: _remove_one(call, id_, clock, deadline_s), action.ids))
    finally:
        # Ctrl-C must not wait for resources that are still in use.
        pool.shutdown(wait=False, cancel_futures=True)


def _removers(ec2: EC2Client) -> dict[ActionKind, Callable[[str], object]]:
    kind = ActionKind
    return {
        kind.CANCEL_SPOT: lambda id_: ec2.cancel_spot_instance_requests(
            SpotInstanceRequestIds=[id_]
        ),
        kind.DELETE_IMAGES: lambda id_: ec2.deregister_image(ImageId=id_),
        kind.DELETE_SNAPSHOTS: lambda id_: ec2.delete_snapshot(SnapshotId=id_),
        kind.DELETE_VOLUMES: lambda id_: ec2.delete_volume(VolumeId=id_),
        kind.DELETE_INTERFACES: lambda id_: ec2.delete_network_interface(NetworkInterfaceId=id_),
        kind.DELETE_PLACEMENTS: lambda id_: ec2.delete_placement_group(GroupName=id_),
        kind.DELETE_GROUPS: lambda id_: ec2.delete_security_group(GroupId=id_),
        kind.DELETE_KEYS: lambda id_: ec2.delete_key_pair(KeyPairId=id_),
    }


def _remove_one(
    call: Callable[[str], object], id_: str, clock: Clock | None, deadline_s: float
) -> None:
    def is_held(error: Exception) -> bool:
        held = isinstance(error, ClientError) and error_code(error) in _STILL_HELD
        return held or is_passing(error)

    try:
        retry(lambda: call(id_), is_held, deadline_s=deadline_s, clock=clock)
    except (ClientError, BotoCoreError) as error:
        if is_held(error):
            limit = spoken_duration(deadline_s)
            raise DeadlineError(f"deleting {id_} timed out after {limit}: {error}") from None
        if not (isinstance(error, ClientError) and error_code(error).endswith(_ALREADY_GONE)):
            raise
