"""A run's model and what belongs to it, stored in S3: which files, under which names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import JobError
from infra.progress import Progress
from infra.s3 import S3Location, push_folder

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

# Last: where it is, the rest is there, too.
_BESIDE = ("log", "job.json", "predictions.json", "results.json")


def files_to_push(results: Path) -> Mapping[str, Path]:
    """The model and the small files beside it, by name; raises :class:`JobError` without a model."""
    model = results / "model"
    if not (model / "config.json").is_file():
        raise JobError(f"{results} has no model to push", hint="did its training end well?")
    paths = [path for path in sorted(model.rglob("*")) if path.is_file()]
    paths += [results / name for name in _BESIDE if (results / name).is_file()]
    return {path.relative_to(results).as_posix(): path for path in paths}


def push_results(
    s3: S3Client, results: Path, place: S3Location, job: str, progress: Progress
) -> S3Location:
    """Upload a run's files into a folder of its own there, named like the job; returns that."""
    files = files_to_push(results)
    target = place.below(job)
    with progress.phase(f"Push {len(files)} files to {target}"):
        push_folder(s3, files, target, about={"spr-cluster-job": job}, on_file=progress.note)
    return target
