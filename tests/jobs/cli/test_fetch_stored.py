"""`fetch s3://…`: the results of a job whose cluster is gone, against moto."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from moto import mock_aws

from cluster.local_files import ClusterFiles
from infra.aws.s3 import connect_s3
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord, record_tags
from infra.errors import JobError, UsageError
from infra.files import write_private
from infra.s3_url import S3Location
from infra.spec import ClusterSpec
from jobs.__main__ import main
from jobs.places.bucket import fetch_stored
from jobs.places.launcher import Outcome
from jobs.places.queue.history import parse_jobs
from tests.fakes import FakeHost
from tests.jobs.context import SUBMITTED, ended, listed

HOUR = timedelta(hours=1)
URL = "s3://results/team/squad-1"
STORED = {
    "job.json": replace(SUBMITTED, cluster="spr", more={"bucket": "s3://results/team"}).render(),
    "end.json": ended(nodes=["node0", "node1"]),
    "begin.json": "{}",
    "log": "the log",
    "data/train.json": "samples",
    "output/results.json": '{"f1": 90.0}',
    "output/model/config.json": "{}",
    "output.state/logs/rank-0.log": "rank",
    "output/log/x": "theirs",
    "output/end.json": "theirs",
    "output/node1/y": "theirs",
    "workers/node1/output/z": "z",
    "output/../../outside": "x",
    "output.state/checkpoints/step-000005/checkpoint.json": "{}",
}
FETCHED = {
    *("job/job.json", "job/log", "job/logs/rank-0.log", "results.json", "model/config.json"),
    *("log/x", "end.json", "node0/node1/y", "node1/z"),
}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    with mock_aws():
        client = connect_s3()
        client.create_bucket(Bucket="results")
        for name, text in STORED.items():
            client.put_object(Bucket="results", Key=f"team/squad-1/{name}", Body=text.encode())
        yield client


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_stored_job_is_fetched_without_a_cluster(
    s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", URL]) == 0

    folder = tmp_path / "results/squad-1"
    assert names(tmp_path) == {f"results/squad-1/{name}" for name in FETCHED}
    record = json.loads((folder / "job/job.json").read_text())
    assert (record["state"], record["exit_code"], record["seconds"]) == ("succeeded", 0, 7.5)
    assert [node["name"] for node in record["nodes"]] == ["node0", "node1"]
    assert capsys.readouterr().out == "squad-1 (succeeded): results/squad-1/\n"

    (tmp_path / "spr-cluster.toml").write_text('[cluster]\nname = "other"\n')
    assert main(["fetch", URL, "--results", "here", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert names(tmp_path / "here") == FETCHED
    assert found["results"] == "here"
    assert (found["job"], found["state"]) == ("squad-1", "succeeded")
    assert (found["checkpoint"], found["has_model"]) == ("step-000005", True)
    assert not found["unfinished"]


def test_the_jobs_in_a_bucket_are_listed(s3: Any, capsys: pytest.CaptureFixture[str]) -> None:
    later = replace(SUBMITTED, when="2026-08-01T10:00:00+00:00").render()
    s3.put_object(Bucket="results", Key="team/squad-0/job.json", Body=later.encode())
    s3.put_object(Bucket="results", Key="team/notes.txt", Body=b"x")

    assert main(["jobs", "s3://results/team", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["jobs"]
    assert [(job["job"], job["state"]) for job in found] == [
        ("squad-1", "succeeded"),
        ("squad-0", "running"),
    ]
    assert main(["jobs", "s3://results/team"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"squad-1 +succeeded", text)
    assert "To get the results of one: spr-cluster fetch s3://results/team/squad-0" in text
    Path("spr-cluster.toml").write_text('[cluster]\nname = "other"\n')
    for name, jobs in {"": "10", "--name=spr": "1", "--name=bert": "0", "--name=x": ""}.items():
        assert main(["jobs", "s3://results/team", "--json", *filter(None, [name])]) == 0
        found = json.loads(capsys.readouterr().out)["jobs"]
        assert [job["job"] for job in found] == [f"squad-{number}" for number in jobs]
    assert main(["jobs", "s3://results/nobody"]) == 0
    assert capsys.readouterr().out == "No jobs in s3://results/nobody.\n"


def test_the_costs_of_the_jobs_in_a_bucket(
    s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = replace(SUBMITTED, usd_per_hour=6.0, price_source="a list", tags=(("team", "nlp"),))
    nodes = tuple({"name": f"node{n}", "type": "r7iz.metal-16xl"} for n in range(2))
    for job in ("squad-1", "squad-0"):
        record = replace(priced, job=job, cloud="aws", nodes=nodes, kind="run").render()
        s3.put_object(Bucket="results", Key=f"team/{job}/job.json", Body=record.encode())
    for name in ("job.json", "end.json"):
        s3.put_object(Bucket="results", Key=f"team/squad-2/{name}", Body=b"damaged")
    own = b'{"trials": [{}, {}]}'  # a program's
    s3.put_object(Bucket="results", Key="team/squad-1/output/results.json", Body=own)

    for place in ("s3://results/team", URL):
        assert main(["jobs", "--cost", place, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [job["job"] for job in found["jobs"]] == ["squad-1"]
        assert found["uncounted"] == ["squad-0"] * (place != URL)
        usd = 2 * 6.0 * 7.5 / 3600
        assert found["tags"]["team=nlp"] == {
            "jobs": 1,
            "node_hours": pytest.approx(2 * 7.5 / 3600),
            "usd": pytest.approx(usd),
            "unpriced": 0,
        }
    assert main(["jobs", "--cost", "s3://results/team"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"team=nlp +1 +0.0 +\$0.03", text)
    why = "not counted, because the end is unknown: 1 job in s3://results/team: squad-0"
    assert f"{why}\n" in text
    assert names(tmp_path) == set()
    assert main(["fetch", URL]) == 0
    assert main(["jobs", URL]) == 0
    assert re.search(r"total +7.5 s +\$0.025\n", capsys.readouterr().out)
    for job, owner in (("squad-3", "ann"), ("squad-4", "")):
        folder = tmp_path / f"results/{job}/job"
        folder.mkdir(parents=True)
        run = replace(SUBMITTED, job=job, owner=owner, seconds=7.5, nodes=nodes, tags=())
        (folder / "job.json").write_text(run.render())
    assert main(["jobs", "--cost"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"owner - +2 +0.0 +\$0.03 without 1 job\n", shown)
    assert re.search(r"owner ann +1 +0.0 +-\n", shown)
    assert main(["jobs", "--cost", "squad-1"]) == 2
    assert "omit JOB and --all" in capsys.readouterr().err


def test_a_job_that_has_not_ended_is_said_to_be_so(
    s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("end.json", "output/results.json"):
        s3.delete_object(Bucket="results", Key=f"team/squad-1/{name}")
    assert main(["fetch", URL]) == 0
    said = capsys.readouterr()
    assert said.out == "squad-1 (running): results/squad-1/\n"
    assert f"squad-1 has not ended, as far as {URL} says; fetching its output so far" in said.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["s3://results/team/squad-2"], 2, "there is no job squad-2 in s3://results/team/squad-2"),
        (["s3://results/team"], 2, "the jobs below it: spr-cluster jobs s3://results/team"),
        (["s3://results/team", "--cloud=local"], 2, "jobs s3://results/team --cloud local\n"),
        (["s3://other/squad-1"], 2, "s3://other/squad-1: bucket 'other' does not exist"),
        (["s3://results"], 2, "fetch s3://results: expected a job's folder, such as"),
        ([URL, "--name", "x"], 2, f"--name: the job is read from {URL}: omit it"),
    ],
)
def test_refusals(
    s3: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("jobs.cli.results.fetch.open_s3", lambda *_: s3)
    assert main(["fetch", *words]) == code
    assert message in capsys.readouterr().err


def test_a_changing_file_is_noticed_and_nothing_is_kept(s3: Any, tmp_path: Path) -> None:
    place, sizes = S3Location("results", "team/squad-1"), {"job.json": 5, "log": 8}
    with pytest.raises(JobError, match="it changed meanwhile"):
        fetch_stored(s3, place, sizes, tmp_path / "out", lambda _: None)
    assert names(tmp_path / "out") == set()


_BUCKET = "s3://results/team"


def write_file(_: Any) -> None:
    Path("spr-cluster.toml").write_text(f'[cluster]\nname = "spr"\nbucket = "{_BUCKET}"\n')


def write_record(_: Any) -> None:
    folder = Path("results/squad-1/job")
    folder.mkdir(parents=True)
    where: dict[str, Any] = {"cloud": "aws", "region": "us-east-1", "bucket": _BUCKET}
    (folder / "job.json").write_text(replace(SUBMITTED, cluster="spr", **where).render())


def leave_group(name: str) -> None:
    """As the nodes do when they end by themselves: the security group has the cluster's record."""
    spec = ClusterSpec(name=name, nodes=1, bucket=_BUCKET, ssh_cidrs=("10.0.0.0/8",))
    now = datetime.now(timezone.utc)
    record = ClusterRecord(spec.model_dump(), now, now + HOUR, now + 2 * HOUR)
    labels = {tags.CLUSTER: name, **record_tags(spec, record)}
    ec2 = boto3.client("ec2", region_name="us-east-1")
    group = ec2.create_security_group(GroupName=name, Description="x")["GroupId"]
    ec2.create_tags(Resources=[group], Tags=[{"Key": k, "Value": v} for k, v in labels.items()])


