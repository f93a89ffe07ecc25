"""``predict``: questions put to a trained model, here where PyTorch is, else on a cluster's head."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shlex
import tarfile
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import JobError, UsageError
from jobs.launch.files import worker_files
from jobs.launch.history import check_job_id, choose_job, list_jobs, newest_model
from jobs.launch.plan import JobPaths
from jobs.train.request import expand_home
from jobs.worker.runtime.errors import WorkerError
from provision.host import Host
from provision.install import VENV

_NEEDED = ("torch", "transformers")
_HOME = JobPaths("").home
_LONGEST_S = 1800
_SPEAKER = "squad.answer: error: "


@dataclass(frozen=True)
class Prediction:
    """An answer; ``start`` is its first character's place in the context, ``score`` as the job gives it."""

    question: str
    text: str
    score: float
    start: int


def can_answer_here() -> bool:
    """What the model needs is installed beside this tool (the extra `job`)."""
    return all(importlib.util.find_spec(name) for name in _NEEDED)


def find_model(wish: str | None, root: Path = Path("results")) -> Path | None:
    """A model's folder on this machine: the wish, or its job's below ``results/``, or the newest there.

    ``None`` where it is not here. Raises :class:`UsageError` for a folder that holds no model.
    """
    if wish is None:
        found = root.glob("*/model/config.json")
        newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
        return newest.parent if newest else None
    for folder in (expand_home(wish), root / wish):
        if folder.is_dir():
            for place in (folder, folder / "model"):
                if (place / "config.json").is_file():
                    return place
            raise UsageError(
                f"--model {wish}: no config.json in {folder} or {folder / 'model'}",
                hint="a folder that `spr-cluster train` or `spr-cluster fetch` has filled",
            )
    if "/" in wish or wish.startswith((".", "~")):
        raise UsageError(f"--model {wish}: no such folder")
    return None


def read_context(wish: str) -> str:
    """The text in a file of that name, or else the wish itself as the text.

    Raises :class:`UsageError` for a file that can't be read, and for what looks like one and isn't there.
    """
    path = Path(wish)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):  # too long for a file's name
        is_file = is_folder = False
    if is_file:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"--context {wish}: is not UTF-8 (byte {error.start})") from None
        except OSError as error:
            raise UsageError(f"--context {wish}: can't be read: {error.strerror}") from None
    elif is_folder:
        raise UsageError(f"--context {wish}: is a folder")
    elif " " not in wish.strip() and ("/" in wish or wish.endswith((".txt", ".md"))):
        raise UsageError(f"--context {wish}: no such file")
    else:
        text = wish
    if not text.strip():
        raise UsageError("--context has no text in it")
    return text


def answer_here(model: Path, questions: Sequence[str], context: str) -> list[Prediction]:
    """Ask a model on this machine; raises :class:`JobError`."""
    # Before the libraries are loaded: nothing is asked of the hub, and no progress bar is drawn.
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    from jobs.worker.squad.answer import answer

    try:
        found = answer(str(model), [(question, context) for question in questions])
    except WorkerError as error:
        raise JobError(error.message, hint=error.hint) from None
    return [
        Prediction(question, each.text, float(each.score), int(each.start))
        for question, each in zip(questions, found, strict=True)
    ]


def answer_on_head(
    head: Host, questions: Sequence[str], context: str, model: Path | None, job: str | None
) -> list[Prediction]:
    """Ask on the head: a model of this machine, or a job's there (without a wish the newest).

    Nothing stays there. Raises :class:`UsageError` where there is no such job, :class:`JobError`
    where the model gives no answers.
    """
    folder = f"{_HOME}/spr-predict-{uuid.uuid4().hex[:12]}"
    place = f"{folder}/model" if model else _model_on_head(head, job)
    rows = [json.dumps({"question": text, "context": context}) + "\n" for text in questions]
    _place(head, folder, model, "".join(rows).encode())
    script = (
        f"cd {folder} && PYTHONPATH=code HF_HUB_OFFLINE=1 nice {VENV}/bin/python -m worker.squad.answer "
        f"{shlex.quote(place)} < asked.jsonl"
    )
    try:
        told = head.run(script, timeout_s=_LONGEST_S, check=False)
    finally:
        head.run(f"rm -rf {folder}", check=False)
    if told.exit_code != 0:
        said = f"{told.stdout}\n{told.stderr}".splitlines()
        lines = [line.strip() for line in said if line.strip()]
        last = lines[-1] if lines else f"exit code {told.exit_code}"
        raise JobError(f"the head could not answer: {last.removeprefix(_SPEAKER)}")
    return _parse(questions, told.stdout)


def _model_on_head(head: Host, job: str | None) -> str:
    jobs = list_jobs(head)
    if job is None:
        found = newest_model(jobs)
    else:
        check_job_id(job)
        found = choose_job(jobs, job)
        if not found.has_model:
            raise UsageError(f"job {job} has no model: it is {found.state}")
    return f"{JobPaths(found.job).output}/model"


def _place(head: Host, folder: str, model: Path | None, asked: bytes) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        bundle = Path(temporary, "predict.tar")
        with tarfile.open(bundle, "w", dereference=True) as archive:
            for name, source in worker_files().items():
                archive.add(source, name)
            info = tarfile.TarInfo("asked.jsonl")
            info.size = len(asked)
            archive.addfile(info, io.BytesIO(asked))
            if model:
                archive.add(model.resolve(), "model")
        head.upload(bundle, f"{folder}.tar")
    head.run(
        f"mkdir -m 700 {folder}; tar --no-same-owner -C {folder} -xf {folder}.tar; rc=$?; "
        f"rm -f {folder}.tar; exit $rc",
        timeout_s=600,
    )


def _parse(questions: Sequence[str], text: str) -> list[Prediction]:
    rows = [row for line in text.splitlines() if (row := _read(line)) is not None]
    if len(rows) != len(questions):
        raise JobError(f"the head gave {len(rows)} answers to {len(questions)} questions")
    return [
        Prediction(question, str(row["text"]), float(row["score"]), int(row["start"]))
        for question, row in zip(questions, rows, strict=True)
    ]


def _read(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"text", "score", "start"} <= row.keys() else None


def require_cluster(error: UsageError) -> UsageError:
    """What to say where the model can be asked nowhere."""
    return UsageError(
        f"PyTorch is not installed here, and there is no cluster to ask: {error.message}",
        hint="pip install 'spr-cluster[job]' answers on this machine",
    )
