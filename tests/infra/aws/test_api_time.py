"""A laptop whose clock is wrong: the cloud's time is used, and refusals name the clock."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.aws.api_time import API_TIME
from infra.aws.clients import translate_boto_error
from infra.errors import UsageError
from tests.infra.local.fakes import FakeCloud

DAY = timedelta(days=1)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    warnings: list[str] = []
    monkeypatch.setattr(API_TIME, "ahead", timedelta())
    monkeypatch.setattr(API_TIME, "on_offset", warnings.append)
    return warnings


def real_time() -> datetime:
    return datetime.now(timezone.utc)


def set_clock(monkeypatch: pytest.MonkeyPatch, off: timedelta) -> None:
    """Let this machine's clock be wrong, but not for signatures."""
    monkeypatch.setattr("infra.aws.api_time.local_now", lambda: real_time() + off)


@pytest.mark.parametrize(("off", "words"), [(DAY, "24 h ahead of"), (-DAY, "24 h behind")])
def test_the_clouds_time_is_used_and_one_warning_names_the_difference(
    http_cloud: FakeCloud,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
    off: timedelta,
    words: str,
) -> None:
    set_clock(monkeypatch, off)

    with pytest.raises(ClientError):
        http_cloud.clients.ec2.describe_vpcs(VpcIds=["vpc-0"])  # refused for another reason
    for _ in range(2):
        http_cloud.clients.ec2.describe_vpcs()

    assert abs(API_TIME.now() - real_time()) < timedelta(seconds=10)
    (warning,) = warnings
    assert f"this machine's clock is {words} the cloud's" in warning
    assert "timedatectl set-ntp true" in warning
    assert "\n" not in warning


def test_a_clock_that_is_a_little_off_is_believed(
    http_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    for seconds in (-90, 0, 90):
        set_clock(monkeypatch, timedelta(seconds=seconds))
        http_cloud.clients.ec2.describe_vpcs()
        assert (API_TIME.ahead, warnings) == (timedelta(), [])


def refusal(code: str, off: timedelta | None) -> ClientError:
    headers = {} if off is None else {"date": format_datetime(real_time() - off, usegmt=True)}
    response: Any = {
        "Error": {"Code": code, "Message": "who?"},
        "ResponseMetadata": {"HTTPHeaders": headers},
    }
    return ClientError(response, "DescribeVpcs")


@pytest.mark.parametrize(
    "code",
    [
        *("AuthFailure", "RequestExpired", "SignatureDoesNotMatch", "RequestTimeTooSkewed"),
        *("ExpiredTokenException", "InvalidAccessKeyId"),  # of SSM and others, of S3
    ],
)
def test_rejected_credentials_with_a_wrong_clock(code: str) -> None:
    for off, text in (
        (-DAY, "this machine's clock is 24 h behind the cloud's"),
        (timedelta(minutes=16), "this machine's clock is 16 min ahead of the cloud's"),
        (timedelta(minutes=1), "AWS rejected the credentials: who?"),
        (None, "AWS rejected the credentials: who?"),
    ):
        error = translate_boto_error(refusal(code, off))
        assert isinstance(error, UsageError)
        assert error.message.startswith(text)
    assert "no permission" in str(translate_boto_error(refusal("UnauthorizedOperation", DAY)))
