"""What a role must allow, asked of the cluster before anything is created."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from jobs.kubernetes.problems import KubernetesProblem
from jobs.kubernetes.resources import dig

if TYPE_CHECKING:
    from jobs.kubernetes.api import KubernetesApi


class AccessRight(NamedTuple):
    """A verb on a type of objects, such as ``get`` on ``pods/log``."""

    verb: str
    resource: str
    group: str = ""


def find_missing_rights(
    api: KubernetesApi, wanted: Iterable[AccessRight]
) -> list[KubernetesProblem]:
    """Return a problem for each right that the user lacks in the namespace."""
    return [
        KubernetesProblem(
            f"you may not {right.verb} {right.resource} in namespace {api.namespace}",
            f"ask for a role with verb {right.verb} on {right.resource}"
            + (f" in {right.group}" if right.group else ""),
        )
        for right in wanted
        if not _has(api, right)
    ]


def _has(api: KubernetesApi, right: AccessRight) -> bool:
    resource, _, part = right.resource.partition("/")
    asked = {"verb": right.verb, "group": right.group, "resource": resource, "subresource": part}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**asked, "namespace": api.namespace}},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    return dig(api.create(path, review), "status").get("allowed") is True
