"""`jobs`, `fetch`, `report`, and `predict` as commands: output, files, exit codes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.cli.chosen_cluster import ClusterRequest
from infra.ec2 import tags
from infra.ec2.instances import label_instances
from infra.ec2.inventory import describe_inventory
from infra.errors import CloudError
from infra.s3_url import S3Location
from jobs.cli.results.predict import render
from jobs.cli.shared.chosen_job import open_job_context
from jobs.places.launcher import Fetched
from provision.host import Result
from tests.harness.command_line import CommandLine
from tests.harness.json_output import require_schema
from tests.jobs.context import listed, pack_output
from tests.jobs.report.sample_runs import make_folder

_BEGUN = {"began": 1800000000, "nodes": ["node0"], "ranks_per_node": 2, "attempt": 1}
_DONE = {**_BEGUN, "ended": 1800000060, "state": "succeeded", "exit_code": 0}
_CAUSE = {"rank": 1, "host": "ip-5", "message": "NaN"}
_FAILED = {**_DONE, "state": "failed", "exit_code": 1, **_CAUSE}
_LISTED = listed(
    "squad-1", begin=_BEGUN, end=_DONE, has_model=True, unfinished=False, size_kib=2048
) + listed("squad-2", "step-000040", submitted=200, begin=_BEGUN, end=_FAILED)


@pytest.fixture
def line(one: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(one.cloud.ctx.files.folder.parent))
    monkeypatch.chdir(tmp_path)
    stage_jobs(one, _LISTED)
    return one


def stage_jobs(line: CommandLine, listing: str) -> None:
    """Have the head list only these jobs, and answer nothing else."""
    line.machines.staged.clear()
    line.stage("node0", "listing the jobs", Result(0, listing, ""))


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were fetched; each brings a small model."""
    found: list[str] = []

    def fetch(_: Any, paths: Any, target: Path, *_more: Any, **_named: Any) -> Fetched:
        found.append(paths.job_id)
        (target / "model").mkdir(parents=True, exist_ok=True)
        (target / "model" / "config.json").write_text("{}")
        return Fetched()

    monkeypatch.setattr("jobs.places.queue.launcher.files.fetch", fetch)
    return found


def test_jobs_are_listed_for_people_and_for_programs(line: CommandLine) -> None:
    result = line.must("jobs").out.splitlines()
    header = "JOB STATE NODES BEGAN TOOK ON DISK MODEL CHECKPOINT"
    assert " ".join(result[0].split()) == header
    assert result[1].startswith("squad-1  succeeded   1 ")
    assert "1 min 00 s" in result[1]
    assert result[1].endswith("2.0 MiB  yes    -")
    assert result[2].startswith("squad-2  failed (1)")
    assert result[2].endswith("-      step-000040")
    assert result[3:] == ["squad-2: rank 1 on ip-5: NaN"]

    rows = json.loads(line.must("jobs", "--json").out)["jobs"]
    assert [(row["job"], row["state"], row["exit_code"]) for row in rows] == [
        ("squad-1", "succeeded", 0),
        ("squad-2", "failed", 1),
    ]


def test_the_list_says_what_a_job_waits_for(line: CommandLine) -> None:
    again = listed("squad-4", **{**_RUNS, "queue": ["PENDING", "BeginTime", ""]})
    stage_jobs(line, listed("squad-3", **_WAITS) + again)
    rows = line.must("jobs").out.splitlines()
    assert [row.split()[:4] for row in rows[1:3]] == [
        ["squad-3", "queued", "-", "-"],
        ["squad-4", "requeued", "1", rows[2].split()[3]],
    ]
    assert rows[3:5] == [
        "squad-3: waits: its nodes are in use",
        "squad-4: waits: it starts again in some seconds",
    ]
    (expiry,) = rows[5:]
    assert expiry.startswith("Nodes shut down automatically at ")
    assert "or up to" not in expiry
    found = describe_inventory(line.cloud.ec2, "spr", ("security_groups",))
    assert found.group
    assert found.record
    later = {tags.LATEST: tags.render_time(found.record.latest + timedelta(hours=9))}
    label_instances(line.cloud.ec2, [found.group.id], later)
    said = " ".join(line.must("jobs").out.split())
    assert re.search(r"automatically at .*, or up to .* while a job with --max-time or --bud", said)


