"""Private and gated models and data from a hub: the real libraries, and a mirror on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jobs.worker.tasks.classify import ClassifyOptions

ROOT = Path(__file__).parents[4]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"


@dataclass
class Mirror:
    """A hub: ``team/…`` is private, ``gated/…`` needs a token with access, ``open/…`` neither."""

    url: str
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Content by repository and name; data sets begin with ``datasets/``."""

    def refuse(self, repository: str, token: str) -> tuple[int, str] | None:
        """Return the status and the error code, as the hub does."""
        owner = repository.removeprefix("datasets/").partition("/")[0]
        if owner == "gated" and token != TOKEN:
            return (403 if token else 401), "GatedRepo"
        if repository not in self.files or (owner == "team" and token != TOKEN):
            return (404 if token else 401), "RepoNotFound"
        return None

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        is_api = path.startswith("/api/")
        words = path.partition("?")[0].strip("/").removeprefix("api/").removeprefix("models/")
        parts = words.split("/")
        length = 3 if parts[0] == "datasets" else 2
        repository, rest = "/".join(parts[:length]), parts[length:]
        if refused := self.refuse(repository, token):
            return refused[0], {"X-Error-Code": refused[1]}, b""
        files = self.files[repository]
        if is_api:
            return 200, {"Content-Type": "application/json"}, _describe(repository, rest, files)
        content = files.get("/".join(rest[2:]))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return 200, {"ETag": etag, "X-Repo-Commit": COMMIT}, content


def _describe(repository: str, rest: list[str], files: dict[str, bytes]) -> bytes:
    if rest[:1] == ["tree"]:
        tree = [
            {"type": "file", "path": name, "size": len(each), "oid": hashlib.sha1(each).hexdigest()}
            for name, each in files.items()
            if "/".join(rest[2:]) in ("", name.rpartition("/")[0])
        ]
        return json.dumps(tree).encode()
    id_ = repository.removeprefix("datasets/")
    siblings = [{"rfilename": name} for name in files]
    about = {"id": id_, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
    return json.dumps(about).encode()


@contextmanager
def serve_hub() -> Iterator[Mirror]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, headers, content = mirror.answer(self.path, token)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    mirror = Mirror(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield mirror
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny model, which transformers itself writes."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"])
    )
    config = BertConfig(
        vocab_size=7,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(model: dict[str, bytes]) -> Iterator[Mirror]:
    with serve_hub() as mirror:
        mirror.files = dict.fromkeys(("open/model", "team/model", "gated/model"), model)
        rows = b"text,label\ngood,yes\nbad,no\ngood good,yes\nbad bad,no\n"
        data = {"train.csv": rows, "test.csv": rows}
        mirror.files |= {"datasets/team/data": data, "datasets/gated/data": data}
        yield mirror


_ASK = """
import json, os, runpy, sys
from worker.data.readers import _load_hub
from worker.runtime.errors import WorkerError
from worker.training.model import load_pretrained
for kind, name, token in json.loads(sys.argv.pop(1)):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        _load_hub(name) if kind == "data" else load_pretrained(name, "SequenceClassification")
        said = "loaded"
    except WorkerError as error:
        said = error.hint
    print("said", json.dumps(said), flush=True)
os.environ.pop("HF_TOKEN", None)
runpy.run_module("worker.tasks", run_name="__main__", alter_sys=True)
"""
LOADS = (
    ("model", "open/model", ""),
    ("model", "gated/model", ""),
    ("model", "gated/model", "hf_other"),
    ("model", "team/model", ""),
    ("model", "team/model", "hf_other"),
    ("model", "team/model", TOKEN),
    ("data", "gated/data", ""),
    ("data", "team/data", ""),
    ("data", "team/data", TOKEN),
)
JOB = ClassifyOptions(
    model="team/model",
    data="team/data",
    eval="team/data",
    max_steps=1,
    batch_size=2,
    max_length=16,
    compile="off",
    report_to="none",
    dtype="fp32",
    token_cache="none",
)


def test_what_is_private_or_gated_needs_the_token_which_a_job_has_in_its_private_file(
    hub: Mirror, tmp_path: Path
) -> None:
    """One process, because the libraries read the mirror's address when they are loaded."""
    (tmp_path / "environment.json").write_text(json.dumps([f"HF_TOKEN={TOKEN}"]))
    # Without a login, a cache, or a proxy.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    own = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT / "jobs")}
    done = subprocess.run(
        [sys.executable, "-c", _ASK, json.dumps(LOADS), "classify", JOB.to_json()],
        env={**kept, **own, "HF_ENDPOINT": hub.url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    hidden = "check the name; if it is private or gated, send your login with --env HF_TOKEN"
    gated = "it is gated: request access on {}/{}, and send your login with --env HF_TOKEN"
    assert [json.loads(line[5:]) for line in lines if line.startswith("said ")] == [
        "loaded",
        gated.format(hub.url, "gated/model"),
        f"it is gated, and the login in HF_TOKEN has no access: request it on {hub.url}/gated/model",
        hidden,
        "check the name, and whether the login in HF_TOKEN may read it",
        "loaded",
        gated.format(hub.url, "datasets/gated/data"),
        hidden,
        "loaded",
    ]
    assert (tmp_path / "output/model/model.safetensors").exists()
    assert TOKEN not in done.stdout + done.stderr
    outputs = [path for path in (tmp_path / "output").rglob("*") if path.is_file()]
    assert not [path for path in outputs if TOKEN.encode() in path.read_bytes()]
