"""`fetch s3://…`: the results of a job whose cluster is gone, against moto."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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


Typed = Callable[..., Any]


@pytest.fixture
def typed(s3: Any, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs a command line that must end with ``code``; returns its output, of which ``err`` is one line."""

    def typed(words: str, code: int = 0) -> SimpleNamespace:
        assert main(shlex.split(words)) == code
        said = capsys.readouterr()
        return SimpleNamespace(out=said.out, err=" ".join(said.err.split()))

    return typed


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def keep_record(job: str, **more: Any) -> None:
    """Have the record of a job in this folder's results."""
    where: dict[str, Any] = {"cloud": "aws", "region": "us-east-1", **more}
    write_private(
        Path(f"results/{job}/job/job.json"), replace(SUBMITTED, job=job, **where).render()
    )


def test_a_stored_job_is_fetched_without_a_cluster(typed: Typed, tmp_path: Path) -> None:
    assert typed(f"fetch {URL}").out == "squad-1 (succeeded): results/squad-1/\n"
    assert names(tmp_path) == {f"results/squad-1/{name}" for name in FETCHED}
    record = json.loads(Path("results/squad-1/job/job.json").read_text())
    assert (record["state"], record["exit_code"], record["seconds"]) == ("succeeded", 0, 7.5)
    assert [node["name"] for node in record["nodes"]] == ["node0", "node1"]

    Path("spr-cluster.toml").write_text('[cluster]\nname = "other"\n')
    found = json.loads(typed(f"fetch {URL} --results here --json").out)
    assert names(tmp_path / "here") == FETCHED
    assert (found["job"], found["state"], found["results"]) == ("squad-1", "succeeded", "here")
    assert (found["checkpoint"], found["has_model"]) == ("step-000005", True)
    assert not found["unfinished"]


def test_the_jobs_in_a_bucket_are_listed(s3: Any, typed: Typed) -> None:
    later = replace(SUBMITTED, when="2026-08-01T10:00:00+00:00").render()
    s3.put_object(Bucket="results", Key="team/squad-0/job.json", Body=later.encode())
    s3.put_object(Bucket="results", Key="team/notes.txt", Body=b"x")

    found = json.loads(typed("jobs s3://results/team --json").out)["jobs"]
    states = {"squad-1": "succeeded", "squad-0": "running"}
    assert [(job["job"], job["state"]) for job in found] == [*states.items()]
    text = typed("jobs s3://results/team").out
    assert re.search(r"squad-1 +succeeded", text)
    assert "To get the results of one: spr-cluster fetch s3://results/team/squad-0" in text
    Path("spr-cluster.toml").write_text('[cluster]\nname = "other"\n')
    for name, jobs in {"": "10", "--name=spr": "1", "--name=bert": "0", "--name=x": ""}.items():
        found = json.loads(typed(f"jobs s3://results/team --json {name}").out)["jobs"]
        assert [job["job"] for job in found] == [f"squad-{number}" for number in jobs]
    assert typed("jobs s3://results/nobody").out == "No jobs in s3://results/nobody.\n"


