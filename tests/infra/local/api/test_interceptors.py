"""Calls that are throttled, fail, lose their answers, or are denied by a policy."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime, timedelta, timezone
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from botocore import UNSIGNED

from infra.local.state import STATUS_PATH
from tests.infra.local.fakes import BASE, CREDENTIALS, FakeCloud, refusal, refused, sign_at


def test_a_region_that_does_not_exist_is_refused(http_cloud: FakeCloud) -> None:
    for service, call, code in (
        ("ec2", "describe_instances", ("AuthFailure", 401)),
        ("sts", "get_caller_identity", ("SignatureDoesNotMatch", 403)),
    ):
        client = http_cloud.endpoint.client(service, region="xx-north-7")
        assert refused(getattr(client, call)) == code


def test_a_service_that_is_not_served_is_refused(http_cloud: FakeCloud) -> None:
    client = http_cloud.endpoint.client("cur")
    answer = refused(client.describe_report_definitions)
    assert answer == ("UnknownOperationException", 400)


def test_a_call_that_moto_lacks_is_refused(http_cloud: FakeCloud) -> None:
    answer = refused(http_cloud.ec2.describe_mac_hosts)
    assert answer == ("UnsupportedOperation", 400)


# Permissions


def put_policy(cloud: FakeCloud, folder: Path, *statements: dict[str, Any]) -> None:
    policy = folder / "policy.json"
    everywhere = [{"Effect": "Allow", "Resource": "*", **statement} for statement in statements]
    policy.write_text(json.dumps({"Version": "2012-10-17", "Statement": everywhere}))
    cloud.faults(f'[iam]\npolicy = "{policy}"\n')


# Signatures

SECRET = {"Authorization": f"Bearer {CREDENTIALS[1]}"}
STRANGERS = [("embedded", "wrong"), ("stranger", "embedded"), ("", "")]


@pytest.mark.parametrize("credentials", STRANGERS)
@pytest.mark.parametrize("with_policy", [False, True])
def test_only_calls_signed_with_this_clouds_secret_are_answered(
    http_cloud: FakeCloud, tmp_path: Path, credentials: tuple[str, str], with_policy: bool
) -> None:
    if with_policy:
        put_policy(http_cloud, tmp_path, {"Action": "*"})
    stranger = http_cloud.endpoint.client("ec2", credentials=credentials)
    if not credentials[0]:
        # Without a signature at all.
        stranger.meta.events.register("choose-signer.ec2", lambda **_: UNSIGNED)
    request = {"ImageId": BASE.ami_id, "MinCount": 1, "MaxCount": 1}

    assert refused(stranger.describe_vpcs) == ("AuthFailure", 401)
    assert refused(stranger.run_instances, **request) == ("AuthFailure", 401)
    assert http_cloud.podman.state == {}


def test_other_services_have_other_codes_for_strangers(http_cloud: FakeCloud) -> None:
    def stranger(service: str) -> Any:
        return http_cloud.endpoint.client(service, credentials=STRANGERS[0])

    code = "UnrecognizedClientException"
    assert refused(stranger("ssm").get_parameters, Names=["n"]) == (code, 400)
    assert refused(stranger("sts").get_caller_identity) == ("InvalidClientTokenId", 403)


def test_a_call_that_was_changed_after_it_was_signed_is_refused(http_cloud: FakeCloud) -> None:
    def change(request: Any, **_: Any) -> None:
        request.body = request.body.replace("DescribeVpcs", "DescribeTags")

    client = http_cloud.endpoint.client("ec2")
    client.meta.events.register("before-send.ec2", change)

    assert refusal(client.describe_vpcs) == "AuthFailure"


@pytest.mark.parametrize(
    ("header", "status"), [({}, 403), ({"Authorization": "Bearer wrong"}, 403), (SECRET, 200)]
)
def test_the_status_page_needs_the_secret(
    http_cloud: FakeCloud, header: dict[str, str], status: int
) -> None:
    connection = HTTPConnection(http_cloud.endpoint.url.removeprefix("http://"), timeout=60)
    with closing(connection):
        connection.request("GET", f"{STATUS_PATH}?region=us-east-1", headers=header)
        assert connection.getresponse().status == status


@pytest.mark.parametrize(
    ("off_s", "accepted"), [(-240, True), (240, True), (-360, False), (86400, False)]
)
def test_a_call_whose_date_is_more_than_five_minutes_off_is_refused(
    http_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, off_s: int, accepted: bool
) -> None:
    sign_at(monkeypatch, datetime.now(timezone.utc) + timedelta(seconds=off_s))

    if accepted:
        assert http_cloud.ec2.describe_vpcs()["Vpcs"]
        return
    assert refused(http_cloud.ec2.describe_vpcs) == ("RequestExpired", 400)
    ssm = http_cloud.endpoint.client("ssm")
    assert refused(ssm.get_parameters, Names=["n"]) == ("InvalidSignatureException", 400)
