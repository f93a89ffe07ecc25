"""``predict --data``: predictions for the rows of a file, here or by a job on the nodes of a cluster."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from infra.errors import JobError, UsageError
from infra.files import check_file
from infra.s3_url import parse_s3_url
from infra.wait import Progress
from jobs.launchers.plan import JobPaths, JobPlan, PlacementOptions
from jobs.launchers.queue.history import list_jobs
from jobs.launchers.queue.session import JobContext, JobSession, run_job
from jobs.train.predict import model_on_head, silence_libraries
from jobs.train.request import MAX_DATA_BYTES, check_writable, place_data, require_able_stack
from jobs.train.train import read_results
from jobs.worker.data.readers import READERS, choose_column, read_table
from jobs.worker.runtime.errors import DatasetError, WorkerError
from jobs.worker.tasks.predict_file import OUTPUTS, Alone, PredictOptions, predict_file
from jobs.worker.training.options import S3, is_url
from provision.stacks.stack import Stack

_LOOK_AT = 1000


@dataclass(frozen=True)
class PredictRequest:
    """Predictions by a job. ``model`` is a local folder, ``job`` one on the head; by default the newest.

    ``results`` receives the job's log and record, and the file, which then moves to its place.
    """

    options: PredictOptions
    results: Path
    model: Path | None = None
    job: str | None = None
    nodes: int | None = None
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    retries: int = 0

    @property
    def name(self) -> str:
        """The file's name in the job's output."""
        return f"predictions{Path(self.options.output).suffix.lower()}"


def check_prediction(options: PredictOptions) -> None:
    """Raise :class:`UsageError` for data or an output that can't be used, as far as this machine can tell."""
    output, data = Path(options.output), options.data
    if output.suffix.lower() not in OUTPUTS:
        raise UsageError(
            f"--output {output}: its name does not say its format",
            hint=f"one of {', '.join(OUTPUTS)}",
        )
    if output.is_dir():
        raise UsageError(f"--output {output}: is a folder")
    check_writable(output.parent, "--output")
    if is_url(data):
        key = PurePosixPath(parse_s3_url(data, "--data").prefix)
        if not {each.lower() for each in key.suffixes[-2:]} & {*READERS}:
            raise UsageError(
                f"--data {data}: its name does not say its format",
                hint=f"one of {', '.join(READERS)}",
            )
        return
    check_file(Path(data), MAX_DATA_BYTES)
    if Path(data).is_dir():
        raise UsageError(f"--data {data}: is a folder", hint="give one of its files")
    if output.exists() and output.samefile(data):
        raise UsageError(f"--output {output}: is the file in --data")
    try:
        table = read_table(data, limit=_LOOK_AT)
        for name, column in options.columns.items():
            if table.columns:  # Parquet may be readable only on the nodes
                choose_column(table, column, (), f"--{name}-column")
    except DatasetError as error:
        raise UsageError(error.message, hint=error.hint) from None


def predict_file_here(options: PredictOptions, progress: Progress) -> dict[str, Any]:
    """Predict on this machine. Raises :class:`UsageError` for unusable rows, else :class:`JobError`."""
    silence_libraries()
    output = Path(options.output).absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".predict-") as folder:
        try:
            return predict_file(options, Alone(), Path(folder), progress.note)
        except DatasetError as error:
            raise UsageError(error.message, hint=error.hint) from None
        except WorkerError as error:
            raise JobError(error.message, hint=error.hint) from None


def predict_on_nodes(context: JobContext, request: PredictRequest) -> dict[str, Any]:
    """Run the job, and return its ``results.json``. Raises :class:`JobError` if it fails."""
    require_able_stack(context.stack, "predict")
    done = run_job(context, lambda session: _plan(session, request))
    found, there = read_results(done), request.results / request.name
    output = Path(request.options.output)
    partial = output.with_name(f".{output.name}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(there, partial)  # perhaps to another disk
        partial.replace(output)
    except OSError as error:
        raise JobError(
            f"--output {output}: can't be written: {error.strerror or error}",
            hint=f"the file is {there if there.exists() else partial}",
        ) from None
    return found


def _plan(session: JobSession, request: PredictRequest) -> JobPlan:
    model, jobs = request.model, list_jobs(session.head)
    on_head = "" if model else model_on_head(jobs, request.job)
    if model and model.name == "model":
        job = model.resolve().parent.name
        if any(each.job == job and each.has_model for each in jobs):  # from there, it was fetched
            on_head = f"{JobPaths(job).output}/model"
    return plan_prediction(request, session.context.stack, on_head)


def plan_prediction(request: PredictRequest, stack: Stack, on_head: str = "") -> JobPlan:
    """Return the job's plan; ``on_head`` is the model's folder there, if it has one. Pure."""
    options, data = request.options, request.options.data
    place = place_data("rows", PurePosixPath(data.removeprefix(S3)))
    files: dict[str, Path | bytes] = {} if is_url(data) else {place: Path(data).resolve()}
    if not on_head:
        assert request.model is not None
        files["model"] = request.model.resolve()
    backend, target = stack.choose_backend(options.backend), f"output/{request.name}"
    there = replace(options, model="model", data=place, output=target, backend=backend)
    argv = (json.dumps(asdict(there)),)
    return JobPlan(
        kind="predict",
        module="worker.tasks.predict_file",
        argv=argv,
        retry_argv=(*argv, "--resume"),
        backend=backend,
        title="Predict",
        files=files,
        head_folders={"model": on_head} if on_head else {},
        stage=((data, place),) if is_url(data) else (),
        env={"HF_HUB_OFFLINE": "1"},
        placement=request.placement,
        nodes=request.nodes,
        results=request.results,
        retries=request.retries,
    )
