"""``predict``: run a trained model: here if PyTorch is installed, on a cluster's head, or on its nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from infra.errors import JobError, MissingExtraError, UsageError
from infra.files import check_file, check_folder, parse_object, read_text
from infra.s3_url import parse_s3_url
from infra.wait import Progress
from infra.words import counted, format_size
from jobs.places.files import unpack_results, upload_archive, worker_files
from jobs.places.launcher import JobSummary, choose_job
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.history import list_jobs
from jobs.places.queue.session import JobContext, JobSession, run_job
from jobs.train.request import (
    check_writable,
    expand_home,
    is_model,
    model_in,
    place_data,
    raising,
    require_able_stack,
)
from jobs.train.train import read_results
from jobs.worker.corpus.coordinator import predict_corpus
from jobs.worker.corpus.files import local_files
from jobs.worker.corpus.options import FORMATS, PredictOptions
from jobs.worker.corpus.shards import make_converter
from jobs.worker.data.readers import first_rows, stream_file
from jobs.worker.data.table import choose_column, read_records
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.runtime.events import NAMES
from jobs.worker.runtime.process import hide_progress_bars
from jobs.worker.spec import JobSpec
from jobs.worker.tasks import find_task
from jobs.worker.tasks.adapters import ADAPTERS, is_folder, merge, read_adapters, require_base
from jobs.worker.training.options import S3, is_url
from provision.host import Host
from provision.install import VENV
from provision.stacks.stack import Stack

_REQUIRED = ("torch", "transformers")
_HOME = JobPaths("").home
_CONFIG = "config.json"
_DONE, _BASE = "data/done.json", "data/base"
"""In a job's folder, the model that adapters belong to."""
_TIMEOUT_S = 1800
# Adapters name the folder that their model was in on the user's machine; their job has its copy.
_FIND_BASE = """# looking for the model of adapters
if [ -f {0}/{2} ] && [ -d {1} ]; then echo {1}; fi"""
_ERROR_PREFIX = "predict: error: "

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})

Prediction = dict[str, Any]
"""A question's or text's result, with its task's fields (docs/jobs.md)."""


def make_rows(texts: Sequence[str], context: str | None) -> list[dict[str, Any]]:
    """Return the model's inputs: questions about a context, or texts. Raises :class:`UsageError`."""
    if not all(text.strip() for text in texts):
        raise UsageError("a text is empty")
    if context is None:
        return [{"text": text} for text in texts]
    return [{"question": text, "context": context} for text in texts]


def read_rows(content: bytes, context: str | None) -> list[dict[str, Any]]:
    """Return the rows of standard input: each line is a text, or a JSON object with columns by name.

    Raises :class:`UsageError`.
    """
    try:
        lines = [line for line in content.decode("utf-8-sig").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input: not UTF-8 (byte {error.start})") from None
    if not lines:
        raise UsageError("standard input has no lines")
    more = {} if context is None else {"context": context}
    return [
        {**more, **parse_object(line, f"standard input: row {number}")}
        if line.lstrip().startswith("{")
        else make_rows([line.rstrip("\r")], context)[0]
        for number, line in enumerate(lines, start=1)
    ]


def can_answer_here() -> bool:
    """Return whether the packages that models need (the extra `job`) are installed."""
    return all(importlib.util.find_spec(name) for name in _REQUIRED)


def find_model(
    model: str | None, log: Callable[[str], None], option: str = "--model "
) -> Path | None:
    """Return the local folder of a model, given a folder or job; by default the newest in ``results/``.

    Returns ``None`` if there is none. ``log`` gets the choice, if the user made none. Raises
    :class:`UsageError` if the folder holds no model.
    """
    root = Path("results")
    if model is None:
        files = [path for path in root.glob("*/model/*") if path.is_file()]
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return None
        if not is_model(newest.parent):
            raise UsageError(
                f"{newest.parent}, the newest model in {root}/, has no {_CONFIG}: it is of no task that "
                "`predict` can do",
                hint="choose another with --model",
            )
        log(f"using the model of {newest.parent.parent.name}, the newest in {root}/")
        return newest.parent
    for folder in (expand_home(model), root / model):
        if folder.is_dir():
            if found := model_in(folder):
                return found
            raise UsageError(
                f"{option}{model}: no config.json in {folder} or {folder / 'model'}",
                hint="give a folder that `spr-cluster train` or `spr-cluster fetch` has filled",
            )
    if "/" in model or model.startswith((".", "~")):
        raise UsageError(f"{option}{model}: no such folder")
    return None


def check_model(
    model: Path | None, settings: Mapping[str, Any] = NO_SETTINGS, *, has_context: bool = False
) -> None:
    """Raise :class:`UsageError` for a local model that can't be sent, or options that don't fit it."""
    if model is None:
        return
    with raising(UsageError):
        for folder in filter(None, (model, local_base(model))):
            check_folder(folder)
        task = find_task(str(model), settings)
    if has_context and "context" not in task.inputs:
        raise UsageError(f"--context: has no effect on models of `train {task.name}`")


def has_adapters(model: Path | None) -> bool:
    """Return whether a folder has adapters, whose model may be on the hub."""
    return model is not None and (model / ADAPTERS).is_file()


def local_base(model: Path | None) -> Path | None:
    """Return the folder of the model that adapters belong to; ``None`` for one on the hub, or without any.

    Raises :class:`ModelError` if it is gone.
    """
    if model is None or not has_adapters(model):
        return None
    base = read_adapters(model)
    require_base(model, base)
    return expand_home(base) if is_folder(base) else None


def read_context(value: str) -> str:
    """Return the content of the file, or the value itself if there is no such file.

    Raises :class:`UsageError` if the file can't be read, or the value looks like a missing file.
    """
    path = Path(value)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # too long for a file's name
        exists = False
    if exists:
        text = read_text(path)
    elif " " not in value.strip() and ("/" in value or value.endswith((".txt", ".md"))):
        raise UsageError(f"--context {value}: no such file")
    else:
        text = value
    if not text.strip():
        raise UsageError("--context contains no text")
    return text


def predict_here(
    model: Path, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] = NO_SETTINGS
) -> list[Prediction]:
    """Predict with a model on this machine. Raises :class:`JobError` if the model can't."""
    with raising(JobError):
        silence_libraries(model)
        # It needs numpy, an optional package.
        from jobs.worker.tasks.predict import predict  # noqa: PLC0415

        return _merge(rows, predict(str(model), rows, settings))