def test_the_costs_of_the_jobs_in_a_bucket(s3: Any, typed: Typed, tmp_path: Path) -> None:
    nodes = tuple({"name": f"node{n}", "type": "r7iz.metal-16xl"} for n in range(2))
    priced: dict[str, Any] = {"usd_per_hour": 6.0, "price_source": "a list", "nodes": nodes}
    for job in ("squad-1", "squad-0"):
        own: dict[str, Any] = {"job": job, "cloud": "aws", "kind": "run", **priced}
        record = replace(SUBMITTED, tags=(("team", "nlp"),), **own).render()
        s3.put_object(Bucket="results", Key=f"team/{job}/job.json", Body=record.encode())
    for name in ("job.json", "end.json"):
        s3.put_object(Bucket="results", Key=f"team/squad-2/{name}", Body=b"damaged")
    program = b'{"trials": [{}, {}]}'  # a program's
    s3.put_object(Bucket="results", Key="team/squad-1/output/results.json", Body=program)

    for place in ("s3://results/team", URL):
        found = json.loads(typed(f"jobs --cost {place} --json").out)
        assert [job["job"] for job in found["jobs"]] == ["squad-1"]
        assert found["uncounted"] == ["squad-0"] * (place != URL)
        hours, usd = pytest.approx(2 * 7.5 / 3600), pytest.approx(2 * 6.0 * 7.5 / 3600)
        one = {"jobs": 1, "node_hours": hours, "usd": usd, "unpriced": 0}
        assert found["tags"]["team=nlp"] == one
    text = typed("jobs --cost s3://results/team").out
    assert re.search(r"team=nlp +1 +0.0 +\$0.03", text)
    why = "not counted, because the end is unknown: 1 job in s3://results/team: squad-0"
    assert f"{why}\n" in text
    assert names(tmp_path) == set()
    typed(f"fetch {URL}")
    assert re.search(r"total +7.5 s +\$0.025\n", typed(f"jobs {URL}").out)
    for job, owner in (("squad-3", "ann"), ("squad-4", "")):
        keep_record(job, owner=owner, seconds=7.5, nodes=nodes, cloud="local")
    shown = typed("jobs --cost").out
    assert re.search(r"owner - +2 +0.0 +\$0.03 without 1 job\n", shown)
    assert re.search(r"owner ann +1 +0.0 +-\n", shown)
    assert "omit JOB and --all" in typed("jobs --cost squad-1", 2).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("s3://results/team/squad-2", "there is no job squad-2 in s3://results/team/squad-2"),
        ("s3://results/team", "the jobs below it: spr-cluster jobs s3://results/team"),
        ("s3://results/team --cloud=local", "jobs s3://results/team --cloud local"),
        ("s3://other/squad-1", "s3://other/squad-1: bucket 'other' does not exist"),
        ("s3://results", "fetch s3://results: expected a job's folder, such as"),
        (f"{URL} --name x", f"--name: the job is read from {URL}: omit it"),
    ],
)
def test_refusals(
    s3: Any, typed: Typed, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.setattr("jobs.cli.results.fetch.open_s3", lambda *_: s3)
    assert message in typed(f"fetch {words}", 2).err


def test_a_changing_file_is_noticed_and_nothing_is_kept(s3: Any, tmp_path: Path) -> None:
    place, sizes = S3Location("results", "team/squad-1"), {"job.json": 5, "log": 8}
    with pytest.raises(JobError, match="it changed meanwhile"):
        fetch_stored(s3, place, sizes, tmp_path / "out", lambda _: None)
    assert names(tmp_path / "out") == set()


_BUCKET = "s3://results/team"


def write_file(_: Any) -> None:
    Path("spr-cluster.toml").write_text(f'[cluster]\nname = "spr"\nbucket = "{_BUCKET}"\n')


def write_record(_: Any) -> None:
    keep_record("squad-1", cluster="spr", bucket=_BUCKET)


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
    s3: Any, typed: Typed, names_it: Callable[[str], None], words: str, shown: str
) -> None:
    names_it("spr")
    write_private(Path("results/squad-0/job/job.json"), "")  # cut off
    later = replace(SUBMITTED, cluster="u2", when="2099-08-01T10:00:00+00:00").render()
    if words != "jobs":  # it lists those of all clusters
        s3.put_object(Bucket="results", Key="team/squad-9/job.json", Body=later.encode())
    said = typed(words)
    assert shown in said.out
    assert "no cluster 'spr' is running in us-east-1; looking in s3://results/team" in said.err
    if words == "jobs squad-1":
        found = json.loads(typed("jobs squad-1 --json").out)
        assert found["state"] == "succeeded", "Job.state needs it"


def test_on_finish_runs_after_results_came_from_the_bucket(
    s3: Any, typed: Typed, tmp_path: Path
) -> None:
    leave_group("spr")
    tell = shlex.quote('echo "$SPR_JOB $SPR_STATE $SPR_RESULTS $SPR_CLUSTER" > said')
    typed(f"attach --results a --on-finish {tell}")
    assert Path("said").read_text() == f"squad-1 succeeded {tmp_path}/a spr\n"
    typed("attach --results b --on-finish 'exit 3'", 1)
    said = typed("attach --results c --down-when-done --cloud aws").err
    down = "to remove what is left of the cluster: spr-cluster down --name spr --cloud aws"
    assert down in said
    s3.delete_object(Bucket="results", Key="team/squad-1/end.json")
    said = typed(f"attach --results d --on-finish {tell}", 1).err
    assert "--on-finish was not run: squad-1 has not ended" in said
    said = typed(f"fetch {URL} --results e")
    assert said.out == "squad-1 (running): e/\n"
    assert f"squad-1 has not ended, as far as {URL} says; fetching its output so far" in said.err


