"""Retries of calls about resources that this command has just created.

For a few seconds, IAM may not see the tags of a new resource, so EC2 denies calls that a policy allows
by these tags. Denials for any other resource are final and never retried.
https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from infra.wait import CONSISTENCY_DEADLINE_S

_EVERY_S = 3.0
# The response keys that identify the resources each call creates.
_MADE_BY = {
    "CreateImage": {"ImageId"},
    "CreatePlacementGroup": {"GroupName"},
    "CreateSecurityGroup": {"GroupId"},
    "ImportKeyPair": {"KeyName", "KeyPairId"},
    "RunInstances": {"InstanceId", "NetworkInterfaceId", "SpotInstanceRequestId", "VolumeId"},
}
_NAMED = re.compile(r"on resource: arn:\S*/(\S+)")


class NewResources:
    """Handlers for the botocore events of one set of EC2 clients."""

    def __init__(self) -> None:
        self._made_at: dict[str, float] = {}

    def learn(self, parsed: Mapping[str, Any], model: Any, **_: Any) -> None:
        """Record what a call created; for the event ``after-call``."""
        if keys := _MADE_BY.get(model.name):
            now = time.monotonic()
            self._made_at.update((id_, now) for id_ in _values(parsed, keys))

    def pause(
        self, response: Any, operation: Any, request_dict: Mapping[str, Any], **_: Any
    ) -> float | None:
        """Return the seconds until a retry, or ``None``; for the event ``needs-retry``."""
        error = response[1].get("Error", {}) if response else {}
        if error.get("Code") != "UnauthorizedOperation":
            return None
        named = _NAMED.search(error.get("Message", ""))
        if named is None:
            return None
        # The snapshots of a new image are equally new, and one call tags them together.
        together = request_dict["body"].values() if operation.name == "CreateTags" else ()
        limit = time.monotonic() - CONSISTENCY_DEADLINE_S
        new = {id_ for id_, at in self._made_at.items() if at > limit}
        return _EVERY_S if new.intersection((named[1], *together)) else None


def _values(found: Any, keys: set[str]) -> Iterator[str]:
    """Yield the values of these keys, at any depth."""
    items = found.items() if isinstance(found, Mapping) else enumerate(found)
    for key, value in items:
        if key in keys and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list):
            yield from _values(value, keys)
