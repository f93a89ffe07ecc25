"""A job's folder comes back from S3: moto behind a layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.storage import restore
from tests.jobs.worker.storage.conftest import Proxy

URL = "s3://data/team/squad-1"
STORED = {
    "job.json": b"{}",
    "end.json": b'{"state": "failed"}',
    "begin.json": b"{}",
    "log": b"second",
    "log.earlier": b"first",
    "data/train.json": b"samples" * 999,
    "model/config.json": b"{}",
    "output.state/metrics/rank-0.jsonl": b"",
    "output.state/checkpoints/step-000005/state.pt": b"old",
    "output.state/checkpoints/step-000005/checkpoint.json": b"{}",
    "output.state/checkpoints/step-1000000/state.pt": b"newest" * 99,
    "output.state/checkpoints/step-1000000/checkpoint.json": b"{}",
    "output.state/checkpoints/step-2000000/state.pt": b"half",
    f"output/{'x' * 255}": b"as long as a file system allows",
    "code/worker/x.py": b"of another release",
}


@pytest.fixture
def stored(bucket: Any) -> Any:
    for name, content in STORED.items():
        bucket.put_object(Key=f"team/squad-1/{name}", Body=content)
    return bucket


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The job's folder on the head, in which only its code is."""
    found = tmp_path / "squad-1"
    (found / "code").mkdir(parents=True)
    return found


def run(folder: Path, capsys: pytest.CaptureFixture[str], url: str = URL) -> dict[str, Any]:
    assert restore.main([url, str(folder)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_job_comes_back_with_its_newest_complete_checkpoint(
    stored: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(folder, capsys)

    left_out = ("step-000005", "step-2000000", "end.json", "begin.json", "code/")
    wanted = {name for name in STORED if not any(part in name for part in left_out)}
    assert names(folder) == {*wanted, "cancelled"}
    for name in wanted:
        assert (folder / name).read_bytes() == STORED[name]
        (folder / name).open("ab").close()  # the job may change it
    size = sum(len(STORED[name]) for name in (*wanted, "end.json"))
    told = {"has_ended": True, "end": {"state": "failed"}}
    assert found == {"checkpoint": "step-1000000", "size": size, **told}


def test_only_a_newer_checkpoint_replaces_what_is_there(
    stored: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, capsys)
    (folder / "log").write_text("of this cluster")
    assert run(folder, capsys)["size"] == 0
    assert (folder / "log").read_text() == "of this cluster"

    newer = "team/squad-1/output.state/checkpoints/step-2000000/checkpoint.json"
    stored.put_object(Key=newer, Body=b"{}")
    stored.Object("team/squad-1/end.json").delete()
    found = run(folder, capsys)
    assert (found["checkpoint"], found["has_ended"]) == ("step-2000000", False)
    assert [path.name for path in (folder / "output.state/checkpoints").iterdir()] == [
        "step-2000000"
    ]


def test_an_interrupted_restore_continues(
    stored: Any, folder: Path, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    denied = "403 Forbidden", ""
    proxy.answer = lambda request: denied if "state.pt" in request else None
    found = run(folder, capsys)
    assert "AccessDenied: the nodes may not read it" in found["message"]
    assert not (folder / "job.json").exists()

    (partial,) = folder.glob(".restore-*")
    (partial / ".log.partial.0a1b").touch()  # by a killed process
    proxy.answer = lambda _: None
    proxy.requests.clear()
    assert run(folder, capsys)["checkpoint"] == "step-1000000"
    assert sum("state.pt" in each for each in proxy.gets) == 1
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


LEFT_OUT = "output.state/checkpoints/step-000005/checkpoint.json"


@pytest.mark.parametrize(
    ("put", "left_out", "message"),
    [
        ("", "job.json", f"{URL}: there is no job here"),
        ("output/results.json", "", "job squad-1 has nothing to resume: it is finished"),
        ("", LEFT_OUT, "job squad-1 has no complete checkpoint there"),
        ("", "/", "no folder has this name"),
    ],
)
def test_a_job_that_cannot_be_resumed_is_refused(
    bucket: Any, folder: Path, capsys: Any, put: str, left_out: str, message: str
) -> None:
    kept = {name for name in STORED if "000000" not in name and name != left_out}
    for name in {*kept, put} - {""} if left_out != "/" else ():
        bucket.put_object(Key=f"team/squad-1/{name}", Body=b"{}")
    assert message in run(folder, capsys)["message"]
    assert names(folder) == set()


def test_what_the_file_system_refuses_is_told(
    stored: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.put_object(Key=f"team/squad-1/output/{'x' * 256}", Body=b"")
    assert "File name too long" in run(folder, capsys)["message"]
