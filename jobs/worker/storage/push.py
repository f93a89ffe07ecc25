"""``python -m worker.storage.push WHAT FOLDER URL``: store a job's folder in S3, as far as S3 lacks it.

WHAT is ``checkpoint``, the inputs and the newest checkpoint; ``all``, after which ``pushed.json`` says that
everything is there; or ``probe``, whether this node may write there. Prints a line of JSON. Runs on Python
3.8.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from ..runtime.checkpoint_names import CHECKPOINTS, LAST, newest, step_of
from ..runtime.errors import WorkerError, first_line
from ..runtime.output import RESULTS, new_file
from . import ownership
from .client import S3Url, connect

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

PUSHED, END, RECORD = "pushed.json", "end.json", "job.json"
_BEGIN = "begin.json"
_LOG, _EARLIER = "log", "log.earlier"
DATA = "data.json"
"""The versions of the data from S3, which a resumed job uses again."""
_INPUTS = (RECORD, "data", "model")
_PART, _AT_ONCE, _LONGEST_KEY = 16 << 20, 16, 1024
_DENIED = ("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
_FINAL = (*_DENIED, "404", "NoSuchBucket")
_ACTIONS = {"ListObjectsV2": "ListBucket", "HeadObject": "GetObject"}
"""IAM's actions for calls of other names; uploads in parts need s3:PutObject."""
_TRIES, _PAUSE_S = 4, 2.0
_SECONDS = timedelta(seconds=10)
"""What S3's times may lack, and an answer may take."""


class PushError(WorkerError):
    """A job's folder can't be stored; the message begins with its URL."""


def explain(error: Exception, url: S3Url) -> PushError:
    """Return the reason of a failed request in words, without keys."""
    if isinstance(error, NoCredentialsError):
        return PushError(f"{url}: the node has no AWS credentials")
    if not isinstance(error, ClientError):
        return PushError(f"{url}: {first_line(error)}")
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code in ("403", "AccessDenied"):
        call = error.operation_name
        action = _ACTIONS.get(call, "PutObject" if "Upload" in call else call)
        return PushError(f"{url}: AccessDenied: the nodes lack s3:{action}")
    return PushError(f"{url}: {code}")


def is_final(error: Exception) -> bool:
    """Return whether a later attempt would fail as well."""
    if isinstance(error, ClientError):
        return error.response.get("Error", {}).get("Code") in _FINAL
    return isinstance(error, NoCredentialsError)


@dataclass(frozen=True)
class Stored:
    """An object as S3 lists it."""

    size: int
    etag: str
    modified: datetime
    """By this node's clock."""

    def equals(self, path: Path) -> bool:
        """Return whether it has the content of a file, by its digest, or its size and times.

        ``cp -p`` and archives set the time of a change back, but not that of the inode.
        """
        known = path.stat()
        if known.st_size != self.size:
            return False
        if max(known.st_mtime, known.st_ctime) <= self.modified.timestamp():
            return True
        is_small = known.st_size <= _PART
        return is_small and hashlib.md5(path.read_bytes()).hexdigest() == self.etag


