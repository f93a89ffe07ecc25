"""SQuAD data, read and checked. Standard library only; the hub's datasets need ``datasets``.

The layout, from https://rajpurkar.github.io/SQuAD-explorer/explore/1.1/dev/:

    {"data": [{"title", "paragraphs": [{"context", "qas": [
        {"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}

``answer_start`` counts characters (Unicode code points) from the beginning of the context. In v2.0, questions
without an answer have ``"is_impossible": true`` and no ``answers``; on the hub, only the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ...data.readers import explaining, load_hub
from ...data.records import SKIP_HINT, noting, refusal, require_text, show
from ...data.text_files import load_json
from ...runtime.errors import DatasetError

_NESTED = (
    'nest the rows in SQuAD\'s layout: {"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, '
    '"question": …, "answers": [{"text": …, "answer_start": …}]}]}]}]}'
)


@dataclass(frozen=True)
class Answer:
    """A span of a question's context; ``start`` in characters."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """One question about a passage, with its accepted answers; the first one is learned.

    The passage does not answer a question without any.
    """

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


def read_dataset(path: str | Path, skipped: list[DatasetError] | None = None) -> list[Question]:
    """Return the questions of a SQuAD file, each checked. Raises :class:`DatasetError`.

    A bad record is an error; with a list ``skipped``, it is left out and added to the list.
    """
    return _judge(str(path), _questions, _read_json(Path(path)), skipped)


def load_hub_dataset(
    name: str, skipped: list[DatasetError] | None = None
) -> tuple[list[Question], list[Question]]:
    """Return the train and validation questions of a hub dataset with SQuAD's columns.

    ``skipped`` and errors are those of :func:`read_dataset`.
    """
    fix = "give a SQuAD file with --data, or check the name and the network"
    train, validation = load_hub(name, f"dataset {name!r}", fix, "train", "validation")
    return (
        _judge(f"{name} (train)", _row_questions, train, skipped),
        _judge(f"{name} (validation)", _row_questions, validation, skipped),
    )


def _judge(
    source: str,
    read: Callable[[str, Any, list[DatasetError]], Iterator[Question]],
    content: Any,
    skipped: list[DatasetError] | None,
) -> list[Question]:
    """Return the usable questions; ``read`` adds to a list of problems."""
    problems, good = list[DatasetError](), dict[str, Question]()
    for question in read(source, content, problems):
        if question.id in good:
            problems.append(DatasetError(f"{source}: the id {show(question.id)} is used twice"))
        else:
            good[question.id] = question
    if problems and skipped is None:
        raise refusal(problems, has_good=bool(good))
    if skipped is not None:
        skipped += problems
    if not good:
        raise DatasetError(f"{source}: has no {'usable ' * bool(problems)}question")
    return list(good.values())


def _read_json(path: Path) -> Any:
    with explaining(path), path.open(encoding="utf-8-sig") as file:
        try:
            return load_json(str(path), file)
        except DatasetError as error:
            if "Extra data" in str(error):  # JSON lines
                error.hint = _NESTED
            raise


def _questions(path: str, document: Any, problems: list[DatasetError]) -> Iterator[Question]:
    for i, article in enumerate(_list(path, document, "data")):
        title = article.get("title", "") if isinstance(article, dict) else ""
        place = f"{path}: data[{i}] {show(title) if isinstance(title, str) else '(no title)'}"
        with noting(problems):
            for j, paragraph in enumerate(_list(place, article, "paragraphs")):
                with noting(problems):
                    yield from _asked(f"{place}, paragraphs[{j}]", paragraph, problems)


def _asked(place: str, paragraph: Any, problems: list[DatasetError]) -> Iterator[Question]:
    context = read_text(place, paragraph, "context")
    for k, record in enumerate(_list(place, paragraph, "qas")):
        with noting(problems):
            yield _question(f"{place}, qas[{k}]", context, record)


def _row_questions(source: str, rows: Any, problems: list[DatasetError]) -> Iterator[Question]:
    for i, row in enumerate(rows):
        with noting(problems):
            place = f"{source}: row {i}"
            columns = _get(place, row, "answers", dict, "an object")
            pairs = zip(
                _list(place, columns, "text"), _list(place, columns, "answer_start"), strict=False
            )
            answers = [{"text": text, "answer_start": start} for text, start in pairs]
            context = read_text(place, row, "context")
            known = {"is_impossible": not answers, **row, "answers": answers}
            yield _question(place, context, known)


def _question(place: str, context: str, record: Any) -> Question:
    if isinstance(record, dict) and type(record.get("id")) is int:
        record = {**record, "id": str(record["id"])}
    identity = read_text(place, record, "id")
    place = f"{place} (id {show(identity)})"
    text = read_text(place, record, "question")
    found = _list(place, record, "answers")
    impossible = record.get("is_impossible") or False
    if not isinstance(impossible, bool):
        raise DatasetError(
            f"{place}: 'is_impossible' is not true or false: {show(str(impossible))}"
        )
    if impossible and found:
        raise DatasetError(f"{place}: has answers, although 'is_impossible' is true")
    if not found and not impossible:
        raise DatasetError(
            f"{place}: has no answer",
            hint=f'a question that has none needs "is_impossible": true; {SKIP_HINT}',
        )
    return Question(identity, text, context, tuple(_answer(place, context, each) for each in found))


def _answer(place: str, context: str, record: Any) -> Answer:
    text = read_text(place, record, "text")
    start = _get(place, record, "answer_start", int, "a whole number")
    if isinstance(start, bool) or start < 0 or context[start : start + len(text)] != text:
        elsewhere = context.find(text)
        there = f"it is at {elsewhere}" if elsewhere >= 0 else "it is not in the context"
        # Python refuses to print integers of thousands of digits.
        shown = start if abs(start) < 10**18 else "beyond all texts"
        raise DatasetError(f"{place}: answer_start {shown} does not point at {show(text)}: {there}")
    return Answer(text, start)


def _get(place: str, record: Any, key: str, kind: type, wanted: str) -> Any:
    row = record[0] if isinstance(record, list) and record else record
    is_row = key in ("data", "paragraphs") and isinstance(row, dict) and "context" in row
    hint = _NESTED if is_row else None
    if not isinstance(record, dict):
        raise DatasetError(f"{place}: is not an object with {key!r}", hint=hint)
    if key not in record:
        raise DatasetError(f"{place}: has no {key!r}", hint=hint)
    if not isinstance(record[key], kind):
        raise DatasetError(f"{place}: {key!r} is not {wanted}")
    return record[key]


def _list(place: str, record: Any, key: str) -> list[Any]:
    found: list[Any] = _get(place, record, key, list, "a list")
    return found


def read_text(place: str, record: Any, key: str) -> str:
    """Return a nonempty text. Raises :class:`DatasetError`."""
    return require_text(_get(place, record, key, str, "a text"), f"{place}: {key!r}")


def all_texts(questions: Sequence[Question]) -> Iterator[str]:
    """Return every passage once, then every question, to train a tokenizer on."""
    passages = dict.fromkeys(question.context for question in questions)
    return chain(passages, (question.text for question in questions))
