"""``python -m worker.storage.stage URL TARGET``: download data from S3, and link them into a job's folder.

URL names an object, or a folder: all objects below it. ``~/spr-data/s3`` keeps each version once, for all
jobs. ``--check URL`` only prints what S3 has, as a line of JSON. Runs on Python 3.8.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from ..runtime.events import MARK, render_event
from ..runtime.output import new_file
from .client import S3Url, connect
from .download import (
    ChangedError,
    CorruptError,
    Download,
    S3Object,
    StagingError,
    download_all,
    explain,
    require_space,
)

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

CACHE, JOBS = "spr-data/s3", "spr-jobs"
"""Below the home folder."""
_KEPT = 2
"""Versions of an URL that stay, besides those that running jobs use."""
_SHOW_S, _SHOW_SELDOM_S, _DAY_S = 5.0, 60.0, 86400


@dataclass(frozen=True)
class Source:
    """What an URL names now: objects by their file names, of which an object itself has one."""

    url: str
    objects: dict[str, S3Object]
    is_folder: bool

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(each.size for each in self.objects.values())

    @property
    def version(self) -> str:
        """A file name that differs if any of the objects does."""
        ids = {name: each.id for name, each in self.objects.items()}
        if not self.is_folder:
            return next(iter(ids.values()))
        return hashlib.sha256(json.dumps(ids, sort_keys=True).encode()).hexdigest()[:24]


def resolve(s3: S3Client, text: str) -> Source:
    """Ask S3 what an URL names. Raises :class:`StagingError`."""
    try:
        url = S3Url.parse(text)
    except ValueError as error:
        raise StagingError(str(error)) from None
    try:
        if not url.key or text.endswith("/"):
            return _list(s3, text, url)
        try:
            head = s3.head_object(Bucket=url.bucket, Key=url.key)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
                raise  # a folder may have the object's name
            return _list(s3, text, url, instead_of=error)
    except (ClientError, BotoCoreError) as error:
        raise explain(error, text) from error
    name = url.key.rpartition("/")[2]
    return Source(text, {name: S3Object(url, head["ETag"], head["ContentLength"])}, False)


def _list(s3: S3Client, text: str, url: S3Url, instead_of: ClientError | None = None) -> Source:
    prefix = f"{url.key}/" if url.key else ""
    found: dict[str, S3Object] = {}
    has_marks = False
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=url.bucket, Prefix=prefix):
        for each in page.get("Contents", ()):
            name = each["Key"][len(prefix) :]
            if name.endswith("/") or not name:
                has_marks = True  # consoles create them to show empty folders
                continue
            if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
                raise StagingError(f"{url}: {each['Key']!r} is no file name")
            found[name] = S3Object(S3Url(url.bucket, each["Key"]), each["ETag"], each["Size"])
    if not found:
        # S3 denies access to a missing key, unless the caller may list the whole bucket.
        first = s3.list_objects_v2(Bucket=url.bucket, Prefix=url.key, MaxKeys=1)
        is_there = [each["Key"] for each in first.get("Contents", ())] == [url.key]
        missing: Any = {"Error": {"Code": "NoSuchKey"}}
        if is_there:
            omit = StagingError(f"{text}: is an object, not a folder: omit the `/`")
            raise instead_of or omit
        if has_marks:
            raise StagingError(f"{text}: the folder is empty")
        raise ClientError(missing, "ListObjectsV2")
    return Source(text, found, True)


@dataclass
class Progress:
    """Shows from time to time how much has arrived. ``note`` gets the text."""

    note: Callable[[str], None]
    url: str
    total: int = 0
    received: int = 0
    began: float = field(default_factory=time.monotonic)
    _due_s: float = _SHOW_S
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, size: int) -> None:
        with self._lock:
            self.received += size
            if self.seconds > self._due_s:
                of = f"{self.received / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
                self.note(f"{self.url}: {of}, {self.speed}")
                self._due_s = self.seconds + min(_SHOW_SELDOM_S, self.seconds)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def speed(self) -> str:
        return f"{self.received / 1e6 / max(self.seconds, 1e-3):,.0f} MB/s"


def announce(**fields: object) -> None:
    """Print an event to the job's log. Ends this process if nobody reads it anymore."""
    try:
        print(render_event(fields, os.environ.get(MARK, "")), flush=True)
    except BrokenPipeError:
        os._exit(1)


