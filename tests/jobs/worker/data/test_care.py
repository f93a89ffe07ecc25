"""What is unusual about data, told before anything is bought."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from jobs.worker.data.care import describe
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks.classify import Classify, ClassifyOptions
from jobs.worker.tasks.squad.dataset import Answer, Question
from jobs.worker.tasks.squad.task import SAMPLE, Squad, SquadOptions


class Row(NamedTuple):
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    place: str


def rows(label: str, count: int, word: str = "text") -> list[Row]:
    return [Row((f"{word} {label} {n}",), (label,), f"row {n}") for n in range(count)]


UNSEEN = [Row(("text  a 1 ",), ("a",), "elsewhere"), *rows("a", 3, "other")]
RARE = [*rows("d", 9), *rows("c", 2), *rows("b", 3), *rows("a", 2), *rows("e", 10)]
ALIKE = [*rows("Spam", 10), *rows("spam ", 10), *rows("ham", 10)]
SAME = "labels differ only in case, spaces, or Unicode form"
SHARED = "1 of 4 records for evaluation are also in the training data, so the scores are too good"


@pytest.mark.parametrize(
    ("train", "unseen", "said"),
    [
        ([*rows("a", 10), *rows("b", 12)], rows("a", 3, "other"), ""),
        (rows("a", 10), None, ""),
        (rows("a", 10), UNSEEN, SHARED),
        (RARE, None, "4 of 5 labels have fewer than 10 rows ('a' 2, 'c' 2, 'b' 3, …)"),
        (ALIKE, None, f"{SAME} ('Spam' and 'spam ')"),
        ([*rows("é", 10), *rows("e\u0301", 10)], None, f"{SAME} ('e\u0301' and 'é')"),
    ],
)
def test_what_is_unusual_is_told(train: list[Row], unseen: list[Row] | None, said: str) -> None:
    """Of records in both parts, neither spaces nor places count."""
    assert describe(train, unseen) == said


def test_questions_about_a_known_passage_are_other_records() -> None:
    train, same, other = (
        [Question(name, text, "eight cores", (Answer("eight", 0),))]
        for name, text in (("a", "How many?"), ("b", " How  many?"), ("c", "What?"))
    )
    assert describe(train, other) == ""
    assert describe(train, same).startswith("1 of 1 records for evaluation")


def test_tables_and_questions_are_described_by_their_check(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"a {n}", "label": "xy"[n % 2]}) for n in range(24)]
    data, other = tmp_path / "data.jsonl", tmp_path / "other.jsonl"
    data.write_text("\n".join(lines))
    other.write_text("\n".join([*lines[:5], json.dumps({"text": "b", "label": "x"})]))
    options = ClassifyOptions(data=str(data), eval=str(other), token_cache="none")

    assert Classify(options).check().startswith("5 of 6 records for evaluation are also")
    assert Classify(ClassifyOptions(data=str(data), token_cache="none")).check() == ""
    again = tmp_path / "again.json"
    again.write_bytes(SAMPLE.read_bytes())
    found = Squad(SquadOptions(data=str(SAMPLE), eval=str(again))).check()
    assert found.startswith("108 of 108 records for evaluation")
    again.write_text(SAMPLE.read_text().replace('"answer_start": 0', '"answer_start": -1'))
    with pytest.raises(DatasetError, match="answer_start -1 does not point"):
        Squad(SquadOptions(data=str(again))).check()
    assert Squad(SquadOptions(data=str(again), skip_bad_records=True)).check() == ""
