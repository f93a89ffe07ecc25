"""Data from S3 on all nodes of a job, before its ranks start: moto's server, and this machine as nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.places.files import check_stage, place_files, worker_files
from jobs.places.plan import JobPaths
from jobs.places.queue.slurm import SlurmLauncher
from jobs.worker.storage import stage
from jobs.worker.supervisor import staging
from tests.jobs.context import job_spec
from tests.jobs.places.this_machine import NODES, ThisMachine, follow, submit, wait_for
from tests.jobs.worker.storage.conftest import Proxy, bucket, proxy, s3_server

__all__ = ["bucket", "proxy", "s3_server"]
URL, TARGET = "s3://data/set/train.csv", "data/train.csv"


@pytest.fixture
def cluster(head: ThisMachine, proxy: Proxy) -> ThisMachine:
    """Three nodes whose AWS configuration names S3's address, as in the embedded cloud."""
    head.connect("node1", "node2")
    for node in NODES:
        folder = head.root / node / ".aws"
        folder.mkdir()
        keys = "aws_access_key_id = a\naws_secret_access_key = b\nregion = us-east-1\n"
        (folder / "config").write_text(f"[default]\nendpoint_url = {proxy.url}\n{keys}")
    return head


def run(head: ThisMachine, script: str, job: str = "squad-1", **more: Any) -> tuple[Any, str]:
    """Return a job's end and its log."""
    paths = submit(head, script, job, nodes=3, stage=((URL, TARGET),), **more)
    end, lines, _ = follow(head, paths)
    return end, "\n".join(lines)


def test_each_node_downloads_its_own_once(cluster: ThisMachine, bucket: Any, proxy: Proxy) -> None:
    bucket.put_object(Key="set/train.csv", Body=b"text,label\n")

    end, log = run(cluster, f"cat {TARGET}")

    assert (end.state, end.attempt) == ("succeeded", 1)
    assert "text,label" in log
    for node in NODES:
        home = cluster.root / node
        target = home / "spr-jobs" / "squad-1" / TARGET
        assert target.read_bytes() == b"text,label\n"
        assert target.resolve().is_relative_to(home / stage.CACHE)
        assert f"{node}: {URL}: 0.0 MB in " in log
    assert len(proxy.gets) == 3
    end, log = run(cluster, f"cat {TARGET}", "squad-2")
    assert end.state == "succeeded"
    assert len(proxy.gets) == 3
    assert f"node2: {URL}: already on this node" in log


def test_data_that_are_not_there_end_the_job(cluster: ThisMachine, bucket: Any) -> None:
    end, log = run(cluster, "echo trained", retries=2)

    assert (end.state, end.attempt, end.rank, end.host) == ("failed", 1, None, "node0")
    assert end.message == f"node0: {URL}: NoSuchKey: no object and no folder has this name"
    assert "trained" not in log


def test_a_check_that_crashes_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(staging, "_MODULE", "no_such_module")
    launch: Any = SimpleNamespace(spec=job_spec(stage=((URL, TARGET),)))
    assert staging._find_versions(launch, "node0") == {}
    said = capsys.readouterr().out
    assert "node0: the check of the data failed: " in said
    assert "No module named no_such_module" in said


def test_data_that_changed_before_a_later_attempt_end_the_job(
    cluster: ThisMachine, bucket: Any
) -> None:
    bucket.put_object(Key="set/train.csv", Body=b"new")
    paths = JobPaths("squad-1", home=str(cluster.home))
    Path(paths.root).mkdir(parents=True)
    Path(paths.root, staging.VERSIONS).write_text(f'{{"{URL}": "earlier"}}')

    end, _ = run(cluster, "echo trained", retries=2)

    assert (end.state, end.attempt, end.rank) == ("failed", 1, None)
    assert f"{end.host}: {URL}: it has changed since the job began" in end.message


def test_node_that_is_lost_meanwhile_is_no_fault_of_the_job(
    cluster: ThisMachine, bucket: Any
) -> None:
    bucket.put_object(Key="set/train.csv", Body=b"x")
    place_files(cluster, JobPaths("squad-1", home=str(cluster.home)), worker_files())
    (cluster.root / "node2").rename(cluster.root / "gone")

    end, log = run(cluster, "echo trained", retries=1)

    assert (end.state, end.attempt, end.host) == ("failed", 2, "node2")
    assert "node2 was lost while it received the data; the job will run again" in log


@pytest.fixture
def slow(bucket: Any, proxy: Proxy) -> Iterator[None]:
    """Downloads that do not end during a test."""
    bucket.put_object(Key="set/train.csv", Body=b"x")
    held = threading.Event()

    def hold(request: str) -> None:
        if request.startswith("GET /data/"):
            held.wait(60)

    proxy.answer = hold
    yield
    held.set()


@pytest.mark.usefixtures("slow")
def test_cancel_ends_the_downloads(cluster: ThisMachine, proxy: Proxy) -> None:
    paths = submit(cluster, "echo trained", nodes=3, stage=((URL, TARGET),))
    wait_for(lambda: len(proxy.gets) == 3)
    SlurmLauncher(cluster).cancel(paths, 5)
    wait_for(lambda: cluster.processes() == [])
    assert json.loads(Path(paths.end).read_text())["state"] == "cancelled"


@pytest.mark.usefixtures("slow")
def test_a_limit_ends_the_downloads(cluster: ThisMachine) -> None:
    end, log = run(cluster, "echo trained", task="squad", max_time_s=3.0)

    assert (end.state, end.attempt) == ("failed", 1)
    assert end.message == "it took longer than --max-time, 0.05 min"
    assert "0.05 min; stopping" in log
    assert "trained" not in log


def test_typing_errors_are_refused_at_submission(
    cluster: ThisMachine, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.places.files.VENV", str(cluster.root))
    bucket.put_object(Key="set/train", Body=b"x")
    paths = JobPaths("squad-1", home=str(cluster.home))
    place_files(cluster, paths, worker_files())
    with pytest.raises(UsageError, match=f"{URL}: NoSuchKey"):
        check_stage(cluster, paths, ((URL, TARGET),))
    with pytest.raises(UsageError, match="does not say its format"):
        check_stage(cluster, paths, (("s3://data/set/train", "data/train"),))
    check_stage(cluster, paths, (("s3://data/set", "data/train"),))
