"""Data from S3 on a node: moto behind a layer that cuts and falsifies answers."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig

from infra.wait import wait_until
from jobs.worker.storage import download, stage
from jobs.worker.storage.client import S3Url, connect
from jobs.worker.storage.download import ChangedError, CorruptError, StagingError
from tests.jobs.worker.storage.conftest import Proxy

MIB = 1 << 20
URL = "s3://data/set/train.csv"
Stage = Callable[..., str]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PART", MIB)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Stage:
    """Stage an URL as a job on a node; returns what the log says."""

    def stage_url(url: str = URL, job: str = "job", expected: str = "") -> str:
        target = tmp_path / "spr-jobs" / job / "data" / "train.csv"
        progress = stage.Progress(lambda text: print(f"node1: {text}"), url)
        stage.stage(connect(), url, target, expected, progress, tmp_path)
        return capsys.readouterr().out

    return stage_url


def read(home: Path, job: str = "job") -> bytes:
    return (home / "spr-jobs" / job / "data" / "train.csv").read_bytes()


def put(bucket: Any, data: bytes, key: str = "set/train.csv") -> None:
    bucket.put_object(Key=key, Body=data)


def test_object_arrives_once_and_is_shared_by_jobs(
    bucket: Any, proxy: Proxy, run: Stage, tmp_path: Path
) -> None:
    data = content(3 * MIB + 5)
    put(bucket, data)
    assert "3.1 MB in " in run()
    assert read(tmp_path) == data
    assert len(proxy.gets) == 4
    proxy.requests.clear()
    assert "already on this node" in run(job="second")
    assert read(tmp_path, "second") == data
    assert [each.split()[0] for each in proxy.requests] == ["HEAD"]
    version = str(stage.check(connect(), URL)["version"])
    proxy.requests.clear()
    run(job="third", expected=version)
    assert proxy.requests == [], "a known version needs none"


def test_cut_connection_is_tried_again_some_times(
    bucket: Any, proxy: Proxy, run: Stage, tmp_path: Path
) -> None:
    data = content(4 * MIB)
    put(bucket, data)
    cut: list[str] = []

    def limit(request: str) -> int | None:
        if "bytes=" in request and len(cut) < 5:
            cut.append(request)
            return 700_000
        return None

    proxy.limit = limit
    run()
    assert read(tmp_path) == data
    assert len(proxy.gets) == 4 + 5
    put(bucket, data[::-1])
    proxy.limit = lambda request: 700_000 if "bytes=0-" in request else None
    with pytest.raises(StagingError, match=f"^{URL}: (?!Max)"):
        run(job="second")
    assert not (tmp_path / "spr-jobs/second").exists()
    assert not [*(tmp_path / stage.CACHE / "files").glob(".*")]


def test_killed_download_starts_over(bucket: Any, proxy: Proxy, tmp_path: Path) -> None:
    data = content(20 * MIB)
    put(bucket, data)
    proxy.limit = lambda request: time.sleep(20) if "=0-" in request else None
    target = tmp_path / "spr-jobs" / "job" / "data" / "train.csv"
    argv = [sys.executable, "-m", "jobs.worker.storage.stage", URL, str(target)]
    files = tmp_path / stage.CACHE / "files"
    with subprocess.Popen(argv, env={**os.environ, "HOME": str(tmp_path)}) as process:
        wait_until("part", lambda: [*files.glob(".*")] or None, deadline_s=60, every_s=0.02)
        process.send_signal(signal.SIGKILL)
    (partial,) = files.iterdir()
    assert partial.name.startswith(".")
    assert not target.exists()
    partial.with_name(".older.partial").touch()
    proxy.limit = lambda _: None
    done = subprocess.run(
        argv, env={**os.environ, "HOME": str(tmp_path)}, check=True, capture_output=True
    )
    assert target.read_bytes() == data
    assert b"21.0 MB in" in done.stdout
    assert [*files.iterdir()] == [target.resolve()]


def test_object_that_changes_during_the_download(
    bucket: Any, proxy: Proxy, run: Stage, tmp_path: Path
) -> None:
    put(bucket, content(4 * MIB))
    cut: list[str] = []

    def limit(request: str) -> int | None:
        if "bytes=" not in request or len(cut) == 4:
            return None
        cut.append(request)
        if len(cut) == 4:
            put(bucket, content(4 * MIB, seed=1))
        return 500_000

    proxy.limit = limit
    with pytest.raises(ChangedError, match="changed while it was downloaded"):
        run()
    assert not (tmp_path / "spr-jobs").exists()
    run(job="again")
    assert read(tmp_path, "again") == content(4 * MIB, seed=1)


def test_object_that_changed_between_jobs_is_downloaded_anew(
    bucket: Any, run: Stage, tmp_path: Path
) -> None:
    put(bucket, b"first")
    version = str(stage.check(connect(), URL)["version"])
    assert "changed" not in run()
    put(bucket, b"second")
    assert f"node1: {URL} has changed since the last job" in run(job="second")
    assert (read(tmp_path), read(tmp_path, "second")) == (b"first", b"second")
    with pytest.raises(ChangedError, match="since the job began"):
        run(job="third", expected="0" * 24)
    run(job="retried", expected=version)
    assert read(tmp_path, "retried") == b"first"


def test_falsified_content_is_noticed(
    bucket: Any, proxy: Proxy, run: Stage, tmp_path: Path
) -> None:
    data = content(15 * MIB)
    (tmp_path / "local").write_bytes(data)
    config = TransferConfig(multipart_threshold=5 * MIB + 1, multipart_chunksize=5 * MIB)
    bucket.upload_file(str(tmp_path / "local"), "set/train.csv", Config=config)
    wrong: list[str] = []

    def change(request: str, block: bytes) -> bytes:
        if "bytes=" in request and not wrong:
            wrong.append(request)
            return bytes([block[0] ^ 1]) + block[1:]
        return block

    proxy.change = change
    assert "downloading it again" in run()
    assert read(tmp_path) == data
    proxy.change = lambda _, block: block[:-1] + b"!" if len(block) > 1 << 12 else block
    for size in (MIB // 2, 2 * MIB):  # in one request and in two
        put(bucket, content(size, seed=2))
        with pytest.raises(CorruptError, match=f"^{URL}: the content differs from its"):
            run(job="second")
        assert not (tmp_path / "spr-jobs" / "second").exists()
        assert not [*(tmp_path / stage.CACHE / "files").glob(".*")]


TEN, NONE, KMS = b"0123456789", "0" * 32, {"ServerSideEncryption": "aws:kms"}
SHA = base64.b64encode(hashlib.sha256(TEN).digest()).decode()
CRCS = b"".join(zlib.crc32(each).to_bytes(4, "big") for each in (b"0123", b"4567", b"89"))
TWO, THREE = (
    hashlib.md5(b"".join(hashlib.md5(each).digest() for each in parts)).hexdigest()
    for parts in ((b"0123", b"456789"), (b"0123", b"456", b"789"))
)
IN_THREE = base64.b64encode(zlib.crc32(CRCS).to_bytes(4, "big")).decode() + "-3"


def test_names_of_downloads_fit_file_systems_and_end_as_the_objects() -> None:
    source = download.S3Object(S3Url("data", f"{'訓練' * 90}.csv.gz"), '"tag"', 1)
    assert len(f".{source.id}.partial".encode()) < 200
    assert source.id.endswith("練.csv.gz")


@pytest.mark.parametrize(
    ("etag", "parts", "head", "said"),
    [
        (hashlib.md5(TEN).hexdigest(), (), {}, ""),
        (NONE, (), {}, "the content differs from its ETag"),
        (NONE, (), KMS, "its size was checked"),
        (TWO + "-2", (4, 6), {}, ""),
        (THREE + "-3", (4, 3, 3), {}, ""),
        (NONE + "-2", (5, 5), {}, "the content differs from its ETag"),
        (NONE + "-2", (4, 0), {}, "its size was checked"),
        (NONE, (), {**KMS, "ChecksumSHA256": SHA}, ""),
        (NONE, (), {**KMS, "ChecksumSHA256": SHA.lower()}, "the content differs from its SHA256"),
        (NONE, (4,), {**KMS, "ChecksumCRC32": IN_THREE}, ""),
        (NONE, (4, 0), {**KMS, "ChecksumCRC32": SHA + "-2"}, "its size was checked"),
    ],
)
def test_a_checksum_is_one_that_s3_made_from_the_content(
    etag: str, parts: tuple[int, ...], head: dict[str, str], said: str, tmp_path: Path
) -> None:
    def head_object(**asked: Any) -> dict[str, Any]:
        return {"ContentLength": parts[asked["PartNumber"] - 1]} if "PartNumber" in asked else head

    s3: Any = SimpleNamespace(head_object=head_object)
    notes = list[str]()
    source = download.S3Object(S3Url.parse(URL), f'"{etag}"', len(TEN))
    one = download.Download(source, tmp_path / "file", note=notes.append)
    one.partial.write_bytes(TEN)
    try:
        download._verify(s3, one)
    except CorruptError as error:
        notes.append(error.message)
    assert said in "".join(notes)
    assert bool(said) is bool(notes)


DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def test_reasons_of_refusals(
    bucket: Any, proxy: Proxy, run: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StagingError, match=f"{URL}: NoSuchKey: no object and no folder"):
        run()
    with pytest.raises(StagingError, match="s3://nothing/a: NoSuchBucket"):
        run("s3://nothing/a")
    put(bucket, b"x", "names/../../escape")
    with pytest.raises(StagingError, match="is no file name"):
        run("s3://data/names/")
    put(bucket, b"", "marked/")
    put(bucket, b"", "marked/below/")
    put(bucket, b"x", "typed.csv")
    for typed, said in {
        "marked": "the folder is empty",
        "marked/": "the folder is empty",
        "typed.csv/": "is an object, not a folder: omit the `/`",
        "none.csv/": "NoSuchKey: no object and no folder has this name",
    }.items():
        assert (
            stage.check(connect(), f"s3://data/{typed}")["message"] == f"s3://data/{typed}: {said}"
        )

    # A folder must not stand in for an object of the same name.
    monkeypatch.setattr("random.random", lambda: 0.001)  # boto3's pauses
    put(bucket, b"x", "both/of-a-folder")
    proxy.answer = lambda request: ("503 Slow Down", "") if request.startswith("HEAD") else None
    with pytest.raises(StagingError, match="s3://data/both: 503"):
        run("s3://data/both")

    def deny(request: str) -> tuple[str, str]:
        return "403 Forbidden", "" if request.startswith("HEAD") else DENIED

    # S3 says so of a missing key, unless the caller may list the whole bucket.
    proxy.answer = lambda request: deny(request) if request.startswith("HEAD") else None
    put(bucket, b"a neighbor", "set/train.csv.gz")
    with pytest.raises(StagingError, match=f"{URL}: NoSuchKey: no object and no folder"):
        run()
    put(bucket, b"not for the nodes")
    with pytest.raises(StagingError, match=f"{URL}: AccessDenied: the nodes may not"):
        run()
    proxy.answer = deny
    with pytest.raises(StagingError, match=f"{URL}: AccessDenied: the nodes may not") as caught:
        run()
    assert "--read-from" in str(caught.value.hint)
    assert "your own KMS key" in str(caught.value.hint)
    assert "that do not exist" in str(caught.value.hint)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(StagingError, match="the node has no AWS credentials"):
        run()


def test_folder_is_a_tree_and_only_changed_objects_are_downloaded(
    bucket: Any, proxy: Proxy, run: Stage, tmp_path: Path
) -> None:
    put(bucket, b"a,b", "set/train.csv")
    put(bucket, content(2 * MIB), "set/more/x.bin")
    put(bucket, b"", "set/more/")
    put(bucket, b"", "set/empty")
    put(bucket, b"not below", "settings")
    run("s3://data/set")
    tree = tmp_path / "spr-jobs" / "job" / "data" / "train.csv"
    names = sorted(str(each.relative_to(tree)) for each in tree.rglob("*") if each.is_file())
    assert names == ["empty", "more/x.bin", "train.csv"]
    assert (tree / "more" / "x.bin").read_bytes() == content(2 * MIB)
    shared = [tree.resolve(), tree.resolve() / "more", tmp_path / stage.CACHE / "files"]
    assert {each.stat().st_mode & 0o777 for each in shared} == {0o555}, "all jobs read them"
    put(bucket, b"c,d,e", "set/train.csv")
    proxy.requests.clear()
    assert "node1: s3://data/set has changed since" in run("s3://data/set", "second")
    assert [each for each in proxy.gets if "x.bin" in each] == []
    assert len(proxy.gets) == 1
    second = tmp_path / "spr-jobs" / "second" / "data" / "train.csv"
    assert (second / "train.csv").read_bytes() == b"c,d,e"
    assert (tree / "train.csv").read_bytes() == b"a,b"


def test_a_disk_that_was_full_leaves_nothing_to_repair(
    bucket: Any, run: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, b"first")
    run()
    with monkeypatch.context() as patch:

        def write_some(path: Path, _: str) -> None:
            path.write_bytes(b"{")
            raise OSError(errno.ENOSPC, "No space left on device")

        put(bucket, b"second")
        patch.setattr(Path, "write_text", write_some)
        with pytest.raises(StagingError, match=f"^{URL}: no space left on the disk$"):
            run(job="second")
    assert "has changed since the last job" in run(job="third")


def test_full_disk_is_refused_before_the_download(
    bucket: Any, proxy: Proxy, run: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, content(2 * MIB))
    usage = shutil.disk_usage("/")._replace(free=200 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StagingError, match=r"needs 0.3 GB of disk space, and 0.2 GB are free"):
        run()
    assert proxy.gets == []


def test_old_versions_are_removed_unless_a_job_uses_them(
    bucket: Any, run: Stage, tmp_path: Path
) -> None:
    files = tmp_path / stage.CACHE / "files"
    for number in range(5):
        put(bucket, content(100, seed=number))
        run(job=f"job{number}")
        if number != 1:
            (tmp_path / "spr-jobs" / f"job{number}" / "end.json").write_text("{}")
        for each in files.iterdir():
            os.utime(each, (0, 0))
    run(job="job5")
    kept = {each.read_bytes() for each in files.iterdir()}
    assert kept == {content(100, seed=number) for number in (1, 3, 4)}
