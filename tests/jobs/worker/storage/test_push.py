"""A job's folder into S3: moto's server."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.worker.runtime.checkpoint_names import LAST
from jobs.worker.storage import ownership, push
from jobs.worker.storage.client import S3Url
from tests.jobs.worker.storage.conftest import Proxy

URL = "s3://data/team/squad-1"
DENIED = (
    "403 Forbidden",
    "<Error><Code>AccessDenied</Code><Message>AKIASECRET may not</Message></Error>",
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a job that has ended."""
    folder = tmp_path / "squad-1"
    names = ["job.json", "begin.json", "end.json", "log", "log.earlier", "output/results.json"]
    names += ["data/train.csv", "output/model/a.bin", "output.state/logs/rank-0.log"]
    names += ["environment.json", "run.sh", "code/worker/a.py"]
    for name in (*names, "output/model/checkpoint-5/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    staged = tmp_path / "spr-data/s3/files/v"
    staged.parent.mkdir(parents=True)
    staged.write_text("x")
    (folder / "data/eval.csv").symlink_to(staged)
    (folder / "model").symlink_to(staged.parent)
    return folder


def save_checkpoint(job: Path, step: int, text: str = "state") -> None:
    folder = job / f"output.state/checkpoints/step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.pt").write_text(f"{text} {step}")
    (folder / LAST).write_text("{}")


def names(bucket: Any) -> list[str]:
    return sorted(each.key.removeprefix("team/squad-1/") for each in bucket.objects.all())


def run(what: str, job: Path, url: str = URL) -> int:
    return push.main([what, str(job), url])