@dataclass(frozen=True)
class Push:
    """A job's folder and its place in S3."""

    s3: S3Client
    folder: Path
    url: S3Url

    def checkpoint(self) -> None:
        """Store the job's record, data, model, and log, unless that is long, and the newest checkpoint.

        Then remove older checkpoints there, except the one before. Data from S3 stay where they are.
        """
        self._abort_unfinished(ownership.PUSH_S)
        if not (self.folder / END).exists():
            self._delete(self.list(END))  # of the run before
        files = self._find([*_INPUTS, DATA, _EARLIER, _LOG])
        if _LOG in files and files[_LOG].stat().st_size > _PART:
            del files[_LOG]  # each time, all of it would be stored again
        self.store(files)
        place = f"{ownership.STATE}/{CHECKPOINTS}"
        name = newest(each.parent for each in (self.folder / place).glob(f"*/{LAST}"))
        if not name:
            return
        files = self._find([f"{place}/{name}"])
        mark = {each: path for each, path in files.items() if each.endswith(f"/{LAST}")}
        rest = {each: path for each, path in files.items() if each not in mark}
        stored = self.list(f"{place}/{name}/")
        if any(each in stored for each in mark) and self._lacking(rest, stored):
            self._delete(mark)  # it would vouch for a mixture of two checkpoints
        self.store(rest)
        self.store(mark)
        names = self.list(f"{place}/")
        steps = {each.split("/")[2] for each in names}
        older = sorted((each for each in steps if 0 <= step_of(each) < step_of(name)), key=step_of)
        self._delete([each for each in names if each.split("/")[2] in older[:-1]])

    def everything(self) -> dict[str, Any]:
        """Store all that a user would fetch, and what a resumed job needs; return what is there.

        ``left`` names what can't be stored, and ``skipped`` what has no content.
        """
        if not (self.folder / "output" / RESULTS).exists():
            self.checkpoint()
        found = ownership.find_all(str(self.folder))
        own = {each.name: Path(each.path) for each in found.items if each.size >= 0}
        files = {**self._find([_BEGIN, END, DATA, *_INPUTS]), **own}
        longest = _LONGEST_KEY - len(f"{self.url.key}/".encode())
        left = [*found.left, *(name for name in files if len(os.fsencode(name)) > longest)]
        self.store({name: path for name, path in files.items() if name not in left})
        self._abort_unfinished()
        stored = self.list()
        if not left:
            stale = self._find_stale(stored, own)
            self._delete(stale)
            stored = {name: each for name, each in stored.items() if name not in stale}
        known = {"url": str(self.url), "files": len(stored)}
        done: dict[str, Any] = {**known, "bytes": sum(each.size for each in stored.values())}
        done["skipped"] = ownership.describe(found.skipped)
        # Output that only the workers have is not safe yet.
        is_whole = not self._gathers or (self.folder / ownership.GATHERED).exists()
        if left:
            done["left"] = f"can't be stored: {ownership.describe(left)}"
        elif END in files and is_whole:
            self._forget_error()
            with new_file(self.folder / PUSHED) as partial:
                partial.write_text(json.dumps(done) + "\n")
        return done

    def _abort_unfinished(self, age_s: float = 0.0) -> None:
        """Abort uploads of this age that an earlier push did not finish: S3 bills their parts."""
        bucket, listing = self.url.bucket, self.s3.get_paginator("list_multipart_uploads")
        # Older roles may not list them.
        with suppress(ClientError):
            for page in listing.paginate(Bucket=bucket, Prefix=self.url.key + "/"):
                for each in page.get("Uploads", ()):
                    if time.time() - each["Initiated"].timestamp() < age_s:
                        continue
                    key, id_ = each["Key"], each["UploadId"]
                    self.s3.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=id_)

    def _find_stale(self, stored: Mapping[str, Stored], own: Mapping[str, Path]) -> set[str]:
        """Return the output in S3 that a run before this one left there, and this one does not have.

        What was stored since stays, though it is no longer here: it may be the only copy.
        """
        with suppress(OSError):
            begun, place = (self.folder / _BEGIN).stat().st_mtime, f"{ownership.OUTPUT}/"
            below = {name: each for name, each in stored.items() if name.startswith(place)}
            return {
                name
                for name, each in below.items()
                if name not in own and each.modified.timestamp() < begun
            }
        return set()

    def _forget_error(self) -> None:
        """Remove an earlier push's error from the end of the job, here and in S3."""
        path = self.folder / END
        with suppress(ValueError, AttributeError):
            content, known = json.loads(path.read_text()), path.stat()
            if content.get("push_error"):
                with new_file(path) as partial:
                    partial.write_text(json.dumps({**content, "push_error": None}) + "\n")
                    os.utime(partial, ns=(known.st_atime_ns, known.st_mtime_ns))  # the job's end
                self.s3.upload_file(str(path), self.url.bucket, self.url.below(END).key)

    @property
    def _gathers(self) -> bool:
        """Whether the results include the workers' output."""
        with suppress(OSError, ValueError):
            return bool(json.loads((self.folder / RECORD).read_text()).get("gather_output"))
        return False

    def probe(self) -> None:
        """Write an object, remove it, and list the others."""
        bucket, key = self.url.bucket, self.url.below(".probe").key
        self.s3.put_object(Bucket=bucket, Key=key, Body=b"")
        with suppress(ClientError):
            self.s3.delete_object(Bucket=bucket, Key=key)
        self.s3.list_objects_v2(Bucket=bucket, Prefix=f"{self.url.key}/", MaxKeys=1)

    def store(self, files: Mapping[str, Path]) -> None:
        """Upload the files that differ from S3's, and verify the sizes. Raises :class:`PushError`."""
        sizes = {name: path.stat().st_size for name, path in files.items()}
        self._upload(self._lacking(files, self.list() if files else {}))
        stored = self.list() if files else {}
        for name, path in files.items():
            size = stored[name].size if name in stored else -1
            # A log may grow meanwhile.
            if not sizes[name] <= size <= path.stat().st_size:
                raise PushError(f"{self.url.below(name)}: {size} bytes of {sizes[name]} are there")

    @staticmethod
    def _lacking(files: Mapping[str, Path], stored: Mapping[str, Stored]) -> dict[str, Path]:
        return {
            name: path
            for name, path in files.items()
            if name not in stored or not stored[name].equals(path)
        }

    def _upload(self, files: Mapping[str, Path]) -> None:
        config = TransferConfig(
            multipart_chunksize=_PART, multipart_threshold=_PART, max_concurrency=_AT_ONCE
        )
        # An error cancels the other uploads.
        with create_transfer_manager(self.s3, config) as manager:
            running = [
                manager.upload(str(path), self.url.bucket, self.url.below(name).key)
                for name, path in files.items()
            ]
            for each in running:
                each.result()

    def list(self, prefix: str = "") -> dict[str, Stored]:
        """Return the objects below a folder of the job's, by their names in the job's folder."""
        root = self.url.key + "/"
        pages = self.s3.get_paginator("list_objects_v2").paginate(
            Bucket=self.url.bucket, Prefix=root + prefix
        )
        found = {}
        for page in pages:
            ahead = _clock_error(page)
            for each in page.get("Contents", ()):
                modified = each["LastModified"] + ahead
                stored = Stored(each["Size"], each["ETag"].strip('"'), modified)
                found[each["Key"][len(root) :]] = stored
        return found

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.s3.delete_object(Bucket=self.url.bucket, Key=self.url.below(name).key)

    def _find(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the regular files below these names. No links: they lead to data that others share."""
        found = {}
        for name in names:
            for path in _walk(self.folder / name):
                place = path.relative_to(self.folder).as_posix()
                found[ownership.readable(place)] = path
        return found


def _clock_error(answer: Mapping[str, Any]) -> timedelta:
    """Return how far this node's clock is ahead of S3's, which may refuse 15 minutes; 0 for seconds."""
    now = datetime.now(timezone.utc)
    ahead = now - parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    return ahead if abs(ahead) > _SECONDS else timedelta()


def _walk(path: Path) -> Iterator[Path]:
    if path.is_symlink():
        return
    if path.is_file():
        yield path
    for parent, _, names in os.walk(path):  # which bears that folders vanish meanwhile
        files = [Path(parent, name) for name in sorted(names)]
        yield from (each for each in files if each.is_file() and not each.is_symlink())


def repeat(action: Callable[[], Any], url: S3Url) -> Any:
    """Return an action's result; try again after what may pass. Raises :class:`PushError`."""
    for attempt in range(_TRIES):
        try:
            return action()
        except (PushError, ClientError, BotoCoreError, OSError) as error:
            if is_final(error) or attempt == _TRIES - 1:
                raise error if isinstance(error, PushError) else explain(error, url) from error
            time.sleep(_PAUSE_S * 2**attempt)
    return None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="push", allow_abbrev=False)
    parser.add_argument("what", choices=("checkpoint", "all", "probe"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    args = parser.parse_args(words)
    try:
        url = S3Url.parse(args.url)
        push = Push(connect(), args.folder, url)
        actions: dict[str, Callable[[], Any]] = {
            "checkpoint": push.checkpoint,
            "all": push.everything,
            "probe": push.probe,
        }
        done = repeat(actions[args.what], url) or {"url": args.url}
        if left := done.get("left"):
            raise PushError(f"{args.url}: {left}")
        print(json.dumps(done), flush=True)
    except (PushError, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