def merge_here(model: Path, target: Path) -> None:
    """Write adapters, merged into their model, into a new folder. Raises :class:`JobError`."""
    with raising(JobError):
        silence_libraries(model)
        merge(str(model), target)


def silence_libraries(model: Path) -> None:
    """Before the libraries are imported: no progress bars, no requests to the hub but for adapters' model."""
    hide_progress_bars()
    if not has_adapters(model):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True)
class OnHead:
    """A model for the head: a local one, or that of a job there, by default the newest."""

    head: Host
    model: Path | None
    job: str | None
    log: Callable[[str], None]

    def predict(
        self, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] = NO_SETTINGS
    ) -> list[Prediction]:
        """Predict there, and leave no files.

        Raises :class:`UsageError` if there is no such job, :class:`JobError` if the model fails.
        """
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        words = ["--settings", json.dumps(dict(settings))] if settings else []
        with self._run(words, lines) as (_, said):
            return _merge(rows, [*_parse(said)])

    def merge(self, target: Path, note: Callable[[str], None]) -> None:
        """Merge adapters there, and bring the model here. Raises as :meth:`predict`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = TemporaryDirectory(dir=target.parent, prefix=".merge-")
        # A failure leaves nothing there, and the command can be repeated.
        with beside as partial, self._run(["--merge", "output"], b"") as (folder, _):
            chunks = self.head.download(f"tar -C {folder} -cf - output")
            unpack_results(chunks, Path(partial, "model"), "predict", note)
            Path(partial, "model").rename(target)

    @contextmanager
    def _run(self, words: Sequence[str], rows: bytes) -> Iterator[tuple[str, str]]:
        """Yield the folder that it ran in, which is then removed, and the output."""
        head, folder = self.head, f"{_HOME}/spr-predict-{uuid.uuid4().hex[:12]}"
        place, base = f"{folder}/model", f"{folder}/base"
        if not self.model:
            place, base = model_on_head(list_jobs(head), self.job, self.log)
        offline = "" if has_adapters(self.model) else "HF_HUB_OFFLINE=1 "
        options = shlex.join(["--base", base, *words, place])
        script = (
            f"cd {folder} && PYTHONPATH=code {offline}nice {VENV}/bin/python "
            f"-m worker.tasks.predict {options} < rows.jsonl"
        )
        try:
            _place(head, folder, self.model, rows)
            done = head.run(script, timeout_s=_TIMEOUT_S, check=False)
            if done.exit_code != 0:
                output = f"{done.stdout}\n{done.stderr}".splitlines()
                lines = [line.strip() for line in output if line.strip()]
                last = lines[-1] if lines else f"exit code {done.exit_code}"
                raise JobError(f"the head could not answer: {last.removeprefix(_ERROR_PREFIX)}")
            yield folder, done.stdout
        finally:
            head.run(f"rm -rf {folder} {folder}.tar", check=False)


def model_on_head(
    jobs: tuple[JobSummary, ...], job: str | None, log: Callable[[str], None]
) -> tuple[str, str]:
    """Return the folders of a job's model on the head, by default the newest, and of its base model.

    ``log`` gets the choice, if the user made none. Raises :class:`UsageError` for a job without one,
    :class:`JobError` if no job has one.
    """
    if job is None:
        having = [each for each in jobs if each.has_model]
        if not having:
            raise JobError("no job on this cluster has a model", hint="`train` trains one")
        found = having[-1]
        log(f"using the model of {found.job}, the newest on the cluster")
    else:
        found = choose_job(jobs, job)
        if not found.has_model:
            raise UsageError(f"job {job} has no model: it is {found.state}")
    return _folders_of(found.job)


def _folders_of(job: str) -> tuple[str, str]:
    root = JobPaths(job).root
    return f"{root}/output/model", f"{root}/model"


def _place(head: Host, folder: str, model: Path | None, rows: bytes) -> None:
    files: dict[str, Path | bytes] = {**worker_files(), "rows.jsonl": rows}
    if model:
        files["model"] = model.resolve()
    if base := local_base(model):
        files["base"] = base.resolve()
    upload_archive(head, files, f"{folder}.tar")
    head.run(
        f"mkdir -m 700 {folder} && tar --no-same-owner -C {folder} -xf {folder}.tar && "
        f"rm {folder}.tar",
        timeout_s=600,
    )


def _parse(text: str) -> Iterator[dict[str, Any]]:
    for line in text.split("\n"):  # predictions may have other line separators
        with suppress(UsageError):  # a login may print other lines
            yield parse_object(line, "prediction")


def _merge(
    rows: Sequence[Mapping[str, str]], found: Sequence[Mapping[str, Any]]
) -> list[Prediction]:
    if len(found) != len(rows):
        raise JobError(
            f"the head gave {counted(len(found), 'answer')} to {counted(len(rows), 'row')}"
        )
    asked = ("question", "text", "prompt")
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
    env: tuple[str, ...] = ()
    """``NAME=VALUE`` words for the ranks."""

    @property
    def name(self) -> str:
        """The name, in the job's output, of the file or folder."""
        return f"predictions{Path(self.options.output).suffix.lower()}"