@pytest.mark.parametrize("state", ["", "succeeded"])
@pytest.mark.parametrize("words", ["fetch", "attach", "jobs", "fetch squad-2"])
def test_the_bucket_of_another_cluster_is_not_searched(
    typed: Typed, words: str, state: str
) -> None:
    write_record("")
    ClusterFiles.of("u2").remember("aws", "us-east-1")
    keep_record("squad-2", cluster="u2", state=state)
    elsewhere = {"region": "eu-west-1", "when": "2020", "bucket": _BUCKET}
    keep_record("squad-3", cluster="u2", state=state, **elsewhere)
    said = typed(f"{words} --name u2", 2).err
    left = "are in results/squad-2" if state else "were lost with its nodes"
    assert f"is running in us-east-1; job squad-2 had no bucket, and its results {left}" in said
    assert "looking in" not in said


@pytest.mark.parametrize("names_it", [write_record, write_file])
def test_one_job_without_a_bucket_hides_no_stored_jobs(
    typed: Typed, names_it: Callable[[str], None]
) -> None:
    names_it("spr")
    ClusterFiles.of("spr").remember("aws", "us-east-1")
    keep_record("squad-9", cluster="spr", when="2099")
    said = typed("jobs")
    assert f"looking in {_BUCKET}" in said.err
    assert "squad-1" in said.out
    typed("fetch", 2)


def test_the_results_on_a_stopped_head_are_not_called_lost(typed: Typed) -> None:
    ClusterFiles.of("u2").remember("aws", "us-east-1")
    keep_record("squad-2", cluster="u2", bucket="", state="")
    ec2: Any = boto3.client("ec2", region_name="us-east-1")
    image = ec2.describe_images()["Images"][0]["ImageId"]
    labels = [{"Key": tags.CLUSTER, "Value": "u2"}, {"Key": tags.ROLE, "Value": "head"}]
    labeled = [{"ResourceType": "instance", "Tags": labels}]
    bought = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, TagSpecifications=labeled)
    for end, is_lost in ((ec2.stop_instances, False), (ec2.terminate_instances, True)):
        end(InstanceIds=[bought["Instances"][0]["InstanceId"]])
        said = typed("fetch --name u2", 2).err
        assert "no cluster 'u2' is running" in said
        assert ("were lost with its nodes" in said) is is_lost


def test_without_any_bucket_the_cluster_is_missing(typed: Typed) -> None:
    for words in ("fetch", "attach", "jobs"):
        assert "no cluster 'spr' is running" in typed(words, 2).err
    write_file("spr")
    assert "looking in" not in typed("fetch --name u2", 2).err
    leave_group("spr")
    stored = "its jobs are in s3://results/team: spr-cluster jobs s3://results/team"
    assert stored in typed("logs", 2).err


@pytest.mark.parametrize("words", ["fetch", "fetch squad-1 --json", "attach squad-1", "logs"])
def test_a_job_whose_files_a_lost_head_had_is_found_in_the_bucket(
    typed: Typed, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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

    said = typed(words, 1 if words == "logs" else 0)

    assert "the files of job squad-1 were on a head that is gone" in said.err
    if words == "logs":
        assert f"to get them from {_BUCKET}: spr-cluster fetch squad-1 --name spr" in said.err
        return
    assert f"is gone; looking in {_BUCKET} " in said.err
    assert names(tmp_path / "results/squad-1") == FETCHED
    if words.startswith("attach"):
        results = Path("results/squad-1")
        assert context.outcome == Outcome("squad-1", "succeeded", results, is_home=True)
    assert '"state": "succeeded"' in said.out or "squad-1 (succeeded)" in said.out


def test_a_job_that_a_new_cluster_lacks_is_found_in_the_bucket(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = UsageError("there is no job squad-1 on cluster 'spr'")
    monkeypatch.setattr("jobs.cli.results.fetch.open_launcher", Mock(side_effect=missing))
    write_record("spr")
    said = typed("fetch squad-1").err
    assert "there is no job squad-1 on cluster 'spr'; looking in" in said
    typed("fetch", 2)
    for name in ("bert", "tutor"):
        ClusterFiles.of(name).remember("aws", "us-east-1")
        write_private(ClusterFiles.of(name).key, "key")
    assert "which cluster?" in typed("fetch squad-1", 2).err
