"""A job's folder as it is stored in S3: read without any cluster, with the user's credentials."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from infra.aws.s3 import download_file, list_folder
from infra.errors import JobError, SprError, UsageError
from infra.files import parse_as
from infra.s3_url import S3Location
from infra.words import format_size
from jobs.launchers.files import move_results
from jobs.launchers.launcher import NAME, RUNNING, JobEnd, JobSummary, parse_end
from jobs.launchers.plan import RECORD
from jobs.launchers.record import JobRecord, complete_record
from jobs.worker.runtime.output import STATE_FILES
from jobs.worker.storage.restore import newest
from jobs.worker.supervisor.launch import BEGIN, CHECKPOINTS, END

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_OUTPUT = "output/"


def find_stored(s3: S3Client, place: S3Location, job: str) -> tuple[JobSummary, dict[str, int]]:
    """Return a job whose folder is ``place``, and the sizes of its files by name.

    A job without an end counts as running. Raises :class:`UsageError` if there is no job.
    """
    sizes = list_folder(s3, place)
    return _read_job(s3, place, job, sizes), sizes


def _read_job(s3: S3Client, place: S3Location, job: str, sizes: Mapping[str, int]) -> JobSummary:
    if RECORD not in sizes:
        raise UsageError(f"there is no job {job} in {place}", hint=f"it has no {RECORD}")
    with tempfile.TemporaryDirectory() as folder:
        text = {
            name: _read(s3, place, Path(folder, name)) for name in (RECORD, END) if name in sizes
        }
    record = parse_as(JobRecord, text[RECORD], f"{place}/{RECORD}")
    end = parse_end(text.get(END, "")) or JobEnd(RUNNING)
    complete = [
        name.split("/")[2]
        for name in sizes
        if name.startswith(CHECKPOINTS) and name.endswith("/checkpoint.json")
    ]
    return JobSummary(
        **vars(end),
        job=job,
        command=record.command,
        submitted=datetime.fromisoformat(record.when),
        ranks_per_node=record.placement.nproc_per_node,
        size_kib=sum(sizes.values()) >> 10,
        has_model="output/model/config.json" in sizes,
        checkpoint=newest(complete) or None,
        unfinished=record.resumable and "output/results.json" not in sizes,
    )


def list_stored(s3: S3Client, place: S3Location) -> tuple[JobSummary, ...]:
    """Return the jobs whose folders are in ``place``, or whose folder it is, in the order of submission."""
    sizes = list_folder(s3, place)
    if RECORD in sizes:
        return (_read_job(s3, place, place.prefix.rpartition("/")[2], sizes),)
    folders: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size in sizes.items():
        folder, _, rest = name.partition("/")
        folders[folder][rest] = size
    found = []
    for job, own in folders.items():
        # A folder may hold other files, or disappear meanwhile.
        with suppress(SprError, ValueError):
            if RECORD in own and NAME.fullmatch(job):
                found.append(_read_job(s3, place.below(job), job, own))
    return tuple(sorted(found, key=lambda job: (job.submitted, job.job)))


def _read(s3: S3Client, place: S3Location, path: Path) -> str:
    download_file(s3, place.below(path.name), path)
    return path.read_text(encoding="utf-8")


def fetch_stored(
    s3: S3Client,
    place: S3Location,
    sizes: Mapping[str, int],
    results: Path,
    note: Callable[[str], None],
) -> None:
    """Download a job's output, log, and record, without checkpoints: all of its files, or none.

    Raises :class:`JobError` if they can't be written.
    """
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=results, prefix=".fetch-") as folder:
            _download(s3, place, sizes, Path(folder), note)
            end = Path(folder, END)
            text = end.read_text(encoding="utf-8") if end.exists() else ""
            end.unlink(missing_ok=True)
            move_results(Path(folder), results)
    except OSError as error:
        why = error.strerror or error
        raise JobError(f"{place} could not be written to {results}: {why}") from error
    complete_record(results, text)


def _download(
    s3: S3Client,
    place: S3Location,
    sizes: Mapping[str, int],
    folder: Path,
    note: Callable[[str], None],
) -> None:
    wanted = {name: local for name in sizes if (local := _local_name(name))}
    total, done = sum(sizes[name] for name in wanted), 0

    def count(received: int) -> None:
        nonlocal done
        done += received
        note(f"{format_size(done)} of {format_size(total)}")

    for name, local in wanted.items():
        path = folder / local
        path.parent.mkdir(parents=True, exist_ok=True)
        download_file(s3, place.below(name), path, count)
        size = path.stat().st_size
        if size != sizes[name]:
            raise JobError(
                f"{place}/{name}: {size} bytes arrived instead of {sizes[name]}: it changed meanwhile",
                hint=f"to try again: spr-cluster fetch {place}",
            )


def _local_name(name: str) -> str:
    """Return a file's name in the results folder; "" for one that stays in S3."""
    is_safe = not {"", ".", ".."} & {*name.split("/")} and "\0" not in name
    is_state = STATE_FILES.match(name) or name.endswith(".keep")
    if not is_safe or is_state or name == BEGIN:
        return ""
    if name in (RECORD, END) or ("/" not in name and name.startswith("log")):
        return name
    return name.removeprefix(_OUTPUT) if name.startswith(_OUTPUT) else ""
