"""``train --report-to``: which clients are installed, and which variables go to the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infra.errors import UsageError
from jobs.cli.train import build_request, build_resume
from jobs.train.request import TrainRequest, spec_of
from jobs.train.resume import ResumeRequest, plan_again
from jobs.train.trackers import tracker_packages, tracker_variables
from jobs.train.train import plan_training
from jobs.worker.tasks.squad.task import DEMO
from provision.stacks.load import load_stack
from tests.jobs.context import NOW, PATHS, listed, parse_request, sent_variables
from tests.jobs.train.test_resume import RECORD, hosts_with, run

URI = "MLFLOW_TRACKING_URI"
SECRET = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own trackers must not matter."""
    for client in ("MLFLOW_TRACKING_", "WANDB_"):
        for name in ("URI", "TOKEN", "API_KEY", "MODE"):
            monkeypatch.delenv(f"{client}{name}", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def parse(*words: str) -> Any:
    return parse_request("train", "squad", *words)


def test_the_shells_variables_go_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URI, "https://here")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    monkeypatch.setenv("WANDB_API_KEY", "not wanted")

    request = build_request(parse("--report-to=mlflow", "--env=SEED=7"), NOW)

    more = (f"MLFLOW_TRACKING_TOKEN={SECRET}", "MLFLOW_EXPERIMENT_ID=7")
    assert request.env == ("SEED=7", f"{URI}=https://here", *more)
    assert build_request(parse(), NOW).env == ()
    given = build_request(parse("--report-to=mlflow", f"--env={URI}=https://there"), NOW)
    assert given.env == (f"{URI}=https://there", *more)


def test_a_tracker_without_a_login_is_refused() -> None:
    with pytest.raises(UsageError, match="needs WANDB_API_KEY or WANDB_MODE=offline\n  → export"):
        tracker_variables("tensorboard,wandb", ("WANDB_MODE=online",))


def test_mlflow_without_a_server_is_refused_before_a_node_fails() -> None:
    for uri, shown in ((f"postgresql://me:{SECRET}@db/runs", "postgresql"), ("mlruns", "mlruns")):
        with pytest.raises(UsageError, match=f"expected the address of a server, not {shown}\n"):
            tracker_variables("mlflow", (f"{URI}={uri}",))
    for word in ("https://a", "databricks", "databricks://team"):
        assert tracker_variables("mlflow", (f"{URI}={word}",)) == (f"{URI}={word}",)
    assert tracker_variables("wandb", ("WANDB_MODE=offline",))


def test_clients_are_installed_beside_the_stack() -> None:
    def lines(report_to: str) -> list[str]:
        packages = tracker_packages(report_to)
        return [line.partition(">")[0] for line in packages.lines] if packages else []

    assert lines("auto") == lines("none") == []
    assert lines("mlflow,tensorboard") == ["mlflow-skinny", "tensorboard"]
    request = TrainRequest(spec_of(replace(DEMO, report_to="wandb")), Path("results"))
    plan = plan_training(request, load_stack("upstream"))
    assert plan.packages == tracker_packages("wandb")
    assert '"report_to": "wandb"' in plan.argv[1]


def test_a_job_resumes_with_its_trackers_and_the_shells_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(DEMO, backend="gloo", output="output", report_to="mlflow")
    argv = ("python", "-m", "worker.tasks", "squad", options.to_json())
    record = replace(RECORD, argv=argv, more={"env": [URI]})
    hosts = hosts_with(record, listed(PATHS.job_id, "step-000040"))
    request = ResumeRequest("squad", None, tmp_path)
    with pytest.raises(UsageError, match=f"--report-to mlflow needs {URI}"):
        run(hosts, request)
    assert not any("submitting" in command for command in hosts["node0"].commands)

    # Packages are installed on a real head only; the rest of the plan is the same.
    install = Mock(return_value="")
    monkeypatch.setattr("jobs.places.queue.session.install_packages", install)
    monkeypatch.setenv(URI, "https://here")
    log: list[str] = []
    run(hosts, request, log)
    assert install.call_args.args[1] == tracker_packages("mlflow")
    assert sent_variables(hosts["node0"]) == [f"{URI}=https://here"]
    assert not any("give it again" in line for line in log)


def test_a_resumed_job_may_report_elsewhere() -> None:
    changed = build_resume(again := parse("--resume", "--report-to=tensorboard", "--retries=3"))
    assert (again.is_new, parse().is_new, changed.retries) == (False, True, 3)
    plan = plan_again(RECORD, changed, 3, PATHS.job_id)
    assert plan.packages == tracker_packages("tensorboard")
    assert '"report_to": "tensorboard"' in plan.argv[1]
    assert plan.variables == ()
