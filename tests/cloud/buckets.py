"""S3 with permissions and faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from moto.core import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends

from infra.local.api.bucket_server import BucketServer, Refusal
from infra.local.state import StateFolder
from tests.cloud.faults import ActiveFaults
from tests.cloud.policy import Policy, Request, parse_policy


@dataclass(frozen=True)
class S3Call:
    """A request: its bucket, key, and query, and the operation's name in S3's API."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]

    @staticmethod
    def of(environ: dict[str, Any]) -> S3Call:
        path, _, query = environ["REQUEST_URI"].partition("?")
        bucket, _, key = path.lstrip("/").partition("/")
        values = {name: v[0] for name, v in parse_qs(query, keep_blank_values=True).items()}
        return S3Call(environ["REQUEST_METHOD"], bucket, unquote(key), values)

    @property
    def operation(self) -> str:
        """Return the operation; "" for one that this S3 does not serve."""
        q = self.query
        kind = "object" if self.key else "bucket" if self.bucket else "all"
        part = next((word for word in ("delete", "uploads", "encryption") if word in q), "")
        part = "part" if "uploadId" in q else part
        return _OPERATIONS.get((self.method, kind, part), "")

    def permissions(self) -> tuple[Request, ...]:
        """Return what IAM decides on.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
        """
        operation = self.operation
        action = _PERMISSIONS.get(operation, operation)
        arn = f"arn:aws:s3:::{self.bucket}" if self.bucket else "*"
        arn += f"/{self.key}" if self.key else ""
        context = {"s3:prefix": self.query.get("prefix", "")} if operation in _LISTS else {}
        return (Request(f"s3:{action}", arn, context),)


_LISTS = ("ListObjectsV2",)
_OPERATIONS = {
    ("GET", "all", ""): "ListBuckets",
    ("PUT", "bucket", ""): "CreateBucket",
    ("HEAD", "bucket", ""): "HeadBucket",
    ("DELETE", "bucket", ""): "DeleteBucket",
    ("GET", "bucket", ""): "ListObjectsV2",
    ("GET", "bucket", "encryption"): "GetBucketEncryption",
    ("PUT", "bucket", "encryption"): "PutBucketEncryption",
    ("PUT", "object", ""): "PutObject",
    ("GET", "object", ""): "GetObject",
    ("HEAD", "object", ""): "HeadObject",
    ("DELETE", "object", ""): "DeleteObject",
    ("POST", "object", "uploads"): "CreateMultipartUpload",
    ("PUT", "object", "part"): "UploadPart",
    ("POST", "object", "part"): "CompleteMultipartUpload",
    ("DELETE", "object", "part"): "AbortMultipartUpload",
}
_PERMISSIONS = {
    "ListBuckets": "ListAllMyBuckets",
    "HeadBucket": "ListBucket",
    "ListObjectsV2": "ListBucket",
    "GetBucketEncryption": "GetEncryptionConfiguration",
    "HeadObject": "GetObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
}


class FaultyBuckets(BucketServer):
    """S3 that follows the policies of its callers, under the active faults."""

    def __init__(self, folder: StateFolder, faults: ActiveFaults) -> None:
        super().__init__(folder)
        self._faults, self._lock = faults, threading.Lock()

    def refuse(self, environ: dict[str, Any], region: str | None) -> Refusal | None:
        if stranger := super().refuse(environ, region):
            return stranger
        call = S3Call.of(environ)
        if not call.operation:
            return 501, "NotImplemented", "The embedded cloud's S3 does not serve this"
        if (
            environ.get("HTTP_X_AMZ_EXPECTED_BUCKET_OWNER", DEFAULT_ACCOUNT_ID)
            != DEFAULT_ACCOUNT_ID
        ):
            return 403, "AccessDenied", "Another account owns the bucket"
        token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")
        profile = self.sessions.profile_of(token, time.time())
        for request in call.permissions():
            allowed = (
                _role_policy(profile).allows(request) if profile else self._faults.allows(request)
            )
            if not allowed:
                who = f"role of {profile}" if profile else "user"
                text = f"{who} is not authorized to perform: {request.action} on {request.resource}"
                return 403, "AccessDenied", text
        with self._lock:
            error = self._faults.find_error(call.operation)
            is_throttled = self._faults.is_throttled(call.operation, named=True)
        if is_throttled:
            return 503, "SlowDown", "Please reduce your request rate."
        return (error.http_status, error.code, error.message) if error else None


def _role_policy(profile: str) -> Policy:
    """Return the statements of a profile's role; a removed one allows nothing."""
    found = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles.get(profile)
    texts = [text for role in (found.roles if found else ()) for text in role.policies.values()]
    return Policy([s for text in texts for s in parse_policy(text, profile).statements])
