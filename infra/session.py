"""The user's AWS session: one for each command, so that its credentials are resolved once."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import boto3
import botocore.session
from botocore.exceptions import BotoCoreError
from botocore.utils import JSONFileCache, parse_timestamp

from infra.credentials import explain_credentials
from infra.errors import UsageError

# The AWS CLI's: https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-role.html#cli-configure-role-cache
_CACHE = "~/.aws/cli/cache"
# From the purchase to installed nodes: botocore cannot refresh a session with MFA.
_FOR_PURCHASE = timedelta(minutes=50)


class _RoleCache(JSONFileCache):
    """The AWS CLI's cache, which may be read-only, without credentials that end too soon."""

    def __init__(self, least: timedelta) -> None:
        super().__init__(os.path.expanduser(_CACHE))  # noqa: PTH111 - pathlib raises without a home
        self._least = least

    def __contains__(self, key: str) -> bool:
        try:
            expires = parse_timestamp(self[key]["Credentials"]["Expiration"])
            left = expires - datetime.now(timezone.utc)
        except (KeyError, TypeError, ValueError):
            return False
        return left >= self._least

    def __setitem__(self, key: str, value: Any) -> None:
        with suppress(OSError):
            super().__setitem__(key, value)


def open_session(region: str | None = None, *, buys: bool = False) -> boto3.session.Session:
    """Return the session of the AWS configuration, in a region: the given one, else the configured one.

    The temporary credentials of a role are shared with the AWS CLI: a role with MFA asks once an hour, not
    in each command, but before each purchase that could outlast them. STS accepts a code once.
    Raises :class:`UsageError` for an unusable configuration.
    """
    try:
        core = botocore.session.Session()
        session = boto3.session.Session(
            botocore_session=core,
            # botocore reads only AWS_DEFAULT_REGION: https://github.com/boto/boto3/issues/3620
            region_name=region or os.environ.get("AWS_REGION") or None,
        )
        roles = core.get_component("credential_provider").get_provider("assume-role")
        roles.cache = _RoleCache(_FOR_PURCHASE if buys else timedelta())
    except BotoCoreError as error:
        raise explain_credentials(error) or UsageError(
            f"AWS configuration can't be used: {error}"
        ) from None
    return session


def find_profile(session: boto3.session.Session | None) -> str:
    """Return the AWS profile that the credentials are from; "" for another source, such as variables."""
    credentials = session.get_credentials() if session else None
    if session is None or credentials is None or credentials.method == "env":
        return ""
    name = session.profile_name
    return name if name in session.available_profiles else ""
