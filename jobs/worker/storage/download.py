"""Download objects from S3 in parallel parts, which survive cut connections and killed processes.

An object grows in a sparse file beside its final place, and a journal lists the ranges that are there. With
the last one, the file is checked and renamed. Runs on Python 3.8.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import random
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from ..runtime.errors import WorkerError, first_line
from .client import S3Url

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

PART, AT_ONCE = 8 << 20, 16
_LONGEST, _PARTS = 64 << 20, 32
"""Parts of a large object are longer: each request costs time, and a cut one continues."""
_BLOCK = 1 << 20
_RANGE = re.compile(r"(\d{1,15}) (\d{1,15})")
_TRIES, _LONGEST_S = 6, 20.0
"""Failures in a row, without a byte between them, after which a part counts as failed."""
_HINT = (
    "`up --bucket` and `up --read-from` give nodes access; S3 also denies names that do not exist"
)
_DENIED, _MISSING = ("403", "AccessDenied"), ("404", "NoSuchKey")


class StagingError(WorkerError):
    """The data can't be brought to this node; the message begins with their URL."""


class ChangedError(StagingError):
    """The object is no longer the one whose download began."""


class CorruptError(StagingError):
    """The downloaded file differs from the object's checksum."""


def explain(error: Exception, url: S3Url) -> StagingError:
    """Return the reason of a failed request to S3 in words."""
    if isinstance(error, NoCredentialsError):
        return StagingError(f"{url}: the node has no AWS credentials", hint=_HINT)
    if not isinstance(error, ClientError):
        return StagingError(f"{url}: {first_line(error)}")
    known = error.response.get("Error", {})
    code = known.get("Code", "")
    if code in ("412", "PreconditionFailed"):
        return ChangedError(
            f"{url}: it changed while it was downloaded", hint="submit the job again"
        )
    if code in _DENIED:
        return StagingError(f"{url}: AccessDenied: the nodes may not read it", hint=_HINT)
    if code in _MISSING:
        return StagingError(f"{url}: NoSuchKey: no object and no folder has this name")
    return StagingError(f"{url}: {code}: {known.get('Message', '')}".rstrip(": "))


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
        name = self.url.key.rpartition("/")[2][-100:]
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}-{name}"


