"""``--push-to hub:…``: huggingface_hub sends the model to a server of its protocol."""

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
from jobs.worker.tasks.digits import DigitsOptions
from jobs.worker.training.hub import push_model
from tests.harness.hub import TOKEN, Hub, serve_hub
from tests.jobs.worker.threaded_ranks import run_threaded, session
from tests.jobs.worker.training.test_hub import ROOT

REPO, TARGET = "team/digits", "hub:team/digits"
JOB = DigitsOptions(digits=64, epochs=1, report_to="none", dtype="fp32", push_to=TARGET)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_a_job_sends_the_model_with_its_card_and_keeps_the_login(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps([f"HF_TOKEN={TOKEN}"]))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    own = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT / "jobs")}
    own |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}  # as a mirror without Xet needs it
    done = subprocess.run(
        [sys.executable, "-m", "worker.tasks", "digits", JOB.to_json()],
        env={**kept, **own},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "output/results.json").read_text())
    assert results["pushed_to"] == f"{hub.url}/{REPO}"
    sent = files_in(tmp_path / "output/model")
    assert hub.files[REPO] == sent
    assert {"README.md", "model.safetensors"} <= sent.keys()
    assert (hub.private[REPO], len(hub.commits)) == (True, 1)
    card = ModelCard(sent["README.md"].decode())
    assert card.data.get("tags") == ["spr-cluster", "digits"]
    assert "# digits\n" in card.text
    assert f'load_file("{REPO}/model.safetensors")' in card.text
    assert TOKEN not in done.stdout + done.stderr
    outputs = [path for path in (tmp_path / "output").rglob("*") if path.is_file()]
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


@pytest.mark.parametrize(
    ("token", "target", "why"),
    [
        ("hf_of_others", TARGET, "401"),
        (TOKEN, "hub:strangers/digits", "403 Forbidden: You don't have the rights to create"),
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
    assert found["push_error"].endswith(f"{again}{model} --private")
    assert f"warning: {found['push_error']}" in said.getvalue()
    assert not model.parent.with_name("output.state").exists()

    Path("job.json").write_text('{"more": {"results": "my models/a"}}')
    found, _ = send(model, target)
    assert f"{again}'my models/a/model' --private" in found["push_error"]
    assert hub.files == {}