def test_of_many_jobs_the_newest_and_active_ones_are_listed_in_a_line_each(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"squad-20261123-1200{n:02}-k3f" for n in range(14)]
    done: dict[str, Any] = {"end": _DONE, "begin": _BEGUN}
    jobs = [listed(name, "step-000040", submitted=n, **done) for n, name in enumerate(names)]
    jobs[0] = listed("squad-20261123-115900-k3f", submitted=0, **_RUNS)
    stage_jobs(line, "".join(jobs))
    monkeypatch.setattr("cluster.console.display.terminal_width", lambda _: 80)
    rows = line.must("jobs").out.splitlines()
    newest = [f"200{n:02}-k3f" for n in range(4, 14)]
    assert [row.split()[0][-9:] for row in rows[1:12]] == ["15900-k3f", *newest]
    assert rows[12] == "3 earlier jobs: --all"
    assert max(map(len, rows[:13])) <= 80
    assert len(line.must("jobs", "--all").out.splitlines()) == 16


def test_the_list_names_who_submitted_each_job(line: CommandLine) -> None:
    jobs = listed("squad-1", owner="ann", begin=_BEGUN, end=_DONE) + listed("squad-2", **_RUNS)
    stage_jobs(line, jobs)
    header, *rows = [row.split()[:3] for row in line.must("jobs").out.splitlines()[:3]]
    assert header == ["JOB", "OWNER", "STATE"]
    assert rows == [["squad-1", "ann", "succeeded"], ["squad-2", "-", "running"]]
    assert json.loads(line.must("jobs", "squad-1", "--json").out)["owner"] == "ann"
    context = open_job_context(ClusterRequest(name="spr"), datetime.now(timezone.utc))
    assert context.cloud.owner == "spr-cluster"


def test_the_last_job_is_fetched_or_the_named_one(line: CommandLine, fetched: list[str]) -> None:
    assert line.must("fetch").out == "squad-2 (failed): results/squad-2/\n"
    assert line.must("fetch").out == "squad-2 (failed): results/squad-2/\n"
    result = json.loads(line.must("fetch", "squad-1", "--results", "here", "--json").out)
    assert (result["job"], result["results"], result["pushed_to"]) == ("squad-1", "here", None)
    assert fetched == ["squad-2", "squad-2", "squad-1"]
    missing = line.run("fetch", "squad-9")
    known = "there is no job squad-9 on cluster spr\n  → the last ones are squad-1, squad-2"
    assert missing.message == known
    stage_jobs(line, listed("squad-3", **_RUNS))
    assert "squad-3 is still running; fetching its output so far" in line.must("fetch").err
    assert fetched[3:] == ["squad-3"]
    stage_jobs(line, "")
    assert line.run("fetch").message == "there is no job on cluster spr"
    assert line.must("jobs").out.startswith("No jobs on cluster spr")


@pytest.mark.parametrize("command", ["fetch", "attach squad-3", "logs squad-3", "logs --rank 1"])
def test_what_was_on_a_lost_head_is_said_to_be_gone(
    line: CommandLine, fetched: list[str], command: str
) -> None:
    ended = {**_DONE, "nodes": ["node0"]}
    stub = listed("squad-3", end=ended, begin=ended, unfinished=False, on_lost_head=True)
    stage_jobs(line, stub)
    line.stage("node0", "reading", Result(0, "", ""))
    result = line.run(*command.split())
    assert (result.code, result.out) == (1, "")
    assert result.message == (
        "the files of job squad-3 were on a head that is gone\n"
        "  → with `up --bucket`, jobs are stored in S3 as well"
    )
    assert fetched == []
    assert not Path("results").exists()
    assert "its files were on a head that is gone" in line.must("jobs", "squad-3").out


_RUNS: dict[str, Any] = {"begin": _BEGUN, "end": {}, "queue": ["RUNNING", "None", "node0"]}
_WAITS: dict[str, Any] = {**_RUNS, "begin": {}, "queue": ["PENDING", "Resources", ""]}
_CANCELLED = {**_DONE, "state": "cancelled", "exit_code": 143}


