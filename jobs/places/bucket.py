"""A job's folder as it is stored in S3: read without any cluster, with the user's credentials."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infra.aws.s3 import download_file, list_folder
from infra.errors import JobError, SprError, UsageError
from infra.files import parse_as
from infra.s3_url import S3Location
from infra.words import format_size
from jobs.places.files import move_results, place_locally
from jobs.places.launcher import NAME, RUNNING, Fetched, JobEnd, JobSummary, parse_end
from jobs.places.plan import RECORD, own_folder
from jobs.places.record import JobRecord, complete_record, has_own_results
from jobs.worker.runtime.checkpoint_names import newest_complete
from jobs.worker.storage import ownership
from jobs.worker.supervisor.launch import CHECKPOINTS, END
from provision.host import TextSink

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


def find_stored(
    s3: S3Client, place: S3Location, job: str, cloud: str = ""
) -> tuple[JobSummary, dict[str, int]]:
    """Return a job whose folder is ``place``, and the sizes of its files by name.

    A job without an end counts as running. Raises :class:`UsageError` if there is no job; ``cloud`` is the
    option for the hint's command.
    """
    sizes = list_folder(s3, place)
    if RECORD not in sizes:
        raise UsageError(
            f"there is no job {job} in {place}",
            hint=f"it has no {RECORD}; to list the jobs below it: spr-cluster jobs {place}{cloud}",
        )
    return _read_job(s3, place, job, sizes), sizes


def _read_job(
    s3: S3Client, place: S3Location, job: str, sizes: Mapping[str, int], cluster: str = ""
) -> JobSummary:
    text = {name: _read(s3, place, name) for name in (RECORD, END) if name in sizes}
    record = parse_as(JobRecord, text[RECORD], f"{place}/{RECORD}")
    if cluster not in ("", record.cluster):
        raise UsageError(f"job {job} is not one of cluster {cluster}")
    end = parse_end(text.get(END, "")) or JobEnd(RUNNING)
    return JobSummary(
        **vars(end),
        job=job,
        command=record.command,
        submitted=datetime.fromisoformat(record.when),
        ranks_per_node=record.placement.nproc_per_node,
        size_kib=sum(sizes.values()) >> 10,
        owner=record.owner,
        has_model=any(f"output/model/{each}config.json" in sizes for each in ("", "adapter_")),
        checkpoint=newest_complete(sizes, CHECKPOINTS) or None,
        unfinished=record.resumable and "output/results.json" not in sizes,
    )


def list_stored(s3: S3Client, place: S3Location, cluster: str = "") -> tuple[JobSummary, ...]:
    """Return the jobs whose folders are in ``place``, or whose folder it is, in the order of submission.

    With ``cluster``, return only those that ran there.
    """
    found = []
    for job, (where, sizes) in _find_folders(s3, place).items():
        if where == place:
            return (_read_job(s3, place, job, sizes),)
        with suppress(SprError, ValueError):  # it may disappear meanwhile
            found.append(_read_job(s3, where, job, sizes, cluster))
    return tuple(sorted(found, key=lambda job: (job.submitted, job.job)))


def _find_folders(s3: S3Client, place: S3Location) -> dict[str, tuple[S3Location, dict[str, int]]]:
    """Return the place of each job in ``place``, or of the job whose folder it is, and its files' sizes."""
    sizes = list_folder(s3, place)
    if RECORD in sizes:
        return {place.prefix.rpartition("/")[2]: (place, sizes)}
    folders: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size in sizes.items():
        folder, _, rest = name.partition("/")
        folders[folder][rest] = size
    # A folder may hold other files.
    jobs = {job: own for job, own in folders.items() if RECORD in own and NAME.fullmatch(job)}
    return {job: (place.below(job), own) for job, own in jobs.items()}


def fetch_records(s3: S3Client, place: S3Location, results: Path) -> None:
    """Download what is known of each job in ``place``, without its files, to folders in ``results``."""
    for job, (where, sizes) in _find_folders(s3, place).items():
        try:
            record = parse_as(JobRecord, _read(s3, where, RECORD), f"{where}/{RECORD}")
            names = [
                RECORD,
                END,
                *(["output/results.json"] if has_own_results(vars(record)) else []),
            ]
            few = {name: sizes[name] for name in names if name in sizes}
            fetch_stored(s3, where, few, results / job, lambda _: None)
        except (SprError, ValueError):  # its record is damaged, or it has disappeared
            shutil.rmtree(results / job, ignore_errors=True)


def _read(s3: S3Client, place: S3Location, name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        download_file(s3, place.below(name), path)
        return path.read_text(encoding="utf-8")


def fetch_stored(
    s3: S3Client,
    place: S3Location,
    sizes: Mapping[str, int],
    results: Path,
    note: TextSink,
    *,
    all_checkpoints: bool = False,
) -> Fetched:
    """Download what is the user's of a job, its log, and its record: all of its files, or none.

    Raises :class:`JobError` if they can't be written.
    """
    read = partial(_read, s3, place)
    old = set() if all_checkpoints else ownership.find_superseded(sizes, read)
    left = sum(size for name, size in sizes.items() if ownership.is_below(name, old))
    sizes = {name: size for name, size in sizes.items() if not ownership.is_below(name, old)}
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=results, prefix=".fetch-") as folder:
            _download(s3, place, sizes, Path(folder), note)
            end = own_folder(Path(folder)) / END
            text = end.read_text(encoding="utf-8") if end.exists() else ""
            end.unlink(missing_ok=True)
            move_results(Path(folder), results)
    except OSError as error:
        why = error.strerror or error
        raise JobError(f"{place} could not be written to {results}: {why}") from error
    complete_record(results, text)
    return Fetched(said=(f"not fetched: {ownership.explain_superseded(old, left)}",) if old else ())


def _download(
    s3: S3Client, place: S3Location, sizes: Mapping[str, int], folder: Path, note: TextSink
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
                hint="run the same command again",
            )


def _local_name(name: str) -> str:
    """Return a file's name in the results folder; "" for one that stays in S3."""
    is_safe = not {"", ".", ".."} & {*name.split("/")} and "\0" not in name
    place = str(own_folder(Path()) / END) if name == END else place_locally(name)
    return place if is_safe else ""
