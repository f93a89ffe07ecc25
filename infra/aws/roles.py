"""IAM roles that services of AWS assume: creation, and deletion together with all attached policies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from infra.aws.clients import error_code, is_passing, retry, unless
from infra.wait import CONSISTENCY_DEADLINE_S, Clock

EXISTS, _MISSING = {"EntityAlreadyExists"}, {"NoSuchEntity"}


def render_document(*statements: Mapping[str, Any]) -> str:
    """Return a policy that allows these statements, as JSON."""
    allowed = [{"Effect": "Allow", **each} for each in statements]
    return json.dumps({"Version": "2012-10-17", "Statement": allowed})


def make_role(
    iam: Any,
    trust: Mapping[str, Any],
    rights: Iterable[Mapping[str, Any]],
    boundary: str | None,
    clock: Clock | None,
    **request: Any,
) -> None:
    """Create a role, if it is missing, and set its rights."""
    if boundary:
        request["PermissionsBoundary"] = boundary
    trusted = render_document({"Action": "sts:AssumeRole", **trust})
    unless(EXISTS, lambda: iam.create_role(AssumeRolePolicyDocument=trusted, **request))
    policy = {"PolicyName": "spr-cluster", "PolicyDocument": render_document(*rights)}
    when_settled(lambda: iam.put_role_policy(RoleName=request["RoleName"], **policy), clock)


def when_settled(call: Callable[[], object], clock: Clock | None) -> None:
    """Repeat a call while IAM does not see what was created seconds ago."""

    def is_early(error: Exception) -> bool:
        missing = isinstance(error, ClientError) and error_code(error) in _MISSING
        return missing or is_passing(error)

    retry(call, is_early, deadline_s=CONSISTENCY_DEADLINE_S, clock=clock)


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
