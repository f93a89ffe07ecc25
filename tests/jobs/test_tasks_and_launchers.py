"""Every task runs with every launcher: they meet in the job's plan, and know nothing of each other."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest

from jobs.cli.train import build_request, render_pods, render_script
from jobs.train.request import check_inputs
from jobs.train.train import plan_training
from jobs.worker.study.plan import StudyPlan
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import TrainOptions
from provision.stacks.load import load_stack
from tests.jobs.context import parse_request

NOW = datetime(2026, 11, 23, tzinfo=timezone.utc)
STACK = load_stack("upstream")


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check_program(task: str, words: Any) -> TrainOptions:
    """The words of a rank, after its module, are the task and options that it understands."""
    assert words[0] == task
    options: TrainOptions = TASKS[task].Options.from_json(words[1])
    assert (options.task, options.model_name) == (task, "scratch")
    return options


def test_the_queue(task: str) -> None:
    request = build_request(parse_request("train", task, "--demo", "--nodes", "2"), NOW)
    check_inputs(request.options)
    plan = plan_training(request, STACK)
    assert (plan.kind, plan.module) == (task, "worker.tasks")
    data = getattr(check_program(task, plan.argv), "data", None)
    assert plan.resumes
    assert [*plan.files] == ([data] if data else [])


def test_kubernetes(task: str) -> None:
    words = ("--to", "kubernetes-yaml", "--demo", "--nodes", "2")
    found = render_pods(parse_request("train", task, *words), NOW)
    if data := getattr(check_program(task, found.plan.argv), "data", None):
        assert "code" + data.partition("/code")[2] in found.build


def test_a_script_for_slurm(task: str) -> None:
    words = ("--to", "slurm-script", "--demo", "--nodes", "2", "--shape", "cores=8")
    script = render_script(parse_request("train", task, *words), NOW)
    assert f"program=(worker.tasks {task} " in script.text
    install = script.files["install.sh"]
    assert isinstance(install, bytes)
    assert f"train=({task} ".encode() in install


def test_a_study(task: str) -> None:
    words = ("--demo", "--tune", "learning-rate=1e-4,1e-3")
    plan = plan_training(build_request(parse_request("train", task, *words), NOW), STACK)
    assert (plan.kind, plan.module) == (task, "worker.study")
    name, study, options = plan.argv
    assert StudyPlan.from_fields(json.loads(study)).trials == 2
    check_program(task, (name, options))
