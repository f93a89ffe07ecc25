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

STRANGERS = [("embedded", "wrong"), ("stranger", "embedded"), ("", "")]


def test_what_the_embedded_cloud_does_not_have_is_refused(http_cloud: FakeCloud) -> None:
    client = http_cloud.endpoint.client
    unknown = {name: client(name, region="xx-north-7") for name in ("ec2", "sts")}
    assert refused(unknown["ec2"].describe_instances) == ("AuthFailure", 401)
    assert refused(unknown["sts"].get_caller_identity) == ("SignatureDoesNotMatch", 403)
    answer = refused(client("cur").describe_report_definitions)
    assert answer == ("UnknownOperationException", 400)
    assert refused(http_cloud.ec2.describe_mac_hosts) == ("UnsupportedOperation", 400)


@pytest.mark.parametrize("credentials", STRANGERS)
def test_only_calls_signed_with_this_clouds_secret_are_answered(
    http_cloud: FakeCloud, tmp_path: Path, credentials: tuple[str, str]
) -> None:
    stranger = http_cloud.endpoint.client("ec2", credentials=credentials)
    if not credentials[0]:
        # Without a signature at all.
        stranger.meta.events.register("choose-signer.ec2", lambda **_: UNSIGNED)
    policy = tmp_path / "policy.json"
    every = {"Effect": "Allow", "Resource": "*", "Action": "*"}
    policy.write_text(json.dumps({"Version": "2012-10-17", "Statement": every}))
    request = {"ImageId": BASE.ami_id, "MinCount": 1, "MaxCount": 1}

    for faults in ("", f'[iam]\npolicy = "{policy}"\n'):
        http_cloud.faults(faults)
        assert refused(stranger.describe_vpcs) == ("AuthFailure", 401)
        assert refused(stranger.run_instances, **request) == ("AuthFailure", 401)
    assert http_cloud.podman.state == {}
    if credentials[0]:
        ssm, sts = (
            http_cloud.endpoint.client(name, credentials=credentials) for name in ("ssm", "sts")
        )
        code = "UnrecognizedClientException"
        assert refused(ssm.get_parameters, Names=["n"]) == (code, 400)
        assert refused(sts.get_caller_identity) == ("InvalidClientTokenId", 403)


def test_the_status_page_needs_the_secret(http_cloud: FakeCloud) -> None:
    given = {"Bearer wrong": 403, "": 403, f"Bearer {CREDENTIALS[1]}": 200}
    for text, status in given.items():
        connection = HTTPConnection(http_cloud.endpoint.url.removeprefix("http://"), timeout=60)
        with closing(connection):
            header = {"Authorization": text} if text else {}
            connection.request("GET", f"{STATUS_PATH}?region=us-east-1", headers=header)
            assert connection.getresponse().status == status


def test_a_call_that_was_changed_after_it_was_signed_is_refused(http_cloud: FakeCloud) -> None:
    def change(request: Any, **_: Any) -> None:
        request.body = request.body.replace("DescribeVpcs", "DescribeTags")

    client = http_cloud.endpoint.client("ec2")
    client.meta.events.register("before-send.ec2", change)

    assert refusal(client.describe_vpcs) == "AuthFailure"


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
