"""The embedded cloud: EC2's API on this machine, with containers as instances.

A background process answers as EC2, SSM, STS, and Service Quotas through moto; podman runs the
instances. Code outside this package sees only the endpoint URL in :class:`infra.aws.cloud.Cloud`.
"""
