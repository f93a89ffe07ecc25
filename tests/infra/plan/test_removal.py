"""The removal: resources in use, missing ones, and the deadline."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError

from infra.plan.actions import Action, ActionKind
from infra.plan.removal import remove
from tests.fakes import FakeClock

K = ActionKind


@dataclass
class Ec2:
    """Refuses each resource with these errors in turn, and then lets it go."""

    errors: tuple[Any, ...] = ()
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __getattr__(self, name: str) -> Any:
        def call(**request: Any) -> None:
            with self.lock:
                self.calls.append((name, request))
                number = self.refused[str(request)]
                self.refused[str(request)] += 1
            if number < len(self.errors):
                raise self.errors[number]

        return call


def refusal(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": f"{code}!"}}, "Delete")


def remove_by(ec2: Ec2, kind: ActionKind, *ids: str, **more: Any) -> None:
    client: Any = ec2
    remove(client, Action(kind, "", ids), FakeClock(), **more)


def test_every_id_is_removed_once() -> None:
    ec2, ids = Ec2(), [f"vol-{number}" for number in range(20)]

    remove_by(ec2, K.DELETE_VOLUMES, *ids)

    assert sorted(request["VolumeId"] for _, request in ec2.calls) == sorted(ids)


_HELD = (
    *("DependencyViolation", "VolumeInUse", "IncorrectState", "InvalidParameterValue"),
    *(f"{kind}.InUse" for kind in ("InvalidNetworkInterface", "InvalidPlacementGroup")),
    *("InvalidSnapshot.InUse", "RequestLimitExceeded", "InternalError"),
)
_GONE = ("InvalidGroup.NotFound", "InvalidAMIID.Unavailable", "InvalidPlacementGroup.Unknown")


@pytest.mark.parametrize(
    "error", [*map(refusal, _HELD), ConnectTimeoutError(endpoint_url="https://ec2")], ids=str
)
def test_what_is_held_a_little_longer_is_waited_for(error: Exception) -> None:
    ec2 = Ec2((error,) * 3)

    remove_by(ec2, K.DELETE_GROUPS, "sg-1")

    assert len(ec2.calls) == 4


def test_what_is_gone_already_is_fine_and_any_other_refusal_an_error_at_once() -> None:
    for code in _GONE:
        remove_by(ec2 := Ec2((refusal(code),)), K.DELETE_GROUPS, "sg-1")
        assert len(ec2.calls) == 1
    ec2 = Ec2((refusal("UnauthorizedOperation"),))
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        remove_by(ec2, K.DELETE_GROUPS, "sg-1")
    assert len(ec2.calls) == 1
    # An unknown spot request keeps no other from its cancellation.
    ec2, spot = Ec2((refusal("InvalidSpotInstanceRequestID.NotFound"),)), ("sir-1", "sir-2")
    remove_by(ec2, K.CANCEL_SPOT, *spot)
    asked = [("cancel_spot_instance_requests", {"SpotInstanceRequestIds": [i]}) for i in spot]
    assert sorted(ec2.calls, key=str) == asked
