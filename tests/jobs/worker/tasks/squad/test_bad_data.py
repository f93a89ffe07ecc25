"""Unusable data: each defect has its own message, and none causes another exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.data.records import SKIP_HINT, skip_note
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks.squad.dataset import read_dataset
from tests.jobs.worker.tasks.squad.test_dataset import document, write

Change = Callable[[dict[str, Any]], object]
FILE = "train.json"
NO_TITLE, ODD_TITLE = f"{FILE}: data[0] (no title)", rf"{FILE}: data[0] '\x1b[31m'"
ARTICLE = f"{FILE}: data[0] 'Nets'"
PARAGRAPH = f"{ARTICLE}, paragraphs[0]"
QUESTION = f"{PARAGRAPH}, qas[0] (id 'q1')"


def article(content: dict[str, Any]) -> Any:
    return content["data"][0]


def paragraph(content: dict[str, Any]) -> Any:
    return article(content)["paragraphs"][0]


def question(content: dict[str, Any]) -> Any:
    return paragraph(content)["qas"][0]


def answer(content: dict[str, Any]) -> Any:
    return question(content)["answers"][0]


BOTH = "has answers, although 'is_impossible' is true"
MORE = "has no 'id' (and 2 more bad records)"
LONG = f"answer_start 11 does not point at '{'x' * 59}'…: it is not in the context"
POINTS = "does not point at '20 Gbit': it is at 11"
WRONG: list[tuple[Change, str, str]] = [
    (lambda c: c.pop("data"), FILE, "has no 'data'"),
    (lambda c: c.update(data=[]), FILE, "has no question"),
    (lambda c: article(c).update(title=["x"], paragraphs=0), NO_TITLE, "'paragraphs' is not a list"),
    (lambda c: article(c).update(title="\x1b[31m", paragraphs=0), ODD_TITLE, "'paragraphs' is not a list"),
    (lambda c: paragraph(c).update(context="  "), PARAGRAPH, "'context' is empty"),
    (lambda c: question(c).update(id=5.5), f"{PARAGRAPH}, qas[0]", "'id' is not a text"),
    (lambda c: question(c).update(answers=[]), QUESTION, "has no answer"),
    (lambda c: question(c).update(is_impossible=True), QUESTION, BOTH),
    (lambda c: question(c).update(is_impossible=1), QUESTION, "'is_impossible' is not true or false: '1'"),
    (lambda c: answer(c).update(answer_start="11"), QUESTION, "'answer_start' is not a whole number"),
    (lambda c: answer(c).update(answer_start=True), QUESTION, f"answer_start True {POINTS}"),
    (lambda c: answer(c).update(answer_start=10**100), QUESTION, f"answer_start beyond all texts {POINTS}"),
    (lambda c: answer(c).update(answer_start=-8), QUESTION, f"answer_start -8 {POINTS}"),
    (lambda c: answer(c).update(text="x" * 10**6), QUESTION, LONG),
    (lambda c: paragraph(c)["qas"].append(question(c)), FILE, "the id 'q1' is used twice"),
    (lambda c: paragraph(c)["qas"].extend([{}, 7, question(c)]), f"{PARAGRAPH}, qas[1]", MORE),
]  # fmt: skip


@pytest.mark.parametrize(("change", "place", "said"), WRONG)
def test_wrong_records_are_named(tmp_path: Path, change: Change, place: str, said: str) -> None:
    content = document()
    change(content)
    path = write(tmp_path, content)
    with pytest.raises(DatasetError) as raised:
        read_dataset(path)
    assert raised.value.message == f"{tmp_path}/{place}: {said}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [', "is not JSON: Expecting value: line 1 column 11 (char 10)"),
        ("[" * 200_000, "is nested too deeply"),
        ("[]", "is not an object with 'data'"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(content)
    with pytest.raises(DatasetError) as raised:
        read_dataset(path)
    assert raised.value.message == f"{path}: {message}"
    with pytest.raises(DatasetError, match="can't be read: Is a directory"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("layout", ['{"data": [%s]}', "[%s]", "%s", "%s\n%s"])
def test_rows_of_a_table_are_recognized(tmp_path: Path, layout: str) -> None:
    row = json.dumps({"id": "q1", "context": "It.", "question": "?", "answers": {}})
    (tmp_path / "train.json").write_text(layout.replace("%s", row))
    with pytest.raises(DatasetError) as raised:
        read_dataset(tmp_path / "train.json")
    assert str(raised.value.hint).startswith("nest the rows in SQuAD's layout: {")


NO_ANSWER = 'a question that has none needs "is_impossible": true'


@pytest.mark.parametrize(
    ("change", "has_good", "hint"),
    [
        (lambda c: answer(c).update(answer_start=3), True, SKIP_HINT),
        (lambda c: question(c).update(answers=[]), True, f"{NO_ANSWER}; {SKIP_HINT}"),
        (lambda c: question(c).update(answers=[]), False, NO_ANSWER),
    ],
)
def test_hints_name_the_fix(tmp_path: Path, change: Change, has_good: bool, hint: str) -> None:
    content, good = document(), document()
    question(good)["id"] = "good"
    content["data"] += good["data"] * has_good
    change(content)
    with pytest.raises(DatasetError) as raised:
        read_dataset(write(tmp_path, content))
    assert raised.value.hint == hint


def test_odd_data_is_read(tmp_path: Path) -> None:
    content = document()
    article(content).pop("title")
    question(content).update(is_impossible=False, plausible_answers=7, question=" NUL \0?\u2028")
    assert len(read_dataset(write(tmp_path, {**content, "version": 2}))) == 1


def test_bad_records_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    content = document()
    good = question(content)
    paragraph(content)["qas"] += [{**good, "answers": []}, 7, good, {**good, "id": "q2"}]
    article(content)["paragraphs"] += [{"context": ""}, None]
    content["data"] += ["no article"]
    path = write(tmp_path, content)
    skipped: list[DatasetError] = []
    assert [question.id for question in read_dataset(path, skipped)] == ["q1", "q2"]
    assert len(skipped) == 6
    assert skip_note(skipped) == (
        f"skipped 6 bad records, the first: {path}: data[0] 'Nets', paragraphs[0], qas[1] "
        "(id 'q1'): has no answer"
    )
    paragraph(content)["qas"] = [{**good, "answers": []}]
    with pytest.raises(DatasetError, match="has no usable question"):
        read_dataset(write(tmp_path, content), [])
