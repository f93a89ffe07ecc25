"""The corpus's files and the output's, local or in S3. Files in S3 are downloaded while they are read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..data.text_files import READERS
from ..runtime.errors import DatasetError
from ..runtime.output import replacing
from ..training.options import is_url
from .options import Source

MANIFEST = "_manifest.json"
"""Hidden, as data in a folder is read: pyarrow and Spark skip such names."""
_BLOCK = 1 << 20
_EMPTY_GZIP = 20
"""Bytes of gzip's output for no input; one byte of input makes it longer."""
_NOT_DATA = re.compile(
    r"manifest\.json|dataset_(infos|dict)\.json|(readme|license|notice|requirements)\.txt(\.gz)?",
    re.I,
)
"""Names of files beside data."""
_SAVED = ("state.json", "dataset_info.json")
"""What save_to_disk writes beside data, always both."""


def list_sources(data: str) -> tuple[Source, ...]:
    """Return the files of a corpus whose names say their format, in order.

    Raises :class:`DatasetError` if there are none, or another :class:`WorkerError`.
    """
    if is_url(data):
        from ..storage.stage import resolve

        found = resolve(connected(), data)
        sources = [
            _source(name, str(each.url), each.etag, each.size)
            for name, each in sorted(found.objects.items())
            if _has_format(name)
            and (not found.is_folder or _is_data(name, each.size, found.objects))
        ]
    else:
        sources = [
            _source(name, str(path), digest_files([path]), path.stat().st_size)
            for name, path in local_files(Path(data)).items()
        ]
    if not sources:
        suffixes = ", ".join(READERS)
        raise DatasetError(
            f"{data}: has no nonempty file whose name says its format ({suffixes}, with .gz)"
        )
    return tuple(sources)


def local_files(data: Path) -> dict[str, Path]:
    """Return a folder's files with data by their names in it; a file itself has none."""
    if not data.is_dir():
        return {"": data}
    found = sorted(each for each in data.rglob("*") if each.is_file())
    names = {each.relative_to(data).as_posix(): each for each in found}
    return {
        name: path
        for name, path in names.items()
        if _has_format(name) and _is_data(name, path.stat().st_size, names)
    }


def _has_format(name: str) -> bool:
    return Path(name.lower().removesuffix(".gz")).suffix in READERS


def _is_data(name: str, size: int, names: Collection[str]) -> bool:
    """Return whether a file in a folder with these names is data, and neither hidden nor beside it.

    An empty file is not: Spark writes one for a partition without rows.
    """
    *folders, last = parts = name.split("/")
    is_hidden = any(each.startswith((".", "_")) for each in parts)
    is_saved = last in _SAVED and all("/".join([*folders, each]) in names for each in _SAVED)
    is_empty = size <= (_EMPTY_GZIP if last.lower().endswith(".gz") else 0)
    return not (is_empty or is_hidden or is_saved or _NOT_DATA.fullmatch(last))


def _source(name: str, place: str, version: str, size: int) -> Source:
    return Source(place, version, size, digest_of([name, version, size]))


def digest_of(value: Any) -> str:
    """Return twelve digits for a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def digest_files(paths: Iterable[Path]) -> str:
    """Return the digest of files' contents."""
    state = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                state.update(block)
    return state.hexdigest()


@cache
def connected() -> Any:
    """Return this process's client of S3, which tries again after errors that pass."""
    from ..storage.client import connect

    return connect()


@contextmanager
def present(source: Source, folder: Path) -> Iterator[Path]:
    """Give a source as a local file: of one in S3, a copy in ``folder``, which this node's ranks share.

    Each reader holds a shared lock, so that only the last one removes the copy.
    """
    if not is_url(source.name):
        yield Path(source.name)
        return
    from ..storage.client import S3Url
    from ..storage.download import Download, S3Object, download_all

    found = S3Object(S3Url.parse(source.name), source.version, source.size)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / found.id
    with (folder / f"{found.id}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not target.exists():
            # Ranks that saw none keep the shared lock, so that no reader removes the copy.
            with (folder / f"{found.id}.download.lock").open("w") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                if not target.exists():
                    download_all(connected(), [Download(found, target)])
        try:
            yield target
        finally:
            with suppress(BlockingIOError):  # another rank reads it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                target.unlink(missing_ok=True)


@dataclass(frozen=True)
class Output:
    """A folder, local or in S3, whose files appear whole."""

    place: str

    def names(self) -> list[str]:
        """Return the files' names."""
        if not is_url(self.place):
            folder = Path(self.place)
            return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        push, url = self._push()
        with _explained(url):
            return sorted(push.list())

    def require_writable(self) -> None:
        """Raise :class:`WorkerError` if nothing can be written there: not after the first shard."""
        if is_url(self.place):
            push, url = self._push()
            with _explained(url):
                push.probe()

    @contextmanager
    def writing(self, name: str, folder: Path) -> Iterator[Path]:
        """Give the file to write, in ``folder`` if the output is in S3. Raises :class:`WorkerError`."""
        target = Path(self.place, name)
        if not is_url(self.place):
            with replacing(target) as partial:
                yield partial
            return
        push, url = self._push()
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{name}"
        try:
            yield partial
            # One request: S3 shows the object when it has all of it.
            with _explained(url), partial.open("rb") as body:
                push.s3.put_object(Bucket=url.bucket, Key=url.below(name).key, Body=body)
        finally:
            partial.unlink(missing_ok=True)

    def _push(self) -> tuple[Any, Any]:
        from ..storage.client import S3Url
        from ..storage.push import Push

        url = S3Url.parse(self.place)
        return Push(connected(), Path(), url), url


@contextmanager
def _explained(url: Any) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    from ..storage.push import explain

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise explain(error, url) from error
