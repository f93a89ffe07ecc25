"""AWS errors: which are retried, and the messages for the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)
from botocore.httpsession import URLLib3Session

from infra.aws.clients import (
    connect,
    error_code,
    is_passing,
    patient,
    translate_boto_error,
    when_visible,
)
from infra.aws.cloud import Cloud
from infra.aws.outage import OUTAGE
from infra.aws.s3 import connect_s3
from infra.errors import SprError
from tests.fakes import FakeClock
from tests.golden import check_section


def refusal(code: str, message: str = "no", operation: str = "RunInstances") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


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
    monkeypatch.setattr("infra.wait.time", clock)
    return clock


def _renewed_in_vain() -> Exception:
    old = dict.fromkeys(("access_key", "secret_key", "token"), "x")
    old["expiry_time"] = "2020-01-01T00:00:00Z"
    credentials = RefreshableCredentials.create_from_metadata(old, lambda: old, "custom-process")
    with pytest.raises(RuntimeError) as caught:
        credentials.get_frozen_credentials()
    return caught.value


_DENIED = (
    "User: arn:aws:sts::123456789012:assumed-role/dev/me is not authorized to perform: "
    "ec2:RunInstances on resource: arn:aws:ec2:*:*:instance/* "
)
_ENCODED = "Not allowed. Encoded authorization failure message: " + "x" * 500
_ERRORS: dict[str, Exception] = {
    "no credentials": NoCredentialsError(),
    "half of the credentials": boto.PartialCredentialsError(provider="env", cred_var="secret"),
    "an unknown profile": boto.ProfileNotFound(profile="x"),
    "no network": EndpointConnectionError(endpoint_url="https://ec2"),
    "old credentials": refusal("ExpiredToken", "old"),
    "what only an administrator can decode": refusal("UnauthorizedOperation", _ENCODED),
    "a denial by the organization": refusal(
        "UnauthorizedOperation", _DENIED + "with an explicit deny in a service control policy"
    ),
    "a boundary": refusal(
        "UnauthorizedOperation",
        _DENIED + "because no permissions boundary allows the ec2:RunInstances action",
    ),
    "another refusal": refusal("Oops", "hm"),
    "no role for spot": refusal("AuthFailure.ServiceLinkedRoleCreationNotPermitted"),
    "an account that is not verified": refusal("PendingVerification"),
    "an SSO session": boto.UnauthorizedSSOTokenError(),
    "an old SSO token": boto.TokenRetrievalError(provider="sso", error_msg="Token has expired"),
    "an old login": boto.LoginRefreshRequired(),
    "a login without permissions": boto.LoginInsufficientPermissions(),
    "no crt": boto.MissingDependencyException(msg="crt"),
    "an old MFA session": boto.RefreshWithMFAUnsupportedError(),
    "credentials that are renewed in vain": _renewed_in_vain(),
    "the user's own program": boto.CredentialRetrievalError(
        provider="custom-process", error_msg="boom\n"
    ),
    "an odd configuration": boto.InvalidConfigError(error_msg="odd"),
    "a used MFA code": refusal(
        "AccessDenied",
        "MultiFactorAuthentication failed with invalid MFA one time pass code.",
        "AssumeRole",
    ),
    "another's role": refusal(
        "AccessDenied", "User ann is not authorized to perform: sts:AssumeRole", "AssumeRole"
    ),
}


@pytest.mark.parametrize("name", _ERRORS)
def test_errors_of_boto_become_ours_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "my work")

    translated = translate_boto_error(_ERRORS[name])

    assert isinstance(translated, SprError)
    assert "\n" not in translated.message
    golden = Path(__file__).parent / "golden" / "errors.txt"
    check_section(golden, name, f"{type(translated).__name__}: {translated}")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (refusal("RequestLimitExceeded"), True),
        (EndpointConnectionError(endpoint_url="https://ec2"), True),
        (ReadTimeoutError(endpoint_url="https://ec2"), True),
        (boto.ProxyConnectionError(proxy_url="http://proxy"), True),
        (refusal("UnauthorizedOperation"), False),
        (refusal("InvalidAMIID.NotFound"), False),
        (NoCredentialsError(), False),
        (KeyError("x"), False),
    ],
)
def test_what_passes_by_itself(error: Exception, passes: bool) -> None:
    assert is_passing(error) is passes
    assert (translate_boto_error(error) is None) is isinstance(error, KeyError)


def test_a_patient_probe_takes_a_broken_network_as_not_yet_but_is_not_blind() -> None:
    probe = patient(failing(refusal("InternalError"), ConnectTimeoutError(endpoint_url="x")))

    assert [probe(), probe(), probe()] == [None, None, "answer"]
    for error in (refusal("UnauthorizedOperation"), NoCredentialsError()):
        with pytest.raises(type(error)):
            patient(failing(error))()


def test_what_was_made_seconds_ago_is_waited_for(clock: FakeClock) -> None:
    unseen = refusal("InvalidGroup.NotFound")

    assert when_visible(failing(*[unseen] * 4), GroupId="sg-1") == "answer"
    assert 0 < clock.now < 30
    for error, seconds in ((unseen, range(30, 40)), (refusal("UnauthorizedOperation"), range(1))):
        began = clock.now
        with pytest.raises(ClientError, match=error_code(error)):
            when_visible(failing(*[error] * 100), GroupId="sg-1")
        assert int(clock.now - began) in seconds


def answer_busy() -> AWSResponse:
    """The answer of an AWS that can't serve requests."""
    body = "<Error><Code>Unavailable</Code><Message>busy</Message></Error>"
    text = f"<Response><Errors>{body}</Errors><RequestID>1</RequestID></Response>".encode()
    raw = SimpleNamespace(stream=lambda **_: iter([text]))
    return AWSResponse("https://x", 503, HTTPHeaders(), raw)


