from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks.squad.dataset import (
    Answer,
    Question,
    load_hub_dataset,
    read_dataset,
)


def document() -> dict[str, Any]:
    answers = [{"text": "20 Gbit", "answer_start": 11}]
    qas = [{"id": "q1", "question": "How fast?", "answers": answers}]
    return {
        "data": [{"title": "Nets", "paragraphs": [{"context": "It reaches 20 Gbit.", "qas": qas}]}]
    }


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(content))
    return path


def test_offsets_count_characters_and_byte_order_marks_are_ignored(tmp_path: Path) -> None:
    content = document()
    paragraph = content["data"][0]["paragraphs"][0]
    paragraph["context"] = "𝔸é reached 20 Gbit."
    path = tmp_path / "train.json"
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8-sig")
    assert read_dataset(path)[0].answers == (Answer("20 Gbit", 11),)


ROW = {
    "id": "q1",
    "title": "Nets",
    "context": "It reaches 20 Gbit.",
    "question": "How fast?",
    "answers": {"text": ["20 Gbit"], "answer_start": [11]},
}


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The rows of a dataset on the hub."""
    found = {"train": [ROW], "validation": [ROW | {"id": "q2"}]}
    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", lambda name: found)
    return found


def test_hub_datasets_give_the_same_questions(splits: dict[str, Any]) -> None:
    train, validation = load_hub_dataset("squad")
    assert train == [Question("q1", "How fast?", "It reaches 20 Gbit.", (Answer("20 Gbit", 11),))]
    assert [question.id for question in validation] == ["q2"]
    splits["train"].append(ROW | {"question": ""})
    with pytest.raises(DatasetError, match=r"mine \(train\): row 1 \(id 'q1'\): 'question' is emp"):
        load_hub_dataset("mine")


def test_questions_without_answers(tmp_path: Path, splits: dict[str, Any]) -> None:
    content = document()
    (question,) = content["data"][0]["paragraphs"][0]["qas"]
    question |= {"answers": [], "is_impossible": True, "plausible_answers": question["answers"]}
    expected = Question("q1", "How fast?", "It reaches 20 Gbit.", ())
    assert read_dataset(write(tmp_path, content)) == [expected]
    row = ROW | {"answers": {"text": [], "answer_start": []}}
    splits |= {"train": [row], "validation": [row]}
    assert load_hub_dataset("squad_v2") == ([expected], [expected])


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", unreachable)
    with pytest.raises(DatasetError) as raised:
        load_hub_dataset("squad")
    assert raised.value.message == "dataset 'squad' can't be loaded from the hub: no route"
