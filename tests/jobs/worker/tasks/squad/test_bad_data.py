"""Unusable data: each defect has its own message, and none causes another exception."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import UsageError
from jobs.train.request import check_inputs
from jobs.worker.data.records import SKIP_HINT, skip_note
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks.squad.dataset import Question, read_dataset
from jobs.worker.tasks.squad.task import DEMO
from tests.jobs.worker.tasks.squad.test_dataset import document, write

Change = Callable[[dict[str, Any]], object]
PARAGRAPH = "train.json: data[0] 'Nets', paragraphs[0]"
QUESTION = f"{PARAGRAPH}, qas[0] (id 'q1')"


def article(content: dict[str, Any]) -> Any:
    return content["data"][0]


def paragraph(content: dict[str, Any]) -> Any:
    return article(content)["paragraphs"][0]


def question(content: dict[str, Any]) -> Any:
    return paragraph(content)["qas"][0]


def answer(content: dict[str, Any]) -> Any:
    return question(content)["answers"][0]


WRONG: list[tuple[Change, str]] = [
    (lambda c: c.pop("data"), "train.json: has no 'data'"),
    (lambda c: c.update(data={}), "train.json: 'data' is not a list"),
    (lambda c: c.update(data=[]), "train.json: has no question"),
    (lambda c: article(c).pop("paragraphs"), "train.json: data[0] 'Nets': has no 'paragraphs'"),
    (
        lambda c: article(c).update(title=["x"], paragraphs=0),
        "train.json: data[0] (no title): 'paragraphs' is not a list",
    ),
    (
        lambda c: article(c).update(title="\ud800\x1b[31m", paragraphs=0),
        "train.json: data[0] '\\ud800\\x1b[31m': 'paragraphs' is not a list",
    ),
    (lambda c: paragraph(c).update(context="  "), f"{PARAGRAPH}: 'context' is empty"),
    (lambda c: question(c).update(id=5.5), f"{PARAGRAPH}, qas[0]: 'id' is not a text"),
    (lambda c: question(c).update(answers=[]), f"{QUESTION}: has no answer"),
    (
        lambda c: question(c).update(is_impossible=True),
        f"{QUESTION}: has answers, although 'is_impossible' is true",
    ),
    (
        lambda c: question(c).update(is_impossible="true"),
        f"{QUESTION}: 'is_impossible' is not true or false: 'true'",
    ),
    (lambda c: answer(c).update(answer_start="11"), f"{QUESTION}: 'answer_start' is not a whole number"),
    (
        lambda c: answer(c).update(answer_start=True),
        f"{QUESTION}: answer_start True does not point at '20 Gbit': it is at 11",
    ),
    (
        lambda c: answer(c).update(answer_start=10**100),
        f"{QUESTION}: answer_start beyond all texts does not point at '20 Gbit': it is at 11",
    ),
    (
        lambda c: question(c)["answers"].extend([answer(c)] * 50_000 + [{"text": "20"}]),
        f"{QUESTION}: has no 'answer_start'",
    ),
    (
        lambda c: answer(c).update(answer_start=-8),
        f"{QUESTION}: answer_start -8 does not point at '20 Gbit': it is at 11",
    ),
    (lambda c: paragraph(c)["qas"].append(question(c)), "train.json: the id 'q1' is used twice"),
    (
        lambda c: answer(c).update(text="x" * 10**6),
        f"{QUESTION}: answer_start 11 does not point at '{'x' * 59}'…: it is not in the context",
    ),
    (
        lambda c: paragraph(c)["qas"].extend([{}, 7, question(c)]),
        f"{PARAGRAPH}, qas[1]: has no 'id' (and 2 more bad records)",
    ),
    (
        lambda c: question(c).update(question="Why \ud800?"),
        f"{QUESTION}: 'question' contains half of a surrogate pair",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_records_are_named(tmp_path: Path, change: Change, message: str) -> None:
    content = document()
    change(content)
    path = write(tmp_path, content)
    with pytest.raises(DatasetError) as raised:
        read_dataset(path)
    assert raised.value.message == f"{tmp_path}/{message}"


UNREADABLE: list[tuple[bytes, str]] = [
    (b" \n", "is not JSON: Expecting value: line 2 column 1 (char 2)"),
    (b'{"data": [', "is not JSON: Expecting value: line 1 column 11 (char 10)"),
    (b'{"data": "' + b"-" * 10_000 + b'\xe9"}', "is not UTF-8 (a byte 0xe9, which is 'é' in Windows-1252)"),
    (gzip.compress(b"{}", mtime=0), "is compressed by gzip: unpack it first"),
    (
        b'{"data": [%s]}' % (b"9" * 5000),
        "is not JSON: Exceeds the limit (4300 digits) for integer string conversion: "
        "value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit",
    ),
    (b"[" * 200_000, "is nested too deeply"),
    (b"[]", "is not an object with 'data'"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), UNREADABLE)
def test_wrong_files_are_explained(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train.json"
    path.write_bytes(content)
    with pytest.raises(DatasetError) as raised:
        read_dataset(path)
    assert raised.value.message == f"{path}: {message}"


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


@pytest.mark.parametrize(
    "change",
    [
        lambda c: article(c).pop("title"),
        lambda c: article(c).update(title={"wrong": "type"}),
        lambda c: c.update(version=2, more=[]),
        lambda c: question(c).update(is_impossible=False, plausible_answers=7),
        lambda c: question(c).update(question="NUL \0 in a text?"),
        lambda c: question(c).update(question="  Which?\u2028"),
        lambda c: question(c).update(answers=[answer(c)] * 10_000),
        lambda c: paragraph(c).update(context=paragraph(c)["context"] + " word" * 100_000),
    ],
)
def test_odd_data_is_read(tmp_path: Path, change: Change) -> None:
    content = document()
    change(content)
    assert len(read_dataset(write(tmp_path, content))) == 1


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


def test_a_file_of_only_bad_records_is_refused_even_then(tmp_path: Path) -> None:
    content = document()
    question(content).update(answers=[])
    path = write(tmp_path, content)
    with pytest.raises(DatasetError) as raised:
        read_dataset(path, [])
    assert raised.value.message == f"{path}: has no usable question"
    path.write_text("[]")
    with pytest.raises(DatasetError, match="is not an object with 'data'"):
        read_dataset(path, [])


def test_the_laptop_refuses_bad_data_before_it_contacts_a_cluster(tmp_path: Path) -> None:
    content = document()
    content["data"].append({"title": "Bad"})
    options = replace(DEMO, data=str(write(tmp_path, content)))
    with pytest.raises(UsageError, match=r"data\[1\] 'Bad': has no 'paragraphs'"):
        check_inputs(options)
    check_inputs(replace(options, skip_bad_records=True))


KEYS = ["data", "title", "paragraphs", "context", "qas", "id", "question", "answers"]
KEYS += ["text", "answer_start", "is_impossible"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["\ud800", "\0", "20 Gbit", "", " ", 10**30])
)
ANY_JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values."""
    if not isinstance(content, dict | list):
        return [path]
    inner = content.items() if isinstance(content, dict) else enumerate(content)
    below = [place for key, value in inner for place in places(value, (*path, key))]
    return [path, *below] if path else below


@settings(max_examples=50)
@given(data=st.data(), wrong=ANY_JSON)
def test_any_change_to_good_data_gives_questions_or_one_line(
    data: st.DataObject, wrong: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = document()
    *way, last = data.draw(st.sampled_from(places(content)))
    target = content
    for key in way:
        target = target[key]
    target[last] = wrong
    path = write(tmp_path_factory.getbasetemp(), content)
    for skipped in (None, list[DatasetError]()):
        message = ""
        try:
            assert {type(each) for each in read_dataset(path, skipped)} == {Question}
        except DatasetError as error:
            message = error.message
        assert "\n" not in message
        assert len(message.encode()) < 1000 + len(str(path))
