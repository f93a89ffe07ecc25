# ruff: noqa: PTH102, PTH115, PTH118, PTH211 - names that are not valid Unicode
"""What is the user's in a job's folder: any tree of files is packed, stored, or named."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import socket
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.places.bucket import _local_name
from jobs.places.files import place_locally, unpack_results
from jobs.worker.storage import ownership, push
from jobs.worker.storage.ownership import Options, find_all, find_superseded, matches, pack

_NAMES = [
    *(b"model", b"log", b"job.json", b"job", b"work", b"node1", b"checkpoints", b"step-000001"),
    *(b"checkpoint-500", b"logs", b"results.json", b"report.json", b"end.json", b".keep"),
    *(b"x.partial", b".restore-x", b"a b", b"a\nb", b"-rf", b"caf\xe9", b"caf\\xe9", "né".encode()),
    *(b"*", b"'\"$(id)", b"~", b"\\", b"%41", b"a&b?c#d+e", b".hidden", b"n" * 255, b"\xff" * 255),
]


def make_tree(random_: random.Random, folder: bytes, job: bytes, depth: int = 0) -> None:
    for name in random_.sample(_NAMES, random_.randint(0, 7)):
        path = os.path.join(folder, name)
        kind = random_.choice(["file", "file", "file", "folder", "link", "hard", "fifo", "socket"])
        if kind == "folder" and depth < 3:
            os.mkdir(path)
            make_tree(random_, path, job, depth + 1)
        elif kind == "link":
            inside = [os.path.join(w, n) for w, ds, fs in os.walk(job) for n in (*ds, *fs)]
            target = random_.choice([b"nowhere", b"/etc/hostname", b"..", b".", *inside[:9]])
            os.symlink(target, path)
        elif kind == "hard" and (
            files := [e.path for e in os.scandir(folder) if e.is_file(follow_symlinks=False)]
        ):
            os.link(random_.choice(files), path)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket" and len(path) < 90:
            with socket.socket(socket.AF_UNIX) as each:
                each.bind(path)
        else:
            Path(os.fsdecode(path)).write_bytes(random_.randbytes(random_.choice([0, 1, 5000])))


def make_job(tmp_path: Path, seed: int = 0, **more: Any) -> Path:
    """A job's folder in which a program has written something to ``output`` and ``work``."""
    job = tmp_path / "spr-jobs/run-1"
    for name in ("output", "work/src", "output.state/logs"):
        (job / name).mkdir(parents=True)
    for name, text in {
        "log": "said",
        "job.json": json.dumps({"more": more}),
        "work/src/sent.py": "1",
    }.items():
        (job / name).write_text(text)
    (job / "output.state/logs/rank-0.log").write_text("rank")
    wait_for_the_clock(job)
    (job / "output.state/started").touch()
    for name in ("output", "work"):
        make_tree(random.Random(seed), os.fsencode(job / name), os.fsencode(job))
    return job


def wait_for_the_clock(job: Path) -> None:
    """Wait until new files have a later time than those that are there."""
    before = max(path.lstat().st_ctime_ns for path in job.rglob("*"))
    mark = job.parent / "now"
    while True:
        mark.unlink(missing_ok=True)
        mark.touch()
        if mark.stat().st_ctime_ns > before:
            return
        time.sleep(0.001)


def written(job: Path) -> dict[str, bytes]:
    """The digests of the user's regular files, by the names that the archive has for them."""
    found = {}
    for top in ("output", "work"):
        for where, _, names in os.walk(job / top):
            for name in names:
                path = Path(where, name)
                if path.is_file() and not path.is_symlink() and name != "sent.py":
                    found[str(path)] = hashlib.sha256(path.read_bytes()).digest()
    return found


def archive(job: Path, **options: Any) -> bytes:
    stream = io.BytesIO()
    pack(Options(str(job), **options), stream)
    return stream.getvalue()


