"""Models and data from a hub, and models for it: the real libraries, and a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TextIO

import pytest
from huggingface_hub import ModelCard

from jobs.worker.runtime.events import Events
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.classify import ClassifyOptions
from jobs.worker.training.hub import push_model
from tests.harness.hub import TOKEN, Hub, serve_hub
from tests.jobs.worker.threaded_ranks import run_threaded, session

ROOT = Path(__file__).parents[4]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


_ASK = """
import json, os, runpy, sys
from worker.data.readers import load_hub
from worker.runtime.errors import WorkerError
from worker.training.model import load_pretrained
for kind, name, token in json.loads(sys.argv.pop(1)):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        load_hub(name, "", "") if kind == "data" else load_pretrained(name, "SequenceClassification")
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


REPO, TARGET = "team/news", "hub:team/news"
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
    push_to=TARGET,
)


@pytest.fixture
def full_hub(hub: Hub, tmp_path: Path) -> Hub:
    """A hub that has a tiny model, which transformers itself writes, and data."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path / "written"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    (folder / "vocab.txt").write_text("\n".join(words))
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    shape = dict(zip(sizes, (8, 1, 1, 8), strict=True))
    config = BertConfig(vocab_size=7, max_position_embeddings=32, **shape)
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    model = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.files = dict.fromkeys(("open/model", "team/model", "gated/model"), model)
    rows = b"text,label\ngood,yes\nbad,no\ngood good,yes\nbad bad,no\n"
    data = {"train.csv": rows, "test.csv": rows}
    hub.files |= {"datasets/team/data": data, "datasets/gated/data": data}
    return hub


def test_what_is_private_or_gated_needs_the_token_which_a_job_has_in_its_private_file(
    full_hub: Hub, tmp_path: Path
) -> None:
    """One process, because the libraries read the hub's address when they are loaded."""
    hub, folder = full_hub, tmp_path / "job"
    folder.mkdir()
    (folder / "environment.json").write_text(json.dumps([f"HF_TOKEN={TOKEN}"]))
    # Without a login, a cache, or a proxy.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    own = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT / "jobs")}
    own |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}  # as a mirror without Xet needs it
    done = subprocess.run(
        [sys.executable, "-c", _ASK, json.dumps(LOADS), "classify", JOB.to_json()],
        env={**kept, **own},
        cwd=folder,
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
    results = json.loads((folder / "output/results.json").read_text())
    assert results["pushed_to"] == f"{hub.url}/{REPO}"
    paths = [path for path in (folder / "output/model").rglob("*") if path.is_file()]
    sent = {str(path.relative_to(folder / "output/model")): path.read_bytes() for path in paths}
    assert hub.files[REPO] == sent
    assert {"README.md", "model.safetensors"} <= sent.keys()
    assert (hub.private[REPO], len(hub.commits)) == (True, 1)
    card = ModelCard(sent["README.md"].decode())
    assert card.data.get("tags") == ["spr-cluster", "classify"]
    assert "# news\n" in card.text
    assert TOKEN not in done.stdout + done.stderr
    outputs = [path for path in (folder / "output").rglob("*") if path.is_file()]
    assert not [path for path in outputs if TOKEN.encode() in path.read_bytes()]


@pytest.fixture
def model(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model, and the libraries' settings as a job's variables make them."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = tmp_path / "output" / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("---\ntags: [a]\n---\nten minutes\n")
    return folder


def send(
    model: Path,
    target: str = TARGET,
    step: int = 9,
    *,
    resume: bool = False,
    said: TextIO | None = None,
) -> list[dict[str, str]]:
    """Return what two ranks get."""

    def work(ranks: Ranks) -> dict[str, str]:
        context = session(replace(JOB, resume=resume), ranks, output=model.parent)
        context = replace(context, events=Events(ranks.rank, said or StringIO()))
        return push_model(context, target, step)

    return run_threaded(2, work)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's
def test_a_restarted_job_does_not_send_its_model_again(hub: Hub, model: Path) -> None:
    url = {"pushed_to": f"{hub.url}/{REPO}"}
    assert send(model) == [url, {}]
    (model / "README.md").write_text("---\ntags: [a]\n---\neleven minutes\n")
    assert send(model, resume=True) == [url, {}]
    assert len(hub.commits) == 1
    # A restart before this was recorded, another step, another run in the same folder, another place.
    (model.parent.with_name("output.state") / "pushed.json").unlink()
    others = ((TARGET, 9), (TARGET, 10), ("hub:team/other", 10))
    for number, (target, step) in enumerate(others):
        found = send(model, target, step, resume=True)
        assert found == [{"pushed_to": f"{hub.url}/{target[4:]}"}, {}]
        (model / "README.md").write_text(f"---\ntags: [a]\n---\n{number} minutes\n")
    send(model, "hub:team/other", 10)
    assert hub.commits == [
        (REPO, "README.md model.safetensors"),
        *[(REPO, "README.md")] * 2,
        ("team/other", "README.md model.safetensors"),
        ("team/other", "README.md"),
    ]
    assert len(hub.uploads) == 1, "the weights crossed the network again"


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's
def test_a_second_push_removes_what_is_left_of_the_first_model(hub: Hub, model: Path) -> None:
    for name in ("adapter_config.json", "openvino/model.xml", "1_Pooling/config.json", "vocab.txt"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    send(model)
    users = (
        ".gitattributes",
        "LICENSE",
        "images/a.png",
        "old/model.safetensors",
        "2024_results/a.png",
    )
    hub.files[REPO] |= dict.fromkeys(users, b"the user's")
    own = model.rename(model.with_name("first"))
    model.mkdir()
    (model / "README.md").write_bytes((own / "README.md").read_bytes())
    (model / "model-00001-of-00002.safetensors").write_bytes(b"other weights")
    send(model)
    assert {*hub.files[REPO]} == {*users, "README.md", "model-00001-of-00002.safetensors"}


@pytest.mark.parametrize(
    ("token", "target", "why"),
    [
        ("hf_of_others", TARGET, "401"),
        (TOKEN, "hub:strangers/news", "403 Forbidden: You don't have the rights to create"),
    ],
)
def test_a_refusal_is_a_warning_with_the_command_that_sends_it_later(
    hub: Hub,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    target: str,
    why: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.chdir(model.parent.parent)
    said = StringIO()
    found, other = send(model, target, said=said)
    assert other == {}
    assert found["push_error"].startswith(f"the model was not pushed to {target}: ")
    assert why in found["push_error"]
    assert found["push_error"].count(why[:3]) == 1
    again = f"; to do it later: hf upload {target[4:]} "
    assert f"{again}{model} --private --delete=adapter_config.json " in found["push_error"]
    assert f"warning: {found['push_error']}" in said.getvalue()
    assert not model.parent.with_name("output.state").exists()

    Path("job.json").write_text('{"more": {"results": "my models/a"}}')
    found, _ = send(model, target)
    assert f"{again}'my models/a/model' --private" in found["push_error"]
    assert hub.files == {}
