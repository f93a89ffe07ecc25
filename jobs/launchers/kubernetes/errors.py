"""Errors of calls to a Kubernetes cluster, for code that runs without the client library."""

from __future__ import annotations

from infra.errors import SprError


class KubernetesError(SprError):
    """A call to the cluster failed. ``status`` is the HTTP status; 0 means that there was no answer."""

    def __init__(self, message: str, *, status: int = 0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class ForbiddenError(KubernetesError):
    """Status 403: the user's role does not allow the call, or a quota is used up."""


class NotFoundError(KubernetesError):
    """Status 404: there is no such object, or no such type of object."""


class ConflictError(KubernetesError):
    """Status 409: an object with this name exists."""


BY_STATUS = {403: ForbiddenError, 404: NotFoundError, 409: ConflictError}
