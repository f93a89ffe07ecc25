"""``predict``: run a trained model: here if PyTorch is installed, on a cluster's head, or on its nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from infra.errors import JobError, MissingExtraError, UsageError
from infra.files import check_file, parse_object, read_object, read_text
from infra.s3_url import parse_s3_url
from infra.wait import Progress
from infra.words import counted
from jobs.places.files import upload_archive, worker_files
from jobs.places.launcher import JobSummary, choose_job
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.history import list_jobs
from jobs.places.queue.session import JobContext, JobSession, run_job
from jobs.train.request import (
    MAX_DATA_BYTES,
    check_writable,
    expand_home,
    place_data,
    require_able_stack,
)
from jobs.train.train import read_results
from jobs.worker.data.readers import first_rows
from jobs.worker.data.table import choose_column
from jobs.worker.data.text_files import READERS
from jobs.worker.runtime.errors import DatasetError, WorkerError
from jobs.worker.runtime.events import NAMES
from jobs.worker.spec import JobSpec
from jobs.worker.tasks import find_task
from jobs.worker.tasks.predict_file import WRITERS, PredictOptions, predict_file, read_items
from jobs.worker.training.options import S3, is_url
from provision.host import Host
from provision.install import VENV
from provision.stacks.stack import Stack

_REQUIRED = ("torch", "transformers")
_HOME = JobPaths("").home
_CONFIG, _ADAPTERS = "config.json", "adapter_config.json"
_TIMEOUT_S = 1800
_ERROR_PREFIX = "predict: error: "


Prediction = dict[str, Any]
"""A question's or text's result, with its task's fields (docs/jobs.md)."""


def make_rows(texts: Sequence[str], context: str | None) -> list[dict[str, str]]:
    """Return the model's inputs: questions about a context, or texts."""
    if context is None:
        return [{"text": text} for text in texts]
    return [{"question": text, "context": context} for text in texts]


def can_answer_here() -> bool:
    """Return whether the packages that models need (the extra `job`) are installed."""
    return all(importlib.util.find_spec(name) for name in _REQUIRED)


def find_model(model: str | None, root: Path = Path("results")) -> Path | None:
    """Return the local folder of a model, given a folder or job; by default the newest in ``results/``.

    Returns ``None`` if there is none. Raises :class:`UsageError` if the folder holds no model.
    """
    if model is None:
        found = [path for name in (_CONFIG, _ADAPTERS) for path in root.glob(f"*/model/{name}")]
        newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
        return _require_whole(newest.parent) if newest else None
    for folder in (expand_home(model), root / model):
        if folder.is_dir():
            for place in (folder, folder / "model"):
                if any((place / name).is_file() for name in (_CONFIG, _ADAPTERS)):
                    return _require_whole(place)
            raise UsageError(
                f"--model {model}: no config.json in {folder} or {folder / 'model'}",
                hint="give a folder that `spr-cluster train` or `spr-cluster fetch` has filled",
            )
    if "/" in model or model.startswith((".", "~")):
        raise UsageError(f"--model {model}: no such folder")
    return None


def _require_whole(model: Path) -> Path:
    if (model / _ADAPTERS).is_file():
        base = read_object(model / _ADAPTERS).get("base_model_name_or_path")
        raise UsageError(
            f"{model}: holds only adapters for {base}, and `predict` needs a whole model",
            hint="merge them into it: docs/training.md shows how, for `train lm`",
        )
    return model


def read_context(value: str) -> str:
    """Return the content of the file, or the value itself if there is no such file.

    Raises :class:`UsageError` if the file can't be read, or the value looks like a missing file.
    """
    path = Path(value)
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError):  # too long for a file's name
        exists = is_folder = False
    if is_folder:
        raise UsageError(f"--context {value}: is a folder")
    if exists:
        text = read_text(path)
    elif " " not in value.strip() and ("/" in value or value.endswith((".txt", ".md"))):
        raise UsageError(f"--context {value}: no such file")
    else:
        text = value
    if not text.strip():
        raise UsageError("--context contains no text")
    return text


def predict_here(model: Path, rows: Sequence[Mapping[str, str]]) -> list[Prediction]:
    """Predict with a model on this machine. Raises :class:`JobError` if the model can't."""
    silence_libraries()
    from jobs.worker.tasks.predict import predict  # noqa: PLC0415 - needs numpy, an optional package

    try:
        return _merge(rows, predict(str(model), rows))
    except WorkerError as error:
        raise JobError(error.message, hint=error.hint) from None


def silence_libraries() -> None:
    """Before the libraries are imported: no requests to the hub, no progress bars."""
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")


