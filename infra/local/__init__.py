"""The embedded cloud: EC2's API on this machine, with containers as instances.

A background process answers as EC2, SSM, STS, and Service Quotas through moto; podman runs the
instances. Code outside this package sees only the endpoint URL in :class:`infra.aws.cloud.Cloud`.
"""

from infra.local.cloud import LocalStatus, open_local_cloud, reset, status, stop
from infra.local.faults import FaultsReport, clear_faults, put_faults, show_faults

__all__ = [
    "FaultsReport",
    "LocalStatus",
    "clear_faults",
    "open_local_cloud",
    "put_faults",
    "reset",
    "show_faults",
    "status",
    "stop",
]