def run_job(line: CommandLine, silent: str = "", **more: Any) -> list[str]:
    """Have the head run a job until it is ended; returns a list of the ends. ``more`` describes it."""
    ends = list[str]()

    def end(_: object) -> Result:
        ends.append("ended")
        return Result(0, silent, "")

    def list_jobs(_: object) -> Result:
        over = {"end": _CANCELLED, "queue": [], "checkpoint": "step-000048"} if ends else {}
        return Result(0, listed("squad-2", **{**_RUNS, **more, **over}), "")

    line.machines.staged.clear()
    line.stage("node0", "listing the jobs", list_jobs)
    line.stage("node0", "^# ending a job on all nodes\ncd /home/ubuntu/spr-jobs/squad-2 ", end)
    return ends


def test_a_running_job_is_cancelled_once(line: CommandLine) -> None:
    ends = run_job(line)

    result = line.must("cancel")

    assert result.out == (
        "Job squad-2 has ended.\nCheckpoint step-000048 is saved. To resume: spr-cluster train squad "
        "--resume squad-2 --name spr\n"
    )
    assert "a job that has begun to train saves a checkpoint first" in result.err
    assert line.must("cancel").out == "No job is running or queued on cluster spr.\n"
    over = "Job squad-2 has ended already: it is cancelled.\n"
    assert line.must("cancel", "squad-2").out == over
    nothing = {"cluster": "spr", "cancelled": False, "unreachable": [], "job": None}
    assert json.loads(line.must("cancel", "--json").out) == nothing
    assert ends == ["ended"]

    run_job(line, "node1\n")
    result = line.must("cancel", "squad-2", "--now", "--json")
    found = json.loads(result.out)
    assert (found["cluster"], found["job"], found["cancelled"]) == ("spr", "squad-2", True)
    assert (found["unreachable"], found["state"]) == (["node1"], "cancelled")
    assert found["checkpoint"] == "step-000048"
    assert "node1 can't be reached, and ranks may still be running there" in result.err


def test_a_job_has_its_time_to_end(line: CommandLine) -> None:
    other = {"unfinished": False}
    jobs: list[tuple[dict[str, Any], str, int]] = [({}, "", 120), (other, "", 10)]
    for job, flag, seconds in (*jobs, ({}, "--now", 0), (_WAITS, "", 0)):
        ends = run_job(line, **job)
        wanted = rf"(?s)^# ending a job on all nodes\n.*\[ {seconds} != 0 \]"
        name, _, act = line.machines.staged.pop()
        line.machines.staged.append((name, wanted, act))
        line.must("cancel", *flag.split())
        assert ends == ["ended"]


def test_all_jobs_are_cancelled_those_that_wait_first(line: CommandLine) -> None:
    rows = listed("squad-2", **_RUNS) + listed("squad-3", **_WAITS)
    stage_jobs(line, rows)
    ends = list[str]()

    def end(job: str, _: object) -> Result:
        ends.append(job)
        return Result(0, "", "")

    for job in ("squad-2", "squad-3"):
        line.stage("node0", f"cd .*/{job} ", partial(end, job))
    assert line.run("cancel").message.startswith("2 jobs are running or queued")
    assert line.run("cancel", "squad-2", "--all").code == 2
    out = line.must("cancel", "--all").out
    assert "It had no checkpoint yet, so there is nothing to resume." in out
    assert ends == ["squad-3", "squad-2"]
    stage_jobs(line, "")
    assert json.loads(line.must("cancel", "--all", "--json").out) == {"jobs": []}


