"""Download objects from S3 with boto3's transfers, several at a time, and compare them with their checksums.

A file gets its name when it is complete and correct; an interrupted object starts over. Runs on Python 3.8.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    NoCredentialsError,
)
from botocore.httpchecksum import Crc32Checksum
from s3transfer import exceptions
from s3transfer.exceptions import RetriesExceededError
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber

from ..runtime.errors import LARGER_DISKS, WorkerError, first_line
from .client import S3Url

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

PART = 16 << 20
"""Bytes of a large object that a request asks for, and asks for again if its connection is cut."""
_AT_ONCE, _TRIES = 16, 6
_WAITING = 200
"""Blocks of 256 KiB that wait in memory for a slow disk."""
_BLOCK, _SPARE_BYTES = 1 << 20, 256 << 20
_HINT = (
    "`up --bucket` and `up --read-from` give nodes access; your own KMS key also requires "
    "`--bucket-kms-key` or `--instance-profile`; S3 also denies names that do not exist; buckets with "
    "Requester Pays can't be read"
)
_DENIED, _MISSING = ("403", "AccessDenied"), ("404", "NoSuchKey")
_CHANGED = ("412", "PreconditionFailed")
# The boto3 for Python 3.8 does not have it, nor the ETag of a transfer: there, the wrong content is noticed.
_OTHER_ETAG: Any = getattr(exceptions, "S3DownloadFailedError", RetriesExceededError)
_FAILURES = (BotoCoreError, ClientError, OSError, RetriesExceededError, _OTHER_ETAG)


class StagingError(WorkerError):
    """The data can't be brought to this node; the message begins with their URL."""


class ChangedError(StagingError):
    """The object is no longer the one whose download began."""


class CorruptError(StagingError):
    """The downloaded file differs from the object's checksum."""


def explain(error: BaseException, url: S3Url | str) -> StagingError:
    """Return the reason of a failed request to S3 in words."""
    if isinstance(error, RetriesExceededError):
        return explain(error.last_exception, url)
    if isinstance(error, NoCredentialsError):
        return StagingError(f"{url}: the node has no AWS credentials", hint=_HINT)
    if isinstance(error, FlexibleChecksumError):
        return CorruptError(f"{url}: the content differs from its checksum")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StagingError(f"{url}: no space left on the disk", hint=LARGER_DISKS)
    known = error.response.get("Error", {}) if isinstance(error, ClientError) else {}
    code = known.get("Code", "")
    if code in _CHANGED or isinstance(error, _OTHER_ETAG):
        return ChangedError(
            f"{url}: it changed while it was downloaded", hint="submit the job again"
        )
    if code in _DENIED:
        return StagingError(f"{url}: AccessDenied: the nodes may not read it", hint=_HINT)
    if code in _MISSING:
        return StagingError(f"{url}: NoSuchKey: no object and no folder has this name")
    reason = f"{code}: {known.get('Message', '')}".rstrip(": ")
    return StagingError(f"{url}: {reason or first_line(error)}")


@dataclass(frozen=True)
class S3Object:
    """One version of an object."""

    url: S3Url
    etag: str
    size: int

    @property
    def id(self) -> str:
        """A file name for this version."""
        text = f"{self.url} {self.etag} {self.size}"
        name = self.url.key.rpartition("/")[2].encode()[-100:].decode(errors="ignore")
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}-{name}"


