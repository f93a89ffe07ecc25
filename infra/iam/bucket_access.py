"""Whether the nodes could use the buckets of `up --bucket` and `--read-from`, asked before a purchase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from botocore.exceptions import ClientError

from infra.aws.clients import DENIED, Clients, error_code, unless
from infra.aws.cloud import Cloud
from infra.errors import UsageError
from infra.s3_url import parse_s3_url
from infra.spec import ClusterSpec


def check_buckets(clients: Clients, spec: ClusterSpec, cloud: Cloud) -> Iterator[str]:
    """Look at each bucket once, and yield what may be wrong with it.

    Raises :class:`UsageError` if one does not exist, or if the nodes' role can't write with its KMS key.
    """
    options = [("--bucket", spec.bucket)] if spec.bucket else []
    options += [("--read-from", url) for url in spec.read_from]
    first: dict[str, tuple[str, str]] = {}
    for flag, url in options:
        first.setdefault(parse_s3_url(url).bucket, (flag, url))
    for flag, url in first.values():
        yield from _check(clients, spec, cloud, flag, url)


def _check(clients: Clients, spec: ClusterSpec, cloud: Cloud, flag: str, url: str) -> Iterator[str]:
    what, bucket = f"{flag} {url}", parse_s3_url(url).bucket
    writes = flag == "--bucket"
    try:
        headers = clients.s3.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status == 404:
            hint = f"create it: aws s3 mb s3://{bucket} --region {cloud.region}"
            if not cloud.billed:
                hint = f"create it: spr-cluster local bucket {bucket}"
            elif not writes:
                hint = "`aws s3 ls` lists this account's buckets"
            raise UsageError(f"{what}: bucket {bucket!r} does not exist", hint=hint) from None
        # Rights below the prefix do not include this question.
        if status not in (301, 400, 403):
            raise
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region", cloud.region)
    if region != cloud.region:
        yield f"{what}: the bucket is in {region}, so traffic from {cloud.region} costs money"
    asked: Any = {"Bucket": bucket, "ExpectedBucketOwner": clients.caller.account}
    if writes and _keeps_versions(clients, asked, parse_s3_url(url).prefix):
        yield (
            f"{what}: the bucket has versioning, so each replaced checkpoint is still stored and billed; a "
            "lifecycle rule that expires noncurrent versions ends that"
        )
    found = unless(DENIED, lambda: clients.s3.get_bucket_encryption(**asked))
    if found is None:
        needed = "--bucket-kms-key" if writes else "--instance-profile"
        yield (
            f"{what}: another account owns the bucket, or these credentials lack "
            "s3:GetEncryptionConfiguration"
            + (f"; if it has its own KMS key, {needed} is needed" if spec.makes_role else "")
        )
        return
    (rule,) = found["ServerSideEncryptionConfiguration"]["Rules"]
    key = rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID", "")
    given = spec.bucket_kms_key or ""
    is_given = given.endswith(f"/{key.rpartition('/')[2]}") or (given and "alias/" in key)
    # Everyone who may use S3 may use the key that AWS manages for it.
    if key and spec.makes_role and not is_given and not key.endswith("alias/aws/s3"):
        arn = key if ":key/" in key else f"ARN (`aws kms describe-key --key-id {key}` shows it)"
        # The objects may have another key, and this key's policy may admit the account's roles.
        if not writes:
            yield (
                f"{what}: the bucket encrypts with KMS key {key}; unless its key policy lets the nodes' "
                "role decrypt, use --instance-profile NAME, of a role that may"
            )
            return
        raise UsageError(
            f"{what}: the bucket encrypts with KMS key {key}, which the nodes can't use",
            hint=f"add --bucket-kms-key {arn}; the key policy must allow this as well",
        )


def _keeps_versions(clients: Clients, asked: Any, prefix: str) -> bool:
    """Return whether the bucket keeps what is overwritten or deleted below a prefix, without end.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/DeletingObjectVersions.html
    """
    versioning = unless(DENIED, lambda: clients.s3.get_bucket_versioning(**asked))
    if not versioning or versioning.get("Status") != "Enabled":
        return False
    try:
        rules = clients.s3.get_bucket_lifecycle_configuration(**asked)["Rules"]
    except ClientError as error:
        if error_code(error) not in DENIED | {"NoSuchLifecycleConfiguration"}:
            raise
        return error_code(error) not in DENIED
    return not any(
        rule["Status"] == "Enabled"
        and "NoncurrentVersionExpiration" in rule
        and _covers(rule, prefix)
        for rule in rules
    )


def _covers(rule: Any, prefix: str) -> bool:
    """Return whether a lifecycle rule holds for all objects below a prefix: not only by tag or size."""
    chosen = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    return chosen.keys() <= {"Prefix"} and prefix.startswith(chosen.get("Prefix", ""))
