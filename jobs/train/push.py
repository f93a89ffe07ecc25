"""Upload a run's model, log, and results to S3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infra.aws.s3 import push_folder
from infra.errors import JobError
from infra.s3_url import S3Location
from infra.wait import Progress
from infra.words import counted

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

# results.json is uploaded last: its presence means that the upload is complete.
_BESIDE = ("log", "job.json", "predictions.json", "null_odds.json", "results.json")


def files_to_push(results: Path) -> Mapping[str, Path]:
    """Return the model and the small files beside it, by name. Raises :class:`JobError` without a model."""
    model = results / "model"
    if not (model / "config.json").is_file():
        raise JobError(
            f"{results} has no model to push", hint="`spr-cluster jobs` shows how the job ended"
        )
    paths = [path for path in sorted(model.rglob("*")) if path.is_file()]
    paths += [results / name for name in _BESIDE if (results / name).is_file()]
    return {path.relative_to(results).as_posix(): path for path in paths}


def push_results(
    s3: S3Client, results: Path, place: S3Location, job: str, progress: Progress
) -> S3Location:
    """Upload a run's files into a folder named after the job, and return its location."""
    files = files_to_push(results)
    target = place.below(job)
    with progress.phase(f"Push {counted(len(files), 'file')} to {target}"):
        push_folder(s3, files, target, about={"spr-cluster-job": job}, on_file=progress.note)
    return target
