"""A job's files: to the nodes before it starts, and home after it ends, with this machine's bash and tar."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from infra.errors import ConnectionLostError, HostError, JobError, SprError
from jobs.places.files import (
    _extract,
    fetch,
    move_results,
    place_files,
    place_head_folders,
    withdraw_files,
    worker_files,
)
from jobs.places.plan import JobPaths
from jobs.places.queue.slurm import SlurmLauncher
from jobs.worker.storage import ownership
from tests.jobs.context import SUBMITTED, ended, pack_output
from tests.jobs.places.this_machine import ThisMachine, submit

OUTCOME = {"nodes": ["node0", "node1"], "host": "node0"}


@pytest.fixture
def paths(head: ThisMachine) -> JobPaths:
    """A job that has ended on two nodes."""
    paths = JobPaths("squad-1", home=str(head.home))
    place_files(head, paths, {"code/x": b""})
    Path(paths.log).write_text("said\n")
    write(f"{paths.root}/begin.json", json.dumps({"nodes": ["node0", "node1"], "outcome": OUTCOME}))
    return paths


def write(path: str | Path, text: str = "") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_no_file_of_pythons_cache_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process compiles, one is there for a moment."""
    for name in ("a.py", "a.sample.csv", "__pycache__/a.pyc", "__pycache__/a.pyc.1403"):
        write(tmp_path / "worker" / name)
    monkeypatch.setattr("jobs.worker.__file__", str(tmp_path / "worker/__init__.py"))
    assert [name.rpartition("/")[2] for name in worker_files()] == [
        *("a.py", "a.sample.csv", "__init__.py")
    ]


def test_links_are_followed_and_the_upload_is_removed(
    head: ThisMachine, paths: JobPaths, tmp_path: Path
) -> None:
    (tmp_path / "blob").write_text("weights")
    model = tmp_path / "model"
    model.mkdir()
    (model / "w").symlink_to("../blob")

    place_files(head, paths, {"model": model, "environment.json": b"[]"})

    assert Path(paths.root, "model", "w").read_text() == "weights"
    assert not Path(paths.root, "model", "w").is_symlink()
    assert Path(paths.root, "environment.json").stat().st_mode & 0o777 == 0o600
    assert not Path(paths.upload).exists()


def test_a_folder_of_the_head_goes_to_every_node(head: ThisMachine, paths: JobPaths) -> None:
    worker = head.connect("node1")
    place_files(head, paths, {"code/x": b""})
    source = head.home / "spr-jobs" / "a 1" / "output" / "model"
    write(source / "w", "weights")
    before = (source / "w").stat().st_ctime

    place_head_folders(head, paths, {"model": str(source)})

    for home in (head.home, worker):
        assert (home / paths.relative_root / "model" / "w").read_text() == "weights"
    # Otherwise `down` would warn of results that are fetched.
    assert (source / "w").stat().st_ctime == before
    shutil.rmtree(worker)
    with pytest.raises(HostError, match="node1 can not take again"):
        place_head_folders(head, paths, {"again": str(source)})


def test_a_worker_that_cannot_be_reached_is_named(head: ThisMachine, paths: JobPaths) -> None:
    head.connect("node1")
    (head.home / "hosts").write_text("node0\nnode1\nnode2\n")

    with pytest.raises(HostError, match="node2 can not be reached"):
        place_files(head, paths, {"x": b"y"})
    assert (head.root / "node1" / paths.relative_root / "x").read_bytes() == b"y"


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_job_that_was_not_submitted_leaves_no_files(
    head: ThisMachine, paths: JobPaths, is_queued: bool
) -> None:
    head.connect("node1")
    place_files(head, paths, {"x": b"y"})
    head.write_program("squeue", f"echo {'7' if is_queued else ''}\n")
    kept = Path(paths.root).parent / "squad-2"
    kept.mkdir()

    assert withdraw_files(head, paths) is not is_queued
    found = [(head.root / node / paths.relative_root / "x").exists() for node in ("node0", "node1")]
    assert found == [is_queued, is_queued]
    assert kept.exists()


_BLOCK = b"x" * (100 << 10)


