"""S3 on all of the server's sockets, by moto: who may make a request, and the buckets between two servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from moto.core import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends
from moto.moto_server.werkzeug_app import create_backend_app
from moto.s3.models import s3_backends
from werkzeug.wrappers import Request as HttpRequest
from werkzeug.wrappers import Response

from infra.local.api.interceptors import is_signed_s3
from infra.local.api.object_files import ObjectFile, keep_contents, remove_unused
from infra.local.api.policy import Policy, Request, parse_policy
from infra.local.api.sessions import Sessions
from infra.local.state import StateFolder, load_snapshot, save_snapshot

# S3's default, which moto lacks: https://docs.aws.amazon.com/AmazonS3/latest/userguide/default-encryption-faq.html
_ENCRYPTION = {"Rule": {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}}
Refusal = tuple[int, str, str]
"""HTTP status, code, and message."""


@dataclass(frozen=True)
class S3Call:
    """A request: its bucket, key, and query, and the operation's name in S3's API."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    source: str = ""
    """What is copied, as ``bucket/key``."""
    deleted: tuple[str, ...] = ()
    """The keys in the body of DeleteObjects."""

    @staticmethod
    def of(environ: dict[str, Any]) -> S3Call:
        path, _, query = environ["REQUEST_URI"].partition("?")
        bucket, _, key = path.lstrip("/").partition("/")
        values = {name: v[0] for name, v in parse_qs(query, keep_blank_values=True).items()}
        source, _, _ = environ.get("HTTP_X_AMZ_COPY_SOURCE", "").lstrip("/").partition("?")
        deleted = _read_deleted(read_body(environ)) if "delete" in values else ()
        return S3Call(
            *(environ["REQUEST_METHOD"], bucket, unquote(key), values, unquote(source), deleted)
        )

    @property
    def operation(self) -> str:
        """Return the operation; "" for one that this S3 does not serve."""
        q = self.query
        if q.keys() - _QUERY - set(_PARTS):
            return ""
        kind = "object" if self.key else "bucket" if self.bucket else "all"
        part = next((word for word in _PARTS if word in q), "")
        part = "part" if "uploadId" in q else part
        operation = _OPERATIONS.get((self.method, kind, part), "")
        return "" if operation == "DeleteObjects" and not self.deleted else operation

    def permissions(self) -> tuple[Request, ...]:
        """Return what IAM decides on.

        https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
        """
        operation = self.operation
        action = _PERMISSIONS.get(operation, operation)
        arn = f"arn:aws:s3:::{self.bucket}" if self.bucket else "*"
        arn += f"/{self.key}" if self.key else ""
        context = (
            {"s3:prefix": self.query.get("prefix", "")} if operation == "ListObjectsV2" else {}
        )
        if operation == "DeleteObjects":
            return tuple(Request("s3:DeleteObject", f"{arn}/{key}", {}) for key in self.deleted)
        needed = Request(f"s3:{action}", arn, context)
        if not self.source:
            return (needed,)
        return needed, Request("s3:GetObject", f"arn:aws:s3:::{self.source}", {})


def read_body(environ: dict[str, Any]) -> bytes:
    """Return the body of a request and leave it readable."""
    body = HttpRequest(environ, populate_request=False).get_data(cache=False)
    environ["wsgi.input"] = BytesIO(body)
    return body


def _read_deleted(body: bytes) -> tuple[str, ...]:
    """Return the keys, none if they can't be read."""
    try:
        elements = ElementTree.fromstring(body).iter()
    except ElementTree.ParseError:
        return ()
    return tuple(e.text or "" for e in elements if e.tag.rpartition("}")[2] == "Key")


_PARTS = ("delete", "uploads", "encryption", "versioning", "lifecycle")
# The other parameters of the operations below; "x-id" names the operation.
_QUERY = {
    *("x-id", "list-type", "prefix", "delimiter", "encoding-type", "max-keys", "start-after"),
    "marker",
    *("continuation-token", "fetch-owner", "key-marker", "upload-id-marker", "max-uploads"),
    *("uploadId", "partNumber", "part-number-marker", "max-parts"),
}
_OPERATIONS = {
    ("GET", "all", ""): "ListBuckets",
    ("PUT", "bucket", ""): "CreateBucket",
    ("HEAD", "bucket", ""): "HeadBucket",
    ("DELETE", "bucket", ""): "DeleteBucket",
    ("GET", "bucket", ""): "ListObjectsV2",
    ("GET", "bucket", "uploads"): "ListMultipartUploads",
    ("POST", "bucket", "delete"): "DeleteObjects",
    ("GET", "bucket", "encryption"): "GetBucketEncryption",
    ("PUT", "bucket", "encryption"): "PutBucketEncryption",
    ("GET", "bucket", "versioning"): "GetBucketVersioning",
    ("PUT", "bucket", "versioning"): "PutBucketVersioning",
    ("GET", "bucket", "lifecycle"): "GetBucketLifecycleConfiguration",
    ("PUT", "bucket", "lifecycle"): "PutBucketLifecycleConfiguration",
    ("PUT", "object", ""): "PutObject",
    ("GET", "object", ""): "GetObject",
    ("HEAD", "object", ""): "HeadObject",
    ("DELETE", "object", ""): "DeleteObject",
    ("POST", "object", "uploads"): "CreateMultipartUpload",
    ("PUT", "object", "part"): "UploadPart",
    ("POST", "object", "part"): "CompleteMultipartUpload",
    ("DELETE", "object", "part"): "AbortMultipartUpload",
    ("GET", "object", "part"): "ListParts",
}
_PERMISSIONS = {
    "ListBuckets": "ListAllMyBuckets",
    "HeadBucket": "ListBucket",
    "ListObjectsV2": "ListBucket",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "ListParts": "ListMultipartUploadParts",
    "GetBucketEncryption": "GetEncryptionConfiguration",
    "GetBucketLifecycleConfiguration": "GetLifecycleConfiguration",
    "PutBucketLifecycleConfiguration": "PutLifecycleConfiguration",
    "HeadObject": "GetObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
}


