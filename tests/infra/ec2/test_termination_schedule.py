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
from botocore.stub import Stubber

from infra.ec2 import tags
from infra.ec2.inventory import Inventory, SecondGuard
from infra.ec2.termination_schedule import with_guard, with_guards
from tests.infra.local.fakes import FakeCloud

URL = "https://scheduler"
_ARN = "arn:aws:scheduler:us-east-1:123456789012:schedule-group/"


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


def test_a_group_that_is_deleted_meanwhile_or_has_no_tag_is_left_out(ec2_cloud: FakeCloud) -> None:
    clients = ec2_cloud.clients
    names = ("spr-cluster-gone", "spr-cluster-bert", "spr-cluster-of-others")
    stub = Stubber(clients.scheduler)
    groups = [{"Name": name, "Arn": f"{_ARN}{name}"} for name in names]
    stub.add_response("list_schedule_groups", {"ScheduleGroups": groups})
    stub.add_client_error("list_tags_for_resource", "ResourceNotFoundException")
    own = [{"Key": tags.CLUSTER, "Value": "bert"}]
    stub.add_response("list_tags_for_resource", {"Tags": own})
    stub.add_response("list_tags_for_resource", {"Tags": []})

    with stub:
        assert with_guards(clients, {}) == {"bert": Inventory(guards=(SecondGuard(names[1]),))}