@dataclass(frozen=True)
class Download:
    """An object on its way to a file; ``count`` gets each block's bytes, negative for those of a lost try."""

    source: S3Object
    target: Path
    count: Callable[[int], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None

    @property
    def partial(self) -> Path:
        # The transfer appends to the name, and the target's may be as long as the file system allows.
        name = hashlib.sha256(os.fsencode(self.target.name)).hexdigest()[:24]
        return self.target.with_name(f".{name}.partial")


class _Observer(BaseSubscriber):
    def __init__(self, download: Download) -> None:
        self._download = download

    def on_queued(self, future: Any, **_: Any) -> None:
        """Spare the transfer a request for the size and the ETag."""
        future.meta.provide_transfer_size(self._download.source.size)
        if hasattr(future.meta, "provide_object_etag"):
            future.meta.provide_object_etag(self._download.source.etag)

    def on_progress(self, future: Any, bytes_transferred: int, **_: Any) -> None:
        self._download.count(bytes_transferred)


def require_space(url: str, downloads: Sequence[Download], folder: Path) -> None:
    """Raise :class:`StagingError` if the folder's disk has no room for these downloads."""
    needed = sum(each.source.size for each in downloads) + _SPARE_BYTES
    free = shutil.disk_usage(str(folder)).free
    if needed > free:
        sizes = f"{needed / 1e9:.1f} GB of disk space, and {free / 1e9:.1f} GB are free"
        raise StagingError(f"{url}: needs {sizes}", hint=LARGER_DISKS)


def download_all(s3: S3Client, downloads: Sequence[Download]) -> None:
    """Complete all downloads. Raises :class:`StagingError`; complete files stay."""
    config = TransferConfig(
        multipart_threshold=PART,
        multipart_chunksize=PART,
        max_request_concurrency=_AT_ONCE,
        num_download_attempts=_TRIES,
        max_io_queue_size=_WAITING,
    )
    with ThreadPoolExecutor(_AT_ONCE) as pool, TransferManager(s3, config) as manager:
        running = [pool.submit(_complete, s3, manager, each) for each in downloads]
        try:
            for each in as_completed(running):
                each.result()
        finally:
            for each in running:
                each.cancel()


def _complete(s3: S3Client, manager: TransferManager, download: Download) -> None:
    """Download a file, check it, and give it its name."""
    url, partial = download.source.url, download.partial
    watch = [_Observer(download)]
    try:
        manager.download(url.bucket, url.key, str(partial), subscribers=watch).result()
        _verify(s3, download)
        partial.chmod(0o444)  # jobs share it
        partial.rename(download.target)
    except _FAILURES as error:
        raise explain(error, url) from error
    finally:
        partial.unlink(missing_ok=True)


_CHECKSUMS: dict[str, Callable[[], Any]] = {
    "SHA256": hashlib.sha256,
    "SHA1": hashlib.sha1,
    "CRC32": Crc32Checksum,
}


def _verify(s3: S3Client, download: Download) -> None:
    """Compare a file with its object's ETag or checksum, whichever S3 made from the content."""
    source, size = download.source, download.partial.stat().st_size
    is_whole = size == source.size
    fits = is_whole and _matches(s3, download, hashlib.md5, source.etag.strip('"'))
    if fits:
        return
    head = _head(s3, source, ChecksumMode="ENABLED", IfMatch=source.etag)
    if not is_whole:
        raise CorruptError(f"{source.url}: {size} bytes of {source.size} arrived")
    for name, new in _CHECKSUMS.items():
        if value := str(head.get(f"Checksum{name}", "")):
            known = _matches(s3, download, new, value)
            if known:
                return
            if known is False:
                raise CorruptError(f"{source.url}: the content differs from its {name} checksum")
    # The ETag of an object that is encrypted with KMS, or has unknown parts, says nothing about its content.
    if fits is False and "kms" not in str(head.get("ServerSideEncryption")):
        raise CorruptError(f"{source.url}: the content differs from its ETag {source.etag}")
    download.note(
        f"{source.url}: its size was checked; S3 has no checksum that this node can compute"
    )


def _matches(s3: S3Client, download: Download, new: Callable[[], Any], value: str) -> bool | None:
    """Return whether a file has an ETag or checksum; ``None`` if it is of parts of unknown sizes.

    ``VALUE-3`` is the digest of the digests of three parts.
    """
    wanted, _, parts = value.partition("-")
    source, path, count = download.source, download.partial, int(parts or 1)

    def ask(number: int) -> int:
        return int(_head(s3, source, PartNumber=number)["ContentLength"])

    def matches(sizes: Sequence[int]) -> bool:
        starts = accumulate([0, *sizes[:-1]])
        found = b"".join(pool.map(lambda *part: _digest(new(), path, *part), starts, sizes))
        if parts:
            whole = new()
            whole.update(found)
            found = whole.digest()
        return wanted in (found.hex(), base64.b64encode(found).decode())

    with ThreadPoolExecutor(4) as pool:
        if not parts:
            return matches([source.size])
        head = _head(s3, source, PartNumber=1)
        if new is hashlib.md5 and "kms" in str(head.get("ServerSideEncryption")):
            return None
        first = int(head["ContentLength"])
        if 0 <= first * count - source.size < first and matches([first] * count):
            return True
        sizes = [first, *pool.map(ask, range(2, count + 1))]  # those of s3fs, as of pandas, differ
        return matches(sizes) if sum(sizes) == source.size else None


def _digest(state: Any, path: Path, at: int, size: int) -> bytes:
    """Return the digest of a part of a file."""
    with path.open("rb") as file:
        file.seek(at)
        while block := file.read(min(_BLOCK, size)):
            state.update(block)
            size -= len(block)
    return bytes(state.digest())


def _head(s3: S3Client, source: S3Object, **more: Any) -> dict[str, Any]:
    url = source.url
    return {**s3.head_object(Bucket=url.bucket, Key=url.key, **more)}
