"""What `--tune` may say, and the plan of a study."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from infra.errors import UsageError
from jobs.cli.train import build_request
from jobs.places.plan import JobPlan
from jobs.places.queue.session import JobSession
from jobs.train.request import TrainRequest
from jobs.train.resume import ResumeRequest, plan_again
from jobs.train.study import OPTUNA, is_placement, parse_tune, plan_study
from jobs.train.train import _with_tuned, plan_training
from jobs.worker.spec import PlacementOptions
from jobs.worker.study.plan import Domain, StudyPlan
from jobs.worker.tasks import TASKS
from jobs.worker.tasks.squad.task import DEMO
from jobs.worker.training.options import TrainOptions
from provision.stacks.load import load_stack
from tests.jobs.context import NOW, SUBMITTED, parse_request

RATES = Domain(low=1e-5, high=1e-3, log=True)
RANGE = "learning-rate=1e-5..1e-3:log"
MANY = f"seed={','.join(map(str, range(550)))} epochs=1,2"
SUITED = Domain()
OTHERS = {"ccl_workers": SUITED}


def options(task: str = "classify") -> TrainOptions:
    found: TrainOptions = TASKS[task].Options()
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (RANGE, {"learning_rate": RATES}),
        ("learning-rate=1e-5..1e-3", {"learning_rate": replace(RATES, log=False)}),
        ("warmup-ratio=0..0.5", {"warmup_ratio": Domain(low=0, high=0.5)}),
        ("batch-size=8..64:log", {"batch_size": Domain(low=8, high=64, log=True)}),
        ("batch-size=16,8", {"batch_size": Domain((16, 8))}),
        ("--batch_size=8", {"batch_size": Domain((8,))}),
        ("lr-schedule=linear,cosine", {"lr_schedule": Domain(("linear", "cosine"))}),
        ("freeze-layers=1,embeddings", {"freeze_layers": Domain(("1", "embeddings"))}),
        ("ipex=True,false", {"ipex": Domain((True, False))}),
        ("patience=1,2 seed=1,2", {"patience": Domain((1, 2)), "seed": Domain((1, 2))}),
        (
            f"batch-size=8,16,{RANGE},epochs=1",
            {"batch_size": Domain((8, 16)), "learning_rate": RATES, "epochs": Domain((1,))},
        ),
        ("placement", {"ppn": SUITED, "ccl_workers": SUITED}),
        ("nodes", {"nodes": SUITED}),
        ("ppn=2,1 placement nodes", {"ppn": Domain((2, 1)), **OTHERS, "nodes": SUITED}),
        ("placement ppn=2", {"ppn": Domain((2,)), **OTHERS}),
    ],
)
def test_what_a_study_varies(words: str, expected: dict[str, Domain]) -> None:
    found = parse_tune(words.split(), options())
    assert found == expected
    assert is_placement(found) == any(name in found for name in ("ppn", "nodes"))
    for name, each in found.items():
        assert name in ("learning_rate", "warmup_ratio") or isinstance(each.low, int)


def test_what_decides_how_runs_are_compared_does_not_vary() -> None:
    fixed = ("data", "dataset", "eval-fraction", "metric", "backend", "report-to", "resume")
    for name in fixed:
        with pytest.raises(UsageError, match=f"{name}: `train classify` has no such option to"):
            parse_tune([f"{name}=1"], options())


def test_nothing_is_given_twice() -> None:
    for words in ("batch-size=8,8", "ppn=2,4,2", "batch-size=8,16 batch-size=32"):
        with pytest.raises(UsageError, match="twice"):
            parse_tune(words.split(), options())


def test_a_value_must_suit_the_jobs_other_options() -> None:
    with pytest.raises(UsageError, match="--stride 300 is out of range: at most half"):
        parse_tune(["stride=16,300"], options("squad"))
    assert parse_tune(["stride=300"], replace(DEMO, max_length=600))


@pytest.mark.parametrize(
    ("words", "trials", "expected"),
    [
        ("batch-size=8,16 epochs=1,2,3", None, 6),
        ("batch-size=8,16", 1, 1),
        ("batch-size=8,16", 50, 2),
        (f"batch-size=8,16 {RANGE}", None, 20),
        (RANGE, 1000, 1000),
        (MANY, 50, 50),
    ],
)
def test_the_number_of_trials(words: str, trials: int | None, expected: int) -> None:
    tune = parse_tune(words.split(), options())
    assert plan_study(tune, trials, options()) == StudyPlan(tune, expected)


def test_impossible_studies_are_refused() -> None:
    class NoScore(TrainOptions):
        task = "none"

    for words, given, why in (
        (MANY, options(), "--tune: 1100 combinations"),
        (RANGE, NoScore(), "`train none` has no score to compare trials by"),
    ):
        with pytest.raises(UsageError, match=why):
            plan_study(parse_tune(words.split(), options()), None, given)


def request_of(*words: str) -> TrainRequest:
    return build_request(parse_request("train", "squad", "--demo", *words), NOW)


def plan_of(*words: str) -> JobPlan:
    return plan_training(request_of(*words), load_stack("upstream"))


def test_the_job_of_a_study() -> None:
    plan = plan_of(f"--tune={RANGE},batch-size=8,16", "--tune=epochs=1,2", "--trials=5")

    task, study, shared = plan.argv
    assert (plan.kind, plan.module, task) == ("squad", "worker.study", "squad")
    tune = {"learning_rate": RATES, "batch_size": Domain((8, 16)), "epochs": Domain((1, 2))}
    assert StudyPlan.from_fields(json.loads(study)) == StudyPlan(tune, 5)
    assert shared == plan_of().argv[1]
    assert plan.packages
    assert plan.packages.lines == (OPTUNA,)
    asked, no_session = request_of(f"--tune={RANGE}"), cast("JobSession", None)
    assert _with_tuned(no_session, asked) is asked, "it does not look for a kept placement"
    assert (plan_of().module, plan_of().packages) == ("worker.tasks", None)


@pytest.mark.parametrize("changes", [{}, {"report_to": "mlflow"}])
def test_a_resumed_study_keeps_its_plan(changes: dict[str, Any]) -> None:
    plan = plan_of(f"--tune={RANGE}", "--trials=5")
    record = replace(
        SUBMITTED,
        argv=("python", "-m", plan.module, *plan.argv),
        options=PlacementOptions("auto", 1, None),
    )

    again = plan_again(record, ResumeRequest("squad", None, changes=changes), 3, SUBMITTED.job)

    assert (again.module, again.argv[:2], again.spec.work.study) == (
        *("worker.study", plan.argv[:2], json.loads(plan.argv[1])),
    )
    assert DEMO.from_json(again.argv[2]).resume
    assert again.packages
    assert again.packages.lines[0] == OPTUNA
    assert again.packages.source == "--tune" + ", --report-to mlflow" * len(changes)
    assert len(again.packages.lines) == 1 + len(changes)
    plain = replace(record, argv=("python", "-m", "worker.tasks", "squad", plan.argv[2]))
    assert plan_again(plain, ResumeRequest("squad", None), 3, "x").packages is None
