"""Deletion of IAM roles, whatever others have attached to them."""

from __future__ import annotations

from functools import partial
from typing import Any

from infra.aws.clients import unless

_MISSING = {"NoSuchEntity"}


def delete_role(iam: Any, name: str) -> None:
    """Delete a role with its policies, if it exists.

    Some organizations attach policies to every role, and IAM refuses to delete a role that has any.
    """
    role = {"RoleName": name}
    attached = unless(_MISSING, lambda: iam.list_attached_role_policies(**role)) or {}
    inline = unless(_MISSING, lambda: iam.list_role_policies(**role)) or {}
    for each in attached.get("AttachedPolicies", ()):
        unless(_MISSING, partial(iam.detach_role_policy, **role, PolicyArn=each["PolicyArn"]))
    for each in inline.get("PolicyNames", ()):
        unless(_MISSING, partial(iam.delete_role_policy, **role, PolicyName=each))
    unless(_MISSING, lambda: iam.delete_role(**role))
