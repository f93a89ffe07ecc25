"""What is new is not known everywhere at once: EC2 is eventually consistent.

https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from infra.local.clock import as_moto_time

Collection = MutableMapping[str, Any]

READS = ("Describe", "Get", "List")
# By these a call finds what it is about. What decides on dependencies (interfaces, volumes) is left
# out: EC2 itself always knows those, and a group in use must not go because its user is new.
_FOUND_BY_ID: dict[str, Callable[[Any], list[Collection]]] = {
    "instance": lambda ec2: [ec2.reservations],
    "image": lambda ec2: [ec2.amis, ec2.snapshots],
    "group": lambda ec2: list(ec2.groups.values()),
    "key": lambda ec2: [ec2.key_pairs],
    "placement": lambda ec2: [ec2.placement_groups],
    "spot": lambda ec2: [ec2.spot_instance_requests],
    "template": lambda ec2: [ec2.launch_templates],
}
_ONLY_DESCRIBED: Callable[[Any], list[Collection]] = lambda ec2: [ec2.volumes, ec2.enis]  # noqa: E731
# A name, or a client token, that is taken is known at once, to whoever would take it again.
_KNOWN_TO: dict[str, frozenset[str]] = {
    "RunInstances": frozenset({"instance", "spot"}),
    "CreateImage": frozenset({"image"}),
    "CreateSecurityGroup": frozenset({"group"}),
    "CreateKeyPair": frozenset({"key"}),
    "ImportKeyPair": frozenset({"key"}),
    # Deleting a key pair that does not exist succeeds, so "not known yet" can't be told.
    "DeleteKeyPair": frozenset({"key"}),
    "CreatePlacementGroup": frozenset({"placement"}),
    "CreateLaunchTemplate": frozenset({"template"}),
}
_BIRTHS = ("creation_date", "create_time", "start_time")


@contextmanager
def observe(ec2: Any, action: str) -> Iterator[None]:
    """Hide what is too new for a call, and take note of what the call makes and removes."""
    reads = action.startswith(READS)
    before = {} if reads else resources(ec2)
    with _hiding(ec2, action):
        yield
    if not reads:
        _take_note(ec2, before, resources(ec2))


def resources(ec2: Any) -> dict[str, Any]:
    """Everything that a user has in a region and that a call can make, by its id."""
    found = {r.id: r for collection in _collections(ec2) for r in collection.values()}
    for reservation in ec2.reservations.values():
        found.update((instance.id, instance) for instance in reservation.instances)
    return found


def _collections(ec2: Any) -> list[Collection]:
    by_id = [collection for find in _FOUND_BY_ID.values() for collection in find(ec2)]
    return [*by_id, *_ONLY_DESCRIBED(ec2)]


def _take_note(ec2: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    now = ec2.clock.time()
    for new_id in after.keys() - before.keys():
        ec2.born[new_id] = now
        for birth in _BIRTHS:
            if birth in vars(after[new_id]):
                setattr(after[new_id], birth, as_moto_time(now))
    for old_id in before.keys() - after.keys():
        ec2.born.pop(old_id, None)
        ec2.tags.pop(old_id, None)


@contextmanager
def _hiding(ec2: Any, action: str) -> Iterator[None]:
    """For one call, take out of the state what that call does not see."""
    limit = ec2.clock.time() - ec2.faults.now.visibility_s
    new = {id_ for id_, at in ec2.born.items() if at > limit}
    if not new:
        yield
        return
    with ExitStack() as stack:
        for collection in _hidden_collections(ec2, action):
            hidden = {key: r for key, r in collection.items() if r.id in new}
            if collection is ec2.reservations:
                ec2.hidden_instances = tuple(i for r in hidden.values() for i in r.instances)
            stack.callback(collection.update, hidden)
            for key in hidden:
                del collection[key]
        if action.startswith(READS):
            tags = {key: ec2.tags[key] for key in new & ec2.tags.keys()}
            stack.callback(ec2.tags.update, tags)
            for key in tags:
                del ec2.tags[key]
        try:
            yield
        finally:
            ec2.hidden_instances = ()


def _hidden_collections(ec2: Any, action: str) -> list[Collection]:
    if action.startswith(READS):
        return _collections(ec2)
    known = _KNOWN_TO.get(action, frozenset())
    return [c for kind, find in _FOUND_BY_ID.items() if kind not in known for c in find(ec2)]
