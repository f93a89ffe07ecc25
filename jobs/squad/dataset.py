"""Read and check SQuAD v1.1 data. Standard library only; the hub's datasets need ``datasets``.

The layout, as in https://rajpurkar.github.io/SQuAD-explorer/explore/1.1/dev/:

    {"data": [{"title", "paragraphs": [{"context", "qas": [
        {"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}

``answer_start`` counts characters (Unicode code points) from the beginning of the context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .errors import DatasetError, first_line

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Answer:
    """A span of a question's context; ``start`` in characters."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """One question about a passage, with one or more accepted answers; the first one is learnt."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


def read_dataset(path: str | Path) -> list[Question]:
    """The questions of a SQuAD v1.1 file, checked one by one; raises :class:`DatasetError`."""
    document = _read_json(Path(path))
    questions = list(_questions(str(path), document))
    if not questions:
        raise DatasetError(f"{path}: holds no question")
    _refuse_duplicates(str(path), questions)
    return questions


def load_hub_dataset(name: str) -> tuple[list[Question], list[Question]]:
    """The train and validation questions of a hub dataset in SQuAD's columns.

    Raises :class:`DatasetError`.
    """
    try:
        from datasets import load_dataset

        splits = load_dataset(name)
        train, validation = splits["train"], splits["validation"]
    # The library raises whatever its parts raise: requests', the hub's, pyarrow's, KeyError.
    except Exception as error:
        raise DatasetError(
            f"dataset {name!r} can't be loaded from the hub: {first_line(error)}",
            hint="give a SQuAD v1.1 file with --data, or check the name and the network",
        ) from error
    return _hub_questions(f"{name} (train)", train), _hub_questions(
        f"{name} (validation)", validation
    )


def _read_json(path: Path) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path}: can't be read: {error.strerror or error}") from error
    if not content.strip():
        raise DatasetError(f"{path}: is empty")
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DatasetError(f"{path}: is not JSON: {error.msg} ({place})") from error
    except RecursionError as error:
        raise DatasetError(f"{path}: is not SQuAD JSON: it is nested too deeply") from error


def _questions(path: str, document: Any) -> Iterator[Question]:
    for i, article in enumerate(_list(path, document, "data")):
        title = article.get("title", "") if isinstance(article, dict) else ""
        place = f"{path}: data[{i}] {title!r}"
        for j, paragraph in enumerate(_list(place, article, "paragraphs")):
            inside = f"{place}, paragraphs[{j}]"
            context = _text(inside, paragraph, "context")
            for k, record in enumerate(_list(inside, paragraph, "qas")):
                yield _question(f"{inside}, qas[{k}]", context, record)


def _hub_questions(source: str, rows: Any) -> list[Question]:
    questions = []
    for i, row in enumerate(rows):
        place = f"{source}: row {i}"
        columns = _get(place, row, "answers", dict, "an object")
        pairs = zip(columns.get("text", ()), columns.get("answer_start", ()), strict=False)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
        record = {**row, "answers": answers}
        questions.append(_question(place, _text(place, row, "context"), record))
    _refuse_duplicates(source, questions)
    return questions


def _question(place: str, context: str, record: Any) -> Question:
    identity = _text(place, record, "id")
    place = f"{place} (id {identity!r})"
    text = _text(place, record, "question")
    found = _list(place, record, "answers")
    if not found:
        raise DatasetError(
            f"{place}: has no answer",
            hint="unanswerable questions are SQuAD v2.0's; this job reads v1.1",
        )
    return Question(identity, text, context, tuple(_answer(place, context, each) for each in found))


def _answer(place: str, context: str, record: Any) -> Answer:
    text = _text(place, record, "text")
    start = _get(place, record, "answer_start", int, "a whole number")
    if isinstance(start, bool) or start < 0 or context[start : start + len(text)] != text:
        elsewhere = context.find(text)
        there = f"it is at {elsewhere}" if elsewhere >= 0 else "it is not in the context"
        raise DatasetError(f"{place}: answer_start {start} does not point at {text!r}: {there}")
    return Answer(text, start)


def _get(place: str, record: Any, key: str, kind: type, wanted: str) -> Any:
    if not isinstance(record, dict):
        raise DatasetError(f"{place}: is not an object with {key!r}")
    if key not in record:
        raise DatasetError(f"{place}: has no {key!r}")
    if not isinstance(record[key], kind):
        raise DatasetError(f"{place}: {key!r} is not {wanted}")
    return record[key]


def _list(place: str, record: Any, key: str) -> list[Any]:
    found: list[Any] = _get(place, record, key, list, "a list")
    return found


def _text(place: str, record: Any, key: str) -> str:
    text: str = _get(place, record, key, str, "a text")
    if not text.strip():
        raise DatasetError(f"{place}: {key!r} is empty")
    # JSON can write half of a surrogate pair ("\ud800"), which no tokenizer can read.
    if _SURROGATE.search(text):
        raise DatasetError(f"{place}: {key!r} holds half of a surrogate pair")
    return text


def _refuse_duplicates(source: str, questions: list[Question]) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise DatasetError(f"{source}: the id {question.id!r} is used twice")
        seen.add(question.id)


def all_texts(questions: list[Question]) -> Iterator[str]:
    """Every passage once, then every question: what a tokenizer can be trained on."""
    passages = dict.fromkeys(question.context for question in questions)
    return chain(passages, (question.text for question in questions))