def predict_on_head(
    head: Host, rows: Sequence[Mapping[str, str]], model: Path | None, job: str | None
) -> list[Prediction]:
    """Predict on the head with a local model, or with that of a job there (by default the newest).

    Leaves no files there. Raises :class:`UsageError` if there is no such job, :class:`JobError` if the
    model fails.
    """
    folder = f"{_HOME}/spr-predict-{uuid.uuid4().hex[:12]}"
    place = f"{folder}/model" if model else model_on_head(list_jobs(head), job)
    _place(head, folder, model, "".join(json.dumps(row) + "\n" for row in rows).encode())
    script = (
        f"cd {folder} && PYTHONPATH=code HF_HUB_OFFLINE=1 nice {VENV}/bin/python "
        f"-m worker.tasks.predict {shlex.quote(place)} < rows.jsonl"
    )
    try:
        done = head.run(script, timeout_s=_TIMEOUT_S, check=False)
    finally:
        head.run(f"rm -rf {folder}", check=False)
    if done.exit_code != 0:
        output = f"{done.stdout}\n{done.stderr}".splitlines()
        lines = [line.strip() for line in output if line.strip()]
        last = lines[-1] if lines else f"exit code {done.exit_code}"
        raise JobError(f"the head could not answer: {last.removeprefix(_ERROR_PREFIX)}")
    return _merge(rows, [*_parse(done.stdout)])


def model_on_head(jobs: tuple[JobSummary, ...], job: str | None) -> str:
    """Return the folder of a job's model on the head, by default the newest.

    Raises :class:`UsageError` for a job without one, :class:`JobError` if no job has one.
    """
    if job is None:
        having = [each for each in jobs if each.has_model]
        if not having:
            raise JobError("no job on this cluster has a model", hint="`train` trains one")
        found = having[-1]
    else:
        found = choose_job(jobs, job)
        if not found.has_model:
            raise UsageError(f"job {job} has no model: it is {found.state}")
    return f"{JobPaths(found.job).output}/model"


def _place(head: Host, folder: str, model: Path | None, rows: bytes) -> None:
    files: dict[str, Path | bytes] = {**worker_files(), "rows.jsonl": rows}
    if model:
        files["model"] = model.resolve()
    upload_archive(head, files, f"{folder}.tar")
    head.run(
        f"mkdir -m 700 {folder}; tar --no-same-owner -C {folder} -xf {folder}.tar; rc=$?; "
        f"rm -f {folder}.tar; exit $rc",
        timeout_s=600,
    )


def _parse(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with suppress(UsageError):  # a login may print other lines
            yield parse_object(line, "prediction")


def _merge(
    rows: Sequence[Mapping[str, str]], found: Sequence[Mapping[str, Any]]
) -> list[Prediction]:
    if len(found) != len(rows):
        raise JobError(
            f"the head gave {counted(len(found), 'answer')} to {counted(len(rows), 'row')}"
        )
    asked = ("question", "text")
    return [
        {**{key: row[key] for key in asked if key in row}, **each}
        for row, each in zip(rows, found, strict=True)
    ]


def no_place_to_answer(error: UsageError) -> UsageError:
    """Return the error for a machine without PyTorch and without a cluster."""
    why = f"PyTorch is not installed here, and there is no cluster: {error.message}"
    return MissingExtraError(why, "job")


@dataclass(frozen=True)
class PredictRequest:
    """Predictions by a job. ``model`` is a local folder, ``job`` one on the head; by default the newest.

    ``results`` receives the job's log and record, and the file, which then moves to its place.
    """

    options: PredictOptions
    results: Path
    model: Path | None = None
    job: str | None = None
    spec: JobSpec = field(default_factory=JobSpec)

    @property
    def name(self) -> str:
        """The file's name in the job's output."""
        return f"predictions{Path(self.options.output).suffix.lower()}"


def check_prediction(options: PredictOptions, model: Path | None = None) -> None:
    """Raise :class:`UsageError` for data or an output that can't be used, as far as this machine can tell.

    ``model`` is a local folder.
    """
    output, data = Path(options.output), options.data
    if output.suffix.lower() not in WRITERS:
        raise UsageError(
            f"--output {output}: its name does not say its format",
            hint=f"one of {', '.join(WRITERS)}",
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
        with first_rows(data) as table:
            if model and table.columns:  # Parquet may be readable only on the nodes
                read_items(find_task(str(model)), table, replace(options, model=str(model)), [])
            for name, column in options.columns.items() if table.columns else ():
                choose_column(table, column, (), f"--{name}-column")
    except WorkerError as error:
        raise UsageError(error.message, hint=error.hint) from None


def predict_file_here(options: PredictOptions, progress: Progress) -> dict[str, Any]:
    """Predict on this machine. Raises :class:`UsageError` for unusable rows, else :class:`JobError`."""
    silence_libraries()
    from jobs.worker.runtime.ranks import Ranks  # noqa: PLC0415 - needs torch, an optional package

    output = Path(options.output).absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".predict-") as folder:
        try:
            return predict_file(options, Ranks(), Path(folder), progress.note)
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
    storage = replace(request.spec.storage, stage=((data, place),) if is_url(data) else ())
    return JobPlan(
        kind="predict",
        spec=replace(request.spec, storage=storage),
        module="worker.tasks.predict_file",
        argv=(json.dumps(asdict(there)),),
        resumes=True,
        backend=backend,
        title="Predict",
        files=files,
        head_folders={"model": on_head} if on_head else {},
        env={"HF_HUB_OFFLINE": "1", NAMES: json.dumps({place: data})},
        results=request.results,
    )