def digests(folder: Path) -> list[bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(hashlib.sha256(path.read_bytes()).digest() for path in files)


@pytest.mark.parametrize("seed", range(20))
def test_each_byte_is_fetched_or_named(tmp_path: Path, seed: int) -> None:
    job, target = make_job(tmp_path, seed), tmp_path / "results"
    content = archive(job, limit=ownership.WORK_LIMIT, all_checkpoints=False)

    report = unpack_results(iter([content]), target, "run-1", print)

    arrived, wanted = digests(target), written(job)
    for digest in (*wanted.values(), hashlib.sha256(b"said").digest()):
        assert digest in arrived
    assert (target / "job/log").read_text() == "said"
    assert json.loads((target / "job/job.json").read_text()) == {"more": {}}
    assert (target / "job/logs/rank-0.log").read_text() == "rank"
    count = sum(1 for each in find_all(str(job)).items if each.size >= 0)
    assert len(arrived) == count, "two files have one place"
    kinds = [p for top in ("output", "work") for p in (job / top).rglob("*")]
    special = [p for p in kinds if not p.is_symlink() and (p.is_fifo() or p.is_socket())]
    links = [p for p in kinds if p.is_symlink()]
    outside = [p for p in links if not p.resolve().is_relative_to(job)]
    outside += [p for p in links if os.readlink(p) == "nowhere" and not p.exists()]
    assert len(report["skipped"]) >= len({*map(str, (*special, *outside))})
    assert report["left"] == []


@pytest.mark.parametrize("seed", range(40, 44))
def test_each_byte_is_stored(tmp_path: Path, bucket: Any, seed: int) -> None:
    job = make_job(tmp_path, seed)
    (job / "end.json").write_text('{"state": "failed", "push_error": "S3 was down"}')

    assert push.main(["all", str(job), "s3://data/run-1"]) == 0

    stored = {
        each.key.removeprefix("run-1/"): each.get()["Body"].read() for each in bucket.objects.all()
    }
    found = {hashlib.sha256(content).digest() for content in stored.values()}
    assert {*written(job).values()} <= found
    assert json.loads(stored["end.json"])["push_error"] is None
    assert json.loads((job / "end.json").read_text()) == {"state": "failed", "push_error": None}
    # The same tree comes from there as from the nodes.
    stream = archive(job)
    with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
        packed = {place_locally(each.name) for each in tar if each.isfile()} - {""}
    assert packed == {_local_name(name) for name in stored} - {"", "job/end.json"}


def test_a_file_that_can_not_be_read_is_named_and_nothing_counts_as_stored(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path)
    for name in ("output/secret.bin", "output/open.bin", "end.json"):
        (job / name).write_text("x")
    open_ = os.open

    def refuse(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith("secret.bin"):
            raise PermissionError(13, "Permission denied")
        return open_(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(push, "_PAUSE_S", 0.0)
    assert find_all(str(job)).left == ["output/secret.bin"]
    assert push.main(["all", str(job), "s3://data/run-1"]) == 1
    assert "can't be stored: output/secret.bin" in capsys.readouterr().err
    assert "run-1/output/open.bin" in [each.key for each in bucket.objects.all()]
    assert not (job / push.PUSHED).exists()


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (None, {"out/a.bin", "out/a.tmp", "src/new.py", "src/sent.py"}),
        ([], set()),
        (["out/**", "!*.tmp"], {"out/a.bin"}),
        (["src"], {"src/new.py", "src/sent.py"}),
    ],
)
def test_new_and_changed_files_of_the_working_folder_are_the_users(
    tmp_path: Path, outputs: list[str] | None, expected: set[str]
) -> None:
    job = make_job(tmp_path, outputs=outputs)
    for path in (job / "work").iterdir():
        if path.name != "src":
            subprocess.run(["rm", "-rf", "--", path], check=True)
    for name in ("out/a.bin", "out/a.tmp", "src/new.py", "src/sent.py", "src/__pycache__/new.pyc"):
        (job / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (job / "work" / name).write_text(name)
        os.utime(job / "work" / name, (1, 1))  # as from an archive
    found = {item.name for item in find_all(str(job)).items if item.name.startswith("work/")}
    assert found == {f"work/{name}" for name in expected}


def test_what_is_beyond_the_limit_is_named_and_left(tmp_path: Path) -> None:
    job = make_job(tmp_path, seed=1)
    before = {item.name for item in find_all(str(job)).items}
    (job / "work/large.bin").write_bytes(b"x" * 2_000_000)
    found = find_all(str(job), limit=1_500_000)
    assert {item.name for item in found.items} == before
    assert found.left == ["work/large.bin (2 MB)"]


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("out/a/b", ["out"], True),
        ("outer/a", ["out/**"], False),
        ("a/b/m.pt", ["*.pt"], True),
        ("a/b/m.pt", ["a/*.pt"], False),
        ("a/b/m.pt", ["a/**/*.pt"], True),
        ("m.pt", ["!*.pt", "m.*"], True),
        ("a+b", ["a+b"], True),
        ("a\nb", ["*"], True),
    ],
)
def test_patterns(name: str, patterns: list[str], expected: bool) -> None:
    assert matches(name, patterns) is expected


def trainer_checkpoints(best: str | None, *steps: int) -> dict[str, str]:
    state = json.dumps({"best_model_checkpoint": best})
    names = ("trainer_state.json", "model.safetensors")
    return {f"output/model/checkpoint-{step}/{name}": state for step in steps for name in names}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (trainer_checkpoints(None, 500, 1000, 1500), {500, 1000}),
        (trainer_checkpoints("/x/output/model/checkpoint-500", 500, 1000, 1500), {1000}),
        (trainer_checkpoints(None, 1500), set()),
        # Not Trainer's, or the newest is not whole.
        ({"output/checkpoint-1/a": "", "output/checkpoint-2/a": ""}, set()),
        ({**trainer_checkpoints(None, 5, 6), "output/model/checkpoint-5/optimizer.pt": "x"}, set()),
        (
            {**trainer_checkpoints(None, 5), "output/model/checkpoint-6/trainer_state.json": "{"},
            set(),
        ),
    ],
)
def test_only_a_checkpoint_that_is_superseded_is_left(
    files: dict[str, str], expected: set[int]
) -> None:
    sizes = {name: len(text) for name, text in files.items()}
    found = find_superseded(sizes, files.__getitem__)
    assert found == {f"output/model/checkpoint-{step}" for step in expected}


def test_superseded_checkpoints_are_named(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    for name, text in trainer_checkpoints(None, 500, 1000).items():
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text(text)
    for choice, expected in ((True, [500, 1000]), (False, [1000])):
        content = archive(job, limit=9999, all_checkpoints=choice)
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            names = tar.getnames()
        model = "output/model/checkpoint-{}/model.safetensors"
        assert [step for step in (500, 1000) if model.format(step) in names] == expected
