"""``python -m worker.storage.restore URL FOLDER``: bring a job's folder back from S3, to resume the job.

FOLDER gets the job's files and its newest complete checkpoint, unless it has a checkpoint that is as new.
The last line of the output is JSON: what is there now, or why the job can't be resumed. Runs on Python 3.8.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.checkpoint_names import CHECKPOINTS, newest, newest_complete, step_of
from .client import connect
from .download import Download, S3Object, StagingError, download_all, explain, require_space
from .ownership import STATE
from .stage import Progress, Source, resolve

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_RECORD, _END, _RESULTS = "job.json", "end.json", "output/results.json"
_CHECKPOINTS = f"{STATE}/{CHECKPOINTS}"
# The versions of its data too: another version would not continue the same run.
_FILES = re.compile(
    r"job\.json|end\.json|data\.json|log(\..+)?|(data|model|output|output\.state)/.+"
)
_PARTIAL = ".restore-"


def choose(url: str, objects: Mapping[str, S3Object]) -> tuple[dict[str, S3Object], str]:
    """Return the files to restore and the name of their checkpoint. Raises :class:`StagingError`."""
    job = url.rpartition("/")[2]
    if _RECORD not in objects:
        raise StagingError(f"{url}: there is no job here: it has no {_RECORD}")
    if _RESULTS in objects:
        hint = f"to get its results: spr-cluster fetch {url}"
        raise StagingError(f"{url}: job {job} has nothing to resume: it is finished", hint=hint)
    found = newest_complete(objects, _CHECKPOINTS)
    if not found:
        raise StagingError(f"{url}: job {job} has no complete checkpoint there")
    chosen = {
        name: each
        for name, each in objects.items()
        if _FILES.fullmatch(name)
        and (not name.startswith(_CHECKPOINTS) or name.startswith(f"{_CHECKPOINTS}/{found}/"))
    }
    return chosen, found


def restore(s3: S3Client, url: str, folder: Path) -> dict[str, object]:
    """Restore a job, and describe it. Raises :class:`StagingError`; then the folder is as before."""
    objects = resolve(s3, f"{url}/").objects
    chosen, checkpoint = choose(url, objects)
    here = newest(folder.glob(f"{_CHECKPOINTS}/*"))
    known = {"checkpoint": checkpoint, "has_ended": _END in objects}
    is_newer = (folder / _RESULTS).exists() or step_of(here) >= step_of(checkpoint)
    if (folder / _RECORD).exists() and is_newer:
        return {**known, "checkpoint": here, "size": 0}
    source = Source(url, chosen, True)
    partial = folder / f"{_PARTIAL}{source.version}"  # a later call finds complete files there
    for old in folder.glob(f"{_PARTIAL}*"):
        if old != partial:
            shutil.rmtree(old, ignore_errors=True)
    _download(s3, source, partial)
    # Told, but not restored: on this cluster, it has not ended.
    end = json.loads((partial / _END).read_text()) if _END in chosen else {}
    _install(partial, folder)
    return {**known, "size": source.size, "end": end}


def _download(s3: S3Client, source: Source, partial: Path) -> None:
    progress = Progress(lambda text: print(text, flush=True), source.url)
    for left in partial.rglob(".*.partial*"):  # by a killed process
        left.unlink()
    downloads = [
        Download(each, partial / name, progress.count) for name, each in source.objects.items()
    ]
    lacking = [each for each in downloads if not each.target.exists()]
    for each in lacking:
        each.target.parent.mkdir(parents=True, exist_ok=True)
    progress.total = sum(each.source.size for each in lacking)
    require_space(source.url, lacking, partial)
    download_all(s3, lacking)


def _install(partial: Path, folder: Path) -> None:
    """Replace the folder's parts. The record is the last: without it, nothing counts as restored."""
    for path in partial.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # the job writes them again
    _remove(partial / _END)
    # Until it is submitted, the job has ended.
    (folder / "cancelled").touch()
    parts = sorted(partial.iterdir(), key=lambda path: path.name == _RECORD)
    for name in (_RECORD, "begin.json", _END, "pushed.json", "fetched", "log.earlier"):
        _remove(folder / name)
    for part in parts:
        _remove(folder / part.name)
        part.rename(folder / part.name)
    partial.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for a restore whose client lost its connection: it goes on."""
    descriptor = os.open(str(folder), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="restore", allow_abbrev=False)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(words)
    try:
        with _locked(args.folder):
            known = restore(connect(), args.url.rstrip("/"), args.folder)
    except (StagingError, OSError) as failure:
        error = failure if isinstance(failure, StagingError) else explain(failure, args.url)
        known = {"message": error.message, "hint": error.hint}
    print(json.dumps(known), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
