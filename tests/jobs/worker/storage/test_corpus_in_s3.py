"""A corpus in S3, predicted by real ranks, one of which is killed, while S3 refuses requests."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.corpus import shards
from jobs.worker.corpus.coordinator import predict_corpus
from jobs.worker.corpus.files import connected
from jobs.worker.corpus.options import PredictOptions
from jobs.worker.runtime.errors import WorkerError
from jobs.worker.runtime.events import parse_event
from jobs.worker.training.text_task import TextTask
from tests.jobs.worker.started_ranks import started_ranks
from tests.jobs.worker.storage.conftest import Proxy

REFUSED, COUNTS = 0.05, (300, 90, 5)


@pytest.fixture(scope="module")
def model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    import transformers

    folder = tmp_path_factory.mktemp("model")
    config = transformers.DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=1, n_heads=2, hidden_dim=32
    )
    transformers.DistilBertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "modules.json").write_text("[]")
    return str(folder)


@pytest.fixture(autouse=True)
def _new_client() -> None:
    connected.cache_clear()


def texts(count: int) -> bytes:
    # Rows of 20 KB: a shard has 32.
    more = {"more": "x" * 20_000}
    rows = ({"id": n, "text": f"core {n} " * (n % 9 + 1), **more} for n in range(count))
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def names(bucket: Any) -> list[str]:
    return [each.key for each in bucket.objects.filter(Prefix="out/")]


def outputs(bucket: Any, prefix: str) -> dict[str, bytes]:
    found = {each.key: each.get()["Body"].read() for each in bucket.objects.filter(Prefix=prefix)}
    return {key.rpartition("/")[2]: content for key, content in found.items()}


def children(process: subprocess.Popen[str]) -> list[int]:
    """The processes below a rank that predict."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "spawn_main"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(each) for each in found.stdout.split()]


def test_two_ranks_write_each_row_once_though_they_are_killed(
    tmp_path: Path, bucket: Any, proxy: Proxy, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, count in enumerate(COUNTS):
        bucket.put_object(Key=f"in/{number}.jsonl", Body=texts(count))
    bucket.put_object(Key="in/_SUCCESS", Body=b"")
    alone = PredictOptions(model, "s3://data/in", "s3://data/alone")
    predict_corpus(alone, print)

    rng = random.Random(1)
    proxy.answer = lambda _: (
        ("503 Slow Down", "<Error><Code>SlowDown</Code></Error>")
        if rng.random() < REFUSED
        else None
    )
    for number in (0, 1):
        Path(str(number)).mkdir()
    argv = ["worker.corpus", json.dumps({**asdict(alone), "output": "s3://data/out"})]
    with started_ranks([Path("0"), Path("1")], argv) as running:
        while len(names(bucket)) < 3 or not children(running[1]):
            time.sleep(0.1)
            assert [process.poll() for process in running] == [None, None]
        running[1].kill()  # as when a node is lost: then the others end
        running[0].communicate(timeout=120)
    assert running[0].returncode == 1
    assert "out/_manifest.json" not in names(bucket)
    shutil.rmtree("0/inputs")  # what a killed process leaves there
    with started_ranks([Path("0")], [*argv, "--resume"]) as (process,):
        while not (predicting := children(process)):
            time.sleep(0.1)
            assert process.poll() is None
        os.kill(predicting[0], signal.SIGKILL)  # as when memory is short
        said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert "the process that predicts them was killed" in said
    copies = {each.suffix for each in Path("0/inputs").iterdir()}
    assert copies == {".lock"}
    events = [event for line in said.splitlines() if (event := parse_event(line))]
    (result,) = (event for event in events if event["event"] == "result")
    assert result["rows"] == sum(COUNTS) > result["rows_now"]

    found, expected = outputs(bucket, "out/"), outputs(bucket, "alone/")
    manifests = [json.loads(each.pop("_manifest.json")) for each in (found, expected)]
    assert found == expected
    assert manifests[0]["files"] == manifests[1]["files"]
    assert [each["rows"] for each in manifests[0]["files"]] == [*COUNTS]


def test_what_is_wrong_is_named_with_its_rows(
    bucket: Any, proxy: Proxy, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TextTask, "shard_rows", 32)
    asked = PredictOptions(model, "s3://data/in/", "s3://data/out")
    with pytest.raises(WorkerError, match=r"s3://data/in.*: NoSuchKey: no object and no folder"):
        predict_corpus(asked, print)
    bucket.put_object(Key="in/readme.md", Body=b"x")
    bucket.put_object(Key="in/0.csv", Body=b"")  # a partition of Spark without rows
    with pytest.raises(
        WorkerError, match="s3://data/in/: has no nonempty file whose name says its format"
    ):
        predict_corpus(asked, print)
    bucket.put_object(Key="in/a.jsonl", Body=texts(40))
    denied = "403 Forbidden", "<Error><Code>AccessDenied</Code></Error>"
    proxy.answer = lambda request: denied if "PUT" in request else None
    other = replace(asked, output="s3://data/denied")
    with pytest.raises(
        WorkerError, match="s3://data/denied: AccessDenied: the nodes lack s3:PutObject"
    ):
        predict_corpus(other, print)
    assert not [each for each in proxy.requests if "denied/" in each and ".probe" not in each]
    proxy.answer = lambda _: None
    monkeypatch.setattr(shards, "predict_sorted", lambda *_: 1 / 0)
    with pytest.raises(WorkerError) as failed:
        predict_corpus(replace(asked, output="s3://data/other"), print)
    assert failed.value.message == (
        "s3://data/in/a.jsonl: rows 1 to 32: ZeroDivisionError: division by zero"
    )