def check_prediction(
    options: PredictOptions, model: Path | None = None, limit: int | None = None
) -> None:
    """Raise :class:`UsageError` for data or an output that can't be used, as far as this machine can tell.

    ``model`` is a local folder. ``limit`` is that of local data, in bytes.
    """
    _check_output(options)
    if is_url(options.data):
        parse_s3_url(options.data, "--data")
        return
    data = Path(options.data)
    check_file(data)
    files = [*local_files(data).values()]
    if not files:
        raise UsageError(f"--data {data}: has no nonempty file whose name says its format")
    for path in files:
        check_file(path, limit)
    if limit and (size := sum(path.stat().st_size for path in files)) > limit:
        what = f"too large: {format_size(size)}, limit {format_size(limit)} for data to send"
        raise UsageError(f"--data {data}: {what}", hint="put the data into S3: --data s3://…")
    checked = next((each for each in files if _has_rows(each, options)), files[0])
    with raising(UsageError), first_rows(str(checked)) as table:
        if model and table.columns:  # Parquet may be readable only on the nodes
            task, asked = find_task(str(model)), replace(options, model=str(model))
            skipped: list[DatasetError] | None = [] if options.skip_bad_records else None
            read_records(table, make_converter(task, table, asked), skipped)
        for name, column in options.columns.items() if table.columns else ():
            choose_column(table, column, (), f"--{name}-column")


def _has_rows(path: Path, options: PredictOptions) -> bool:
    """Return whether a file has a row, which must be usable if bad ones are skipped."""
    skips = options.skip_bad_records
    try:
        return any(not (skips and isinstance(row, DatasetError)) for _, row in stream_file(path))
    except (DatasetError, ImportError):  # the check explains the error, and works without pyarrow
        return True


def _check_output(options: PredictOptions) -> None:
    place, output = options.output, Path(options.output)
    is_folder = is_url(place) or output.suffix.lower() not in FORMATS
    if is_url(place):
        if not parse_s3_url(place, "--output").prefix or output.suffix.lower() in FORMATS:
            raise UsageError(
                f"--output {place}: in S3, predictions are Parquet files in a folder",
                hint="--output s3://BUCKET/FOLDER/",
            )
    elif is_folder and output.suffix and not output.is_dir():
        raise UsageError(
            f"--output {output}: its name does not say its format",
            hint=f"one of {', '.join(FORMATS)}; without a suffix, it is a folder for Parquet files",
        )
    else:
        if output.is_dir() and not is_folder:
            raise UsageError(f"--output {output}: is a folder")
        check_writable(output if is_folder else output.parent, "--output")
    if _resolve(place).is_relative_to(_resolve(options.data)):
        raise UsageError(f"--output {place}: is the file in --data, or in its folder")