def test_the_bucket_is_checked_before_a_model_is_pushed(
    line: CommandLine, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, order = "jobs.cli.results.fetch", list[object]()
    monkeypatch.setattr(f"{module}.connect_s3", lambda: "s3")
    monkeypatch.setattr(f"{module}.check_s3_location", lambda _, place: order.append(place))

    def push(s3: Any, files: Any, place: S3Location, **more: Any) -> None:
        order.append((fetched[:], place, list(files), more["about"]))

    monkeypatch.setattr(f"{module}.push_folder", push)

    result = line.must("fetch", "squad-1", "--push-to", "s3://models/squad")

    target, about = S3Location("models", "squad/squad-1"), {"spr-cluster-job": "squad-1"}
    pushed = ["squad-1"], target, ["model/config.json", "job/job.json"], about
    assert order == [S3Location("models", "squad"), pushed]
    assert result.out == "squad-1 (succeeded): results/squad-1/\ns3://models/squad/squad-1\n"

    expired = CloudError("the token has expired", hint="log in")
    monkeypatch.setattr(f"{module}.push_folder", Mock(side_effect=expired))
    result = line.run("fetch", "squad-1", "--push-to", "s3://models")
    assert (result.code, fetched) == (1, ["squad-1"] * 2)
    assert result.message == (
        "the results are in results/squad-1/, but were not stored in S3: the token has expired\n"
        "  → log in\n"
        "  → to try again: spr-cluster fetch squad-1 --name spr --push-to s3://models"
    )
    result = line.run("fetch", "--push-to", "s3://models")
    assert (result.code, fetched) == (2, ["squad-1"] * 2)
    assert result.message.startswith(
        "--push-to stores a model, but job squad-2 (failed) has none\n"
    )


def test_a_folder_with_other_results_or_files_is_refused(
    line: CommandLine, fetched: list[str]
) -> None:
    line.must("fetch", "squad-1", "--results", "best")
    line.must("fetch", "squad-1", "--results", "best", "--json")
    for place in ("mine/elements", "squad-1", "old"):
        Path(place).mkdir(parents=True)
        Path(place, ".hidden" if place == "old" else "file").touch()
    line.must("fetch", "squad-1", "--results", "old")  # such as an interrupted download's
    line.must("fetch", "squad-1", "--results", "squad-1")
    assert fetched == ["squad-1"] * 4
    for place, why in {
        "best": "the results of job squad-1",
        "mine": "other files, such as elements",
        ".": "other files, such as best",
    }.items():
        for command in ("fetch squad-2", "attach squad-2", "train squad --demo", "run"):
            program = ["--", "true"] * (command == "run")
            result = line.run(*command.split(), "--results", place, *program)
            assert result.code == 2, command
            assert result.message.startswith(f"--results {place}: it contains {why}\n")
    assert fetched == ["squad-1"] * 4


def test_a_report_is_written_beside_the_results(
    tmp_path: Path, line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "results/squad-1", ranks=2, steps=40)
    other: dict[str, Any] = {"dtype": "fp32", "scores": {"x": 80.0}, "backend": None}
    make_folder(tmp_path / "results/one", ranks=1, steps=2, **other)

    result = line.must("report", "squad-1", "--compare", "one", "--price", "3", "--json")

    found = json.loads(result.out)
    assert found["report"] == "results/squad-1/report.html"
    assert found["missing"] == []
    assert found["usd_per_epoch"] == pytest.approx(2 * 3 * 88524 / 114 / 3600)
    assert found["usd_of_run"] == pytest.approx(2 * 3 * 864 / 3600)
    (compared,) = found["comparisons"]
    assert compared["runs"] == ["one", "squad-1"]
    assert compared["differing"]["world size"] == [1, 2]
    assert compared["differing"]["dtype"] == ["fp32", "bf16"]
    assert compared["scores"]["x"] == [80.0, None]
    shown = line.must("report", "--compare", "one", "squad-1").out
    assert shown.split()[:2] == ["one", "squad-1"]
    assert shown.endswith("results/squad-1/report.html\n")
    assert Path(found["report"]).read_text().startswith("<!doctype html>")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    line.must("report", "squad-1", "--output=~/a/b.html")
    assert Path("home/a/b.html").is_file()


@pytest.fixture
def without_torch(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.setattr("jobs.cli.results.predict.can_answer_here", lambda: False)
    monkeypatch.setattr("tests.harness.simulated_machines.SimulatedHost.upload", lambda *_: None)
    for pattern in ("^mkdir -m 700", "^rm -rf /home/ubuntu/spr-predict-"):
        line.stage("node0", pattern, Result(0, "", ""))
    return line


def test_adapters_are_merged_on_the_head_if_pytorch_is_not_installed_here(
    without_torch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = without_torch
    root = "/home/ubuntu/spr-jobs/squad-1"
    pattern = f"worker.tasks.predict --base {root}/model --merge output {root}/output/model <"
    line.stage("node0", pattern, Result(0, "", ""))
    asked: list[str] = []

    def download(_: Any, command: str) -> Iterator[bytes]:
        asked.append(command)
        yield pack_output({"output/config.json": b"{}"})[: None if asked[1:] else 9]

    monkeypatch.setattr("tests.harness.command_line.StagedHost.download", download)
    assert "arrived damaged" in line.run("predict", "--merge", "new").message
    assert not [*Path().glob("[.n]*")]
    result = line.must("predict", "--merge", "new")
    assert result.out == "new/\n"
    assert "using the model of squad-1, the newest on the cluster" in result.err
    assert Path("new/config.json").read_text() == "{}"
    assert re.fullmatch(r"tar -C /home/ubuntu/spr-predict-\w+ -cf - output", asked[0])

    whole = Path("results/a/model/config.json")
    whole.parent.mkdir(parents=True)
    whole.write_text('{"architectures": ["LlamaForCausalLM"]}')
    refused = line.run("predict", "--merge", "other")
    assert refused.code == 2
    assert "--merge: results/a/model is a whole model, without adapters" in refused.message
    assert not Path("other").exists()


def test_a_prediction_is_shown_as_its_task_has_it() -> None:
    predictions: list[tuple[dict[str, Any], str]] = [
        ({"labels": {"good": 0.9, "new": 0.8}}, "good, new"),
        ({"labels": {}}, "(no label)"),
        ({"words": ["in", "Delft"], "tags": ["O", "B-LOC"]}, "in\tO\nDelft\tB-LOC"),
        ({"completion": ""}, ""),
        ({"perplexity": 7.5, "tokens": 3}, "perplexity 7.5"),
        ({"text": "a text", "embedding": [0.6, 0.8]}, "[0.6, 0.8]"),
        ({"text": "a text", "score": 0.25}, "0.25"),
        ({"question": "Where?", "text": "", "score": 0.0, "start": 0}, "(no answer)"),
    ]
    assert [render([found]) for found, _ in predictions] == [shown for _, shown in predictions]
    texts = render([found for found, _ in predictions]).splitlines()
    assert texts[:6] == ["row 1", "  good, new", "row 2", "  (no label)", "row 3", "  in\tO"]
    assert texts[-4:] == ["a text", "  0.25", "Where?", "  (no answer)"]


def test_the_head_answers_if_pytorch_is_not_installed_here(
    without_torch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = without_torch
    said = '{"text": "in Delft", "score": NaN, "start": 19}'
    line.stage("node0", "-m worker.tasks.predict", Result(0, said + "\n", ""))

    asked = ("predict", "Where?", "--context", "The mill has stood in Delft.")
    assert line.must(*asked).out == "in Delft\n"
    result = json.loads(line.must(*asked, "--json").out)
    assert result["where"] == "head"
    assert result["answers"] == [
        {"question": "Where?", "text": "in Delft", "score": None, "start": 19}
    ]
    require_schema(["predict"], result)
    require_schema(["predict"], {**result, "answers": [{"text": "Fine.", "labels": {"good": 0.9}}]})

    stdin = SimpleNamespace(buffer=io.BytesIO(b'{"question": "Where?"}\n'))
    monkeypatch.setattr("sys.stdin", stdin)
    assert json.loads(line.must("predict", "-", *asked[2:], "--json").out) == result

    Path("mine").mkdir()
    folder = "'mine' is a folder, not a text\n  → --model names a model"
    for texts in (["mine"], ["Where?", "mine"]):
        assert line.run("predict", *texts).message == folder
    both = line.run("predict", "-", "Where?")
    assert both.message == "- (standard input) can't be used with other texts"
    assert both.code == 2

    nobody = line.run(*asked, "--name", "other")
    assert nobody.code == 2
    assert nobody.message == (
        "PyTorch is not installed here, and there is no cluster: no cluster 'other' is "
        "running in us-east-1\n  → in spr-cluster's source folder: pip "
        "install '.[job]'; with pipx: pipx runpip spr-cluster install '.[job]'"
    )