class BucketServer:
    """A WSGI application that serves S3 without the lock of :class:`.Application`."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder, self._moto = folder, create_backend_app("s3")
        keep_contents(folder.objects)
        self.lock = threading.RLock()
        """Held while a bucket changes, and while buckets are saved."""
        self._is_saved, self._next_save = True, 0.0
        self._credentials = folder.credentials()
        self.sessions = Sessions(self._credentials[1])

    def load(self) -> None:
        """Continue with the buckets that the last server saved.

        Raises :class:`CloudError` if they can't be read.
        """
        buckets = load_snapshot(self._folder.buckets)
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.update(buckets)
        # moto's index of all accounts' buckets.
        s3_backends.bucket_accounts.update(dict.fromkeys(buckets, ("aws", DEFAULT_ACCOUNT_ID)))

    def save(self) -> None:
        """Save all buckets, except for their objects' contents, if they have changed."""
        with self.lock:
            if not self._is_saved:
                ObjectFile.pickled.clear()
                buckets = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets
                save_snapshot(self._folder.buckets, buckets)
                self._is_saved = True
                remove_unused(self._folder.objects)

    def save_changes(self) -> None:
        """Do :meth:`save` for at most a tenth of the time."""
        begun = time.monotonic()
        if self._is_saved or begun < self._next_save:
            return
        pause_s = 10.0  # after a failure, such as of a full disk
        try:
            self.save()
            pause_s = 0.0
        finally:
            ended = time.monotonic()
            self._next_save = ended + max(pause_s, 10 * (ended - begun))

    def __call__(
        self, environ: dict[str, Any], start_response: Any, region: str | None = None
    ) -> Iterable[bytes]:
        if refusal := self.refuse(environ, region):
            status, code, text = refusal
            body = f"<Error><Code>{code}</Code><Message>{escape(text)}</Message></Error>"
            response = Response(body, status, content_type="application/xml")
            return response(environ, start_response)
        for bucket in list(s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.values()):
            bucket.encryption = bucket.encryption or _ENCRYPTION
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            # Before the lock: a node may shut down during its upload.
            read_body(environ)
            with self.lock:
                self._is_saved = False
                return list(self._moto(environ, start_response))
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer

    def refuse(self, environ: dict[str, Any], region: str | None) -> Refusal | None:
        """Return an error unless the tool signed a request, or a node whose role allows it."""
        token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")
        profile = self.sessions.profile_of(token, time.time())
        if token and not profile:
            return 400, "ExpiredToken", "The provided token has expired."
        keys = self.sessions.keys_of(token) if profile else self._credentials
        is_signed = is_signed_s3(environ, keys)
        # A node's requests only for its own region, as in China and in GovCloud.
        if not is_signed or (region and f"/{region}/s3/" not in environ["HTTP_AUTHORIZATION"]):
            return 403, "InvalidAccessKeyId", "The request is not signed with known credentials"
        if not profile:
            return None
        call = S3Call.of(environ)
        if not call.operation:
            return 403, "AccessDenied", "The embedded cloud's S3 does not serve this to nodes"
        return deny(call, f"role of {profile}", _role_policy(profile).allows)


def deny(call: S3Call, who: str, allows: Callable[[Request], bool]) -> Refusal | None:
    """Return the error unless the caller's policy allows all that a call needs."""
    for request in call.permissions():
        if not allows(request):
            text = f"{who} is not authorized to perform: {request.action} on {request.resource}"
            return 403, "AccessDenied", text
    return None


def _role_policy(profile: str) -> Policy:
    """Return the statements of a profile's role; a removed one allows nothing."""
    found = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles.get(profile)
    texts = [text for role in (found.roles if found else ()) for text in role.policies.values()]
    return Policy([s for text in texts for s in parse_policy(text, profile).statements])
