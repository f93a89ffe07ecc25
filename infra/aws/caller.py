"""AWS callers and the owner tag of a cluster. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.words import LONGEST_TAG, tag_value

if TYPE_CHECKING:
    from types_boto3_sts.type_defs import GetCallerIdentityResponseTypeDef

_ROLE = re.compile(r"arn:[^:]*:sts::(?P<account>\d*):assumed-role/(?P<role>[^/]+)/(?P<session>.+)")
# Without role_session_name, botocore, the AWS CLI, and other SDKs generate one for each session.
_GENERATED = re.compile(r"(botocore-session-|aws-go-sdk-|aws-sdk-\w+-)?\d+")
# The role of a permission set; its sessions carry the user's name:
# https://docs.aws.amazon.com/singlesignon/latest/userguide/using-service-linked-roles.html
_SSO_ROLE = "AWSReservedSSO_"


@dataclass(frozen=True)
class Caller:
    """The identity behind a command's credentials."""

    account: str
    arn: str

    @staticmethod
    def from_aws(answer: GetCallerIdentityResponseTypeDef) -> Caller:
        return Caller(answer["Account"], answer["Arn"])

    @property
    def owner(self) -> str:
        """The ARN as a tag value, without the user's path if it would be too long."""
        arn = self.arn
        if len(arn) > LONGEST_TAG:
            arn = re.sub(r":user/.*/", ":user/", arn)
        return tag_value(arn)


def is_same_owner(one: str, other: str) -> bool:
    """Return whether two owner tags name the same person or program.

    Ignores generated session names and, with IAM Identity Center, the permission set.
    """
    return _identity(one) == _identity(other)


def _identity(owner: str) -> tuple[str, ...]:
    found = _ROLE.fullmatch(owner)
    if not found:
        return (owner,)
    account, role, session = found.groups()
    if role.startswith(_SSO_ROLE):
        return account, _SSO_ROLE, session
    return account, role, "" if _GENERATED.fullmatch(session) else session


def short_owner(owner: str) -> str:
    """Return an owner's name for a table: ``ann``, ``Admin/ann``, or ``root``."""
    found = _ROLE.fullmatch(owner)
    if found is None:
        return owner.rpartition("/")[2].rpartition(":")[2]
    _, role, session = found.groups()
    return session if role.startswith(_SSO_ROLE) else f"{role}/{session}"
