"""Files into an S3 bucket of the user's own: checked before the work, uploaded after it.

Always AWS with the user's own credentials, wherever the cluster is. No ACL is ever set, and no
encryption asked for: who may read the files, and how they are kept, is the bucket's to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from boto3.exceptions import S3UploadFailedError
from botocore import exceptions as boto
from botocore.config import Config

from infra.clients import DENIED, error_code, translate_boto_error
from infra.errors import CloudError, SprError, UsageError

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_EXPECTED = "expected s3://BUCKET or s3://BUCKET/PREFIX"
_LONGEST_KEY = 1024


@dataclass(frozen=True)
class S3Location:
    """A bucket and the beginning of the keys in it; no ``/`` at its ends."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def below(self, name: str) -> S3Location:
        """A place inside this one."""
        return S3Location(self.bucket, f"{self.prefix}/{name}".strip("/"))


def parse_s3_url(wish: str) -> S3Location:
    """``s3://bucket/prefix`` as a place; raises :class:`UsageError` for anything else."""
    scheme, found, rest = wish.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not found or not _BUCKET.fullmatch(bucket):
        raise UsageError(f"--push-to {wish}: {_EXPECTED}")
    parts = prefix.strip("/").split("/") if prefix.strip("/") else []
    if any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        raise UsageError(f"--push-to {wish}: {_EXPECTED}, without empty parts, `.` and `..`")
    if len(prefix.encode("utf-8", "replace")) > _LONGEST_KEY - 256:
        raise UsageError(f"--push-to: the prefix has more than {_LONGEST_KEY - 256} bytes")
    return S3Location(bucket, "/".join(parts))


def connect_s3() -> S3Client:
    """A client with this user's own AWS configuration; nothing is sent yet.

    Where the bucket is in another region, S3 says so and botocore follows.
    """
    try:
        session = boto3.session.Session()
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
    """Make sure that this user may write there, without leaving anything.

    Raises :class:`UsageError` for a bucket that is not there or closed: before hours of training.
    """
    probe = place.below(".spr-cluster").prefix
    try:
        # The beginning of a large upload needs the right to write, and makes no object.
        begun = s3.create_multipart_upload(Bucket=place.bucket, Key=probe)
    except (boto.ClientError, boto.BotoCoreError) as error:
        raise _explain(error, place) from None
    try:
        s3.abort_multipart_upload(Bucket=place.bucket, Key=probe, UploadId=begun["UploadId"])
    except (boto.ClientError, boto.BotoCoreError):
        return  # without a part in it, it costs nothing


def push_folder(
    s3: S3Client,
    files: Mapping[str, Path],
    place: S3Location,
    *,
    about: Mapping[str, str],
    on_file: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Upload files by their names below a place, in their order; returns their keys.

    ``about`` becomes the objects' metadata: unlike tags it needs no right of its own. Raises
    :class:`SprError` with what failed; what was uploaded before stays.
    """
    keys = []
    for name, source in files.items():
        key = place.below(name).prefix
        on_file(f"{key.rpartition('/')[2]}: {source.stat().st_size / 1e6:,.1f} MB")
        try:
            # In parts, several at once, where it is large.
            s3.upload_file(str(source), place.bucket, key, ExtraArgs={"Metadata": dict(about)})
        except S3UploadFailedError as error:
            raise _explain(error.__context__ or error, place) from None
        except (boto.ClientError, boto.BotoCoreError) as error:
            raise _explain(error, place) from None
        keys.append(key)
    return keys


def _explain(error: BaseException, place: S3Location) -> SprError:
    code = error_code(error) if isinstance(error, boto.ClientError) else ""
    if code in ("NoSuchBucket", "404"):
        return UsageError(
            f"--push-to {place}: there is no bucket {place.bucket!r}",
            hint=f"`aws s3 mb s3://{place.bucket}` makes one, private and encrypted",
        )
    if code in (*DENIED, "AccessDenied", "403", "AllAccessDisabled"):
        return UsageError(
            f"--push-to {place}: this user may not write there ({code})",
            hint=f"`spr-cluster iam-policy --push-to {place}` prints the rights that it needs; "
            "an encrypted bucket's key may need kms:GenerateDataKey and kms:Decrypt, too",
        )
    if isinstance(error, boto.ClientError | boto.BotoCoreError):
        return translate_boto_error(error) or CloudError(str(error))
    return CloudError(f"the upload to {place} failed: {error}")
