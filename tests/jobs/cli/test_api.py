"""The Python API: the commands' values, errors, and options, without their output and questions."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from cluster.local_files import ClusterFiles
from infra.errors import DeadlineError
from jobs.api import Given
from jobs.places.plan import new_job_id
from jobs.program.plan import plan_program
from provision.host import Result
from spr_cluster import Cluster, Job, JobError, Run, SprError, Training, UsageError, study
from tests.cluster.cli.test_down_losses import Terminal
from tests.harness.command_line import CommandLine, StagedHost
from tests.jobs.cli.test_attach import Head
from tests.jobs.context import pack_output

_CHANGES = ("age_s", "left_s", "usd_so_far", "minutes", "prices_as_of", "expires")


@pytest.fixture
def line(one: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(one.cloud.ctx.files.folder.parent))
    monkeypatch.chdir(tmp_path)
    # Another test of this process may have run the command line.
    monkeypatch.setattr("cluster.console.output._may_ask", False)
    return one


@pytest.fixture
def files() -> dict[str, bytes]:
    """What a job leaves on the head."""
    return {"log": b"text\n", "output/results.json": b'{"f1": 88.5}'}


@pytest.fixture
def head(line: CommandLine, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Head:
    def download(_: StagedHost, command: str) -> Iterator[bytes]:
        yield pack_output(files)

    monkeypatch.setattr(StagedHost, "download", download)
    return Head(line)


@pytest.fixture(autouse=True)
def _silent(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capsys.readouterr().out == ""


def steady(value: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key not in _CHANGES}


def test_values_are_those_that_json_prints(line: CommandLine, head: Head) -> None:
    def printed(*argv: str) -> Any:
        return json.loads(line.must(*argv, "--json").out)

    cluster = Cluster.find()
    assert cluster == Cluster("spr", "aws", "us-east-1")
    assert steady(cluster.status()) == steady(printed("status")) == steady(dict(cluster.details))
    again = Cluster.up()  # there is nothing to buy
    assert (again, again.details["changed"]) == (cluster, False)
    assert again.details == printed("up")
    plan = Cluster.plan(name="new", nodes=2, instance_type=["r7iz.metal-16xl", "m7i.metal-24xl"])
    listed = "--instance-type=r7iz.metal-16xl,m7i.metal-24xl"
    assert steady(plan) == steady(printed("up", "--dry-run", "--name=new", "--nodes=2", listed))
    assert plan["changes"] is True
    head.asked_until_end = 10
    assert cluster.jobs() == printed("jobs")
    assert cluster.job("squad-1").status() == printed("jobs", "squad-1")
    assert cluster.extend("1m")["cluster"] == "spr"


def test_a_job_from_its_state_to_its_results(
    line: CommandLine, head: Head, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Cluster.find().job("squad-1")
    assert job.state == "running"
    assert job.wait()["state"] == "succeeded"
    assert "Wait for squad-1" in capsys.readouterr().err
    assert job.results == {"f1": 88.5}
    assert Path("results/squad-1/job/log").read_text() == "text\n"
    assert job.fetch("here")["results"] == "here"
    Path("here/results.json").write_text('{"f1": 1}')
    assert job.results == {"f1": 1}, "what is here is not downloaded again"
    line.stage("node0", "# reading a log", lambda show: show("a\nb") or Result(0, "", ""))
    assert job.log() == "a\nb"
    assert job.cancel()["cancelled"] is False


def test_failures_are_exceptions(head: Head, files: dict[str, bytes]) -> None:
    job = Cluster.find().job("squad-1")
    del files["output/results.json"]
    with pytest.raises(JobError, match=r"squad-1 has no results\.json\n  → its log is results/"):
        _ = job.results
    head.asked_until_end = 10**6
    with pytest.raises(DeadlineError, match="job squad-1 is still running after 1 s; it continues"):
        job.wait(timeout=1)
    head.asked_until_end, head.state = 0, "failed"
    with pytest.raises(JobError, match="job squad-1 is failed"):
        job.wait()
    with pytest.raises(UsageError, match="there is no job squad-9"):
        Cluster.find().job("squad-9").status()


_MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: Cluster.up(idle_timeot="1h"), "unknown option '--idle-timeot'; did you mean --idle-t"),
    (lambda: Cluster.up(nodes=False), "nodes: False is not a value\n  → None omits an option"),
    (lambda: Cluster.find("none"), "no cluster 'none' in aws us-east-1"),
    (lambda: submit(Training("--help")), "unexpected '--help': options are keywords"),
    (lambda: submit(study("squad", tune=None)), "a study needs tune"),
    (lambda: submit(Run("ls", dry_run=True)), "dry_run: not in Python\n  → spr-cluster train or"),
    (lambda: submit(Training("squad", to="slurm-script")), "--detach: not with --to slurm-script"),
    (lambda: submit(Run("x", env={"NO NAME": "secret"})), "--env NO NAME: expected NAME=VALUE"),
    (lambda: submit(Run("x", env={"A": "\0secret"})), "'--env': a null character"),
    (lambda: submit(Run("echo", "a\0b")), r"'a\x00b': a null character"),
    (lambda: submit(Run("x", envs={"KEY": "secret"})), "unknown option '--envs'"),
    (lambda: submit(Run("x", cast(Any, ["y"]))), "Run: ['y'] is no word of a command"),
    (lambda: submit(Run("x", outputs=["../y"])), "--outputs '../y' is outside of the program's"),
    (lambda: submit(["x"]), "['x'] is no job"),
    (lambda: Cluster.up(help=True), "help: not in Python\n  → spr-cluster up --help"),
    (lambda: Cluster.find().down(name="x"), "name: the cluster is spr"),
    (lambda: Cluster.find().job("squad-1").cancel(name="x"), "name: the cluster is spr"),
    (lambda: Cluster.find().extend(cast(Any, 2)), "extend '2': expected a duration"),
    (lambda: Job(Cluster.find(), "$(id)").wait(), "'$(id)' is not a job ID"),
]


def submit(job: Any, **options: Given) -> Job:
    return Cluster.find().submit(job, **options)


@pytest.mark.parametrize("number", range(len(_MISTAKES)))
def test_a_mistake_is_the_commands_error(line: CommandLine, number: int) -> None:
    act, message = _MISTAKES[number]
    before = line.changes
    with pytest.raises(UsageError) as caught:
        act()
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
    assert line.changes == before


def test_a_hint_never_repeats_a_variables_value(line: CommandLine) -> None:
    config = ClusterFiles.of("spr").ssh_config
    text = config.read_text()
    try:
        first = text.splitlines()[0]
        config.write_text(f"{first}\n# spr-cluster account: 999999999999 work\n")
        with pytest.raises(UsageError) as caught:
            Cluster("spr", "aws", "us-east-1").submit(Run("x", env={"API_KEY": "se\ncret"}))
        place = ("--name=spr", "--cloud=aws", "--region=us-east-1")
        program = ("sh", "-c", "x --env C=secret")
        typed = line.run("run", *place, "--env", "API_KEY=secret", "--env=B=secret", "--", *program)
    finally:
        config.write_text(text)
    assert "AWS_PROFILE=work spr-cluster run --env=API_KEY --name=spr" in str(caught.value)
    assert "cret" not in str(caught.value)
    assert "--region=us-east-1 --env API_KEY --env=B -- sh -c 'x --env C'" in typed.err
    assert "cret" not in typed.err


def test_nothing_is_bought_or_removed_without_yes(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.console.output.sys", Terminal("yes"))  # it is never asked
    before, machines = line.changes, line.ids()

    with pytest.raises(UsageError, match=r"needs confirmation.*: \$13\.20 an hour, at most \$113"):
        Cluster.up(name="dear", nodes=2)
    line.machines.staged.clear()
    line.stage("node0", "# listing what would be lost", Result(0, "running squad-2\n", ""))
    with pytest.raises(UsageError, match=r"needs confirmation.*: Job squad-2 is .*\n  → yes=True"):
        Cluster.find().down()

    assert (line.changes, line.ids()) == (before, machines)
    bought = Cluster.up(name="dear", yes=True, region="us-east-1")
    assert len(line.ids()) == len(machines) + 1
    assert len(bought.down(yes=True)["removed"]) > 3
    assert line.ids() == machines


def test_jobs_are_submitted_by_the_options_of_the_commands(
    line: CommandLine, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.stage("node0", "tuned.json", Result(0, "", ""))
    plan = Mock(side_effect=plan_program)
    monkeypatch.setattr("jobs.cli.run.plan_program", plan)
    monkeypatch.setenv("HERE", "from here")
    Path("spr-cluster.toml").write_text(
        '[jobs.mine]\ncommand = "echo hi"\nretries = 2\n[jobs.tune]\ntask = "digits"\nepochs = 2\n'
    )
    Path("a.txt").touch()
    cluster = Cluster.find("spr")

    variables = {"SEED": "7", "HERE": None}
    run = Run("echo", "--nodes", 9, "", ppn=1, files=["a.txt"], folder="none", env=variables)
    assert cluster.submit(run).id.startswith("run-")
    assert cluster.submit("mine", retries=0, folder="none", large_files=False).id.startswith("run-")
    assert cluster.submit(Run("true"), detach=True, outputs=[], folder="none").id.startswith("run-")
    for job in (cluster.submit("tune", epochs=1), cluster.submit(Training("tune", demo=True))):
        assert job.id.startswith("digits-")

    first, second, third = (call.args[0] for call in plan.call_args_list)
    assert (first.outputs, third.outputs) == (None, ())
    assert first.spec.work.program == ("echo", "--nodes", "9", "")
    assert first.spec.resources.placement.nproc_per_node == 1
    assert first.env == ("SEED=7", "HERE=from here")
    assert (second.spec.work.program, second.spec.recovery.retries) == (("echo", "hi"), 0)
    assert "SEED" not in repr(run)
    with pytest.raises(UsageError, match=r"has no job 'min'; did you mean mine\?"):
        cluster.submit("min")


def test_ids_of_one_second_differ_among_moments_threads_and_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = datetime(2026, 7, 31, 14, 25, 1, tzinfo=timezone.utc)
    moments = [now + timedelta(microseconds=each) for each in range(2000)]
    ids = [new_job_id("squad", each) for each in moments]
    assert [new_job_id("squad", each) for each in moments] == ids
    together = threading.Barrier(5)

    def draw(_: int) -> str:
        together.wait()
        return new_job_id("squad", now)

    with ThreadPoolExecutor(5) as pool:
        ids += pool.map(draw, range(5))
    assert len({*ids}) == len(ids) == 2005
    assert all(re.fullmatch(r"squad-20260731-142501-[a-z0-9]{3,}", each) for each in ids)
    assert max(*ids, later := new_job_id("squad", now + timedelta(seconds=1))) == later
    others = set()
    for process in (-1, -2, -3):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        others.add(new_job_id("squad", now))
    assert len(others) > 1, "each process begins at random"


def test_it_works_in_a_thread(line: CommandLine, head: Head) -> None:
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(lambda: Cluster.find().job("squad-1").wait()["state"])
        mistake = pool.submit(lambda: submit(Training("squad", epochs=20000)))
        assert job.result() == "succeeded"
        with pytest.raises(SprError, match="--epochs 20000 is out of range: 0 to 10000"):
            mistake.result()
