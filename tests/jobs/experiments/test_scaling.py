"""The scaling study from its trials to its table, with SSH faked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import JobError, UsageError
from jobs.cli.tune import build_scaling_request, choose_nodes, render_scaling
from jobs.experiments.scaling import FOLDER, ScalingRequest, ScalingStudy, batch_per_rank, scaling
from jobs.experiments.step_model import StepModel
from jobs.places.plan import JobPaths, new_job_id
from jobs.places.record import CloudInfo
from jobs.train.request import TrainRequest, spec_of
from jobs.worker.fast.communication import BUCKET_MB
from jobs.worker.fast.compilation import choose_compilation
from jobs.worker.spec import PlacementOptions
from jobs.worker.tasks.squad.task import DEMO
from tests.fakes import FakeHost
from tests.jobs.context import (
    NOW,
    ended,
    event,
    job_context,
    make_hosts,
    mpirun_line,
    parse_request,
)

TRIALS = JobPaths(new_job_id("scaling", NOW))
BYTES = 265_457_672
TRUE = StepModel(0.01, BYTES, 1.25e9, fixed_s=0.02)


def step_s(nodes: int, batch: int) -> float | None:
    return TRUE.step_s(nodes, batch)


def scaling_hosts(
    speed: Callable[[int, int], float | None] = step_s,
) -> tuple[dict[str, FakeHost], list[tuple[int, int]]]:
    """Nodes whose step time depends on the number of nodes and the batch, or which fail."""
    hosts = make_hosts([])
    head, seen = hosts["node0"], list[tuple[int, int]]()

    def follow(_: str) -> str:
        line = mpirun_line(head, TRIALS)
        found = re.search(r'-ppn 1 .*-n (\d+) .*"batch_size": (\d+).*"trial_seconds": 7', line)
        assert found, line
        seen.append((int(found[1]), int(found[2])))
        seconds = speed(*seen[-1])
        if seconds is None:
            return "no memory"
        rate = seen[-1][0] * seen[-1][1] / seconds
        return event(
            event="trial",
            samples_per_second=rate,
            steps=5,
            seconds=5 * seconds,
            gradient_bytes=BYTES if seen[-1][0] > 1 else 0,
        )

    head.answers[:0] = [
        ("# following a job", follow),
        ("cat .*/end.json", lambda _: ended(exit_code=int(speed(*seen[-1]) is None))),
        (f"mkdir -p ~/{FOLDER}", ""),
    ]
    return hosts, seen


def scaling_request(folder: Path, **more: Any) -> ScalingRequest:
    training = TrainRequest(spec_of(replace(DEMO, batch_size=12)), folder)
    return replace(ScalingRequest(training, (1, 2, 3), weak=False, seconds=7), **more)


def go(hosts: dict[str, FakeHost], request: ScalingRequest) -> ScalingStudy:
    price = CloudInfo("aws", "us-east-1", True, 6.5472, "Price List API, 2026-11-22")
    return scaling(job_context(hosts, cloud=price), request)


def test_strong_scaling_keeps_the_whole_batch(tmp_path: Path) -> None:
    hosts, seen = scaling_hosts()

    study = go(hosts, scaling_request(tmp_path, predict=(6,)))

    assert seen == [(1, 12), (2, 6), (3, 4)]
    assert [row.batch_size for row in study.rows] == [12, 6, 4, 2]
    one, _, three, six = study.rows
    assert one.efficiency == 1
    assert three.speedup == pytest.approx(TRUE.step_s(1, 12) / TRUE.step_s(3, 4), rel=1e-3)
    assert study.fit is not None
    assert study.fit.worst < 1e-3
    assert six.predicted
    assert six.step_s == pytest.approx(TRUE.step_s(6, 2), rel=1e-2)
    assert six.epoch_s == pytest.approx(88_500 / 12 * TRUE.step_s(6, 2), rel=1e-2)
    # r7iz.metal-16xl at 6.5472 US dollars an hour.
    assert six.epoch_usd == pytest.approx(6 * 6.5472 * (six.epoch_s or 0) / 3600)


def test_weak_scaling_keeps_the_batch_of_each_rank(tmp_path: Path) -> None:
    hosts, seen = scaling_hosts()
    study = go(hosts, scaling_request(tmp_path, weak=True, nodes=(1, 3)))
    assert seen == [(1, 12), (3, 12)]
    assert study.rows[1].efficiency == pytest.approx(TRUE.step_s(1, 12) / TRUE.step_s(3, 12))


def test_the_study_is_kept_on_the_head_and_here(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts()
    study = go(hosts, scaling_request(tmp_path / "new"))

    here = json.loads((tmp_path / "new" / "scaling.json").read_text())
    kept = hosts["node0"].files[f"/home/ubuntu/{FOLDER}/20260731-142501.json"]
    assert json.loads(kept) == here == json.loads(json.dumps(study.as_dict()))
    assert [(run["nodes"], run["name"]) for run in here["runs"]] == [
        (1, "strong"),
        (2, "strong"),
        (3, "strong"),
    ]
    assert here["published_speedup"] == {"1": 1.0, "4": 3.467}


def test_files_are_sent_once(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts()
    go(hosts, scaling_request(tmp_path, nodes=(1, 2)))
    assert len([c for c in hosts["node0"].commands if "distributing" in c]) == 1


def test_a_trial_that_fails_is_a_row(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts(lambda nodes, batch: None if nodes == 2 else step_s(nodes, batch))
    study = go(hosts, scaling_request(tmp_path))
    assert [bool(row.failure) for row in study.rows] == [False, True, False]
    shown = "\n".join(render_scaling(study, tmp_path))
    assert re.search(r"^2 +6 +failed: the job ended with exit code 1: no memory", shown, re.M)


def test_no_study_is_kept_if_all_trials_fail(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts(lambda *_: None)
    with pytest.raises(JobError, match="every trial failed: the job ended with exit code 1"):
        go(hosts, scaling_request(tmp_path))
    assert not (tmp_path / "scaling.json").exists()


def test_one_number_of_nodes_makes_no_model(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts()
    study = go(hosts, scaling_request(tmp_path, nodes=(2,), predict=(4,)))
    assert study.fit is None
    assert [row.nodes for row in study.rows] == [2]
    shown = "\n".join(render_scaling(study, tmp_path))
    assert "No model of the step time" in shown
    assert "25 MiB" not in shown


def test_the_study_is_rendered_as_a_table(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts()
    request = scaling_request(tmp_path, weak=True, predict=(4, 8))
    shown = "\n".join(render_scaling(go(hosts, request), tmp_path))

    assert "Cost on demand, machines alone: Price List API, 2026-11-22." in shown
    assert re.search(r"^4\* +12 .* 3\.47 ", shown, re.M)
    assert re.search(r"^1 +12 .* 1\.00 +100% +1\.00 .* \$\d+\.\d\d$", shown, re.M)
    assert "around a ring at 10.00 Gbit/s." in shown
    assert "Largest error for a measured step: 0.0%" in shown
    assert "Trials compile no layers, except with --compile on" in shown
    assert not choose_compilation("auto", "bf16", 0.0).enabled
    assert f"25 MiB; `train` sends {BUCKET_MB / 2} MiB ({BUCKET_MB} MiB in fp32)" in shown


def test_steps_explained_by_exchange_alone_make_no_model(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts(lambda nodes, _: {2: 1.0, 3: 1.6}[nodes])
    study = go(hosts, scaling_request(tmp_path, nodes=(2, 3), weak=True, predict=(1,)))
    assert study.fit is None
    shown = "\n".join(render_scaling(study, tmp_path))
    assert "the exchange alone would explain these steps; also measure one node" in shown
    # What was published is against one node, which this study has not measured.
    assert "3.47" not in shown


def test_superlinear_speedup_implies_no_network_speed(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts(lambda nodes, _: 1.0 / (nodes * 1.1))
    shown = "\n".join(render_scaling(go(hosts, scaling_request(tmp_path, nodes=(1, 2))), tmp_path))
    assert "the steps show no cost of exchanging gradients" in shown
    assert "Gbit/s" not in shown
    assert "with 2 parameters for 2 measurements it proves little" in shown


def test_containers_cost_nothing(tmp_path: Path) -> None:
    hosts, _ = scaling_hosts()
    free = job_context(hosts, cloud=CloudInfo("local", "x", False))
    assert {row.epoch_usd for row in scaling(free, scaling_request(tmp_path)).rows} == {None}


def test_an_indivisible_batch_is_refused() -> None:
    assert batch_per_rank(32, 1, 4, weak=False) == 8
    assert batch_per_rank(32, 2, 4, weak=False) == 16
    assert batch_per_rank(32, 1, 3, weak=True) == 32
    for size, nodes in ((32, 3), (2, 4)):
        with pytest.raises(UsageError, match=f"can't be divided evenly among {nodes}"):
            batch_per_rank(size, 1, nodes, weak=False)


def typed(*flags: str) -> ScalingRequest:
    return build_scaling_request(parse_request("tune", "squad", "--scaling", *flags), NOW)


def test_the_command_line() -> None:
    asked = typed("--nodes=4,1,2", "--predict=16,8", "--weak", "--ppn=2", "--batch-size=24")
    assert (asked.nodes, asked.predict, asked.weak) == ((1, 2, 4), (8, 16), True)
    assert asked.training.placement == PlacementOptions("auto", 2)
    assert asked.training.options.batch_size == 24
    all_of = [choose_nodes(typed("--weak"), there).nodes for there in (1, 2, 3, 4)]
    assert all_of == [(1,), (1, 2), (1, 2, 3), (1, 2, 4)]
    with pytest.raises(UsageError, match="can't be divided evenly among 3"):
        choose_nodes(typed("--batch-size=16"), 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--nodes=1,3 --batch-size=16",
            "--batch-size 16: the batch of 1 node can't be divided evenly among 3",
        ),
        ("--seconds=0", "--seconds 0 is out of range: 1 to 3600"),
        ("--predict=257", "--predict 257 is out of range: 1 to 256"),
        ("--batch-size=5000", "--batch-size 5000 is out of range"),
        ("--ppn=1,2", "--ppn 1,2: --scaling compares only nodes"),
    ],
)
def test_mistakes(flags: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        typed(*flags.split())
    assert caught.value.message.startswith(message)
