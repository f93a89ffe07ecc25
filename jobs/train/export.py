"""``export``: a trained model for OpenVINO, by a run of its task that only evaluates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from infra.errors import JobError, UsageError
from infra.files import read_object
from jobs.places.plan import RECORD, own_folder
from jobs.places.queue.job_output import JobOutput
from jobs.places.record import training_options
from jobs.train.predict import can_answer_here, has_adapters
from jobs.train.request import local_data, raising, refuse_s3
from jobs.worker.runtime.output import state_folder
from jobs.worker.tasks import find_task
from jobs.worker.tasks.squad.metrics import LONGEST_ANSWER, WINDOW
from jobs.worker.tasks.squad.task import SquadOptions
from jobs.worker.training.options import EncoderOptions

_UNUSED: Mapping[str, Any] = {
    **dict.fromkeys(("class_weights", "mine_negatives", "patience", "push_to"), None),
    **dict.fromkeys(("student_layers", "teacher", "trial_seconds"), None),
    "backend": "auto",
    "compile": "off",
    "epochs": 0,
    "eval_every": "never",
    "ipex": False,
    "report_to": "none",
    "resume": False,
}
"""Options of a job that have no effect, or a wrong one, on a run that only evaluates its model."""


def export_options(model: Path, given: Mapping[str, Any]) -> EncoderOptions:
    """Return a run that exports the model in a folder, with the options of the job that trained it, if any.

    ``given`` are those that the user chose. Raises :class:`UsageError` for a model of another kind, or data
    that nothing names.
    """
    with raising(UsageError):
        kind = find_task(str(model)).Options
    if not issubclass(kind, EncoderOptions):
        whole, first = quote(str(model)), ""
        if has_adapters(model):
            whole, first = "WHOLE", f"spr-cluster predict --model {whole} --merge WHOLE; then: "
        raise UsageError(
            f"a model of `train {kind.task}` can't be exported: it is not an encoder",
            hint=f"for a language model: {first}uvx --from optimum-intel optimum-cli export openvino "
            f"--task text-generation-with-past --weight-format int8 --model {whole} OUTPUT",
        )
    record = read_object(own_folder(model.parent) / RECORD, optional=True)
    own = {**(training_options(record) or _lengths(model, kind)), **_UNUSED, **given}
    if "eval" in given:
        own["eval_fraction"] = None
    if "data" in given:
        own.pop("dataset", None)
    if not own.get("data") and not own.get("dataset"):
        raise UsageError(
            f"{model} does not name the data of its job",
            hint="--data names training data, for calibration, and --eval those that measure the loss",
        )
    own = {each.name: own[each.name] for each in fields(kind) if each.name in own}
    if own.get("dtype") == "int8":  # of products in training
        own["dtype"] = "auto"
    try:
        return kind(**{**own, "model": str(model.absolute())})
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None


def _lengths(model: Path, kind: type[EncoderOptions]) -> dict[str, Any]:
    """Return the options for lengths that a model was trained with, as far as its folder tells them."""
    config, tokens, sentences = (
        read_object(model / name, optional=True)
        for name in ("config.json", "tokenizer_config.json", "sentence_bert_config.json")
    )
    longest = sentences.get("max_seq_length") or tokens.get("model_max_length")
    found = {"max_length": longest, "max_answer_length": config.get(LONGEST_ANSWER)}
    if kind is SquadOptions:
        found |= dict(zip(("max_length", "stride"), config.get(WINDOW) or (None,), strict=False))
    limits = {each.name: each.metadata.get("within") for each in fields(kind)}
    # Some tokenizers have no limit: a number of thirty digits.
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int)
        and (limit := limits.get(name))
        and limit.low <= value <= limit.high
    }


def can_export_here() -> bool:
    """Return whether the packages that an export needs (the extra `export`) are installed."""
    return can_answer_here() and all(map(find_spec, ("openvino", "nncf")))


def export_here(options: EncoderOptions, output: JobOutput, results: Path) -> dict[str, Any]:
    """Export on this machine, and return the content of ``results.json``.

    Raises :class:`UsageError` for data in S3, :class:`JobError` if it fails.
    """
    refuse_s3(options, "here")
    local: dict[str, Any] = {
        each: str(path.absolute()) for each, path in local_data(options).items()
    }
    options = replace(options, **local, output=str(results.absolute()))
    results.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "jobs.worker.tasks", options.task, options.to_json()]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, cwd=results, errors="replace", **streams) as process:
        try:
            for line in process.stdout or ():
                output.add(line.rstrip("\n"))
        except BaseException:  # such as Ctrl-C
            process.kill()
            raise
    if process.returncode:
        error = next((each for each in output.events if each["event"] == "error"), {})
        last = (output.lines or [f"exit code {process.returncode}"])[-1]
        raise JobError(f"the export failed: {error.get('message', last)}", hint=error.get("hint"))
    # Where a fetched job has its logs and metrics too.
    state_folder(results).rename(own_folder(results))
    return read_object(results / "results.json")
