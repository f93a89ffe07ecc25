"""Failures of calls to a Kubernetes cluster's API."""

from __future__ import annotations

from infra.errors import SprError


class KubernetesError(SprError):
    """A call to the cluster failed. ``status`` is HTTP's; 0 means that there was no answer."""

    def __init__(self, message: str, *, status: int = 0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
