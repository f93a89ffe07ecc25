"""`tune` from its trials to its result, and the next `train` that uses it, with SSH faked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import HostError, JobError
from jobs.experiments.tune import Trial, TrialGrid, TrialResult, TuneRequest, tune
from jobs.places.plan import JobPaths, new_job_id
from jobs.train.request import TrainRequest, spec_of
from jobs.train.train import train
from jobs.train.tuned import FILE, TuningResult
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

TRIALS = JobPaths(new_job_id("tune", NOW))


def trial_hosts(speeds: Mapping[str, float | None]) -> dict[str, FakeHost]:
    """Nodes on which a trial is as fast as is said for ``PPN/BATCH``, or fails."""
    hosts = make_hosts([])
    head = hosts["node0"]

    def speed() -> float | None:
        line = mpirun_line(head, TRIALS)
        found = re.search(r'-ppn (\d+).*"batch_size": (\d+).*"trial_seconds": 7', line)
        assert found, line
        return speeds[f"{found[1]}/{found[2]}"]

    def follow(_: str) -> str:
        value = speed()
        if value is not None:
            return event(
                event="trial", samples_per_second=value, steps=5, seconds=7, gradient_bytes=1000
            )
        return error

    error = event(event="error", message="no memory", hint=None, rank=0, host="a", lost_peer=False)
    head.answers[:0] = [
        ("(?s)# following a job\n.*/tune-", follow),
        ("cat .*/tune-.*/end", lambda _: ended() if speed() is not None else ended([error], 1)),
        (f"cat {FILE}", lambda _: head.files.get(FILE, b"").decode()),
    ]
    return hosts


def run(
    hosts: dict[str, FakeHost], grid: TrialGrid, log: list[str] | None = None
) -> tuple[TuningResult, dict[Trial, TrialResult]]:
    training = TrainRequest(spec_of(DEMO), Path("results"))
    return tune(
        job_context(hosts, log=log),
        TuneRequest(training, grid, 7),
        on_plan=lambda trials: (log if log is not None else []).append(f"{len(trials)} trials"),
    )


def next_train(hosts: dict[str, FakeHost], folder: Path, *left_open: str) -> tuple[str, list[str]]:
    """The mpirun script of the job that follows, and what it says."""
    head, log = hosts["node0"], list[str]()
    head.answers[:0] = [
        ("(?s)# following a job\n.*/squad-", event(**RESULT)),
        ("cat .*/squad-.*/end", ended()),
    ]
    train(
        job_context(hosts, log=log),
        TrainRequest(spec_of(DEMO), folder, frozenset(left_open)),
    )
    return mpirun_line(head), log


@pytest.mark.parametrize(("slow", "fast"), [(1, 2), (2, 1)])
def test_the_faster_trial_is_kept_and_the_next_job_uses_it(
    tmp_path: Path, slow: int, fast: int
) -> None:
    hosts = trial_hosts({f"{slow}/8": 10.0, f"{fast}/8": 20.0})

    best, results = run(hosts, TrialGrid((1, 2), None, (8,)))

    assert (best.nproc_per_node, best.batch_size, best.samples_per_second) == (fast, None, 20.0)
    speeds = {t.nproc_per_node: r.samples_per_second for t, r in results.items()}
    assert speeds == {slow: 10, fast: 20}
    assert {t.nproc_per_node: r.threads for t, r in results.items()} == {1: 2, 2: 1}
    script, log = next_train(hosts, tmp_path, "placement", "batch_size")
    assert f"-ppn {fast} " in script
    assert '"trial_seconds": null' in script
    assert f"--ppn {fast} from `spr-cluster tune` of 2026-07-31; --no-tuned ignores it" in log


def test_the_users_placement_is_kept(tmp_path: Path) -> None:
    hosts = trial_hosts({"1/8": 10.0, "2/8": 20.0})
    run(hosts, TrialGrid((1, 2), None, (8,)))

    script, log = next_train(hosts, tmp_path)

    assert "-ppn 1 " in script
    assert not [line for line in log if "tune" in line]


def test_an_untuned_cluster_has_the_default_placement(tmp_path: Path) -> None:
    script, log = next_train(trial_hosts({}), tmp_path, "placement", "batch_size")

    assert "-ppn 1 " in script
    assert not [line for line in log if "tune" in line]


def test_the_batch_is_kept_only_if_several_were_compared(tmp_path: Path) -> None:
    hosts = trial_hosts({"1/8": 10.0, "1/16": 20.0})
    best, _ = run(hosts, TrialGrid((1,), None, (8, 16)))

    assert best.batch_size == 16
    script, log = next_train(hosts, tmp_path, "placement", "batch_size")
    assert '"batch_size": 16' in script
    assert "--batch-size 16 (a global batch of 48 samples)" in "".join(log)


def test_a_failed_trial_does_not_end_the_study() -> None:
    hosts = trial_hosts({"1/8": None, "2/8": 5.0})

    best, results = run(hosts, TrialGrid((1, 2, 3), None, (8,)))
    outcomes = list(results.values())

    assert best.nproc_per_node == 2
    assert [bool(outcome.failure) for outcome in outcomes] == [True, False, True]
    assert outcomes[0].failure == "rank 0 on a: no memory"
    # Two cores can't be divided among three ranks, which is known without a run.
    assert outcomes[2] == TrialResult(failure=outcomes[2].failure)
    assert "--ppn 3: node0 has 2 physical cores" in outcomes[2].failure


def test_nothing_is_kept_if_all_trials_fail() -> None:
    hosts = trial_hosts({"1/8": None, "2/8": None})

    with pytest.raises(JobError, match="every trial failed: rank 0 on a: no memory") as caught:
        run(hosts, TrialGrid((1, 2), None, (8,)))
    # Once, though two failed by it.
    assert caught.value.message == "every trial failed: rank 0 on a: no memory"
    assert f"{TRIALS.log} on node0" in str(caught.value.hint)
    assert FILE not in hosts["node0"].files


def test_ctrl_c_ends_the_trial_and_keeps_nothing() -> None:
    hosts, log = trial_hosts({"1/8": 5.0, "2/8": 5.0}), list[str]()
    hosts["node0"].answers[:0] = [("# following a job", interrupt), ("# ending a job", "")]

    with pytest.raises(KeyboardInterrupt):
        run(hosts, TrialGrid((1, 2), None, (8,)), log)
    assert f"# ending a job on all nodes\ncd {TRIALS.root} " in hosts["node0"].commands[-1]
    assert log[-1] == "Job stopped on all nodes"
    assert FILE not in hosts["node0"].files


def test_a_cancelled_trial_is_the_last_one() -> None:
    hosts, log = trial_hosts({"1/8": None, "2/8": 5.0}), list[str]()
    hosts["node0"].answers[:0] = [("cat .*/end.json", ended(state="cancelled", exit_code=None))]

    with pytest.raises(JobError, match=f"job {TRIALS.job_id} was cancelled"):
        run(hosts, TrialGrid((1, 2), None, (8,)), log)
    assert len([c for c in hosts["node0"].commands if "# submitting" in c]) == 1
    assert FILE not in hosts["node0"].files


def test_files_are_sent_once_and_the_plan_is_shown_first() -> None:
    hosts, log = trial_hosts({"1/8": 5.0, "2/8": 6.0}), list[str]()

    run(hosts, TrialGrid((1, 2), None, (8,)), log)

    assert log[0] == "2 trials"
    commands = hosts["node0"].commands
    assert len([c for c in commands if "# distributing" in c]) == 1
    assert len([c for c in commands if "# submitting" in c]) == 2


def test_files_that_can_not_be_sent_are_removed() -> None:
    hosts = trial_hosts({})
    full = HostError("node0", "tar: No space left on device")
    hosts["node0"].answers[:0] = [("# distributing", full), ("# removing the files of a job", "")]
    with pytest.raises(HostError, match="No space left"):
        run(hosts, TrialGrid((1,), None, (8,)))
    assert "# removing the files of a job" in hosts["node0"].commands[-1]


def test_a_result_records_what_it_was_measured_with() -> None:
    hosts = trial_hosts({"1/8": 5.0})
    best, _ = run(hosts, TrialGrid((1,), None, (8,)))

    (kept,) = json.loads(hosts["node0"].files[FILE])
    assert kept["key"]["nodes"] == "3 x Xeon, 2 cores in 1"
    assert (kept["key"]["backend"], kept["key"]["model"]) == ("gloo", "scratch")
    assert (kept["when"], best.day) == ("2026-07-31T14:25:01Z", "2026-07-31")


def test_a_trial_that_needs_no_hub_is_offline() -> None:
    hosts = trial_hosts({"1/8": 5.0})
    run(hosts, TrialGrid((1,), None, (8,)))
    assert "HF_HUB_OFFLINE 1" in mpirun_line(hosts["node0"], TRIALS)


def test_every_trial_gets_the_variables_which_the_one_before_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts, put = trial_hosts({"1/8": 5.0, "2/8": 6.0}), list[tuple[str, bytes]]()
    plain = hosts["node0"].put

    def note(content: bytes, path: str, *mode: int) -> None:
        put.append((path, content))
        plain(content, path, *mode)

    monkeypatch.setattr(hosts["node0"], "put", note)
    training = TrainRequest(spec_of(DEMO), Path("x"), env=("HF_TOKEN=hf_secret",))

    tune(
        job_context(hosts),
        TuneRequest(training, TrialGrid((1, 2), None, (8,)), 7),
        on_plan=lambda _: None,
    )

    head = hosts["node0"]
    submitting = [text for text in head.commands if text.startswith("# submitting")]
    assert len(submitting) == 2
    assert all("environment.json.new" in text for text in submitting)
    sent = [content for path, content in put if path == f"{TRIALS.root}/environment.json.new"]
    assert [json.loads(content) for content in sent] == [["HF_TOKEN=hf_secret"]] * 2
    assert not any("hf_secret" in command for command in head.commands)


def test_a_trial_is_the_training_job_itself() -> None:
    hosts = trial_hosts({"1/4": 5.0})
    options = replace(DEMO, dtype="fp32", max_length=128, stride=32)
    tune(
        job_context(hosts),
        TuneRequest(TrainRequest(spec_of(options), Path("x")), TrialGrid((1,), None, (4,)), 7),
        on_plan=lambda _: None,
    )
    script = mpirun_line(hosts["node0"], TRIALS)
    assert "-m worker.tasks squad '{" in script
    assert '"dtype": "fp32"' in script
    assert '"max_length": 128' in script
