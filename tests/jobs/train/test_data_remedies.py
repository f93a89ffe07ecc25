"""Hints about data, followed to the letter: with each, the check before anything is sent passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.train.request import check_inputs
from tests.jobs.context import parse_request

CSV = "text,label\na,x\nb,y\n"
COLUMNS = CSV.replace("text", "x1").replace("label", "x2")
LABELS = '{"text":"a","label":0.5}\n{"text":"b","label":"y"}\n{"text":"c","label":"x"}\n'
SKIP = "--skip-bad-records"
CONLL = "He O\nran B-X\n\nNo O\nway B-X\n"
NO_ANSWER = '{"id":"1","question":"Who?","answers":[]}'
ANSWER = '{"id":"2","question":"Who?","answers":[{"text":"Ada","answer_start":0}]}'


def squad(*asked: str) -> str:
    return '{{"data":[{{"paragraphs":[{{"context":"Ada ran","qas":[{}]}}]}}]}}'.format(
        ",".join(asked)
    )


@dataclass(frozen=True)
class Row:
    """A file that a task refuses, its hint, and what follows it: options, or another file."""

    task: str
    name: str
    content: str
    hint: str
    options: str = ""
    file: tuple[str, str] = ("", "")


ROWS = (
    Row("classify", "a.docx", CSV, "rename it", file=("a.csv", CSV)),
    Row("classify", "a.txt", "a\nb\n", "give CSV", file=("a.csv", CSV)),
    Row("classify", "a.csv", COLUMNS, "--text-column", "--text-column x1 --label-column x2"),
    Row("classify", "b.csv", CSV + "c,\n", SKIP, SKIP),
    Row("classify", "latin.csv", CSV + "é,x\n", "UTF-8", file=("latin.csv", CSV + "é,x\n")),
    Row("classify", "semi.csv", CSV.replace(",", ";"), "commas", file=("semi.csv", CSV)),
    Row("classify", "l.jsonl", LABELS, SKIP, SKIP),
    Row("tag", "a.conll", CONLL.replace("ran B-X", "ran"), SKIP, SKIP),
    Row("squad", "s.json", squad(ANSWER, NO_ANSWER), SKIP, SKIP),
    Row(
        "squad",
        "t.json",
        squad(ANSWER, NO_ANSWER),
        '"is_impossible": true',
        file=("t.json", squad(ANSWER, NO_ANSWER.replace("[]", '[],"is_impossible":true'))),
    ),
    Row("lm", "a.bin", "text", "rename it", file=("a.txt", "text\n")),
)


def check(row: Row, path: Path, options: str = "") -> None:
    words = ["--data", str(path), "--model", "scratch", *options.split()]
    check_inputs(parse_request("train", row.task, *words).read_options())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.task} {row.name}")
def test_a_hint_about_data_cures(tmp_path: Path, row: Row) -> None:
    path = tmp_path / row.name
    path.write_bytes(row.content.encode("latin-1" if row.name == "latin.csv" else "utf-8"))
    with pytest.raises(UsageError) as refused:
        check(row, path)
    assert row.hint in str(refused.value.hint), refused.value

    path = tmp_path / (row.file[0] or row.name)
    if row.file[0]:
        path.write_text(row.file[1])
    check(row, path, row.options)