def test_all_are_the_results_and_inputs_but_no_secrets(
    job: Path, bucket: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("all", job) == 0

    assert names(bucket) == [
        *("begin.json", "data/train.csv", "end.json", "job.json", "log", "log.earlier"),
        *("output.state/logs/rank-0.log", "output/model/a.bin", "output/model/checkpoint-5/a"),
        "output/results.json",
    ]
    done = json.loads((job / push.PUSHED).read_text())
    assert (done["url"], done["files"]) == (URL, 10)
    assert json.loads(capsys.readouterr().out) == done


def test_only_what_differs_is_stored_again(job: Path, bucket: Any, proxy: Proxy) -> None:
    run("all", job)
    proxy.requests.clear()
    (job / "log").write_text("content of LOG")
    os.utime(job / "log", (0, 0))  # as `cp -p` of an older file
    now = time.time() + 60
    os.utime(job / "job.json", (now, now))  # newer, but its digest is the same

    assert run("all", job) == 0

    assert [each for each in proxy.requests if each.startswith("PUT")] == [
        "PUT /data/team/squad-1/log"
    ]
    assert bucket.Object("team/squad-1/log").get()["Body"].read() == b"content of LOG"


@pytest.mark.parametrize("behind_s", [-300, 0, 300])
def test_times_in_s3_are_compared_by_this_nodes_clock(job: Path, behind_s: float) -> None:
    """Else a file that changed after a push looks older, or output of this run as of an earlier one."""
    there = datetime.now(timezone.utc) + timedelta(seconds=behind_s)
    known = {"Size": 3, "ETag": '"of abc"', "LastModified": there - timedelta(seconds=20)}
    names = ("log", "output/a.bin")
    page: dict[str, Any] = {
        "Contents": [{"Key": f"team/squad-1/{name}", **known} for name in names]
    }
    page["ResponseMetadata"] = {"HTTPHeaders": {"date": format_datetime(there, usegmt=True)}}
    s3: Any = SimpleNamespace(
        get_paginator=lambda _: SimpleNamespace(paginate=lambda **_: iter([page]))
    )
    (job / "log").write_text("new")
    os.utime(job / "begin.json", (time.time() - 60,) * 2)
    storing = push.Push(s3, job, S3Url.parse(URL))
    stored = storing.list()
    assert not stored["log"].equals(job / "log")
    assert storing._find_stale(stored, {}) == set()


def test_output_of_an_earlier_run_goes_and_what_may_be_the_only_copy_stays(
    job: Path, bucket: Any
) -> None:
    run("all", job)
    (job / "output/model/a.bin").unlink()
    for begun, stays in ((-60, True), (60, False)):
        os.utime(job / "begin.json", (time.time() + begun,) * 2)
        assert run("all", job) == 0
        assert ("output/model/a.bin" in names(bucket)) is stays
    assert json.loads((job / push.PUSHED).read_text())["files"] == 9 == len(names(bucket))


def test_a_name_that_s3_does_not_take_is_told(
    job: Path, bucket: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = "/".join(["data", *["x" * 250] * 3, "y"])
    taken += "y" * (1024 - len("team/squad-1/") - len(taken))
    (job / taken).parent.mkdir(parents=True)
    (job / taken).touch()
    (job / "data/caf\udce9.csv").touch()  # Latin-1
    assert run("all", job) == 0
    assert {taken, "data/caf\\xe9.csv"} <= {*names(bucket)}
    (job / f"{taken}y").touch()
    assert run("all", job) == 1
    assert "can't be stored: data/xxx" in capsys.readouterr().err


def test_checkpoint_is_complete_last_and_the_one_before_stays(
    job: Path, bucket: Any, proxy: Proxy
) -> None:
    own = "team/squad-1/output/checkpoints/step-000001"  # the user's
    bucket.put_object(Key=own, Body=b"")
    for step in (5, 50, 500):
        save_checkpoint(job, step)
        assert run("checkpoint", job) == 0
    assert own.removeprefix("team/squad-1/") in names(bucket)
    bucket.Object(own).delete()
    (job / "output.state/checkpoints/step-000600").mkdir()  # incomplete
    assert run("checkpoint", job) == 0

    assert names(bucket)[:4] == ["data/train.csv", "job.json", "log", "log.earlier"]
    assert names(bucket)[4:] == [
        f"output.state/checkpoints/step-000{step}/{name}"
        for step in ("050", "500")
        for name in (LAST, "state.pt")
    ]
    puts = [each.rpartition("/")[2] for each in proxy.requests if each.startswith("PUT")]
    assert puts[4:] == ["state.pt", LAST] * 3, "the inputs come first"


def test_a_running_job_has_no_end_and_its_long_log_stays_here(
    job: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end that is stored is that of the run before."""
    run("all", job)
    (job / "end.json").unlink()
    monkeypatch.setattr(push, "_PART", 30)
    for content in ("now", "of this run: long" * 2):
        (job / "log").write_text(content)
        assert run("checkpoint", job) == 0
    assert "end.json" not in names(bucket)
    assert bucket.Object("team/squad-1/log").get()["Body"].read() == b"now"


def test_a_job_is_marked_only_if_it_has_ended_and_all_files_are_stored(
    job: Path, bucket: Any, proxy: Proxy
) -> None:
    proxy.answer = lambda request: DENIED if "a.bin" in request else None
    assert run("all", job) == 1
    assert not (job / push.PUSHED).exists()
    proxy.answer = lambda _: None
    for name in ("output/results.json", "end.json"):
        (job / name).unlink()
    save_checkpoint(job, 7)
    assert run("all", job) == 0
    stored = {"output/model/a.bin", f"output.state/checkpoints/step-000007/{LAST}"}
    assert stored <= {*names(bucket)}
    assert not (job / push.PUSHED).exists()


def test_a_probe_leaves_nothing_and_a_denial_fails_at_once_without_secrets(
    job: Path, bucket: Any, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("probe", job) == 0
    assert names(bucket) == []
    proxy.answer = lambda _: DENIED
    proxy.requests.clear()
    assert run("probe", job) == 1
    assert len(proxy.requests) == 1
    assert capsys.readouterr().err == f"{URL}: AccessDenied: the nodes lack s3:PutObject\n"


def test_errors_of_the_server_are_tried_again(
    job: Path, bucket: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "_PAUSE_S", 0.01)
    failures = iter(range(9))  # more than boto3 alone tries again
    slow = ("503 Slow Down", "<Error><Code>SlowDown</Code></Error>")
    monkeypatch.setattr("random.random", lambda: 0.001)  # boto3's pauses
    proxy.answer = lambda request: slow if "PUT" in request and next(failures, None) == 0 else None
    assert run("checkpoint", job) == 0
    assert names(bucket) == ["data/train.csv", "job.json", "log", "log.earlier"], "no data from S3"
    assert not (job / push.PUSHED).exists()


@pytest.mark.parametrize(
    ("what", "may", "longest_s"),
    [
        ("all", True, 1e10),
        ("all", False, 0),
        ("checkpoint", True, 1800),
        ("checkpoint", False, 1e10),
    ],
)
def test_uploads_that_an_earlier_push_left_unfinished_are_aborted(
    job: Path, bucket: Any, proxy: Proxy, monkeypatch: Any, what: str, may: bool, longest_s: float
) -> None:
    """Nothing lists them, but their parts are billed."""
    uploads = ("team/squad-1/output/model/b.bin", "team/squad-10/a")
    for key in uploads:
        bucket.Object(key).initiate_multipart_upload()
    monkeypatch.setattr(ownership, "PUSH_S", longest_s)  # moto's uploads are from 2010
    if not (may or longest_s):
        proxy.answer = lambda request: DENIED if "?uploads" in request else None

    assert run(what, job) == 0

    left = [each.object_key for each in bucket.multipart_uploads.all()]
    assert left == [*uploads[1 if may else 0 :]]
    assert (job / push.PUSHED).exists() is (what == "all")
