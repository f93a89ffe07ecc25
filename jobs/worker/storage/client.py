"""S3 as a node sees it: an URL, and a client with the node's own credentials. Runs on Python 3.8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

SCHEME = "s3://"
CONNECTIONS = 32


@dataclass(frozen=True)
class S3Url:
    """A bucket and a key or prefix, without a leading ``/``."""

    bucket: str
    key: str

    @staticmethod
    def parse(text: str) -> S3Url:
        """Parse ``s3://BUCKET/KEY``. Raises :class:`ValueError`."""
        bucket, _, key = text[len(SCHEME) :].partition("/")
        if not text.startswith(SCHEME) or not bucket:
            raise ValueError(f"{text}: expected s3://BUCKET/KEY")
        return S3Url(bucket, key.strip("/"))

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}".rstrip("/")

    def below(self, name: str) -> S3Url:
        """Return an URL inside this one."""
        return S3Url(self.bucket, f"{self.key}/{name}".strip("/"))


def connect() -> S3Client:
    """Return a client with the machine's role, or what boto3 finds in the environment. Sends nothing."""
    retries = {"mode": "adaptive", "total_max_attempts": 8}
    config = Config(retries=retries, max_pool_connections=CONNECTIONS, connect_timeout=10)  # type: ignore[arg-type]
    return boto3.client("s3", config=config)