def _resolve(place: str) -> PurePath:
    return PurePosixPath(place) if is_url(place) else Path(place).resolve()


def predict_file_here(options: PredictOptions, progress: Progress) -> dict[str, Any]:
    """Predict on this machine. Raises :class:`UsageError` for unusable rows, else :class:`JobError`.

    The predictions of shards stay, for the same command, until all are there.
    """
    silence_libraries(Path(options.model))
    output = Path(options.output).absolute()
    parts = output.with_name(f".{output.name}.parts")
    try:
        with raising(JobError), raising(UsageError, only=DatasetError):
            return predict_corpus(replace(options, parts=str(parts)), progress.note)
    finally:
        with suppress(OSError):  # it has shards
            parts.rmdir()


def predict_on_nodes(context: JobContext, request: PredictRequest) -> dict[str, Any]:
    """Run the job, and return its ``results.json``. Raises :class:`JobError` if it fails."""
    require_able_stack(context.stack, "predict")
    done = run_job(context, lambda session: _plan(session, request))
    found, there = read_results(done), request.results / request.name
    output = Path(request.options.output)
    if is_url(request.options.output):
        return found
    try:
        if there.is_dir():
            for each in there.iterdir():
                _move(each, output / each.name)
            there.rmdir()
        else:
            _move(there, output)
    except OSError as error:
        raise JobError(
            f"--output {output}: can't be written: {error.strerror or error}",
            hint=f"the predictions are in {request.results}",
        ) from None
    return found


def _move(source: Path, target: Path) -> None:
    """Move a file, perhaps to another disk, where it appears whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.move(source, partial)
    partial.replace(target)


def _plan(session: JobSession, request: PredictRequest) -> JobPlan:
    model, jobs, head, on_head = request.model, list_jobs(session.head), session.head, ("", "")
    job = model.resolve().parent.name if model and model.name == "model" else ""
    if not model:
        on_head = model_on_head(jobs, request.job, session.context.on_log)
    elif any(each.job == job and each.has_model for each in jobs):  # from there, it was fetched
        on_head = _folders_of(job)
    if on_head[0] and not head.run(_FIND_BASE.format(*on_head, ADAPTERS)).stdout.strip():
        on_head = on_head[0], ""
    context, resources = session.context, request.spec.resources
    price = (context.cloud.usd_per_hour or 0.0) * session.share_of(resources)
    price *= len(context.cluster.first(resources.nodes).nodes)
    priced = replace(request, options=replace(request.options, usd_per_hour=round(price, 4)))
    return plan_prediction(priced, context.stack, on_head)


def plan_prediction(
    request: PredictRequest, stack: Stack, on_head: tuple[str, str] = ("", "")
) -> JobPlan:
    """Return the job's plan.

    ``on_head`` are the folders there, if there are any, of the model and of that which its adapters need.
    """
    options, data, output = request.options, request.options.data, Path(request.options.output)
    place = place_data("rows", PurePosixPath(data.removeprefix(S3)))
    found = {} if is_url(data) else local_files(Path(data))
    files: dict[str, Path | bytes] = {
        str(PurePosixPath(place, name)): path.resolve() for name, path in found.items()
    }
    local = {} if on_head[0] else {"model": request.model, _BASE: local_base(request.model)}
    files |= {name: folder.resolve() for name, folder in local.items() if folder}
    if output.is_dir():
        files[_DONE] = json.dumps([each.name for each in output.iterdir()]).encode()
    there = replace(
        options,
        model="model",
        data=data if is_url(data) else place,
        output=options.output if is_url(options.output) else f"output/{request.name}",
        base=_BASE,
        done=_DONE if _DONE in files else "",
    )
    offline = {} if not on_head[0] and has_adapters(request.model) else {"HF_HUB_OFFLINE": "1"}
    return JobPlan(
        kind="predict",
        spec=request.spec,
        module="worker.corpus",
        argv=(json.dumps(asdict(there)),),
        resumes=True,
        backend=stack.choose_backend("gloo"),
        title="Predict",
        files=files,
        head_folders={
            name: each for name, each in zip(("model", _BASE), on_head, strict=True) if each
        },
        env={**offline, NAMES: json.dumps({} if is_url(data) else {place: data})},
        reads=((data, place),) if is_url(data) else (),
        writes=(options.output,) if is_url(options.output) else (),
        variables=request.env,
        results=request.results,
    )
