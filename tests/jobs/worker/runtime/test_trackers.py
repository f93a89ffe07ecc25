"""Trackers against TensorBoard's reader, MLflow's files, Weights & Biases offline, and dead servers."""

from __future__ import annotations

import io
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.runtime import trackers
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.trackers import (
    JOB_TAG,
    Point,
    TrackedRun,
    choose,
    report_to,
    without_secrets,
)
from tests.fakes import FakeClock
from tests.jobs.worker.forked_ranks import events_of
from tests.jobs.worker.training.test_run import free_port

JOB = "digits-20260801-120000-abc"
SECRET = "hunter2-hunter2"


@dataclass
class Job:
    """A job that reports steps without training."""

    output: Path
    printed: io.StringIO = field(default_factory=io.StringIO)
    clock: FakeClock = field(default_factory=FakeClock)

    def run(
        self,
        names: str,
        steps: range,
        accuracy: float | None = None,
        evaluation: float | None = None,
        **options: Any,
    ) -> None:
        """Take a step every two seconds; then the job ends or, without ``accuracy``, fails.

        A run with an ``evaluation`` resumes, and begins with it.
        """
        events = Events(stream=self.printed, clock=self.clock.monotonic)
        run = TrackedRun(self.output, {"epochs": 3, "dtype": "fp32", **options})
        with report_to(names, run, events, self.clock.monotonic):
            if evaluation is not None:
                events.emit("resumed", step=steps[0] - 1, total=6)
                scores = {"accuracy": evaluation}
                events.emit("evaluation", step=steps[0] - 1, total=6, scores=scores)
            for step in steps:
                more = {"samples_per_second": 8.0, "tokens_per_second": 64.0, "shares": {"a": 1.0}}
                events.step(step, 6, epoch=step / 2, loss=1 / step, lr=0.5, **more)
                self.clock.sleep(2)
            if accuracy is None:
                raise RuntimeError
            events.emit("result", scores={"accuracy": accuracy}, world_size=1)

    def fail(self, *arguments: Any, **options: Any) -> None:
        with suppress(RuntimeError):
            self.run(*arguments, **options)

    @property
    def notes(self) -> list[str]:
        return [event["text"] for event in events_of(self.printed.getvalue(), "note")]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job that waits for its trackers also on a busy machine."""
    monkeypatch.setattr(trackers, "FLUSH_SECONDS", 120.0)
    monkeypatch.setattr(trackers, "FAILED_FLUSH_SECONDS", 120.0)
    return Job(tmp_path / JOB / "output")


def read_scalars(folder: Path) -> dict[str, Any]:
    """Return the steps and values that TensorBoard shows, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    names = shown.Tags()["scalars"]
    return {name: [(each.step, each.value) for each in shown.Scalars(name)] for name in names}


def test_tensorboard_shows_each_step_once_also_after_a_resume(job: Job) -> None:
    job.fail("tensorboard", range(1, 5))  # the newest checkpoint, which is evaluated, is of step 2
    job.run("tensorboard", range(3, 7), accuracy=97.5, evaluation=50.0)

    scalars = read_scalars(job.output / "tensorboard")
    assert job.notes == []
    assert scalars["train/loss"] == [(n, pytest.approx(1 / n)) for n in range(1, 7)]
    assert scalars["train/epoch"] == [(n, n / 2) for n in range(1, 7)]
    assert scalars["eval/accuracy"] == [(2, 50.0)], "with evaluations, the result has no new scores"
    assert scalars.keys() == {
        *("train/loss", "train/learning_rate", "train/epoch", "train/samples_per_second"),
        *("train/tokens_per_second", "eval/accuracy"),
    }


def test_steps_within_a_second_are_one_point_but_the_last_counts(job: Job) -> None:
    events = Events(stream=job.printed, clock=job.clock.monotonic)
    with report_to("tensorboard", TrackedRun(job.output, {}), events, job.clock.monotonic):
        for step in range(1, 7):
            events.step(step, 6, loss=1.0)
            job.clock.sleep(0.2 if step == 1 else 0.3)
            if step == 2:  # too soon after the first one to be printed
                events.emit("evaluation", step=2, total=6, scores={"accuracy": 50.0})
    shown = read_scalars(job.output / "tensorboard")
    assert [step for step, _ in shown["train/loss"]] == [1, 5, 6]
    assert shown["eval/accuracy"] == [(2, 50.0)]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of MLflow, about files
