"""Questions to a model: here, and on a head that is this machine's bash and Python."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import jobs.train.predict
from infra.errors import JobError, UsageError
from jobs.train.predict import find_model, make_rows, predict_here, predict_on_head, read_context
from provision.host import Result
from tests.fakes import FakeHost
from tests.jobs.context import listed
from tests.jobs.launchers.this_machine import ThisMachine

TEXT = "The mill has stood in Delft since 1692. It grinds pepper."
WHERE = make_rows(["Where?"], TEXT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a job leaves it; it knows nothing, but it answers."""
    from transformers import DistilBertConfig, DistilBertForQuestionAnswering

    from jobs.worker.training.model import new_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("results") / "squad-1" / "model"
    tokenizer = new_tokenizer(train_tokenizer([TEXT, "Where? Since when is it there?"]))
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=16, n_layers=1, n_heads=2, hidden_dim=16
    )
    DistilBertForQuestionAnswering(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_answers_are_parts_of_the_text(model: Path) -> None:
    found = predict_here(model, make_rows(["Where?", "Since when?"], TEXT))
    assert [each["question"] for each in found] == ["Where?", "Since when?"]
    for each in found:
        assert each["text"]
        assert TEXT[each["start"] :].startswith(each["text"])


def test_a_question_without_a_context_is_explained(model: Path) -> None:
    with pytest.raises(JobError, match="answers questions about a context") as refused:
        predict_here(model, make_rows(["Where?"], None))
    assert refused.value.hint == "`spr-cluster predict` takes it as --context"


def test_a_folder_that_is_no_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(JobError):
        predict_here(tmp_path, WHERE)


@dataclass
class Head(ThisMachine):
    """A head whose home is a local folder and whose venv is this one."""

    def run(self, command: str, **more: Any) -> Result:
        python = command.replace("/opt/spr-cluster/venv/bin/python", sys.executable)
        return super().run(python, **more)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    head = Head(tmp_path)
    head.home.mkdir()
    monkeypatch.setattr(jobs.train.predict, "_HOME", str(head.home))
    return head


def test_the_head_answers_with_a_model_of_this_machine_and_keeps_nothing(
    head: Head, model: Path
) -> None:
    question = "Since 'when' is it \"there\"; $(id) é?"
    rows = make_rows([question], TEXT)
    assert predict_on_head(head, rows, model, None) == predict_here(model, rows)
    assert list(head.home.glob("spr-predict*")) == []


def test_an_error_about_the_model_is_passed_on(head: Head, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the head could not answer"):
        predict_on_head(head, WHERE, tmp_path, None)
    assert list(head.home.glob("spr-predict*")) == []


def test_a_jobs_model_is_used_on_the_head_without_a_copy(tmp_path: Path) -> None:
    def listing(_: str) -> str:
        return (
            listed("squad-1", has_model=True, submitted=100)
            + listed("squad-2", has_model=True, submitted=200)
            + listed("squad-3", submitted=300)
        )

    said = json.dumps({"text": "in Delft", "score": 1.5, "start": 19})
    host = FakeHost(
        "node0",
        [
            ("listing the jobs", listing),
            ("worker.tasks.predict", f"noise\n{said}\n"),
            ("", ""),
        ],
    )
    found = predict_on_head(host, WHERE, None, None)
    assert found[0]["text"] == "in Delft"
    assert "/home/ubuntu/spr-jobs/squad-2/output/model <" in host.commands[-2]
    assert host.commands[-1].startswith("rm -rf /home/ubuntu/spr-predict-")

    predict_on_head(host, WHERE, None, "squad-1")
    assert "/home/ubuntu/spr-jobs/squad-1/output/model <" in host.commands[-2]
    with pytest.raises(UsageError, match="job squad-3 has no model: it is failed"):
        predict_on_head(host, WHERE, None, "squad-3")
    with pytest.raises(JobError, match="the head gave 1 answer to 2 rows"):
        predict_on_head(host, WHERE * 2, None, None)


def test_a_model_is_found_by_folder_job_or_age(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = model.parent.parent
    assert find_model(None, root) == model
    assert find_model("squad-1", root) == model
    assert find_model(str(model), root) == model
    assert find_model(str(model.parent), root) == model
    assert find_model("squad-9", root) is None
    assert find_model(None, tmp_path) is None
    with pytest.raises(UsageError, match=r"--model \./nowhere: no such folder"):
        find_model("./nowhere", root)
    with pytest.raises(UsageError, match=r"no config\.json in"):
        find_model(str(tmp_path), root)


def test_a_context_is_a_file_or_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"\xef\xbb\xbfSome text")
    Path("b.txt").write_bytes(b"\xff")
    Path("c.txt").write_text(" \n")
    assert read_context("a.txt") == "Some text"
    assert read_context(TEXT) == TEXT
    assert read_context("x" * 5000) == "x" * 5000
    for given, result in (
        ("b.txt", r"b\.txt: not UTF-8 \(byte 0\)"),
        ("c.txt", "--context contains no text"),
        ("nowhere.txt", r"--context nowhere\.txt: no such file"),
        ("./nowhere", "no such file"),
        (" ", "--context contains no text"),
    ):
        with pytest.raises(UsageError, match=result):
            read_context(given)