@dataclass
class Cache:
    """All versions on this node: ``files`` of objects, ``folders`` of links to them, and URLs' histories."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / CACHE

    def place(self, version: str) -> Path | None:
        """Return a complete version."""
        places = (self.root / "files" / version, self.root / "folders" / version)
        return next((each for each in places if each.exists()), None)

    @contextmanager
    def locked(self, progress: Progress) -> Iterator[None]:
        """Keep other jobs' processes from downloading or removing anything."""
        for name in ("files", "folders", "urls"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                progress.note(f"{progress.url}: waiting for another job's download")
                fcntl.flock(file, fcntl.LOCK_EX)
            files = self.root / "files"
            files.chmod(0o755)
            try:
                yield
            finally:
                files.chmod(0o555)  # a job could replace a file there

    def take(self, s3: S3Client, source: Source, progress: Progress) -> Path:
        """Return the place of a version, which is downloaded if it is not there."""
        name = hashlib.sha256(source.url.encode()).hexdigest()[:24]
        history = self.root / "urls" / f"{name}.json"
        known = _read_versions(history)
        if known and known[-1] != source.version:
            progress.note(f"{source.url} has changed since the last job")
        place = self.place(source.version) or self._download(s3, source, progress)
        known = [each for each in known if each != source.version] + [source.version]
        with new_file(history) as partial:
            partial.write_text(json.dumps({"url": source.url, "versions": known[-_KEPT:]}))
        self.prune()
        return place

    def _download(self, s3: S3Client, source: Source, progress: Progress) -> Path:
        files = self.root / "files"
        for left in files.glob(".*"):  # by a killed process; this one has the lock
            left.unlink()
        wanted = {
            each.id: Download(each, files / each.id, progress.count, progress.note)
            for each in source.objects.values()
        }
        lacking = [each for name, each in wanted.items() if not (files / name).exists()]
        try:
            require_space(source.url, lacking, self.root)
        except StagingError:
            self.prune([*wanted])
            require_space(source.url, lacking, self.root)
        progress.total, progress.began = sum(each.source.size for each in lacking), time.monotonic()
        try:
            download_all(s3, lacking)
        except CorruptError as error:
            progress.note(f"{error.message}; downloading it again")
            download_all(s3, [each for each in lacking if not each.target.exists()])
        return self._build_folder(source) if source.is_folder else files / source.version

    def _build_folder(self, source: Source) -> Path:
        place = self.root / "folders" / source.version
        partial = place.with_name(f".{place.name}")
        _remove(partial)
        for name, each in source.objects.items():
            try:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(self.root / "files" / each.id, partial / name)
            except OSError as error:
                why = f"{error.strerror}: {name!r} can't be a file here"
                raise StagingError(f"{source.url}: {why}") from error
        _set_modes(partial, 0o555)  # jobs share it
        partial.rename(place)
        return place

    def prune(self, only: Sequence[str] | None = None) -> None:
        """Remove old versions, except those to which jobs that have not ended link.

        The newest ones stay, and for a day what no URL names, such as objects of an unfinished download of a
        folder. With ``only``, to make room, nothing stays but these files.
        """
        links = [each for each in (self.home / JOBS).glob("*/*/*") if each.is_symlink()]
        used = {
            Path(os.readlink(each)).name  # noqa: PTH115 - Python 3.8
            for each in links
            if not (each.parent.parent / "end.json").exists()
        }
        for history in (self.root / "urls").iterdir() if only is None else ():
            used |= {*_read_versions(history)}
        for folder in (self.root / "folders").iterdir():
            if folder.name not in used:
                _remove(folder)
        for file in (self.root / "files").iterdir():
            name, known = file.name, file.stat()
            is_new = only is None and time.time() - known.st_mtime < _DAY_S
            if not (is_new or name in used or name in (only or ()) or known.st_nlink > 1):
                file.unlink()


def _read_versions(history: Path) -> list[str]:
    """Return the versions in a history, the newest last; none if it is damaged."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return [*json.loads(history.read_text())["versions"]]
    return []


def _set_modes(folder: Path, mode: int) -> None:
    """Change the modes of a folder and those below it."""
    for each, _, _ in os.walk(folder):
        Path(each).chmod(mode)


def _remove(folder: Path) -> None:
    with suppress(OSError):  # another user's folders
        _set_modes(folder, 0o755)
    shutil.rmtree(folder, ignore_errors=True)


def stage(
    s3: S3Client, url: str, target: Path, expected: str, progress: Progress, home: Path
) -> None:
    """Link the data of an URL to ``target``. With ``expected``, a version, any other is an error."""
    cache = Cache(home)
    try:
        with cache.locked(progress):
            place = cache.place(expected) if expected else None
            if place is None:
                source = resolve(s3, url)
                if expected not in ("", source.version):
                    raise ChangedError(
                        f"{url}: it has changed since the job began, and its nodes would read different data",
                        hint="submit the job again",
                    )
                place = cache.take(s3, source, progress)
            _link(place, target)
    except OSError as error:
        raise explain(error, url) from error
    got = f"{progress.received / 1e6:,.1f} MB in {progress.seconds:.1f} s, {progress.speed}"
    progress.note(f"{url}: {got if progress.received else 'already on this node'}")


def _link(place: Path, target: Path) -> None:
    if target.exists() and not target.is_symlink():
        raise StagingError(f"{target} is already in the job's folder", hint="rename it")
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    new.symlink_to(place.absolute())
    new.replace(target)


def check(s3: S3Client, url: str) -> dict[str, object]:
    """Return what S3 has, or the reason why this node can't have it."""
    try:
        source = resolve(s3, url)
    except StagingError as error:
        return {"url": url, "message": error.message, "hint": error.hint}
    known = {"version": source.version, "is_folder": source.is_folder}
    return {"url": url, "size": source.size, "files": len(source.objects), **known}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stage", allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--node", default=socket.gethostname())
    parser.add_argument("--expect", default="")
    parser.add_argument("url")
    parser.add_argument("target", nargs="?", type=Path)
    args = parser.parse_args(words)
    s3 = connect()
    if args.check:
        print(json.dumps(check(s3, args.url)), flush=True)
        return 0
    progress = Progress(lambda text: announce(event="note", text=f"{args.node}: {text}"), args.url)
    try:
        stage(s3, args.url, args.target, args.expect, progress, Path.home())
    except StagingError as error:
        known = {"hint": error.hint, "rank": None, "host": args.node}
        announce(event="error", message=f"{args.node}: {error.message}", **known)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
