"""The user's S3 bucket: check access before a job, upload files after it, download a stored job.

:func:`connect_s3` always uses AWS and the user's credentials, even if the cluster is in another cloud. The
bucket's settings determine ACLs and encryption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from boto3.exceptions import RetriesExceededError, S3UploadFailedError
from botocore import exceptions as boto
from botocore.config import Config

from infra.aws.clients import DENIED, error_code, translate_boto_error
from infra.aws.cloud import open_session
from infra.aws.outage import OUTAGE
from infra.errors import CloudError, SprError, UsageError
from infra.s3_url import S3Location

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_DENIED = {*DENIED, "403", "AllAccessDisabled"}


def connect_s3() -> S3Client:
    """Create a client from the user's AWS configuration. Sends nothing.

    botocore follows S3's redirects to the bucket's region.
    """
    try:
        session = open_session()
        session.events.register("needs-retry", OUTAGE.notice)
        return session.client(
            "s3",
            region_name=session.region_name or "us-east-1",
            config=Config(
                retries={"mode": "adaptive", "total_max_attempts": 8},
                connect_timeout=10,
                user_agent_extra="spr-cluster",
            ),
        )
    except boto.BotoCoreError as error:
        raise translate_boto_error(error) or error from None


def check_s3_location(s3: S3Client, place: S3Location) -> None:
    """Check write access before hours of training, without creating an object.

    Raises :class:`UsageError` if the bucket does not exist or access is denied.
    """
    probe = place.below(".spr-cluster").prefix
    try:
        # Starting a multipart upload requires write access but creates no object.
        begun = s3.create_multipart_upload(Bucket=place.bucket, Key=probe)
    except (boto.ClientError, boto.BotoCoreError) as error:
        raise _explain(error, place) from None
    try:
        s3.abort_multipart_upload(Bucket=place.bucket, Key=probe, UploadId=begun["UploadId"])
    except (boto.ClientError, boto.BotoCoreError):
        return  # an upload without parts costs nothing


def push_folder(
    s3: S3Client,
    files: Mapping[str, Path],
    place: S3Location,
    *,
    about: Mapping[str, str],
    on_file: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Upload files in order and return their keys.

    ``about`` becomes the objects' metadata; unlike tags, it needs no extra permission. Raises
    :class:`SprError` if an upload fails; earlier uploads remain.
    """
    keys = []
    for name, source in files.items():
        key = place.below(name).prefix
        on_file(f"{key.rpartition('/')[2]}: {source.stat().st_size / 1e6:,.1f} MB")
        try:
            s3.upload_file(str(source), place.bucket, key, ExtraArgs={"Metadata": dict(about)})
        except S3UploadFailedError as error:
            raise _explain(error.__context__ or error, place) from None
        except (boto.ClientError, boto.BotoCoreError) as error:
            raise _explain(error, place) from None
        keys.append(key)
    return keys


def list_folder(s3: S3Client, place: S3Location) -> dict[str, int]:
    """Return the sizes of all objects below a prefix, by their names there.

    Raises :class:`UsageError` if the bucket does not exist or access is denied.
    """
    prefix = f"{place.prefix}/" if place.prefix else ""
    try:
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=prefix)
        return {
            each["Key"][len(prefix) :]: each["Size"]
            for page in pages
            for each in page.get("Contents", ())
        }
    except (boto.ClientError, boto.BotoCoreError) as error:
        raise _explain_reading(error, place) from None


def download_file(
    s3: S3Client, place: S3Location, path: Path, on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Download an object in parallel parts. Raises :class:`SprError` if that fails."""
    try:
        s3.download_file(place.bucket, place.prefix, str(path), Callback=on_bytes)
    except (boto.ClientError, boto.BotoCoreError, RetriesExceededError) as error:
        raise _explain_reading(error, place) from None


def _explain_reading(error: Exception, place: S3Location) -> SprError:
    code = error_code(error) if isinstance(error, boto.ClientError) else ""
    if code == "NoSuchBucket":
        return UsageError(f"{place}: bucket {place.bucket!r} does not exist")
    if code in _DENIED:
        return UsageError(
            f"{place}: no permission to read ({code})",
            hint=f"`spr-cluster iam-policy --bucket {place}` prints the required permissions",
        )
    return translate_boto_error(error) or CloudError(f"{place}: {error}")


def _explain(error: BaseException, place: S3Location) -> SprError:
    code = error_code(error) if isinstance(error, boto.ClientError) else ""
    if code in ("NoSuchBucket", "404"):
        return UsageError(
            f"--push-to {place}: bucket {place.bucket!r} does not exist",
            hint=f"create a private, encrypted one: aws s3 mb s3://{place.bucket}",
        )
    if code in _DENIED:
        return UsageError(
            f"--push-to {place}: no permission to write ({code})",
            hint=f"`spr-cluster iam-policy --push-to {place}` prints the required permissions; "
            "an encrypted bucket may also need kms:GenerateDataKey and kms:Decrypt on its key",
        )
    return translate_boto_error(error) or CloudError(f"the upload to {place} failed: {error}")
