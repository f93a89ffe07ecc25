"""The embedded cloud: EC2's API on this machine, with containers as instances.

moto answers as EC2, SSM, STS and Service Quotas in a background process; podman runs the instances.
Everything outside this package sees only :class:`infra.cloud.Cloud`'s endpoint URL, as if it were AWS's.
"""

from infra.local.cloud import LocalStatus, open_local_cloud, reset, status, stop
from infra.local.faults_file import FaultsShown, clear_faults, put_faults, show_faults

__all__ = [
    "FaultsShown",
    "LocalStatus",
    "clear_faults",
    "open_local_cloud",
    "put_faults",
    "reset",
    "show_faults",
    "status",
    "stop",
]
