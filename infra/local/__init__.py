"""The embedded cloud: EC2's API on this machine, with containers as instances.

moto answers as EC2, SSM and STS in a background process; podman runs the instances. Everything
outside this package sees only :class:`infra.cloud.Cloud`'s endpoint URL, as if it were AWS's.
"""

from infra.local.cloud import LocalStatus, open_local_cloud, reset, status, stop

__all__ = ["LocalStatus", "open_local_cloud", "reset", "status", "stop"]
