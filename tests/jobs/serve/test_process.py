"""`serve` as a process: a real model, OpenAI's client, and a clean stop."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from jobs.serve.worker import UnloadableError, _run
from jobs.worker.tasks import TASKS
from jobs.worker.tasks.predict import predict
from tests.jobs.worker.forked_ranks import run_forked

LONG = [{"text": "an excellent read " * 60}] * 1000
"""Rows that take seconds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of `train embed`, also for OpenVINO."""
    output = tmp_path_factory.mktemp("embed")
    fixed = {"backend": "gloo", "token_cache": "none", "report_to": "none", "dtype": "fp32"}
    options = replace(TASKS["embed"].demo, output=str(output), epochs=1, **fixed)
    exported = replace(options, export="int8", max_loss=100.0)
    (ran,) = run_forked([(exported, {"ranks": 1})])
    assert ran.codes == [0], ran.texts
    return output / "model"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = [sys.executable, "-m", "jobs", "serve", str(model), "--port", "0", "--threads", "1"]
    piped: Any = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **piped, start_new_session=True) as process:
        assert process.stderr
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert found
        _wait_until_ready(found[0])
        yield process, found[0]
        process.kill()


def _wait_until_ready(url: str) -> None:
    until = time.monotonic() + 120
    while httpx.get(f"{url}/health").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_openai_gets_the_vectors_of_the_exported_model(
    model: Path, server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    import openai  # a twentieth of all tests' collection

    client = openai.OpenAI(base_url=f"{server[1]}/v1", api_key="none")
    texts = ["an excellent read", "a dull story"]

    found = client.embeddings.create(model="any", input=texts)

    vectors = [each.embedding for each in found.data]
    # int8 rounds: near the original, and not the same.
    plain = shutil.copytree(model, tmp_path / "plain", ignore=lambda *_: ["openvino"])
    original = [each["embedding"] for each in predict(plain, [{"text": each} for each in texts])]
    for one, other in zip(vectors, original, strict=True):
        assert sum(a * b for a, b in zip(one, other, strict=True)) == pytest.approx(1, abs=0.02)
        assert one != pytest.approx(other, abs=1e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 6
    rows = [{"text": "a"}] * 34 + [{"text": 5}]
    error = httpx.post(f"{server[1]}/predict", json={"rows": rows}, timeout=60).json()["error"]
    assert error["message"].startswith("row 35:")
    with pytest.raises(openai.BadRequestError, match="expected a text"):
        client.embeddings.create(model="any", input=[[1, 2]])


def _rows(url: str, what: str) -> int:
    """Return `waiting` or `total` rows."""
    found = re.search(rf"^spr_rows_{what} (\d+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found
    return int(found[1])


def test_what_a_client_asked_that_has_left_is_not_computed(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    url, before = server[1], _rows(server[1], "total")
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/predict", json={"rows": LONG}, timeout=0.3)
    until = time.monotonic() + 1
    while _rows(url, "waiting"):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert _rows(url, "total") == before


def test_a_signal_to_all_processes_ends_it_after_the_requests_in_progress(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = server
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (model,) = (
        each for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()
    )
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(httpx.post, f"{url}/predict", json={"rows": LONG}, timeout=60)
        while not _rows(url, "waiting"):
            assert not request.done()
        os.killpg(process.pid, signal.SIGTERM)
        assert len(request.result().json()["predictions"]) == len(LONG)
    assert process.wait(30) == 0
    assert not Path(f"/proc/{model}").exists()
    assert process.stderr
    assert "stopped" in process.stderr.read()


def test_why_a_model_can_not_be_loaded_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: it damages the model."""
    weights = model / "openvino" / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    for each in ("signal.signal", "torch.set_num_threads"):  # of this process
        monkeypatch.setattr(each, Mock())
    pipe = Mock(recv=Mock(side_effect=[None, EOFError]))
    _run(pipe, str(model), 1)
    (failure,) = pipe.send.call_args.args
    assert isinstance(failure, UnloadableError)
    assert "Incorrect weights" in str(failure)
    assert "\n" not in str(failure)
