"""A study of the speed from its trials to its result, and the next `train` that uses it, with SSH faked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infra.errors import JobError, UsageError
from jobs.experiments.placement_study import (
    PlacementStudy,
    Trial,
    TrialResult,
    plan_trials,
    study_placement,
    suggest_ppn,
)
from jobs.places.plan import JobPaths, new_job_id
from jobs.train.request import TrainRequest, spec_of
from jobs.train.study import parse_tune
from jobs.train.train import train
from jobs.train.tuned import FILE
from jobs.worker.spec import PlacementOptions, Resources
from jobs.worker.tasks.squad.task import DEMO
from tests.fakes import FakeHost
from tests.jobs.context import (
    NOW,
    RESULT,
    ended,
    event,
    interrupt,
    job_context,
    make_hosts,
    mpirun_line,
)
from tests.jobs.places.topologies import machine

TRIALS = JobPaths(new_job_id("tune", NOW))
R7IZ = machine(32, smt=True)
MANY = f"batch-size={','.join(map(str, range(1, 66)))}"
SQUAD = TrainRequest(spec_of(DEMO), Path("results"))


def test_ranks_per_node_that_suit_all_nodes() -> None:
    assert suggest_ppn([R7IZ] * 4, 1) == (1, 2, 4)
    assert suggest_ppn([machine(64, sockets=2, numa=2)], 1) == (2, 1, 4, 8)
    assert suggest_ppn([machine(32, numa=4)], 1) == (4, 1, 8, 16)
    assert suggest_ppn([machine(1)] * 2, 0) == (1,)
    assert suggest_ppn([machine(2)], 0) == (1, 2)
    assert suggest_ppn([machine(2)], 1) == (1,), "with a core for oneCCL"
    assert suggest_ppn([machine(6), machine(4)], 0) == (1, 2)
    assert suggest_ppn([machine(1)], 1) == (1,), "nothing fits: the trial says why"


def trials_of(
    words: str, backend: str = "gloo", nodes: int | None = None, there: int = 5, **placement: Any
) -> list[tuple[int, ...]]:
    """The trials of ``--tune`` on 32-core nodes: nodes, ranks per node, oneCCL workers, batch size."""
    resources = Resources(nodes, PlacementOptions(**placement))
    training = TrainRequest(spec_of(DEMO, resources=resources), Path())
    found = plan_trials(parse_tune(words.split(), DEMO), training, [R7IZ] * there, backend)
    assert len(set(found)) == len(found)
    return [(t.nodes, t.nproc_per_node, t.ccl_workers, t.batch_size) for t in found]


def test_every_combination_is_tried_and_the_rest_is_as_in_the_job() -> None:
    both = [(5, ppn, workers, 8) for ppn in (1, 2, 4) for workers in (1, 2)]
    assert trials_of("placement") == [(5, 1, 0, 8), (5, 2, 0, 8), (5, 4, 0, 8)]
    assert trials_of("placement", "ccl") == both
    assert trials_of("placement", "ccl", ccl_workers=3) == both, "varied all the same"
    assert trials_of("ppn=1,2", "ccl", ccl_workers=3) == [(5, 1, 3, 8), (5, 2, 3, 8)]
    assert trials_of("ppn=2 batch-size=4,16", nodes=2) == [(2, 2, 0, 4), (2, 2, 0, 16)]
    assert trials_of("ccl-workers=1,4", "ccl") == [(5, 1, 1, 8), (5, 1, 4, 8)]
    assert trials_of("nodes") == [(1, 1, 0, 8), (2, 1, 0, 8), (4, 1, 0, 8), (5, 1, 0, 8)]
    assert trials_of("nodes", nodes=2, nproc_per_node=4) == [(1, 4, 0, 8), (2, 4, 0, 8)]
    assert trials_of("nodes=4,3") == [(4, 1, 0, 8), (3, 1, 0, 8)]
    assert len(trials_of("nodes=1,2 placement batch-size=8,16", "ccl")) == 24


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("ccl-workers=1", {}, "--ccl-workers: the backend is gloo, which has none"),
        ("nodes=1,6", {}, "--tune nodes=6: expected at most 5"),
        ("batch-size=8,16", {"nodes": 6}, "--nodes 6: the cluster has 5"),
        (MANY, {}, "--tune: 65 trials, expected at most 64"),
    ],
)
def test_impossible_trials_are_refused(words: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}($|\n)"):
        trials_of(words, **options)


def trial_hosts(speeds: Mapping[str, float | None]) -> dict[str, FakeHost]:
    """Nodes on which a trial is as fast as is said for ``RANKS/PPN/BATCH``, or fails."""
    hosts = make_hosts([])
    head = hosts["node0"]

    def speed() -> float | None:
        line = mpirun_line(head, TRIALS)
        found = re.search(r'-ppn (\d+) .*-n (\d+) .*"batch_size": (\d+).*_seconds": 20', line)
        assert found, line
        return speeds[f"{found[2]}/{found[1]}/{found[3]}"]

    def follow(_: str) -> str:
        value = speed()
        if value is None:
            return error
        return event(event="trial", samples_per_second=value, steps=5, seconds=20)

    error = event(event="error", message="no memory", hint=None, rank=0, host="a", lost_peer=False)
    head.answers[:0] = [
        ("(?s)# following a job\n.*/tune-", follow),
        ("cat .*/tune-.*/end", lambda _: ended() if speed() is not None else ended([error], 1)),
        (f"cat {FILE}", lambda _: head.files.get(FILE, b"").decode()),
    ]
    return hosts


def run(
    hosts: dict[str, FakeHost],
    words: str = "ppn=1,2",
    log: list[str] | None = None,
    training: TrainRequest = SQUAD,
    stack: str = "upstream",
) -> PlacementStudy:
    tune = parse_tune(words.split(), training.options)
    return study_placement(job_context(hosts, log=log, stack=stack), training, tune)


def next_train(hosts: dict[str, FakeHost], folder: Path, *left_open: str) -> tuple[str, str]:
    """The mpirun script of the job that follows, and what it says about a study."""
    head, log = hosts["node0"], list[str]()
    head.answers[:0] = [
        ("(?s)# following a job\n.*/squad-", event(**RESULT)),
        ("cat .*/squad-.*/end", ended()),
    ]
    request = TrainRequest(spec_of(DEMO), folder, frozenset(left_open))
    train(job_context(hosts, log=log), request)
    return mpirun_line(head), "".join(line for line in log if "--tune" in line)


@pytest.mark.parametrize(("slow", "fast"), [(1, 2), (2, 1)])
def test_the_faster_trial_is_kept_and_the_next_job_uses_it(
    tmp_path: Path, slow: int, fast: int
) -> None:
    hosts = trial_hosts({f"{3 * slow}/{slow}/8": 10.0, f"{3 * fast}/{fast}/8": 20.0})

    study = run(hosts)

    assert study.best == Trial(3, fast, 0, 8)
    assert study.results == {
        Trial(3, ppn, 0, 8): TrialResult(2 // ppn, 20.0 if ppn == fast else 10.0, 4.0)
        for ppn in (1, 2)
    }
    (kept,) = json.loads(hosts["node0"].files[FILE])
    assert kept["key"]["nodes"] == "3 x Xeon, 2 cores in 1"
    assert (kept["key"]["backend"], kept["key"]["model"]) == ("gloo", "scratch")
    assert (kept["nproc_per_node"], kept["batch_size"]) == (fast, None)
    assert (kept["samples_per_second"], kept["when"]) == (20.0, "2026-07-31T14:25:01Z")
    script, said = next_train(hosts, tmp_path, "placement", "batch_size")
    assert f"-ppn {fast} " in script
    assert '"trial_seconds": null' in script
    assert (
        said == f"--ppn {fast} from `--tune placement` of 2026-07-31; --placement auto ignores it"
    )


def test_the_batch_is_kept_only_if_several_were_compared(tmp_path: Path) -> None:
    hosts = trial_hosts({"3/1/4": 10.0, "3/1/16": 20.0})
    study = run(hosts, "ppn=1,batch-size=4,16")
    assert study.kept
    assert study.kept.batch_size == 16
    script, said = next_train(hosts, tmp_path, "placement", "batch_size")
    assert '"batch_size": 16' in script
    assert "--batch-size 16 (a global batch of 48 samples)" in said
    training = TrainRequest(spec_of(DEMO, resources=Resources(2)), Path())
    one = run(trial_hosts({"2/1/4": 10.0}), "ppn=1,batch-size=4", training=training).kept
    assert one
    assert (one.batch_size, one.key.nodes) == (None, "2 x Xeon, 2 cores in 1")


def test_numbers_of_nodes_have_an_efficiency_and_nothing_is_kept() -> None:
    on_two_and_three = {"2/1/8": 16.0, "4/2/8": 20.0, "3/1/8": 24.0, "6/2/8": None}
    hosts = trial_hosts({"1/1/8": None, "2/2/8": None, **on_two_and_three})

    study = run(hosts, "nodes=1,2,3 ppn=1,2")

    assert (study.best, study.kept) == (Trial(3, 1, 0, 8), None)
    assert FILE not in hosts["node0"].files
    # Relative to the best on two nodes, because the trials on one failed.
    shares = [study.efficiency(each) for each in study.results]
    assert shares == [None, None, 0.8, 1.0, 0.8, None]


def test_a_failed_trial_does_not_end_the_study() -> None:
    study = run(trial_hosts({"3/1/8": None, "6/2/8": 5.0}), "ppn=1,2,3")

    assert study.best.nproc_per_node == 2
    failures = [each.failure for each in study.results.values()]
    assert failures[:2] == ["rank 0 on a: no memory", ""]
    # Two cores can't be divided among three ranks, which is known without a run.
    assert failures[2].startswith("--ppn 3: node0 has 2 physical cores")


def test_trials_have_different_oneccl_workers() -> None:
    study = run(trial_hosts({"3/1/8": 5.0}), "ccl-workers=1,2", stack="intel")
    one, two = study.results.values()
    assert (one.threads, one.failure) == (1, "")
    assert two.failure.startswith("--ppn 1 --ccl-workers 2: node0 has 2 physical cores, too few")
    assert study.kept
    assert (study.best.ccl_workers, study.kept.ccl_workers) == (1, 1)


def test_nothing_is_kept_if_all_trials_fail() -> None:
    hosts = trial_hosts({"3/1/8": None, "6/2/8": None})
    with pytest.raises(JobError) as caught:
        run(hosts)
    # Once, though two failed by it.
    assert caught.value.message == "every trial failed: rank 0 on a: no memory"
    assert f"{TRIALS.log} on node0" in str(caught.value.hint)
    assert FILE not in hosts["node0"].files


def test_ctrl_c_and_a_cancelled_trial_end_the_study_and_nothing_is_kept() -> None:
    speeds = {"3/1/8": 5.0, "6/2/8": 5.0}
    hosts, log = trial_hosts(speeds), list[str]()
    hosts["node0"].answers[:0] = [("# following a job", interrupt), ("# ending a job", "")]
    with pytest.raises(KeyboardInterrupt):
        run(hosts, log=log)
    assert f"# ending a job on all nodes\ncd {TRIALS.root} " in hosts["node0"].commands[-1]
    assert log[-1] == "Job stopped on all nodes"
    others = trial_hosts(speeds)
    others["node0"].answers[:0] = [("cat .*/end.json", ended(state="cancelled", exit_code=None))]
    with pytest.raises(JobError, match=f"job {TRIALS.job_id} was canceled"):
        run(others)
    assert len([c for c in others["node0"].commands if "# submitting" in c]) == 1
    assert FILE not in {**hosts["node0"].files, **others["node0"].files}


def test_files_are_sent_once_after_the_plan_and_variables_for_every_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts, log = trial_hosts({"3/1/8": 5.0, "6/2/8": 6.0}), list[str]()
    head = hosts["node0"]
    put = Mock(side_effect=head.put)
    monkeypatch.setattr(head, "put", put)

    options = replace(DEMO, dtype="fp32", max_length=128, stride=32, max_steps=7)
    run(
        hosts,
        log=log,
        training=TrainRequest(spec_of(options), Path("x"), env=("HF_TOKEN=hf_secret",)),
    )

    assert log[0] == "2 trials of 20 s each: about 2 min with start-up"
    assert len([c for c in head.commands if "# distributing" in c]) == 1
    submitting = [text for text in head.commands if text.startswith("# submitting")]
    name = f"environment.json.{TRIALS.new}"
    words = {f"new={TRIALS.new}", "secrets=environment.json"}
    assert [words <= {*text.splitlines()} for text in submitting] == [True, True]
    calls = [call.args[:2] for call in put.call_args_list]
    sent = [content for content, path in calls if path == f"{TRIALS.root}/{name}"]
    assert [json.loads(content) for content in sent] == [["HF_TOKEN=hf_secret"]] * 2
    assert not any("hf_secret" in command for command in head.commands)
    script = mpirun_line(head, TRIALS)
    assert "-m worker.tasks squad '{" in script
    for text in ('"dtype": "fp32"', '"max_length": 128', '"max_steps": 7', "HF_HUB_OFFLINE 1"):
        assert text in script
