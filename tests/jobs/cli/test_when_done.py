"""`--on-finish` and `--down-when-done`: the whole command, on simulated EC2; the job's answers are staged."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import RefreshWithMFAUnsupportedError

from cluster.cli.chosen_cluster import ClusterRequest
from cluster.cli.down import remove_cluster
from cluster.context import Context
from cluster.local_files import ClusterFiles
from infra.ec2.cluster_record import ClusterRecord
from infra.ec2.inventory import describe_inventory
from infra.errors import HostError, SprError
from jobs.cli.shared.chosen_job import open_job_context
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.slurm import SlurmLauncher
from jobs.worker.spec import Ending, JobSpec
from jobs.worker.supervisor.launch import Launch
from provision.host import Result
from tests.harness.command_line import Act, CommandLine, StagedHost, open_command_line
from tests.infra.local.fakes import Endpoint
from tests.jobs.context import listed, pack_output

_DOWN = "--down-when-done"
_MODEL = {"log": b"trained\n", "output/model/config.json": b"{}", "output/results.json": b"{}"}
_RUN = ("run", _DOWN, "--results", "here")
Removed = list[tuple[str, bool]]
"""The clusters whose removal was asked for, and whether that would ask questions."""


@dataclass
class StagedJob:
    """A job on the head as the next command meets it."""

    state: str = "succeeded"
    files: dict[str, bytes] = field(default_factory=lambda: dict(_MODEL))
    losses: list[str] = field(default_factory=list)
    """What would be lost, question by question; the last one stays."""
    missing: str = ""
    follow: BaseException | None = None
    asked: int = 0

    def end(self, _: Any) -> Result:
        code = 0 if self.state == "succeeded" else 1
        return Result(0, json.dumps({"state": self.state, "exit_code": code}), "")

    def followed(self, _: Any) -> Result:
        if self.follow:
            raise self.follow
        return Result(0, "", "")

    def lost(self, _: Any) -> Result:
        self.asked += 1
        answer = self.losses.pop(0) if len(self.losses) > 1 else "".join(self.losses)
        return Result(0, answer, "")


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> Removed:
    found: Removed = []

    def remove(ctx: Context, *, yes: bool, sure: bool) -> None:
        assert ctx.command == "down"
        found.append((ctx.name, not (yes and sure)))

    monkeypatch.setattr("jobs.cli.shared.when_done.remove_cluster", remove)
    return found


@pytest.fixture
def line(
    two: CommandLine,
    removed: Removed,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> CommandLine:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(two.cloud.ctx.files.folder.parent))
    monkeypatch.chdir(tmp_path)
    two.machines.staged.clear()
    return two


@pytest.fixture
def job(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> StagedJob:
    """A job that succeeds."""
    return stage(line, monkeypatch)


def stage(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> StagedJob:
    job = StagedJob()

    def download(host: StagedHost, command: str) -> Iterator[bytes]:
        if "ssh " in command:
            raise HostError(host.name, "ended with 255")
        yield pack_output(job.files)

    monkeypatch.setattr(StagedHost, "download", download)
    answers: dict[str, Act] = {
        "# listing what would be lost": lambda on_text: job.lost(on_text),
        "# following a job": job.followed,
        "# collecting the results": lambda _: Result(0, f"at 5\n{job.missing}", ""),
        r"cat \S+/end.json": job.end,
        "# (distributing|submitting)": lambda _: Result(0, "", ""),
    }
    for pattern, answer in answers.items():
        line.stage("node0", pattern, answer)
    return job


def test_nothing_is_left_and_the_model_is_here(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_command_line(endpoint, tmp_path, monkeypatch) as line:
        line.begin("--nodes", "2")
        stage(line, monkeypatch)

        result = line.must(*_RUN, "--", "hostname")

        assert line.cloud.left() == []
    assert "will be removed when the job has ended and its results are here.\n" in result.err
    assert result.err.endswith("Nothing left of cluster spr.\n")
    assert Path("here/model/config.json").read_bytes() == b"{}"
    assert json.loads(Path("here/job/job.json").read_text())["state"] == "succeeded"


def test_a_checkpoint_that_is_only_on_the_nodes_keeps_the_cluster(
    line: CommandLine, job: StagedJob, removed: Removed
) -> None:
    job.state, job.losses = "failed", ["", "checkpoint squad-1\n"]

    result = line.run(*_RUN, "--", "hostname")

    assert result.code == 1
    assert result.message.startswith("the job ended with exit code 1")
    assert "→ Only on the nodes: the checkpoint of squad-1." in result.message
    assert "to continue its training: spr-cluster train squad --resume squad-1 --name spr\n" in (
        result.message
    )
    assert result.message.endswith(
        "→ cluster spr stays, and its 2 machines cost $13.20 an hour on demand; to remove it: "
        "spr-cluster down --name spr"
    )
    assert removed == []


def test_results_that_were_never_fetched_are_named_at_the_start(
    line: CommandLine, job: StagedJob, removed: Removed
) -> None:
    job.losses = ["model squad-0\n"]

    result = line.run(*_RUN, "--", "hostname")

    begin, found, end = result.err.partition("Prepare the job")
    assert found
    assert "the model of squad-0" in begin
    assert "As long as that is so, the cluster stays.\n" in begin
    assert "the model of squad-0" in end
    assert removed == []


def test_the_job_itself_is_waited_for_until_the_queue_is_rid_of_it(
    line: CommandLine, job: StagedJob, removed: Removed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has written its end while Slurm still cleans up, and its checkpoint is not looked at so early."""
    monkeypatch.setattr("jobs.places.queue.session.new_job_id", lambda *_: "run-1")
    job.losses = ["", "running run-1\n", "running run-1\n", ""]

    line.must(*_RUN, "--", "hostname")

    assert job.asked == 4
    assert removed == [("spr", False)]


