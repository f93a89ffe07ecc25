"""Credentials that AWS or botocore refuses: one line for each cause, with the command that mends it."""

from __future__ import annotations

import os
import shlex

from botocore import exceptions as boto

from infra.errors import UsageError

CREDENTIALS_HINT = (
    "run `aws configure`, `aws login`, or `aws sso login`, or set AWS_PROFILE; "
    "to try the tool without an account: --cloud local"
)
_SSO = (boto.SSOError, boto.TokenRetrievalError)
_UNUSABLE = (boto.CredentialRetrievalError, boto.InvalidConfigError, boto.ConfigParseError)
_NO_MFA_CODE = "an MFA code is accepted once: wait for the next one, and run the same command again"


class MissingCredentialsError(UsageError):
    """This machine has no AWS credentials at all."""


def _profile() -> str:
    """Return ``--profile`` for a command of the AWS CLI; botocore prefers AWS_DEFAULT_PROFILE, too."""
    name = os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")
    return f" --profile {shlex.quote(name)}" if name else ""


def explain_credentials(error: Exception) -> UsageError | None:
    """Return an error of the AWS configuration or its credentials for the user; ``None`` for others."""
    profile = _profile()
    if isinstance(error, boto.NoCredentialsError):
        return MissingCredentialsError("no AWS credentials found", hint=CREDENTIALS_HINT)
    if isinstance(error, boto.PartialCredentialsError):
        return UsageError(f"incomplete AWS credentials: {error}", hint=f"aws configure{profile}")
    if isinstance(error, boto.ProfileNotFound):
        return UsageError(
            f"AWS configuration can't be used: {error}",
            hint=f"`aws configure list-profiles` lists the profiles, `aws configure{profile}` makes this one",
        )
    if isinstance(error, _SSO):
        return UsageError(f"the SSO session has expired: {error}", hint=f"aws sso login{profile}")
    if isinstance(error, boto.LoginInsufficientPermissions):
        return UsageError(
            f"cannot use the AWS credentials: {error}",
            hint="ask an administrator for the policy SignInLocalDevelopmentAccess",
        )
    if isinstance(error, boto.LoginError):
        return UsageError(f"the AWS login has expired: {error}", hint=f"aws login{profile}")
    if isinstance(error, boto.RefreshWithMFAUnsupportedError):
        return UsageError(
            "the session of the role with MFA has expired",
            hint="run the same command again, which asks for a new code; duration_seconds in the profile "
            "makes sessions longer",
        )
    if isinstance(error, boto.MissingDependencyException):
        return UsageError(
            f"cannot use the AWS credentials: {error}", hint="uv pip install 'boto3[crt]'"
        )
    if isinstance(error, _UNUSABLE):
        return UsageError(f"cannot use the AWS credentials: {error}", hint=CREDENTIALS_HINT)
    return None


def explain_role(operation: str, detail: str) -> UsageError | None:
    """Return why a profile's role could not be assumed; ``None`` for another operation."""
    if not operation.startswith("AssumeRole"):
        return None
    hint = "may these credentials assume the role? `aws sts get-caller-identity` names them"
    return UsageError(
        f"the profile's role can't be assumed: {detail}",
        hint=_NO_MFA_CODE if "MultiFactorAuthentication" in detail else hint,
    )