@pytest.mark.parametrize(
    "content",
    [
        b"Welcome to Ubuntu\n" * 100,
        gzip.compress(b"x"),
        pack_output(dict.fromkeys(("log", "output/model/w"), _BLOCK))[:150_000],
        pack_output(dict.fromkeys(("log",), _BLOCK))[:512] + b"\xff" * 512,
        pack_output(dict.fromkeys(("output/model", "output/model/w"), _BLOCK)),
    ],
    ids=["text", "gzip", "cut off", "half garbage", "a file and its folder"],
)
def test_a_damaged_archive_of_results_is_one_line(
    head: ThisMachine,
    paths: JobPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
) -> None:
    monkeypatch.setattr(head, "download", lambda _: iter([content]))

    with pytest.raises(JobError, match="the results of job squad-1 arrived damaged: ") as caught:
        fetch(head, paths, tmp_path / "results", print)
    assert files_in(tmp_path / "results") == []
    assert "\n" not in caught.value.message
    hint = f"to try again: spr-cluster fetch squad-1 --results {tmp_path / 'results'}"
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("cut_after", "failure"),
    [
        (3, ConnectionLostError("node0", "the connection broke")),
        (99, HostError("node0", "ended with 2: tar: model: Input/output error")),
        (3, OSError(errno.ENOSPC, "No space left on device")),
    ],
    ids=["connection", "command", "disk here"],
)
def test_a_fetch_that_fails_leaves_nothing_on_the_head_and_no_half_of_a_file_here(
    head: ThisMachine,
    paths: JobPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut_after: int,
    failure: Exception,
) -> None:
    write(f"{paths.root}/output/model/w", "w" * 5000)
    target, before = tmp_path / "results 'here'", files_in(head.home)
    download = head.download

    def cut(command: str) -> Iterator[bytes]:
        yield from islice(download(command), cut_after)
        raise failure

    monkeypatch.setattr(head, "download", cut)
    with pytest.raises(SprError) as caught:
        fetch(head, paths, target, print, "--name a")
    assert (files_in(target), files_in(head.home)) == ([], before)
    assert (caught.value.hint or "").startswith("to try again: spr-cluster fetch squad-1 --name a")

    monkeypatch.setattr(head, "download", download)
    fetch(head, paths, target, print)
    assert files_in(target) == ["job/log", "model/w"]
    assert not set(files_in(head.home)) - {*before, f"{paths.relative_root}/fetched"}


