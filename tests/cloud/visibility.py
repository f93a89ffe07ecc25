"""EC2's eventual consistency: calls do not see new resources immediately.

https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from moto.ec2.models.instances import Instance

from infra.local.api.requests import READS
from infra.local.api.runtime import Runtime
from tests.cloud.faults import faults_of

Collection = MutableMapping[str, Any]

# The collections in which calls look up resources. Interfaces and volumes are not included, because EC2
# itself always sees dependencies: nobody can delete a security group that a new instance uses.
_FOUND_BY_ID: dict[str, Callable[[Any], list[Collection]]] = {
    "instance": lambda ec2: [ec2.reservations],
    "image": lambda ec2: [ec2.amis, ec2.snapshots],
    "group": lambda ec2: list(ec2.groups.values()),
    "key": lambda ec2: [ec2.key_pairs],
    "placement": lambda ec2: [ec2.placement_groups.by_name],
    "spot": lambda ec2: [ec2.spot_instance_requests],
}
# These calls see new resources immediately, because they check that a name or client token is unused.
_KNOWN_TO: dict[str, frozenset[str]] = {
    "RunInstances": frozenset({"instance", "spot"}),
    "CreateImage": frozenset({"image"}),
    "CreateSecurityGroup": frozenset({"group"}),
    "CreateKeyPair": frozenset({"key"}),
    "ImportKeyPair": frozenset({"key"}),
    # Deleting a missing key pair succeeds, so a hidden one would seem to be deleted.
    "DeleteKeyPair": frozenset({"key"}),
    "CreatePlacementGroup": frozenset({"placement"}),
}
_CREATION_TIMES = ("creation_date", "create_time", "start_time")


class Visibility:
    """Controls which of a region's resources a call sees; ``created_at`` maps ids to creation times."""

    def __init__(self, ec2: Any) -> None:
        self._ec2 = ec2
        self._runtime: Runtime = ec2.runtime
        self.created_at: dict[str, float] = {}
        self._hidden_instances: tuple[Instance, ...] = ()

    def live_instances(self) -> list[Instance]:
        """Return the instances that are not terminated, including hidden ones."""
        known = [*self._ec2.all_instances(), *self._hidden_instances]
        return [i for i in known if i.state != "terminated"]

    def resources(self) -> dict[str, Any]:
        """Return all user-created resources of a region by id."""
        found = {r.id: r for collection in self._collections() for r in collection.values()}
        for reservation in self._ec2.reservations.values():
            found.update((instance.id, instance) for instance in reservation.instances)
        return found

    @contextmanager
    def observe(self, action: str) -> Iterator[None]:
        """Hide resources that are too new for a call; record what the call creates and deletes."""
        reads = action.startswith(READS)
        before = {} if reads else self.resources()
        with self._hiding(action):
            yield
        if not reads:
            self._record(before, self.resources())

    def _collections(self) -> list[Collection]:
        by_id = [collection for find in _FOUND_BY_ID.values() for collection in find(self._ec2)]
        return [*by_id, self._ec2.volumes, self._ec2.enis]

    def _record(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        now, moto_now = self._runtime.now(), self._runtime.moto_now()
        for new_id in after.keys() - before.keys():
            self.created_at[new_id] = now
            for attribute in _CREATION_TIMES:
                if attribute in vars(after[new_id]):
                    setattr(after[new_id], attribute, moto_now)
        for old_id in before.keys() - after.keys():
            self.created_at.pop(old_id, None)
            self._ec2.tags.pop(old_id, None)

    @contextmanager
    def _hiding(self, action: str) -> Iterator[None]:
        """Temporarily remove resources that a call must not see."""
        limit = self._runtime.now() - faults_of(self._runtime).now.visibility_s
        new = {id_ for id_, at in self.created_at.items() if at > limit}
        if not new:
            yield
            return
        with ExitStack() as stack:
            for collection in self._collections_hidden_from(action):
                hidden = _take_out(collection, {k for k, r in collection.items() if r.id in new})
                stack.callback(collection.update, hidden)
                if collection is self._ec2.reservations:
                    instances = tuple(i for r in hidden.values() for i in r.instances)
                    self._hidden_instances = instances
            if action.startswith(READS):
                stack.callback(self._ec2.tags.update, _take_out(self._ec2.tags, new))
            try:
                yield
            finally:
                self._hidden_instances = ()

    def _collections_hidden_from(self, action: str) -> list[Collection]:
        if action.startswith(READS):
            return self._collections()
        known = _KNOWN_TO.get(action, frozenset())
        kinds = [find for kind, find in _FOUND_BY_ID.items() if kind not in known]
        return [collection for find in kinds for collection in find(self._ec2)]


def _take_out(collection: Collection, keys: set[str]) -> dict[str, Any]:
    """Remove entries from a collection and return them in the collection's order."""
    return {key: collection.pop(key) for key in [k for k in collection if k in keys]}