@pytest.mark.parametrize(
    ("names_it", "words", "shown"),
    [
        (write_file, "fetch squad-1", "squad-1 (succeeded): results/squad-1/"),
        (write_record, "fetch", "squad-1 (succeeded): results/squad-1/"),
        (leave_group, "attach", "squad-1 (succeeded): results/squad-1/"),
        (write_file, "jobs", "get the results of one: spr-cluster fetch s3://results/team/squad-1"),
        (leave_group, "jobs squad-1", "squad-1  succeeded"),
    ],
)
def test_without_its_cluster_a_job_is_found_in_the_bucket(
    s3: Any,
    names_it: Callable[[str], None],
    words: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names_it("spr")
    later = replace(SUBMITTED, cluster="u2", when="2099-08-01T10:00:00+00:00").render()
    if words != "jobs":  # it lists those of all clusters
        s3.put_object(Bucket="results", Key="team/squad-9/job.json", Body=later.encode())
    assert main(words.split()) == 0
    said = capsys.readouterr()
    assert shown in said.out
    assert "no cluster 'spr' is running in us-east-1; looking in s3://results/team" in said.err
    if words == "jobs squad-1":
        assert main(["jobs", "squad-1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "succeeded", "Job.state needs it"


def test_on_finish_runs_after_results_came_from_the_bucket(
    s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_group("spr")
    tell = 'echo "$SPR_JOB $SPR_STATE $SPR_RESULTS $SPR_CLUSTER" > said'
    assert main(["attach", "--results", "a", "--on-finish", tell]) == 0
    assert Path("said").read_text() == f"squad-1 succeeded {tmp_path}/a spr\n"
    assert main(["attach", "--results", "b", "--on-finish", "exit 3"]) == 1
    assert main(["attach", "--results", "c", "--down-when-done", "--cloud", "aws"]) == 0
    down = "to remove what is left of the cluster: spr-cluster down --name spr --cloud aws"
    assert down in " ".join(capsys.readouterr().err.split())
    s3.delete_object(Bucket="results", Key="team/squad-1/end.json")
    assert main(["attach", "--results", "d", "--on-finish", tell]) == 1
    assert "--on-finish was not run: squad-1 has not ended" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["", "succeeded"])
@pytest.mark.parametrize("words", ["fetch", "attach", "jobs", "fetch squad-2"])
def test_the_bucket_of_another_cluster_is_not_searched(
    s3: Any, words: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record("")
    ClusterFiles.of("u2").remember("aws", "us-east-1")
    own = replace(SUBMITTED, job="squad-2", cluster="u2", cloud="aws", region="us-east-1")
    for job, region in (("squad-2", "us-east-1"), ("squad-3", "eu-west-1")):
        folder = Path(f"results/{job}/job")
        folder.mkdir(parents=True)
        more: dict[str, Any] = {"when": "2020", "bucket": _BUCKET} if job == "squad-3" else {}
        record = replace(own, job=job, region=region, state=state, **more)
        (folder / "job.json").write_text(record.render())
    assert main([*words.split(), "--name", "u2"]) == 2
    left = "are in results/squad-2" if state else "were lost with its nodes"
    said = " ".join(capsys.readouterr().err.split())
    assert f"is running in us-east-1; job squad-2 had no bucket, and its results {left}" in said
    assert "looking in" not in said


@pytest.mark.parametrize("names_it", [write_record, write_file])
def test_one_job_without_a_bucket_hides_no_stored_jobs(
    s3: Any, names_it: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    names_it("spr")
    ClusterFiles.of("spr").remember("aws", "us-east-1")
    last = replace(SUBMITTED, cluster="spr", cloud="aws", region="us-east-1", when="2099")
    write_private(Path("results/squad-9/job/job.json"), replace(last, job="squad-9").render())
    assert main(["jobs"]) == 0
    said = capsys.readouterr()
    assert f"looking in {_BUCKET}" in said.err
    assert "squad-1" in said.out
    assert main(["fetch"]) == 2


def test_the_results_on_a_stopped_head_are_not_called_lost(
    s3: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ClusterFiles.of("u2").remember("aws", "us-east-1")
    own = replace(SUBMITTED, cluster="u2", cloud="aws", region="us-east-1", bucket="", state="")
    write_private(Path("results/squad-2/job/job.json"), replace(own, job="squad-2").render())
    ec2: Any = boto3.client("ec2", region_name="us-east-1")
    image = ec2.describe_images()["Images"][0]["ImageId"]
    labels = [{"Key": tags.CLUSTER, "Value": "u2"}, {"Key": tags.ROLE, "Value": "head"}]
    head = ec2.run_instances(
        ImageId=image,
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": labels}],
    )["Instances"][0]["InstanceId"]
    for end, is_lost in ((ec2.stop_instances, False), (ec2.terminate_instances, True)):
        end(InstanceIds=[head])
        assert main(["fetch", "--name", "u2"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "no cluster 'u2' is running" in said
        assert ("were lost with its nodes" in said) is is_lost


def test_without_any_bucket_the_cluster_is_missing(
    s3: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["fetch"], ["attach"], ["jobs"]):
        assert main(words) == 2
        assert "no cluster 'spr' is running" in capsys.readouterr().err
    write_file("spr")
    assert main(["fetch", "--name", "u2"]) == 2
    assert "looking in" not in capsys.readouterr().err
    leave_group("spr")
    assert main(["logs"]) == 2
    assert "its jobs are in s3://results/team: spr-cluster jobs s3://results/team" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("words", ["fetch", "fetch squad-1 --json", "attach squad-1", "logs"])
def test_a_job_whose_files_a_lost_head_had_is_found_in_the_bucket(
    s3: Any,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (stub,) = parse_jobs(listed("squad-1", on_lost_head=True, bucket=_BUCKET))
    head = FakeHost("node0", [("reading", "")])
    cluster: Any = SimpleNamespace(
        list_jobs=lambda: (stub,), head=head, place="here", flags="--name spr"
    )
    context: Any = SimpleNamespace(
        cluster=SimpleNamespace(name="spr", head=None, flags="--name spr"),
        open_host=lambda _: None,
        outcome=Outcome(),
    )
    for module in ("results.fetch", "logs"):
        monkeypatch.setattr(f"jobs.cli.{module}.open_launcher", lambda *_: cluster)
    monkeypatch.setattr("jobs.cli.attach.open_job_context", lambda *_, **__: context)
    monkeypatch.setattr("jobs.cli.attach.list_jobs", lambda _: (stub,))

    code, said = main(words.split()), capsys.readouterr()

    assert "the files of job squad-1 were on a head that is gone" in said.err
    if words == "logs":
        assert code == 1
        assert f"to get them from {_BUCKET}: spr-cluster fetch squad-1 --name spr" in said.err
        return
    assert code == 0
    assert f"is gone; looking in {_BUCKET}\n" in said.err
    assert names(tmp_path / "results/squad-1") == FETCHED
    if words.startswith("attach"):
        results = Path("results/squad-1")
        assert context.outcome == Outcome("squad-1", "succeeded", results, is_home=True)
    assert '"state": "succeeded"' in said.out or "squad-1 (succeeded)" in said.out


def test_a_job_that_a_new_cluster_lacks_is_found_in_the_bucket(
    s3: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise UsageError("there is no job squad-1 on cluster 'spr'")

    monkeypatch.setattr("jobs.cli.results.fetch.open_launcher", fail)
    write_record("spr")
    assert main(["fetch", "squad-1"]) == 0
    assert "there is no job squad-1 on cluster 'spr'; looking in" in capsys.readouterr().err
    assert main(["fetch"]) == 2
    for name in ("bert", "tutor"):
        ClusterFiles.of(name).remember("aws", "us-east-1")
        write_private(ClusterFiles.of(name).key, "key")
    assert main(["fetch", "squad-1"]) == 2
    assert "which cluster?" in capsys.readouterr().err
