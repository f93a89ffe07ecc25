"""Whether a second guard was looked for: no answer is not the answer that there is none."""

from __future__ import annotations

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ReadTimeoutError,
    TokenRetrievalError,
)

from infra.ec2.inventory import Inventory
from infra.ec2.termination_schedule import with_guard, with_guards
from tests.infra.local.fakes import FakeCloud

URL = "https://scheduler"


def fails(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cloud.clients.scheduler, "_make_api_call", fail)


@pytest.mark.parametrize(
    "error",
    [
        ConnectTimeoutError(endpoint_url=URL),
        ReadTimeoutError(endpoint_url=URL),
        TokenRetrievalError(provider="sso", error_msg="expired"),
    ],
)
def test_no_answer_is_reported(
    ec2_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, error: BotoCoreError
) -> None:
    fails(ec2_cloud, monkeypatch, error)

    with pytest.raises(type(error)):
        with_guards(ec2_cloud.clients, {})
    with pytest.raises(type(error)):
        with_guard(ec2_cloud.clients, "spr", Inventory(), is_certain=False)


@pytest.mark.parametrize(
    "error",
    [
        EndpointConnectionError(endpoint_url=URL),
        ClientError({"Error": {"Code": "AccessDeniedException"}}, "ListScheduleGroups"),
    ],
)
def test_who_cannot_look_has_made_none(
    ec2_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fails(ec2_cloud, monkeypatch, error)

    assert with_guards(ec2_cloud.clients, {}) == {}
    found = with_guard(ec2_cloud.clients, "spr", Inventory(), is_certain=False)
    assert found == Inventory()
    with pytest.raises(type(error)):
        with_guard(ec2_cloud.clients, "spr", Inventory(), is_certain=True)
