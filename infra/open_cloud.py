"""The choice between AWS and the embedded cloud."""

from __future__ import annotations

from infra.aws.cloud import DEFAULT_REGION, Cloud, open_aws_cloud
from infra.errors import UsageError
from infra.wait import Progress

CLOUD_NAMES = ("aws", "local")


def open_cloud(name: str, region: str | None, progress: Progress, *, buys: bool = False) -> Cloud:
    """Return the named cloud; start the embedded one if necessary.

    With ``buys``, assumed-role credentials stay valid until the machines are installed.
    Raises :class:`UsageError` if the name is unknown or the embedded cloud cannot run here.
    """
    if name == "local":
        from infra.local import open_local_cloud  # noqa: PLC0415 - optional: needs moto

        return open_local_cloud(region or DEFAULT_REGION, progress)
    if name == "aws":
        return open_aws_cloud(region, buys=buys)
    raise UsageError(f"unknown cloud {name!r}: one of {', '.join(CLOUD_NAMES)}")
