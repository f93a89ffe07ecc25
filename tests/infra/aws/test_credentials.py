"""Credentials that can't be used: one line, and the very command that mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as boto

from infra.aws.clients import translate_boto_error
from infra.aws.cloud import open_session
from infra.errors import UsageError


@pytest.mark.parametrize(
    ("error", "text", "hint"),
    [
        (boto.UnauthorizedSSOTokenError(), "SSO session", "aws sso login --profile 'my work'"),
        (boto.SSOTokenLoadError(error_msg="none"), "SSO", "aws sso login --profile 'my work'"),
        (
            boto.TokenRetrievalError(provider="sso", error_msg="Token has expired"),
            "Token has expired",
            "aws sso login --profile 'my work'",
        ),
        (boto.LoginRefreshRequired(), "AWS login", "aws login --profile 'my work'"),
        (boto.LoginTokenLoadError(error_msg="none"), "none", "aws login --profile 'my work'"),
        (boto.LoginInsufficientPermissions(), "permissions", "SignInLocalDevelopmentAccess"),
        (boto.MissingDependencyException(msg="crt"), "crt", "uv pip install 'boto3[crt]'"),
        (boto.ProfileNotFound(profile="x"), "(x)", "aws configure --profile 'my work'"),
        (
            boto.PartialCredentialsError(provider="env", cred_var="secret"),
            "missing: secret",
            "aws configure --profile 'my work'",
        ),
        (boto.RefreshWithMFAUnsupportedError(), "MFA has expired", "same command again"),
        (boto.CredentialRetrievalError(provider="x", error_msg="y"), "from x: y", "aws login"),
        (
            boto.CredentialRetrievalError(provider="custom-process", error_msg="boom\n"),
            "from custom-process: boom",
            "credential_process",
        ),
        (boto.InvalidConfigError(error_msg="odd"), "odd", "correct the profile"),
    ],
)
def test_each_cause_names_its_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str, hint: str
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "my work")

    explained = translate_boto_error(error)

    assert isinstance(explained, UsageError)
    assert text in explained.message
    assert "\n" not in explained.message
    assert hint in str(explained.hint)


GOOD = '{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "s"}'


@pytest.mark.parametrize(
    ("bad", "good", "text", "hint"),
    [
        ("credential_process = /bin/echo {}", None, "Unsupported version", "credential_process"),
        ("credential_process = /bin/echo []", None, "cannot use", "credential_process"),
        ("credential_process = /bin/echo Password:", None, "cannot use", "credential_process"),
        ("credential_process = /none/helper", None, "/none/helper", "credential_process"),
        ("credential_process = /bin/sh -c 'exit 3'", None, "cannot use", "credential_process"),
        ("role_arn = arn:aws:iam::1:role/x\nsource_profile = b", None, '"b"', "correct the prof"),
        ("endpoint_url = http://127.0.0.1:9", "", "127.0.0.1:9", "remove endpoint_url"),
    ],
)
def test_a_profile_that_cant_be_used_is_mended_as_the_hint_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bad: str,
    good: str | None,
    text: str,
    hint: str,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "a")

    config.write_text(f"[profile a]\nregion = us-east-1\n{bad}\n")
    with pytest.raises(UsageError) as caught:
        open_session()
    assert text in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in str(caught.value.hint)

    good = f"credential_process = /bin/echo '{GOOD}'" if good is None else good
    config.write_text(f"[profile a]\nregion = us-east-1\n{good}\n")
    open_session()


@pytest.mark.parametrize(
    ("detail", "hint"),
    [
        (
            "MultiFactorAuthentication failed with invalid MFA one time pass code.",
            "wait for the next",
        ),
        ("User ann is not authorized to perform: sts:AssumeRole", "aws sts get-caller-identity"),
    ],
)
def test_a_role_that_can_not_be_assumed_is_no_lack_of_a_permission_for_ec2(
    detail: str, hint: str
) -> None:
    answer: Any = {"Error": {"Code": "AccessDenied", "Message": detail}}

    explained = translate_boto_error(boto.ClientError(answer, "AssumeRole"))

    assert isinstance(explained, UsageError)
    assert explained.message == f"the profile's role can't be assumed: {detail}"
    assert hint in str(explained.hint)
