"""Credentials that can't be used: one line, and the very command that mends it."""

from __future__ import annotations

from typing import Any

import pytest
from botocore import exceptions as boto

from infra.aws.clients import translate_boto_error
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
        (boto.InvalidConfigError(error_msg="odd"), "odd", "aws configure"),
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