def _raise(error: BaseException) -> Result:
    raise error


_STAYS = r"\n  → cluster spr stays, and "
_CUT = HostError("node0", "no SSH: timed out")
_FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("job_changes", "replaced", "message"),
    [
        ({"losses": ["running squad-2\n"]}, {}, rf"Job squad-2 is running\.{_STAYS}"),
        ({"losses": ["waiting squad-2\n"]}, {}, rf"Job squad-2 is waiting\.{_STAYS}"),
        ({"losses": ["running run-1\n"]}, {}, r"Job run-1 is running\.\n"),
        (
            {"missing": "output node1\n"},
            {},
            "--on-finish was not run: the results are not here\n"
            r"  → not all results are here: the output of node1 could not be fetched\n"
            r"  → to try again: spr-cluster fetch run-1 --name spr --results here\n",
        ),
        ({}, {f"{__name__}.pack_output": lambda _: b"not a tar"}, ".* arrived damaged"),
        ({"lost": lambda _: _raise(_CUT)}, {}, r"The head could not be asked .* lost: \[node0\]"),
    ],
    ids=["running", "waiting", "itself", "missing", "damaged", "unreachable"],
)
def test_the_cluster_stays_as_long_as_something_would_be_lost(
    line: CommandLine,
    job: StagedJob,
    removed: Removed,
    monkeypatch: pytest.MonkeyPatch,
    job_changes: dict[str, Any],
    replaced: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr("jobs.places.queue.session.new_job_id", lambda *_: "run-1")
    for place, stand_in in replaced.items():
        monkeypatch.setattr(place, stand_in)
    vars(job).update(job_changes)

    result = line.run(*_RUN, "--on-finish", "touch said", "--", "hostname")

    assert result.code == 1
    assert re.match(message, result.message), result.message
    assert "cluster spr stays" in result.message
    assert Path("said").exists() is not bool(job.missing or replaced)
    assert "As long as that is so" not in result.err  # a running job will have ended by then
    assert removed == []


def test_a_full_disk_at_home_keeps_the_cluster(
    line: CommandLine, job: StagedJob, removed: Removed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: _raise(_FULL))

    result = line.run(*_RUN, "--on-finish", "touch said", "--", "hostname")

    assert result.code == 1
    job_id = json.loads(Path("here/job/job.json").read_text())["job"]
    assert result.message.splitlines() == [
        f"the results of job {job_id} could not be written to here: No space left on device",
        f"  → to try again: spr-cluster fetch {job_id} --name spr --results here",
        "  → --on-finish was not run: the results are not here",
        "  → cluster spr stays, and its 2 machines cost $13.20 an hour on demand; to remove it: "
        "spr-cluster down --name spr",
    ]
    assert removed == []
    assert not Path("said").exists()


def test_results_that_are_not_in_s3_keep_the_cluster(
    line: CommandLine, job: StagedJob, removed: Removed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.cli.results.fetch.connect_s3", lambda: None)
    monkeypatch.setattr("jobs.cli.results.fetch.check_s3_location", lambda *_: None)
    refused = SprError("AccessDenied")
    monkeypatch.setattr("jobs.cli.results.fetch.push_folder", lambda *_, **__: _raise(refused))
    monkeypatch.setattr("jobs.cli.train.render_result", lambda *_: "trained")
    monkeypatch.setattr("jobs.train.train._with_tuned", lambda _, request: request)

    push = ("--push-to", "s3://models/squad", "--on-finish", "touch said")
    result = line.run("train", "squad", "--demo", _DOWN, "--results", "here", *push)

    assert result.code == 1
    assert "its results are here and in S3.\n" in result.err
    assert "not stored in S3: AccessDenied\n  → to try again: spr-cluster fetch squad-" in (
        result.message
    )
    assert "cluster spr stays" in result.message
    assert removed == []
    assert Path("said").exists()  # they are here


def test_ctrl_c_leaves_the_job_and_the_cluster(
    line: CommandLine, job: StagedJob, removed: Removed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("jobs.cli._exit_at_once", end)
    job.follow = KeyboardInterrupt()

    result = line.run(*_RUN, "--on-finish", "touch said", "--", "hostname")

    assert result.code == 130
    assert "continues without this command" in result.err
    assert re.search(
        r"cluster spr stays, and its 2 machines cost \$13\.20 an hour on demand\n"
        r"  to remove it at the job's end: spr-cluster attach run-\S+ --on-finish 'touch said' "
        r"--down-when-done --name spr\n",
        result.err,
    )
    assert removed == []
    assert not Path("said").exists()


def test_another_command_at_work_on_the_cluster_is_not_disturbed(
    line: CommandLine, job: StagedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.cli.shared.when_done.remove_cluster", remove_cluster)
    with ClusterFiles.of("spr").lock("up"):
        result = line.run(*_RUN, "--", "hostname")

    assert result.code == 1
    assert result.message.startswith("`down` failed: another spr-cluster command (PID ")
    assert result.message.endswith("to try again: spr-cluster down --name spr")
    assert len(line.ids()) == 2


@pytest.mark.parametrize("losses", ["", "model squad-0\n"])
@pytest.mark.parametrize(("fails", "cut"), [(False, 0), (False, 255), (True, 0)])
def test_nodes_end_without_aws_when_its_credentials_have_expired(
    line: CommandLine,
    job: StagedJob,
    monkeypatch: pytest.MonkeyPatch,
    losses: str,
    cut: int,
    *,
    fails: bool,
) -> None:
    job.losses, told = ["", losses], list[str]()
    expired = RefreshWithMFAUnsupportedError()
    monkeypatch.setattr(
        "jobs.cli.shared.when_done.remove_cluster", lambda *_, **__: _raise(expired)
    )
    answers = iter([describe_inventory])
    find = lambda *given: next(answers, lambda *_: _raise(expired))(*given)  # noqa: E731
    monkeypatch.setattr("jobs.cli.shared.when_done.describe_inventory", find)
    monkeypatch.setattr("jobs.cli.shared.when_done.describe_end", lambda _: "at 15:00 UTC")

    def power_off(command: str) -> Result:
        told.append(command)
        codes = {"node0": 0, "node1": cut, "node2": 0}  # node2 was added while the job ran
        rows = [
            {"node": node, "code": code, "text": "" if code else "off", "began": 0, "ended": 0}
            for node, code in codes.items()
        ]
        return Result(0, "\n".join(map(json.dumps, rows)), "")

    line.stage("node0", "systemctl poweroff", _CUT if fails else power_off)

    result = line.run(*_RUN, "--", "hostname")

    assert result.code == 1
    assert "These AWS credentials expire at 15:00 UTC. If the job ends later" in result.err
    assert len(told) == (not (losses or fails))
    assert (f"{2 if cut else 3} machines told over SSH to power off" in result.message) is bool(
        told
    )
    assert ("billed: node1 (ssh gave no reason)" in result.message) is bool(told and cut)
    assert ("its 2 machines cost $13.20 an hour" in result.message) is not bool(told)
    assert "spr-cluster down --name spr" in result.message


@pytest.mark.parametrize(
    ("state", "more", "code"),
    [("succeeded", "exit 3", 1), ("succeeded", "true", 0), ("failed", "true", 1)],
)
def test_the_command_knows_its_job_and_the_cluster_is_removed_whatever_happened(
    line: CommandLine, job: StagedJob, removed: Removed, state: str, more: str, code: int
) -> None:
    """Also without a checkpoint, and with an exit code of the command that is not the job's."""
    job.state = state
    names = ("SPR_JOB", "SPR_STATE", "SPR_RESULTS", "SPR_CLUSTER")
    tell = f"printf '%s\\n' {' '.join(f'${name}' for name in names)} > said"

    result = line.run(
        *_RUN, "--json", "--on-finish", f"{tell}; echo said; {more}", "--", "hostname"
    )

    assert result.code == code
    assert state == "failed" or json.loads(result.out)["state"] == "succeeded"
    assert result.message.startswith("the job ended with exit code 1") is (state == "failed")
    assert ("--on-finish failed with exit code 3" in result.err) is (more == "exit 3")
    record = json.loads(Path("here/job/job.json").read_text())
    assert (record["state"], Path("here/job/log").exists()) == (state, True)
    here = str(Path("here").absolute())
    assert Path("said").read_text().splitlines() == [record["job"], state, here, "spr"]
    assert removed == [("spr", False)]


@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
def test_attach_ends_the_same_way(
    line: CommandLine, job: StagedJob, removed: Removed, state: str
) -> None:
    job.state = state
    row = listed("run-1", queue=["RUNNING", "None", "node0"], end={}, unfinished=False)
    line.stage("node0", "# listing the jobs", Result(0, row, ""))
    line.machines.staged.insert(0, line.machines.staged.pop())

    said = "echo $SPR_JOB $SPR_STATE > said"
    result = line.run("attach", _DOWN, "--on-finish", said)

    assert result.code == (0 if state == "succeeded" else 1)
    if state == "cancelled":
        assert result.message.startswith("job run-1 was canceled\n")
    assert Path("said").read_text() == f"run-1 {state}\n"
    assert "Nothing left of cluster spr.\n" in result.err
    assert removed == [("spr", False)]


def test_somebody_elses_cluster_needs_its_name(
    line: CommandLine, job: StagedJob, removed: Removed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, before the job costs anything."""
    monkeypatch.setattr("cluster.cli.chosen_cluster.is_same_owner", lambda *_: False)

    result = line.run(*_RUN, "--", "hostname")

    assert result.code == 2
    assert "cluster 'spr' belongs to " in result.message
    assert not Path("here").exists()
    refused = line.run("run", "--detach", _DOWN, "--name", "spr", "--", "hostname")
    assert (refused.code, "needs a bucket" in refused.message) == (2, True)
    assert "up --bucket s3://" in refused.message
    line.must(*_RUN, "--name", "spr", "--", "hostname")
    assert removed == [("spr", False)]


def find_record(line: CommandLine) -> ClusterRecord:
    record = describe_inventory(line.cloud.ec2, "spr", ("security_groups",)).record
    assert record
    return record


def test_a_job_keeps_the_nodes_within_its_limit_and_the_clusters(
    line: CommandLine, job: StagedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []
    submit = SlurmLauncher.submit

    def note(launcher: SlurmLauncher, launch: Launch, paths: JobPaths, *_: object) -> None:
        launches.append(launch)
        submit(launcher, launch, paths)

    monkeypatch.setattr(SlurmLauncher, "submit", note)
    before = find_record(line)
    refused = line.run("run", "--budget", "0.1", "--", "hostname")
    assert refused.code == 2
    assert (
        "--budget 0.1: the shortest job on 2 nodes costs $0.66: a minute, which" in refused.message
    )
    assert (find_record(line), launches) == (before, [])

    done = line.must("run", "--max-time", "9h", "--results", "kept", "--", "hostname")
    assert "this job may take 9 h (--max-time) and keep the nodes until" in done.err
    assert re.search(r"for at most \$1[34]\.\d\d more", done.err)
    after = find_record(line)
    assert after.expires == before.expires
    left = after.latest - line.cloud.ctx.now()
    assert timedelta(hours=9, minutes=22) < left < timedelta(hours=9, minutes=32)
    ending = launches[-1].spec.ending
    assert (ending.max_time_s, ending.by_budget) == (9 * 3600, False)

    # Until then, nodes stay only for a job that takes so long.
    short = line.must("run", "--max-time", "12m", "--results", "short", "--", "hostname").err
    end = f"{before.expires:%H:%M} UTC"
    assert re.search(rf"Nodes shut down automatically at [^.]*{end}", short)
    assert "this job may take 12 min (--max-time)" in short
    assert find_record(line) == after
    stay = rf"{end} .*, or up to {after.latest:.*%H:%M} UTC.* while a job with --max-time or --bud"
    assert re.search(stay, line.must("status").out.replace("\n", " "))

    spent, ending = {"seconds": 600.0, "usd": 1.0}, Ending(budget=3.0)
    context = open_job_context(ClusterRequest(name="spr"), line.cloud.ctx.now())
    plan = JobPlan("squad", "m", (), "gloo", JobSpec(ending=ending), details={"spent": spent})
    again = context.keep_limit(plan, 0.0)
    price = again.details["limit"].pop("usd_per_hour")
    assert price == pytest.approx(13.1961 / 2, abs=0.01)
    alone = {"from": after.expires.timestamp(), "nodes": 2}
    kept = {"max_time_s": 0.0, "budget": 3.0, "alone": alone}
    assert again.details == {"spent": spent, "limit": kept}
    assert again.spec.ending.max_time_s == pytest.approx(2 / price * 1800 - 120)
    assert find_record(line) == after

    line.must("up", "--max-time", "10h", "--yes")
    said = line.must("run", "--budget", "150", "--results", "more", "--", "hostname").err
    assert "this job may take 11 h 2" in said
    assert "(--budget)" in said
    assert "the nodes shut down before that" in said
    last = find_record(line)
    assert last.latest == last.bound == last.created + timedelta(hours=10)
    ending = launches[-1].spec.ending
    assert (ending.budget, ending.by_budget) == (150, True)
    assert ending.max_time_s == pytest.approx(150 / 13.1961 * 3600 - 120, abs=2)
