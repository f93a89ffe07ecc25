"""AWS errors: which are retried, and the messages for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
)

from infra.aws.clients import is_passing, patient, translate_boto_error, when_visible
from infra.aws.cloud import MissingCredentialsError
from infra.errors import CloudError, SprError, UsageError
from tests.fakes import FakeClock


def refusal(code: str, message: str = "no") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "RunInstances")


def failing(*errors: Exception) -> Callable[..., str]:
    """A call that fails with each of these, and then answers."""
    rest = list(errors)

    def call(**_: Any) -> str:
        if rest:
            raise rest.pop(0)
        return "answer"

    return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The time of waits that are given no clock."""
    clock = FakeClock()
    monkeypatch.setattr("infra.wait.SystemClock", lambda: clock)
    return clock


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (NoCredentialsError(), MissingCredentialsError, "no AWS credentials"),
        (
            PartialCredentialsError(provider="env", cred_var="aws_secret_access_key"),
            UsageError,
            "incomplete AWS credentials",
        ),
        (ProfileNotFound(profile="work"), UsageError, "(work) could not be found"),
        (EndpointConnectionError(endpoint_url="https://ec2"), CloudError, "cannot reach AWS"),
        (refusal("ExpiredToken", "old"), UsageError, "AWS rejected the credentials: old"),
        (refusal("AuthFailure", "who?"), UsageError, "AWS rejected the credentials: who?"),
        (refusal("UnauthorizedOperation"), CloudError, "no permission for RunInstances: no"),
        (
            refusal("AccessDeniedException"),
            CloudError,
            "ask an administrator to allow RunInstances",
        ),
        (refusal("VcpuLimitExceeded"), CloudError, "RunInstances failed: VcpuLimitExceeded"),
        (refusal("Oops", "hm"), CloudError, "RunInstances failed: Oops: hm"),
    ],
)
def test_errors_of_boto_become_ours(error: Exception, kind: type[SprError], text: str) -> None:
    translated = translate_boto_error(error)

    assert type(translated) is kind
    assert text in str(translated)


def test_what_only_an_administrator_can_decode_is_left_out() -> None:
    secret = "Not allowed. Encoded authorization failure message: " + "x" * 500

    translated = translate_boto_error(refusal("UnauthorizedOperation", secret))

    assert "Not allowed." in str(translated)
    assert "xxx" not in str(translated)


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ("with an explicit deny in a service control policy", "service control policy"),
        (
            "because no service control policy allows the ec2:RunInstances action",
            "service control policy",
        ),
        (
            "because no permissions boundary allows the ec2:RunInstances action",
            "permissions boundary",
        ),
    ],
)
def test_an_organizations_denial_is_named(end: str, name: str) -> None:
    who = "User: arn:aws:sts::123456789012:assumed-role/dev/me is not authorized to perform:"
    text = f"{who} ec2:RunInstances on resource: arn:aws:ec2:*:*:instance/* {end}"

    translated = translate_boto_error(refusal("UnauthorizedOperation", text))

    assert translated
    assert translated.message.startswith(f"a {name} forbids RunInstances: ")
    assert "up --tag KEY=VALUE" in str(translated.hint)


def test_a_bug_is_not_translated() -> None:
    assert translate_boto_error(KeyError("x")) is None


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (refusal("RequestLimitExceeded"), True),
        (refusal("InternalError"), True),
        (refusal("Unavailable"), True),
        (EndpointConnectionError(endpoint_url="https://ec2"), True),
        (ReadTimeoutError(endpoint_url="https://ec2"), True),
        (refusal("UnauthorizedOperation"), False),
        (refusal("InvalidAMIID.NotFound"), False),
        (NoCredentialsError(), False),
        (KeyError("x"), False),
    ],
)
def test_what_passes_by_itself(error: Exception, passes: bool) -> None:
    assert is_passing(error) is passes


def test_a_patient_probe_takes_a_broken_network_as_not_yet() -> None:
    probe = patient(failing(refusal("InternalError"), ConnectTimeoutError(endpoint_url="x")))

    assert [probe(), probe(), probe()] == [None, None, "answer"]


@pytest.mark.parametrize("error", [refusal("UnauthorizedOperation"), NoCredentialsError()])
def test_a_patient_probe_is_not_blind(error: Exception) -> None:
    with pytest.raises((ClientError, BotoCoreError)):
        patient(failing(error))()


def test_what_was_made_seconds_ago_is_waited_for(clock: FakeClock) -> None:
    unseen = [refusal("InvalidGroup.NotFound")] * 4

    assert when_visible(failing(*unseen), GroupId="sg-1") == "answer"
    assert 0 < clock.seconds < 30


def test_what_never_shows_is_an_error_within_half_a_minute(clock: FakeClock) -> None:
    with pytest.raises(ClientError, match=r"InvalidGroup\.NotFound"):
        when_visible(failing(*[refusal("InvalidGroup.NotFound")] * 100), GroupId="sg-1")
    assert 30 <= clock.seconds < 40


def test_another_refusal_is_not_waited_for(clock: FakeClock) -> None:
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        when_visible(failing(refusal("UnauthorizedOperation")), GroupId="sg-1")
    assert clock.seconds == 0
