"""Resuming an interrupted job: which one, with which options, and what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import JobError, UsageError
from infra.s3_url import S3Location
from jobs.places.launcher import JobSummary, parse_end
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.record import CloudInfo, JobRecord
from jobs.train.resume import (
    ResumeRequest,
    add_spent,
    choose_unfinished,
    keep_choices,
    plan_again,
    resume,
    with_login,
)
from jobs.worker.runtime.process import PLANNED
from jobs.worker.spec import Ending, JobSpec, PlacementOptions, Recovery
from jobs.worker.tasks.squad.task import DEMO
from jobs.worker.training.options import BASE_MODEL
from tests.fakes import FakeHost
from tests.jobs.context import (
    PATHS,
    RESULT,
    SUBMITTED,
    event,
    job_context,
    job_spec,
    listed,
    make_hosts,
    mpirun_line,
    sent_variables,
)
from tests.jobs.places.test_history import job

OPTIONS = replace(DEMO, backend="gloo", output="output")
RECORD = replace(
    SUBMITTED,
    argv=("python", "-m", "worker.tasks", "squad", OPTIONS.to_json()),
    nnodes=3,
    options=PlacementOptions("auto", 1, None),
    env={"HF_HUB_OFFLINE": "1", BASE_MODEL: "/home/me/base"},
)


def hosts_with(record: JobRecord | str, jobs: str) -> dict[str, FakeHost]:
    hosts = make_hosts([event(event="resumed", step=40, total=90), event(**RESULT)])
    text = record if isinstance(record, str) else record.render()
    hosts["node0"].answers[:0] = [
        ("listing the jobs", jobs),
        ("cat .*/job.json", text),
    ]
    return hosts


def with_ppn(ppn: int | None) -> JobSpec:
    return job_spec(placement=PlacementOptions(nproc_per_node=ppn))


def run(
    hosts: dict[str, FakeHost], request: ResumeRequest, log: list[str] | None = None
) -> tuple[Any, Path]:
    return resume(job_context(hosts, log=log), request)


def test_a_job_resumes_with_its_own_options_and_files(tmp_path: Path) -> None:
    hosts = hosts_with(RECORD, listed(PATHS.job_id, "step-000040"))
    log: list[str] = []

    result, folder = run(hosts, ResumeRequest("squad", None, tmp_path / "out"), log)

    assert result == {"f1": 90.0}
    assert folder == tmp_path / "out"
    script = mpirun_line(hosts["node0"])
    assert f"-ppn 1 -wdir {PATHS.root} -n 3 " in script
    assert replace(OPTIONS, resume=True).to_json() in script
    assert "HF_HUB_OFFLINE 1" in script
    assert f"{BASE_MODEL} /home/me/base" in script
    assert f"job {PATHS.job_id} resumes from step-000040" in log
    assert not any("distributing the job's files" in each for each in hosts["node0"].commands)
    kept = json.loads(hosts["node0"].files[PATHS.uploaded("job.json")])
    changed = {**json.loads(RECORD.render()), "when": kept["when"], "boot_s": kept["boot_s"]}
    spent, recovery = {"seconds": 0.0, "usd": 0.0}, {"retries": 0, "least_nodes": 0}
    more = {"spent": spent, "recovery": recovery}
    now = {"cloud": "", "region": "", "billed": None, "more": more, "run_nodes": 3}
    assert kept == {**changed, **now}


ALONE = {"from": 1_800_000_500.0, "nodes": 8}
LIMIT = {"max_time_s": 720.0, "budget": 3.0, "usd_per_hour": 6.0, "alone": ALONE}
LATE = {**LIMIT, "alone": {**ALONE, "from": 1_800_000_300.0}}
BEFORE = {"seconds": 50.0, "usd": 1.0}
RAN = {"state": "cancelled", "began": 1_800_000_200.0, "ended": 1_800_000_400.0}
RAN |= {"first": 1_800_000_000.0, "nodes": ["node0", "node1"]}


@pytest.mark.parametrize(
    ("more", "asked", "kept", "spent"),
    [
        ({"limit": LIMIT}, {}, (720.0, 3.0), (400.0, 4 / 3)),
        ({"limit": LIMIT}, {"max_time_s": 9000.0}, (9000.0, 3.0), (400.0, 4 / 3)),
        ({"limit": LIMIT}, {"budget": 5.0}, (720.0, 5.0), (400.0, 4 / 3)),
        ({"limit": LIMIT, "spent": BEFORE}, {}, (720.0, 3.0), (450.0, 7 / 3)),
        # For its last 100 s, it kept all eight nodes.
        ({"limit": LATE}, {}, (720.0, 3.0), (400.0, 4 / 3 + 1.0)),
        ({}, {}, (0.0, 0.0), (400.0, 2 * 6.5 / 9)),
    ],
)
def test_a_resumed_job_keeps_its_limits_and_what_it_took_of_them(
    tmp_path: Path,
    more: dict[str, Any],
    asked: dict[str, Any],
    kept: tuple[float, float],
    spent: tuple[float, float],
) -> None:
    record = replace(RECORD, more=more, usd_per_hour=6.5)
    row = {"end": RAN, "first": RAN["first"]}
    hosts = hosts_with(record, listed(PATHS.job_id, "step-000040", **row))
    plans: list[JobPlan] = []

    def keep_limit(plan: JobPlan, _: float) -> JobPlan:
        plans.append(plan)
        return replace(plan, details={**plan.details, "limit": "new"})

    spec = replace(job_spec(), ending=Ending(**asked))
    context = replace(job_context(hosts), keep_limit=keep_limit)
    resume(context, ResumeRequest("squad", None, tmp_path / "out", spec=spec))

    (plan,) = plans
    assert (plan.spec.ending.max_time_s, plan.spec.ending.budget) == kept
    assert (*plan.details["spent"].values(),) == pytest.approx(spent)
    written = json.loads(hosts["node0"].files[PATHS.uploaded("job.json")])["more"]
    assert (written["limit"], written["spent"]) == ("new", plan.details["spent"])


def test_each_attempt_counts_with_its_nodes_and_its_share_of_them() -> None:
    end = parse_end({**RAN, "starts": [(RAN["first"], 8), (RAN["began"], 2)]})
    record = replace(RECORD, more={"limit": LATE}, node_share=0.5)
    assert end
    node_s = 200 * 8 / 2 + 100 * 2 / 2 + 100 * 8
    assert add_spent(record, end, print) == {"seconds": 400.0, "usd": node_s * 6 / 3600}


def test_the_end_of_an_earlier_run_in_s3_does_not_count_twice() -> None:
    end = parse_end(RAN)
    assert end
    later = replace(RECORD, when="2027-02-01T00:00:00+00:00", more={"limit": LIMIT})
    log: list[str] = []
    assert add_spent(later, end, log.append) == {"seconds": 0.0, "usd": 0.0}
    assert log == ["warning: the end of the last run is unknown, so the limits do not count it"]


@pytest.mark.parametrize(
    ("had", "asked", "now"),
    [("", None, ""), ("s3://mine/x", None, "s3://mine/x"), ("s3://mine/x", "", "")],
)
@pytest.mark.parametrize(("retries", "kept"), [(None, 2), (0, 0)])
def test_a_resumed_job_keeps_its_bucket_and_restarts(
    had: str, asked: str | None, now: str, retries: int | None, kept: int
) -> None:
    record = replace(RECORD, bucket=had, more={"recovery": {"retries": 2, "least_nodes": 5}})
    request, spec = ResumeRequest("squad", None, retries=retries), job_spec(bucket=asked, nodes=3)
    found = keep_choices(spec, request, record, job("squad-1"))
    assert (found.storage.bucket, found.recovery) == (now, Recovery(kept, 3, "squad-1"))


def test_a_resumed_job_needs_its_variables_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    record = replace(RECORD, more={"env": ["HF_TOKEN", "OTHER"], "hub_token": True})
    hosts = hosts_with(record, listed(PATHS.job_id, "step-000040"))
    log: list[str] = []

    run(hosts, ResumeRequest("squad", None, tmp_path), log)

    assert "warning: the job had OTHER: give it again with --env if needed" in log
    assert sent_variables(hosts["node0"]) == ["HF_TOKEN=hf_secret"]
    assert PATHS.upload not in hosts["node0"].files


@pytest.mark.parametrize(
    ("asked", "login", "given", "expected"),
    [
        (True, "hf_mine", (), ("HF_TOKEN=hf_mine",)),
        (True, "hf_mine", ("HF_TOKEN=other",), ("HF_TOKEN=other",)),
        (True, "", (), ()),
        (False, "hf_mine", (), ()),
    ],
)
def test_the_login_of_the_hub_is_sent_again_only_if_the_job_began_with_it(
    monkeypatch: pytest.MonkeyPatch,
    asked: bool,
    login: str,
    given: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    monkeypatch.setenv("HF_TOKEN", login)
    monkeypatch.setenv("HF_TOKEN_PATH", "/none")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    record = replace(RECORD, more={"env": ["HF_TOKEN"], "hub_token": asked})
    log: list[str] = []
    assert with_login(record, given, log.append) == expected
    said = "sending this machine's Hugging Face login, because the job began with --env HF_TOKEN"
    assert log == ([said] if expected == ("HF_TOKEN=hf_mine",) else [])


@pytest.mark.parametrize(("total", "refused"), [("90\n", True), ("900\n", False), ("", False)])
def test_a_checkpoint_beyond_the_requested_end_is_refused_before_anything_is_sent(
    tmp_path: Path, total: str, *, refused: bool
) -> None:
    hosts = hosts_with(RECORD, listed(PATHS.job_id, "step-000040"))  # of 40 epochs
    hosts["node0"].answers.insert(0, ("# reading how many steps", total))
    request = ResumeRequest("squad", None, tmp_path, {"epochs": 2})
    if not refused:
        run(hosts, request)
        return
    with pytest.raises(
        UsageError, match="is at step 40, and with these options it has only 4 steps"
    ):
        run(hosts, request)
    assert not hosts["node0"].files.get(PATHS.uploaded("run.sh"))


@pytest.mark.parametrize(
    ("began", "now", "said"),
    [
        (2, 2, "using 2 nodes of 3"),
        (5, 3, "the job began with 5 ranks and continues with 3, on the same samples per step; "),
    ],
)
def test_a_job_resumes_on_a_larger_or_smaller_cluster(
    tmp_path: Path, began: int, now: int, said: str
) -> None:
    hosts = hosts_with(replace(RECORD, nnodes=began), listed(PATHS.job_id, "step-000001"))
    log: list[str] = []

    run(hosts, ResumeRequest("squad", None, tmp_path, {"learning_rate": 1e-5}), log)

    assert any(line.startswith(said) for line in log)
    script = mpirun_line(hosts["node0"])
    assert '"learning_rate": 1e-05' in script
    assert f"-ppn 1 -wdir {PATHS.root} -n {now} " in script
    assert (f"{PLANNED} {began}" in script) is (now < began)


def test_an_uneven_share_of_the_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--ppn 3: job a has 4 ranks, 1 on each of 4 nodes\n"):
        plan_again(replace(RECORD, nnodes=4), ResumeRequest("squad", "a", spec=with_ppn(3)), 4, "a")


@pytest.mark.parametrize(
    ("nnodes", "before", "ppn", "nodes", "used", "planned"),
    [
        (4, 1, None, 3, 3, 4),
        (4, 2, 2, 2, 2, 4),
        (2, 2, 1, 2, 2, 4),
        (2, 2, None, 2, 2, 0),
        (1, 6, 2, 3, 3, 0),
        (2, 2, 2, 4, 2, 0),
        (2, 2, 4, 4, 1, 0),
    ],
)
def test_fewer_ranks_share_the_samples_of_all_and_others_leave_nodes_free(
    nnodes: int, before: int, ppn: int | None, nodes: int, used: int, planned: int
) -> None:
    placement = replace(RECORD.placement, nproc_per_node=before)
    record = replace(RECORD, nnodes=nnodes, placement=placement)
    plan = plan_again(record, ResumeRequest("squad", None, spec=with_ppn(ppn)), nodes, "squad-1")
    assert (plan.spec.resources.nodes, plan.planned_nodes) == (used, planned)
    assert plan.spec.resources.placement.nproc_per_node == (ppn or before)


BUCKET = S3Location("results", "team")
RESTORED = {"checkpoint": "step-000040", "has_ended": True, "size": 5 << 20}


def restoring(answer: dict[str, Any], *lists: str) -> dict[str, FakeHost]:
    """Nodes whose head lists these jobs in turn, and answers when it restores one."""
    hosts, rest = hosts_with(RECORD, ""), list(lists)
    hosts["node0"].answers[:0] = [
        ("listing the jobs", lambda _: rest.pop(0) if len(rest) > 1 else rest[0]),
        ("# restoring the job", json.dumps(answer)),
        ("# placing the worker code|# removing a job|push probe", ""),
    ]
    return hosts


def test_a_job_of_another_cluster_is_restored_to_the_head_and_resumed(tmp_path: Path) -> None:
    answer = {**RESTORED, "end": RAN}
    hosts = restoring(answer, "", listed(PATHS.job_id, "step-000040", end={}, cancelled=True))
    log: list[str] = []
    spec = job_spec(bucket=str(BUCKET))
    request = ResumeRequest("squad", PATHS.job_id, tmp_path / "out", spec=spec, bucket=BUCKET)

    resume(job_context(hosts, log=log), request)

    head = hosts["node0"]
    assert json.loads(head.files[PATHS.uploaded("job.json")])["more"]["spent"]["seconds"] == 400.0
    order = ("# placing the worker code", "# restoring the job", "# submitting a job")
    found = [next(n for n, each in enumerate(head.commands) if word in each) for word in order]
    assert found == sorted(found)
    url = f"s3://results/team/{PATHS.job_id}"
    assert f"worker.storage.restore {url} ." in head.commands[found[1]]
    assert not any("distributing the job's files" in each for each in head.commands)
    with tarfile.open(fileobj=io.BytesIO(head.files[PATHS.upload])) as tar:
        assert f"{PATHS.relative_root}/code/worker/storage/restore.py" in tar.getnames()
    assert f'"bucket": "{BUCKET}"' in head.files[PATHS.uploaded("launch.json")].decode()
    assert f"5.0 MiB of job {PATHS.job_id} came from {url}" in log


def test_a_job_that_cannot_be_restored_leaves_nothing() -> None:
    url = f"s3://results/team/{PATHS.job_id}"
    hosts = restoring({"message": f"{url}: no checkpoint", "hint": f"fetch {url}"}, "")
    context = job_context(hosts, cloud=CloudInfo("local"))
    with pytest.raises(UsageError, match="no checkpoint") as refused:
        resume(context, ResumeRequest("squad", PATHS.job_id, bucket=BUCKET))
    assert refused.value.hint == f"fetch {url} --cloud local"
    assert any(f"rm -rf {PATHS.root}" in each for each in hosts["node0"].commands)
    running = listed(PATHS.job_id, end={}, queue=["RUNNING", "None", "node0"])
    hosts = restoring(RESTORED, running)
    with pytest.raises(UsageError, match=f"job {PATHS.job_id} is running"):
        run(hosts, ResumeRequest("squad", PATHS.job_id, bucket=BUCKET))
    assert not any("restoring" in each for each in hosts["node0"].commands)


def test_a_record_that_cannot_be_read_is_named() -> None:
    record = JobPaths(PATHS.job_id).record
    with pytest.raises(JobError, match=f"record on node0 can't be read: {record}"):
        run(hosts_with('{"argv": []}', listed(PATHS.job_id, "")), ResumeRequest("squad", None))


DONE = "job squad-2 has nothing to resume: it is finished, or not a training job"
START = "`train squad` without --resume starts one"
WAITS = (job("squad-4", "requeued", unfinished=True),)
JOBS = (job("squad-1", unfinished=True), job("squad-2"), job("squad-3", unfinished=True))


def test_the_last_unfinished_job_is_the_default() -> None:
    assert choose_unfinished(JOBS, "squad", None, "bert").job == "squad-3"
    assert choose_unfinished((*JOBS, job("squad-4")), "squad", None, "bert").job == "squad-3"
    failed_at_once = job("squad-5", checkpoint="", unfinished=True)
    kept = job("squad-4", checkpoint="step-000040", unfinished=True)
    assert choose_unfinished((kept, failed_at_once), "squad", None, "bert").job == "squad-4"
    assert choose_unfinished((failed_at_once,), "squad", None, "bert").job == "squad-5"
    assert choose_unfinished(JOBS, "squad", "squad-1", "bert").job == "squad-1"
    running = replace(kept, state="running")
    assert choose_unfinished((failed_at_once, running), "squad", None, "bert").job == "squad-5"


@pytest.mark.parametrize(
    ("jobs", "job_id", "message", "hint"),
    [
        (JOBS, "squad-2", DONE, None),
        (WAITS, "squad-4", "job squad-4 is requeued", "to follow it: spr-cluster attach squad-4"),
        (JOBS[1:2], None, "no unfinished squad job on cluster bert", START),
    ],
)
def test_an_unsuitable_job_is_not_resumed(
    jobs: tuple[JobSummary, ...], job_id: str | None, message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        choose_unfinished(jobs, "squad", job_id, "bert")
    assert (caught.value.message, caught.value.hint) == (message, hint)
