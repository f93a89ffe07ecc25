"""A job's folder in S3, stored by its supervisor: moto's server, and this machine as nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.cli.train import build_request, build_resume
from jobs.places.files import check_places, place_files, worker_files
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.session import with_bucket
from jobs.worker.spec import JobSpec
from tests.jobs.context import NOW, parse_request, whole_cluster
from tests.jobs.places.test_staging import cluster
from tests.jobs.places.this_machine import ThisMachine, follow, submit, wait_for
from tests.jobs.worker.storage.conftest import Proxy, bucket, proxy, s3_server
from tests.jobs.worker.storage.test_push import DENIED

__all__ = ["bucket", "cluster", "proxy", "s3_server"]
BUCKET = "s3://data/team"
URL = f"{BUCKET}/squad-1"
_TRAIN = """
step=output.state/checkpoints/step-000007; mkdir -p $step.partial
echo x > $step.partial/state.pt; echo {} > $step.partial/checkpoint.json; mv $step.partial $step
for i in $(seq 900); do sleep 0.2; [ ! -e ../../seen ] || break; done
echo trained; echo '{}' > output/results.json
"""


def run(head: ThisMachine, script: str, **more: Any) -> tuple[JobPaths, Any, str]:
    paths = submit(head, script, nodes=2, bucket=BUCKET, **more)
    end, lines, _ = follow(head, paths)
    return paths, end, "\n".join(lines)


def read(bucket: Any, name: str) -> str:
    return str(bucket.Object(f"team/squad-1/{name}").get()["Body"].read().decode())


def test_checkpoints_and_results_are_stored(
    cluster: ThisMachine, bucket: Any, proxy: Proxy
) -> None:
    def look(request: str) -> None:
        if "DELETE" not in request and "PUT" not in request and "step-000007" in request:
            (cluster.home / "seen").touch()

    proxy.answer = look
    command = 'echo "$SPR_JOB is $SPR_STATE" | tee $SPR_RESULTS/../finished'
    paths, end, log = run(cluster, _TRAIN, on_finish=command)

    assert end.state == "succeeded"
    assert f"stored in {URL} (" in log
    assert "squad-1 is succeeded" in log
    assert Path(paths.root, "finished").read_text() == "squad-1 is succeeded\n"

    wait_for(Path(paths.root, "pushed.json").exists)
    assert json.loads(read(bucket, "end.json"))["state"] == "succeeded"
    assert "squad-1 is succeeded" in read(bucket, "log")
    assert read(bucket, "output/results.json") == "{}\n"
    assert read(bucket, "output.state/checkpoints/step-000007/checkpoint.json") == "{}\n"


def test_failure_to_store_does_not_change_the_state(
    cluster: ThisMachine, bucket: Any, proxy: Proxy
) -> None:
    proxy.answer = lambda _: DENIED
    paths, end, log = run(cluster, "echo '{}' > output/results.json")

    assert end.state == "succeeded"
    why = f"{URL}: AccessDenied: the nodes lack s3:ListBucket"
    assert f"warning: its folder can't be stored: {why}" in log
    assert json.loads(Path(paths.end).read_text())["push_error"] == why
    assert not Path(paths.root, "pushed.json").exists()


def test_denial_is_reported_at_submission(
    cluster: ThisMachine, bucket: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.places.files.VENV", str(cluster.root))
    paths = JobPaths("squad-1", home=str(cluster.home))
    place_files(cluster, paths, worker_files())
    check_places(cluster, paths, "s3://data/team")
    proxy.answer = lambda _: DENIED
    lacks = "AccessDenied: the nodes lack s3:PutObject"
    with pytest.raises(UsageError, match=f"^--bucket s3://data/team: {lacks}") as refused:
        check_places(cluster, paths, "s3://data/team")
    assert "up --bucket" in (refused.value.hint or "")
    with pytest.raises(UsageError, match=f"^--output s3://data/out/: {lacks}"):
        check_places(cluster, paths, "", ("s3://data/out/",))
    proxy.answer = lambda request: DENIED if "list-type=2" in request else None
    with pytest.raises(UsageError, match="the nodes lack s3:ListBucket"):
        check_places(cluster, paths, "", ("s3://data/out/",))


@pytest.mark.parametrize(
    ("gathers", "name"),
    [(False, "output.state/logs/rank-1.log"), (True, "workers/node1/output/one")],
)
def test_output_of_workers_is_stored_too(
    cluster: ThisMachine, bucket: Any, gathers: bool, name: str
) -> None:
    paths = JobPaths("squad-1", home=str(cluster.home))
    record = json.dumps({"gather_output": gathers}).encode()
    place_files(cluster, paths, {**worker_files(), "job.json": record})
    files = f"{paths.root}/output.state/logs/rank-1.log {paths.root}/output/one"
    folders = f"{paths.root}/output.state/logs {paths.root}/output"
    run(cluster, f"ssh node1 'mkdir -p {folders} && echo one | tee {files}'")

    wait_for(Path(paths.root, "pushed.json").exists)
    assert read(bucket, name) == "one\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "s3://own/team"),
        (["--bucket", "none"], ""),
        (["--bucket", "s3://other/p/"], "s3://other/p"),
        (["--resume", "s3://box/p/squad-1"], "s3://box/p"),
        (["--resume", "s3://box/p/squad-1", "--bucket", "none"], ""),
        (["--resume", "squad-1"], "s3://own/team"),
    ],
)
def test_option_overrides_the_clusters_bucket(words: list[str], expected: str) -> None:
    request = parse_request("train", "squad", *words)
    spec = (build_resume if request.resume else build_request)(
        request, *([] if request.resume else [NOW])
    ).spec
    plan = JobPlan("squad", "worker.tasks", (), "gloo", spec)
    cluster = replace(whole_cluster(), bucket="s3://own/team")
    assert with_bucket(plan, cluster).spec.storage.bucket == expected
    bench = replace(plan, spec=JobSpec())
    assert with_bucket(bench, cluster).spec.storage.bucket == ""
