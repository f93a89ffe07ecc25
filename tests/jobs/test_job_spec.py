"""A job's value is the same from every front end, and reaches the supervisor on the node unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.files import parse_toml
from infra.project_file import ProjectFile
from jobs.api import Run, Training, _render
from jobs.cli import run as run_command
from jobs.cli import train as train_command
from jobs.cli.shared.project_options import apply_project
from jobs.places.placement import plan_placement
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.session import with_bucket
from jobs.places.queue.slurm import build_launch
from jobs.program.plan import plan_program
from jobs.train.train import plan_training
from jobs.worker.spec import JobSpec
from jobs.worker.study.plan import Domain, StudyPlan
from jobs.worker.supervisor.launch import parse_launch
from provision.stacks.load import load_stack
from tests.jobs.context import NOW, parse_request, whole_cluster
from tests.jobs.places.topologies import machine

STACK = load_stack("upstream")
OPTIONS: dict[str, Any] = {
    "nodes": 1,
    "ppn": 2,
    "retries": 3,
    "max-time": "8h",
    "bucket": "s3://own/team",
    "budget": 12.5,
}
TOML = "".join(f"{key} = {value!r}\n" for key, value in OPTIONS.items())


def words_of(kind: str) -> list[str]:
    flags = [f"--{key}={value}" for key, value in OPTIONS.items()]
    if kind == "run":
        return ["run", "--folder=none", *flags, "--", "echo", "--nodes", "it's"]
    return ["train", kind, "--demo", "--seed=7", *flags]


def from_file(kind: str) -> list[str]:
    own = 'command = ["echo", "--nodes", "it\'s"]\n'
    own = own if kind == "run" else f'task = "{kind}"\ndemo = true\nseed = 7\n'
    text = f"[jobs.a]\n{own}{TOML}"
    project = ProjectFile(Path("spr-cluster.toml"), parse_toml(text, "f"), text)
    words = apply_project(["run", "a"], project).words
    return [word for word in words if not word.startswith("--folder=/")]


def from_python(kind: str) -> list[str]:
    options = {key.replace("-", "_"): value for key, value in OPTIONS.items()}
    if kind == "run":
        work: Any = Run("echo", "--nodes", "it's", folder="none", **options)
    else:
        work = Training(kind, demo=True, seed=7, **options)
    rest = ["--", *work.program] if work.program else []
    return [*work.words, *_render(work.words[0], work.options), *rest]


def plan_of(words: list[str]) -> JobPlan:
    if words[0] == "run" and "--folder=none" not in words:
        words = ["run", "--folder=none", *words[1:]]
    request = parse_request(*words)
    if words[0] == "run":
        return plan_program(run_command.build_request(request, Path("out")), STACK)
    return plan_training(train_command.build_request(request, NOW), STACK)


def on_the_node(plan: JobPlan) -> JobSpec:
    """What the supervisor reads."""
    cluster = whole_cluster().first(1)
    address = {"node0": cluster.head.private_ip}
    placement = plan_placement(
        {"node0": machine(8)}, address, plan.spec.resources.placement, "gloo"
    )
    launch = build_launch(plan, placement, JobPaths("squad-1"), cluster, STACK)
    return parse_launch(launch.render().decode()).spec


@pytest.mark.parametrize("kind", ["squad", "digits", "run"])
def test_the_value_is_the_same_on_both_ends(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    plans = [plan_of(each(kind)) for each in (words_of, from_file, from_python)]
    specs = [with_bucket(plan, whole_cluster()).spec for plan in plans]
    assert specs[0] == specs[1] == specs[2]
    assert [on_the_node(plan) for plan in plans] == specs
    spec = specs[0]
    assert (spec.resources.nodes, spec.resources.placement.nproc_per_node) == (1, 2)
    assert (spec.recovery.retries, spec.storage.bucket) == (3, "s3://own/team")
    assert (spec.ending.max_time_s, spec.ending.budget) == (28800.0, 12.5)
    if kind == "run":
        assert spec.work.program == ("echo", "--nodes", "it's")
    else:
        assert (spec.work.task, spec.work.options["seed"]) == (kind, 7)


def test_a_study_is_the_same_on_both_ends() -> None:
    words = ["train", "squad", "--demo", "--tune=epochs=1,2", "--tune=warmup-ratio=0..0.5"]
    tune = ["epochs=1,2", "warmup-ratio=0..0.5"]
    text = f'[jobs.a]\ntask = "squad"\ndemo = true\ntune = {tune}\n'
    project = ProjectFile(Path("spr-cluster.toml"), parse_toml(text, "f"), text)
    work = Training("squad", demo=True, tune=tune)
    by_python = [*work.words, *_render("train", work.options)]
    by_file = apply_project(["run", "a"], project).words

    studies = [on_the_node(plan_of(each)).work.study for each in (words, by_file, by_python)]

    assert studies[0] == studies[1] == studies[2]
    choices, range_ = Domain((1, 2)), Domain(low=0, high=0.5)
    assert StudyPlan.from_fields(studies[0]) == StudyPlan(
        {"epochs": choices, "warmup_ratio": range_}, 20
    )