def test_a_job_is_one_mlflow_run_also_after_a_failure(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end-to-end tests have a real server; files need no database to be made."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "an experiment")
    client = MlflowClient(f"file://{tmp_path}/mlflow")

    def find(count: int = 1) -> Any:
        """The newest of so many."""
        experiment = client.get_experiment_by_name("an experiment")
        assert experiment
        found = client.search_runs([experiment.experiment_id], f"tags.`{JOB_TAG}` = '{JOB}'")
        assert len(found) == count
        return found[0]

    job.fail("mlflow", range(1, 5))
    failed = find()
    job.run("mlflow", range(3, 7), accuracy=97.5, epochs=4, wire="bf16")

    run = find()
    assert job.notes == []
    assert (failed.info.status, run.info.status) == ("FAILED", "FINISHED")
    assert run.info.run_id == failed.info.run_id
    assert run.info.run_name == JOB
    assert run.data.params == {"epochs": "3", "dtype": "fp32", "wire": "bf16"}
    assert run.data.metrics["eval/accuracy"] == 97.5
    assert run.data.metrics["train/loss"] == pytest.approx(1 / 6)
    history = client.get_metric_history(run.info.run_id, "train/learning_rate")
    assert sorted({each.step for each in history}) == [1, 2, 3, 4, 5, 6]

    # A later job may have the same name, as on Kubernetes, and nothing to resume.
    job.run("mlflow", range(1, 3), accuracy=1.0)
    later = find(2)
    assert (later.info.status, later.data.metrics["eval/accuracy"]) == ("FINISHED", 1.0)
    (job.output.parent / "output.state/checkpoints/step-000002").mkdir(parents=True)
    job.run("mlflow", range(3, 5), accuracy=2.0)
    assert find(2).info.run_id == later.info.run_id


def test_a_refused_connection_is_said_without_the_password(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{SECRET}@127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    job.run("mlflow,tensorboard", range(1, 7), accuracy=97.5)

    note = job.notes[-1]
    assert note.startswith("warning: mlflow gets no more metrics: ")
    assert "refused" in note
    assert SECRET not in job.printed.getvalue()
    assert read_scalars(job.output / "tensorboard")["eval/accuracy"] == [(6, 97.5)]


def test_a_server_that_hangs_is_one_note_at_the_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "FLUSH_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        job.run("mlflow", range(1, 7), accuracy=97.5)
    # Its thread now fails, and stays silent.
    for thread in threading.enumerate():
        if thread.name == "mlflow":
            thread.join(60)
    assert job.notes == ["warning: mlflow gets no more metrics: it did not answer within 1 s"]


@pytest.mark.parametrize("failing", ["begin", "log"])
def test_an_outage_costs_no_points_and_two_notes(
    job: Job, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.02)
    back, seen, failures = threading.Event(), list[Point](), list[str]()

    def meet(where: str, *points: Point) -> None:
        if failing == where and len(failures) < 3:
            failures.append(where)
            raise ConnectionError("503")
        back.set()
        seen.extend(points)

    class Fake:
        def __init__(self, run: TrackedRun) -> None:
            meet("begin")

        def log(self, points: list[Point]) -> None:
            meet("log", *points)

        def finish(self, *, succeeded: bool) -> None:
            assert succeeded

    monkeypatch.setattr(trackers, "TRACKERS", {"fake": Fake})
    events = Events(stream=job.printed, clock=job.clock.monotonic)
    with report_to("fake", TrackedRun(job.output, {}), events, job.clock.monotonic):
        for step in range(1, 7):
            events.step(step, 6, loss=1.0)
            job.clock.sleep(2)
        while len(failures) < 3 or not back.wait(60):
            pass
    assert [point.step for point in seen] == [1, 2, 3, 4, 5, 6]
    assert job.notes == [
        "warning: fake gets no metrics: 503; trying again every 0 s",
        "fake gets metrics again",
    ]


@pytest.mark.parametrize(
    ("name", "address", "reason"),
    [
        ("mlflow", "", "MLFLOW_TRACKING_URI is not set"),
        ("mlflow", "gopher://x", "gopher"),
        ("wandb", "", "warning: wandb gets no more metrics: import of wandb halted"),
    ],
)
def test_a_wrong_setting_or_a_missing_client_is_said(
    job: Job, monkeypatch: pytest.MonkeyPatch, name: str, address: str, reason: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setitem(sys.modules, "wandb", None)
    job.run(name, range(1, 7), accuracy=97.5)
    assert reason in job.notes[-1]


def test_weights_and_biases_offline_keeps_the_run_with_the_results(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    job.output.mkdir(parents=True)
    job.run("wandb", range(1, 7), accuracy=97.5)

    assert job.notes == []
    (kept,) = (job.output / "wandb").glob(f"offline-run-*/run-{JOB}.wandb")
    content = kept.read_bytes()
    assert b"train/loss" in content
    assert b"eval/accuracy" in content
    files = [path for path in job.output.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_auto_means_tensorboard_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto") == ["tensorboard"]
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert choose("auto") == choose("none") == []
    assert choose("mlflow,tensorboard,mlflow") == ["mlflow", "tensorboard"]


def test_the_job_is_named_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert TrackedRun(Path("output"), {}).job == tmp_path.name
    assert TrackedRun(tmp_path / "it's mine", {}).job == "it-s-mine"


def test_secrets_are_cut_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("GITHUB_PAT", "ghp-1234")
    said = without_secrets(f"401 for https://me:{SECRET}/@host/api, key {SECRET}, ghp-1234")
    assert said == "401 for https://host/api, key …, …"