@dataclass
class Download:
    """An object on its way to a file; ``count`` gets the number of bytes of each block."""

    s3: S3Client
    source: S3Object
    target: Path
    count: Callable[[int], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: int = 0

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def journal(self) -> Path:
        return self.target.with_name(f".{self.target.name}.parts")

    def missing(self) -> list[tuple[int, int]]:
        """Return the ranges that are not there, none longer than a part."""
        found, at, size = [], 0, self.source.size
        part = max(PART, min(_LONGEST, size // _PARTS))
        for begin, end in [*self._arrived(), (size, size)]:
            found += [(start, min(start + part, begin)) for start in range(at, begin, part)]
            at = max(at, end)
        return found

    def _arrived(self) -> list[tuple[int, int]]:
        if not (self.partial.exists() and self.journal.exists()):
            return []
        lines = self.journal.read_text(encoding="ascii", errors="replace").split("\n")
        found = [_RANGE.fullmatch(line) for line in lines[:-1]]  # the last one may be cut off
        return sorted((int(each[1]), int(each[2])) for each in found if each)

    @property
    def remaining(self) -> int:
        """The number of bytes to download."""
        return sum(end - at for at, end in self.missing())

    def begin(self) -> list[tuple[int, int]]:
        """Create the sparse file; return the missing ranges."""
        parts = self.missing()
        self._left = len(parts)
        with self.partial.open("ab") as file:
            file.truncate(self.source.size)
        return parts

    def fetch(self, at: int, end: int) -> None:
        """Download a range; the last one completes the file."""
        failures = 0
        while at < end and not self.stop.is_set():
            before = at
            try:
                for written in self._receive(at, end):
                    at = written
            except ClientError as error:
                raise explain(error, self.source.url) from error
            except (BotoCoreError, OSError) as error:
                failures = 1 if at > before else failures + 1
                if failures >= _TRIES or isinstance(error, NoCredentialsError):
                    raise explain(error, self.source.url) from error
                pause = min(_LONGEST_S, 0.5 * 2**failures)
                self.stop.wait(pause * random.uniform(0.5, 1))
        if at >= end:
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                self.finish()

    def _receive(self, at: int, end: int) -> Iterator[int]:
        """Write a range to the file; yield the end of what is written."""
        source = self.source
        answer = self.s3.get_object(
            Bucket=source.url.bucket,
            Key=source.url.key,
            Range=f"bytes={at}-{end - 1}",
            IfMatch=source.etag,
        )
        if not answer.get("ContentRange", "").startswith(f"bytes {at}-{end - 1}/"):
            raise OSError("the answer is not the range that was asked for")
        # Three managers would get parentheses, which Python 3.8 does not know.
        with closing(answer["Body"]) as body, self.partial.open("r+b", buffering=0) as file:
            file.seek(at)
            while at < end and not self.stop.is_set():
                block = body.read(_BLOCK)
                if not block:
                    raise OSError("the connection was cut")
                try:
                    file.write(block)
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        raise StagingError(f"{source.url}: no space left on the disk") from error
                    raise
                with self.journal.open("ab", buffering=0) as journal:
                    journal.write(b"%d %d\n" % (at, at + len(block)))
                at += len(block)
                self.count(len(block))
                yield at

    def finish(self) -> None:
        """Check the file and give it its name; a wrong one is removed."""
        try:
            _verify(self)
        except CorruptError:
            self.partial.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
            raise
        self.partial.chmod(0o444)  # jobs share it
        self.partial.rename(self.target)
        self.journal.unlink(missing_ok=True)


def download_all(downloads: Sequence[Download]) -> None:
    """Complete all downloads. Raises :class:`StagingError`; what has arrived is kept."""
    stop = threading.Event()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = []
        for each in downloads:
            each.stop = stop
            parts = each.begin()
            running += [pool.submit(each.fetch, *part) for part in parts] or [
                pool.submit(each.finish)
            ]
        wait(running, return_when=FIRST_EXCEPTION)
        failed = [each for each in running if each.done() and each.exception()]
        if failed:
            stop.set()
            for future in running:
                future.cancel()
    for future in failed:
        future.result()


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "MD5": hashlib.md5,
    "SHA256": hashlib.sha256,
    "SHA1": hashlib.sha1,
    "CRC32": _Crc32,
}


def _verify(download: Download) -> None:
    """Compare a file with its object's ETag or checksum, whichever S3 made from the content."""
    source, path = download.source, download.partial
    if path.stat().st_size != source.size:
        raise CorruptError(f"{source.url}: {path.stat().st_size} bytes of {source.size} arrived")
    etag = source.etag.strip('"')
    if source.size == 0 or _matches(
        download, "MD5", etag.partition("-")[0], "-" in etag, bytes.hex
    ):
        return
    head = _head(download, ChecksumMode="ENABLED")
    for name in list(_ALGORITHMS)[1:]:
        value = str(head.get(f"Checksum{name}", ""))
        if value and _matches(download, name, value.partition("-")[0], "-" in value, _base64):
            return
        if value:
            raise CorruptError(f"{source.url}: the content differs from its {name} checksum")
    # The ETag of an object that is encrypted with KMS, or has unknown parts, says nothing about its content.
    if "kms" not in str(head.get("ServerSideEncryption")) and _part_sizes(download, "-" in etag):
        raise CorruptError(f"{source.url}: the content differs from its ETag {etag}")
    download.note(
        f"{source.url}: its size was checked; S3 has no checksum that this node can compute"
    )


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _matches(
    download: Download, name: str, wanted: str, in_parts: bool, encode: Callable[[bytes], str]
) -> bool:
    """Return whether the file has a digest; ``in_parts``: that of its parts' digests."""
    new, sizes = _ALGORITHMS[name], _part_sizes(download, in_parts)
    ends = list(accumulate(sizes))
    starts = [0, *ends[:-1]]
    with ThreadPoolExecutor(4) as pool:
        digests = list(
            pool.map(lambda at, end: _digest(new(), download.partial, at, end), starts, ends)
        )
    if not in_parts:
        return bool(digests) and encode(digests[0]) == wanted
    whole = new()
    whole.update(b"".join(digests))
    return bool(digests) and encode(whole.digest()) == wanted


def _digest(state: Any, path: Path, at: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        while at < end:
            block = file.read(min(1 << 20, end - at))
            if not block:
                break
            state.update(block)
            at += len(block)
    return bytes(state.digest())


def _part_sizes(download: Download, in_parts: bool) -> list[int]:
    """Return the sizes of the parts in which the object was uploaded; none if S3 does not tell."""
    size = download.source.size
    if not in_parts:
        return [size]
    first = _head(download, PartNumber=1)
    count, length = int(first.get("PartsCount", 0)), int(first["ContentLength"])
    if length and -(-size // length) == count:
        return [length] * (count - 1) + [size - length * (count - 1)]
    sizes = [int(_head(download, PartNumber=n)["ContentLength"]) for n in range(1, count + 1)]
    return sizes if sum(sizes) == size else []


def _head(download: Download, **more: Any) -> dict[str, Any]:
    url = download.source.url
    try:
        found = download.s3.head_object(Bucket=url.bucket, Key=url.key, **more)
    except (ClientError, BotoCoreError) as error:
        raise explain(error, url) from error
    return dict(found)