def test_an_outage_is_reported_once_and_an_untrusted_certificate_ends_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, pauses = list[str](), list[float]()
    monkeypatch.setattr(OUTAGE, "on_wait", said.append)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr("botocore.endpoint.time.sleep", pauses.append)
    clients = connect(Cloud("aws", "eu-west-1", str, True, True, credentials=("a", "s")))

    def lose(call: Callable[..., object], error: Exception, **parameters: Any) -> int:
        """Return how often a call whose requests are lost, or refused by a busy AWS, is repeated."""
        before = len(pauses)
        is_lost = isinstance(error, boto.BotoCoreError)
        send: Any = (lambda *_: failing(error)()) if is_lost else lambda *_: answer_busy()
        monkeypatch.setattr(URLLib3Session, "send", send)
        with pytest.raises(type(error)):
            call(**parameters)
        return len(pauses) - before

    lost = EndpointConnectionError(endpoint_url="https://x")
    untrusted = boto.SSLError(endpoint_url="https://x", error=OSError("CERTIFICATE_VERIFY_FAILED"))

    # A quota is only for information.
    assert lose(clients.quotas.get_service_quota, lost, ServiceCode="ec2", QuotaCode="L-1") == 1
    assert lose(clients.ec2.describe_vpcs, untrusted) == 0
    assert lose(connect_s3().list_buckets, untrusted) == 0
    assert said == []
    assert "AWS_CA_BUNDLE" in str(translate_boto_error(untrusted))
    reason = "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid"
    early = boto.SSLError(endpoint_url="https://x", error=OSError(reason))
    assert "set the clock" in str(translate_boto_error(early))
    for error in (lost, lost):
        assert lose(clients.ec2.describe_vpcs, error) > 9
    (text,) = said
    assert text.startswith("requests to AWS fail, retrying: Could not connect")
    monkeypatch.setattr(OUTAGE, "on_wait", said.append)
    assert lose(clients.ec2.describe_vpcs, refusal("Unavailable")) > 9
    assert said[1:] == ["requests to AWS fail, retrying: Unavailable"]
