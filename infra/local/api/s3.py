"""S3 for the embedded cloud: objects are files in the state folder, so that they survive its server.

moto's S3 keeps objects in memory and copies all of an object for each range; this one streams files, in
parallel with the rest of the server.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from infra.errors import SprError
from infra.files import write_private
from infra.local.policy import Request

_BLOCK = 1 << 20
_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"
_MOST_KEYS = 1000
_KEPT_HEADERS = ("x-amz-meta-", "content-type")


class S3Error(Exception):
    """S3's answer to a request that it refuses."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message or code


@dataclass(frozen=True)
class StoredObject:
    """An object without its bytes; ``headers`` are those that S3 returns as they were sent."""

    key: str
    size: int
    etag: str
    changed: float
    headers: dict[str, str]


@dataclass(frozen=True)
class S3Call:
    """A request: its bucket, key, and query, and the operation's name in S3's API."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any
    length: int

    @staticmethod
    def of(environ: dict[str, Any]) -> S3Call:
        path, _, query = environ["REQUEST_URI"].partition("?")
        bucket, _, key = path.lstrip("/").partition("/")
        values = {name: v[0] for name, v in parse_qs(query, keep_blank_values=True).items()}
        headers = {
            name.removeprefix("HTTP_").replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_") or name == "CONTENT_TYPE"
        }
        length = int(environ.get("CONTENT_LENGTH") or 0)
        method = environ["REQUEST_METHOD"]
        return S3Call(method, bucket, unquote(key), values, headers, environ["wsgi.input"], length)

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


Answer = tuple[int, dict[str, str], Iterable[bytes]]


class Storage:
    """Buckets and objects in a folder. The lock protects the index, not the bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._index: dict[str, dict[str, StoredObject]] = {}
        for bucket in folder.glob("*/objects"):
            found = (StoredObject(**json.loads(f.read_text())) for f in bucket.glob("*.json"))
            self._index[bucket.parent.name] = {each.key: each for each in found}

    def answer(self, call: S3Call) -> Answer:
        """Serve a permitted request. Raises :class:`S3Error`."""
        if not call.operation or "x-amz-copy-source" in call.headers:
            raise S3Error(501, "NotImplemented", "The embedded cloud's S3 does not serve this")
        if call.bucket and call.operation != "CreateBucket" and call.bucket not in self._index:
            raise S3Error(404, "NoSuchBucket", "The specified bucket does not exist")
        answer: Answer = getattr(self, f"_{call.operation}")(call)
        return answer

    def _place(self, bucket: str, key: str) -> Path:
        return self._folder / bucket / "objects" / hashlib.sha256(key.encode()).hexdigest()

    def _find(self, call: S3Call) -> StoredObject:
        found = self._index[call.bucket].get(call.key)
        if found is None:
            raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
        return found

    # Buckets

    def _ListBuckets(self, _: S3Call) -> Answer:  # noqa: N802
        names = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in sorted(self._index))
        return _xml("ListAllMyBucketsResult", f"<Buckets>{names}</Buckets>")

    def _CreateBucket(self, call: S3Call) -> Answer:  # noqa: N802
        if call.bucket in self._index:
            raise S3Error(409, "BucketAlreadyOwnedByYou")
        (self._folder / call.bucket / "objects").mkdir(mode=0o700, parents=True)
        self._index[call.bucket] = {}
        return 200, {"Location": f"/{call.bucket}"}, ()

    def _HeadBucket(self, _: S3Call) -> Answer:  # noqa: N802
        return 200, {}, ()

    def _GetBucketEncryption(self, _: S3Call) -> Answer:  # noqa: N802
        return _xml("ServerSideEncryptionConfiguration", "<Rule></Rule>")

    def _DeleteBucket(self, call: S3Call) -> Answer:  # noqa: N802
        with self._lock:
            if self._index[call.bucket]:
                raise S3Error(409, "BucketNotEmpty")
            del self._index[call.bucket]
            shutil.rmtree(self._folder / call.bucket)
        return 204, {}, ()

    def _ListObjectsV2(self, call: S3Call) -> Answer:  # noqa: N802
        prefix, delimiter = call.query.get("prefix", ""), call.query.get("delimiter", "")
        after = call.query.get("continuation-token") or call.query.get("start-after", "")
        most = min(int(call.query.get("max-keys", _MOST_KEYS)), _MOST_KEYS)
        with self._lock:
            known = dict(self._index[call.bucket])
        shown: dict[str, StoredObject | None] = {}
        last, more = "", False
        for key in sorted(k for k in known if k.startswith(prefix) and k > after):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = prefix + head + delimiter if found else key
            # A token may end inside a common prefix, which is shown once.
            if name in shown or (found and after.startswith(name)):
                last = key
                continue
            if more := len(shown) == most:
                break
            shown[name], last = (None if found else known[key]), key
        encode = quote if call.query.get("encoding-type") == "url" else escape
        parts = [f"<Prefix>{encode(prefix)}</Prefix><KeyCount>{len(shown)}</KeyCount>"]
        parts.append(f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>")
        if "encoding-type" in call.query:
            parts.append("<EncodingType>url</EncodingType>")
        if more:
            parts.append(f"<NextContinuationToken>{escape(last)}</NextContinuationToken>")
        parts += [_entry(encode(name), each) for name, each in shown.items()]
        return _xml("ListBucketResult", "".join(parts))

    # Objects

    def _PutObject(self, call: S3Call) -> Answer:  # noqa: N802
        part = self._place(call.bucket, call.key).with_suffix(f".{time.monotonic_ns()}.part")
        digest = _receive(call, part)
        return self._store(call, part, digest, _kept(call.headers))

    def _store(self, call: S3Call, part: Path, etag: str, headers: dict[str, str]) -> Answer:
        made = StoredObject(call.key, part.stat().st_size, f'"{etag}"', time.time(), headers)
        place = self._place(call.bucket, call.key)
        with self._lock:
            part.rename(place)
            write_private(place.with_suffix(".json"), json.dumps(asdict(made)))
            self._index[call.bucket][call.key] = made
        return 200, {"ETag": made.etag}, ()

    def _HeadObject(self, call: S3Call) -> Answer:  # noqa: N802
        status, headers, _ = self._read(call, self._find(call))
        return status, headers, ()

    def _GetObject(self, call: S3Call) -> Answer:  # noqa: N802
        return self._read(call, self._find(call))

    def _read(self, call: S3Call, found: StoredObject) -> Answer:
        asked = call.headers.get("if-match")
        if asked and asked.strip('"') != found.etag.strip('"'):
            raise S3Error(412, "PreconditionFailed")
        first, end = 0, found.size
        headers = {
            **found.headers,
            "ETag": found.etag,
            "Last-Modified": formatdate(found.changed, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if asked := call.headers.get("range"):
            first, end = _range(asked, found.size)
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{found.size}"
        headers["Content-Length"] = str(end - first)
        blocks = _send(self._place(call.bucket, call.key), first, end)
        return (206 if asked else 200), headers, blocks

    def _DeleteObject(self, call: S3Call) -> Answer:  # noqa: N802
        place = self._place(call.bucket, call.key)
        with self._lock:
            self._index[call.bucket].pop(call.key, None)
            place.with_suffix(".json").unlink(missing_ok=True)
            place.unlink(missing_ok=True)
        return 204, {}, ()

    # Multipart uploads

    def _upload(self, call: S3Call) -> Path:
        id_ = call.query["uploadId"]
        folder = self._folder / call.bucket / "uploads" / id_
        if not id_.isalnum() or not folder.is_dir():
            raise S3Error(404, "NoSuchUpload", "The specified upload does not exist.")
        return folder

    def _CreateMultipartUpload(self, call: S3Call) -> Answer:  # noqa: N802
        id_ = hashlib.sha256(f"{call.key} {time.monotonic_ns()}".encode()).hexdigest()
        folder = self._folder / call.bucket / "uploads" / id_
        folder.mkdir(mode=0o700, parents=True)
        write_private(folder / "headers", json.dumps(_kept(call.headers)))
        text = f"<Bucket>{call.bucket}</Bucket><Key>{escape(call.key)}</Key>"
        return _xml("InitiateMultipartUploadResult", f"{text}<UploadId>{id_}</UploadId>")

    def _UploadPart(self, call: S3Call) -> Answer:  # noqa: N802
        place = self._upload(call) / str(int(call.query["partNumber"]))
        return 200, {"ETag": f'"{_receive(call, place)}"'}, ()

    def _CompleteMultipartUpload(self, call: S3Call) -> Answer:  # noqa: N802
        folder, digests = self._upload(call), []
        root = ElementTree.fromstring(call.body.read(call.length))
        numbers = [int(n.text or 0) for n in root.iter() if n.tag.endswith("PartNumber")]
        whole = folder / "whole"
        with whole.open("wb") as target:
            for number in numbers:
                digest = hashlib.md5()
                try:
                    source = (folder / str(number)).open("rb")
                except FileNotFoundError:
                    raise S3Error(400, "InvalidPart") from None
                with source:
                    while block := source.read(_BLOCK):
                        digest.update(block)
                        target.write(block)
                digests.append(digest.digest())
        etag = f"{hashlib.md5(b''.join(digests)).hexdigest()}-{len(digests)}"
        headers = json.loads((folder / "headers").read_text())
        _, answered, _ = self._store(call, whole, etag, headers)
        shutil.rmtree(folder)
        text = f"<Bucket>{call.bucket}</Bucket><Key>{escape(call.key)}</Key>"
        return _xml("CompleteMultipartUploadResult", f"{text}<ETag>{answered['ETag']}</ETag>")

    def _AbortMultipartUpload(self, call: S3Call) -> Answer:  # noqa: N802
        shutil.rmtree(self._upload(call), ignore_errors=True)
        return 204, {}, ()


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith(_KEPT_HEADERS)}


def _receive(call: S3Call, place: Path) -> str:
    """Write the body to a file and return its MD5 digest. Raises :class:`S3Error` if it is not as signed."""
    if "aws-chunked" in call.headers.get("content-encoding", ""):
        raise S3Error(501, "NotImplemented", "The embedded cloud's S3 does not serve aws-chunked")
    md5, sha, left = hashlib.md5(), hashlib.sha256(), call.length
    signed = call.headers.get("x-amz-content-sha256", "")
    with place.open("wb") as target:
        while left and (block := call.body.read(min(left, _BLOCK))):
            left -= len(block)
            md5.update(block)
            if len(signed) == sha.digest_size * 2:
                sha.update(block)
            target.write(block)
    if left or (len(signed) == sha.digest_size * 2 and sha.hexdigest() != signed):
        place.unlink()
        raise S3Error(400, "IncompleteBody" if left else "XAmzContentSHA256Mismatch")
    return md5.hexdigest()


def _range(text: str, size: int) -> tuple[int, int]:
    first, _, last = text.removeprefix("bytes=").partition("-")
    begin = int(first) if first else max(0, size - int(last))
    end = min(int(last) + 1, size) if first and last else size
    if begin >= end:
        raise S3Error(416, "InvalidRange", "The requested range is not satisfiable")
    return begin, end


def _send(place: Path, first: int, end: int) -> Iterator[bytes]:
    with place.open("rb") as source:
        source.seek(first)
        while first < end and (block := source.read(min(_BLOCK, end - first))):
            first += len(block)
            yield block


def _entry(name: str, found: StoredObject | None) -> str:
    if found is None:
        return f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
    changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.changed))
    return (
        f"<Contents><Key>{name}</Key><LastModified>{changed}</LastModified>"
        f"<ETag>{escape(found.etag)}</ETag><Size>{found.size}</Size></Contents>"
    )


def _xml(root: str, content: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?><{root} xmlns="{_XMLNS}">{content}</{root}>'
    return 200, {"Content-Type": "application/xml"}, (body.encode(),)


def error_answer(error: S3Error | SprError) -> Answer:
    """Return an error in S3's format."""
    code, status = getattr(error, "code", "InternalError"), getattr(error, "status", 500)
    text = f"<Error><Code>{code}</Code><Message>{escape(error.message)}</Message></Error>"
    return status, {"Content-Type": "application/xml"}, (text.encode(),)
