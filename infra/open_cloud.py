"""Opening the cloud that the user names."""

from __future__ import annotations

from infra.cloud import DEFAULT_REGION, Cloud
from infra.errors import UsageError
from infra.progress import Progress

CLOUD_NAMES = ("aws", "local")


def open_cloud(name: str, region: str | None, progress: Progress) -> Cloud:
    """The cloud of that name, started first where it is the embedded one.

    Raises :class:`UsageError` for an unknown name, or where the embedded cloud can't run here.
    """
    if name == "local":
        from infra.local import open_local_cloud

        return open_local_cloud(region or DEFAULT_REGION, progress)
    if name == "aws":
        from infra.aws import open_aws_cloud

        return open_aws_cloud(region)
    raise UsageError(f"unknown cloud {name!r}: one of {', '.join(CLOUD_NAMES)}")
