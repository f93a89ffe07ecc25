"""Whether a second guard was looked for: no answer is not the answer that there is none."""

from __future__ import annotations

import pytest
from botocore.exceptions import (
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


@pytest.mark.parametrize(
    ("error", "is_closed"),
    [
        (ConnectTimeoutError(endpoint_url=URL), False),
        (ReadTimeoutError(endpoint_url=URL), False),
        (TokenRetrievalError(provider="sso", error_msg="expired"), False),
        (EndpointConnectionError(endpoint_url=URL), True),
        (ClientError({"Error": {"Code": "AccessDeniedException"}}, "ListScheduleGroups"), True),
    ],
)
def test_who_cannot_look_has_made_none_but_no_answer_is_an_error(
    ec2_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, error: Exception, is_closed: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    clients, none = ec2_cloud.clients, Inventory()
    monkeypatch.setattr(clients.scheduler, "_make_api_call", fail)
    with pytest.raises(type(error)):
        with_guard(clients, "spr", none, is_certain=True)
    if is_closed:
        assert with_guards(clients, {}) == {}
        assert with_guard(clients, "spr", none, is_certain=False) == none
        return
    with pytest.raises(type(error)):
        with_guards(clients, {})
    with pytest.raises(type(error)):
        with_guard(clients, "spr", none, is_certain=False)