def test_two_fetches_of_a_job_at_the_same_time(
    head: ThisMachine, paths: JobPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(f"{paths.root}/output/model/w", "w" * 5000)
    write(paths.record, replace(SUBMITTED, gather_output=False).render())
    worker = head.connect("node1") / paths.relative_root
    for name in ("output.state/logs/rank-1.log", "output.state/metrics/rank-1.jsonl", "output/w"):
        write(worker / name, "said")
    for name in ("logs/rank-0.log", "checkpoints/step-000001/state.pt"):
        write(f"{paths.root}/output.state/{name}")
    download = head.download
    others = [tmp_path / "same", tmp_path / "other"]

    def meet(command: str) -> Iterator[bytes]:
        for chunk in download(command):
            if others:
                fetch(head, paths, others.pop(), print)
            yield chunk

    monkeypatch.setattr(head, "download", meet)
    fetch(head, paths, tmp_path / "same", print)

    # Every rank's files, without checkpoints.
    ranks = ["job/logs/rank-0.log", "job/logs/rank-1.log", "job/metrics/rank-1.jsonl"]
    found = ["job/job.json", "job/log", *ranks, "model/w"]
    assert [files_in(tmp_path / name) for name in ("same", "other")] == [found, found]


def test_what_was_written_after_the_fetch_began_is_not_fetched(
    head: ThisMachine, paths: JobPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` asks about it; and how much has arrived is said."""
    write(f"{paths.root}/output/model/w", "w" * 9000)
    download = head.download

    def write_more(command: str) -> Iterator[bytes]:
        yield from download(command)
        write(f"{paths.root}/output/later")

    monkeypatch.setattr(head, "download", write_more)
    monkeypatch.setattr("jobs.places.files._NOTED", 4096)
    said: list[str] = []
    fetch(head, paths, tmp_path, said.append)

    marked = Path(paths.root, "fetched").stat().st_mtime_ns
    late = [
        path.name
        for path in Path(paths.root, "output").rglob("*")
        if path.stat().st_mtime_ns > marked
    ]
    assert (late, said[0]) == (["later"], "4.9 KiB")


def test_checkpoints_of_a_failed_program_on_a_worker_are_fetched(
    head: ThisMachine, paths: JobPaths, tmp_path: Path
) -> None:
    worker = head.connect("node2", "node1") / paths.relative_root
    write(head.root / "node2" / paths.relative_root / "output/of another attempt")
    write(worker / "output/model/checkpoint-500/model.safetensors", "weights")
    write(worker / "output.state/started")
    write(worker / "work/out/model.bin", "model")
    write(paths.record, replace(SUBMITTED, gather_output=True).render())
    write(paths.end, ended(exit_code=1))

    fetched = fetch(head, paths, tmp_path / "results", print)

    found = files_in(tmp_path / "results")
    assert "node1/model/checkpoint-500/model.safetensors" in found
    assert "work/node1/out/model.bin" in found
    assert not [name for name in found if "another" in name]
    where = tmp_path / "results/work"
    text = f"written to the working folder, and now in {where}/: node1/out/model.bin (5 bytes)"
    assert (fetched.missing, fetched.said) == ((), (text,))


def test_gathered_files_of_a_worker_that_is_gone_are_fetched(
    head: ThisMachine, paths: JobPaths, tmp_path: Path
) -> None:
    worker = head.connect("node1")
    write(f"{paths.root}/workers/node1/output/x", "x")
    write(f"{paths.root}/gathered")
    write(paths.record, replace(SUBMITTED, gather_output=True).render())
    shutil.rmtree(worker)

    assert fetch(head, paths, tmp_path / "results", print).missing == ()

    assert "node1/x" in files_in(tmp_path / "results")


def test_what_is_left_on_a_node_is_missing(
    head: ThisMachine, paths: JobPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "WORK_LIMIT", 10)
    write(f"{paths.root}/output.state/started")
    write(f"{paths.root}/work/large", "x" * 11)

    missing = fetch(head, paths, tmp_path / "results", print).missing

    assert missing == ("only on node0: work/large (0 MB)",)
    assert not Path(paths.root, "fetched").exists()


def test_what_is_fetched_of_a_running_job_does_not_count(head: ThisMachine, tmp_path: Path) -> None:
    """Its first node, or its workers, may have older files that come to the head later."""
    paths = submit(head, "until [ -e go ]; do sleep 0.05; done")
    fetch(head, paths, tmp_path / "early", print)
    assert not Path(paths.root, "fetched").exists()

    Path(paths.root, "go").touch()
    SlurmLauncher(head).follow(paths, lambda _: None, lambda _: None)
    fetch(head, paths, tmp_path / "late", print)
    assert Path(paths.root, "fetched").exists()


def test_archive_members_outside_the_target_are_skipped(tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar"
    file = tmp_path / "evil.sh"
    file.touch(0o711)
    os.utime(file, (1, 1))
    with tarfile.open(archive, "w") as tar:
        tar.add(file, "output/../../outside")
        tar.add(file, "output/inside")
    file.unlink()
    target = tmp_path / "deep" / "target"
    with tarfile.open(archive) as tar:
        _extract(tar, target)

    known = (target / "inside").stat()
    assert (known.st_mode & 0o777, known.st_mtime) == (0o711, 1)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["evil.tar", "inside"]


def test_a_folder_that_became_a_file_is_replaced(tmp_path: Path) -> None:
    """And the other way round: a job may go on after its output was fetched."""
    (tmp_path / "results").mkdir()
    for name in ("a", "a/b", "a"):
        new = tmp_path / "new" / name
        new.parent.mkdir(parents=True)
        new.write_text(name)
        move_results(tmp_path / "new", tmp_path / "results")
        assert (tmp_path / "results" / name).read_text() == name
        shutil.rmtree(tmp_path / "new")
