"""Whether the bucket of `up --bucket` exists, asked before anything is bought."""

from __future__ import annotations

from collections.abc import Callable

from botocore.exceptions import ClientError

from infra.aws.clients import Clients, error_code
from infra.aws.cloud import Cloud
from infra.errors import UsageError
from infra.s3_url import parse_s3_url


def check_bucket(clients: Clients, url: str, cloud: Cloud, note: Callable[[str], None]) -> None:
    """Raise :class:`UsageError` if the bucket does not exist; note what may be wrong with it."""
    bucket = parse_s3_url(url).bucket
    try:
        answer = clients.s3.head_bucket(Bucket=bucket)
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status == 404:
            make = f"aws s3 mb s3://{bucket} --region {cloud.region}"
            if not cloud.billed:
                make = f"spr-cluster local bucket {bucket}"
            raise UsageError(
                f"--bucket {url}: bucket {bucket!r} does not exist", hint=f"create it: {make}"
            ) from None
        if status not in (301, 400, 403):
            raise
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
        # Rights below the prefix do not include this question.
        if status == 403:
            note(
                f"--bucket {url}: these credentials may not see the bucket ({error_code(error) or 403})"
            )
    region = headers.get("x-amz-bucket-region", cloud.region)
    if region != cloud.region:
        note(
            f"--bucket {url}: the bucket is in {region}, so traffic from {cloud.region} costs money"
        )
