"""Odd files are read exactly, or refused in one line, by the check of `train` before anything is sent."""

from __future__ import annotations

import gzip
import io
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import array
from pyarrow.parquet import write_table

from infra.errors import UsageError
from jobs.train.request import check_inputs
from jobs.worker.corpus.options import PredictOptions
from jobs.worker.corpus.shards import make_converter
from jobs.worker.data.table import Table
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks import TASKS
from jobs.worker.tasks.embed.task import Embed
from jobs.worker.tasks.lm.task import Lm
from tests.jobs.worker.data.test_readers import GLUE

XY = "a{0}x\nb{0}y\n"
GOOD = '{"text":"a","label":"x"}\n{"text":"b","label":"y"}\n'
CONTROLS = "a\u2028\x85\x0b\x0c\x1cb"
LABELED = [("a", "x"), ("b", "y")]


def squad(**changes: Any) -> str:
    asked = {
        "id": "1",
        "question": "Who?",
        "answers": [{"text": "Ada", "answer_start": 0}],
        **changes,
    }
    return json.dumps({"data": [{"paragraphs": [{"context": "Ada ran", "qas": [asked]}]}]})


def parquet(**columns: Any) -> bytes:
    names, file = [name.rstrip("_") for name in columns], io.BytesIO()
    write_table(pyarrow.Table.from_arrays([*map(array, columns.values())], names=names), file)
    return file.getvalue()


READ: list[tuple[str, str | bytes, Any]] = [
    ("crlf.csv", 'text,label\r\n"a\nb",x\r\n"c\r\nd",y\r\n', [("a\nb", "x"), ("c\r\nd", "y")]),
    ("data_column.json", GOOD.replace("{", '{"data":"d",'), LABELED),
    ("excel.csv", "sep=,\r\ntext,label\r\n" + XY.format(","), LABELED),
    ("pandas.csv", ",text,label\n0,a,x\n1,b,y\n", LABELED),
    ("huge.csv", f"text,label\n{'w' * 1_000_000},x\nb,y\n", [("w" * 1_000_000, "x"), ("b", "y")]),
    ("controls.csv", f"text,label\n{CONTROLS},x\nb,y\n", [(CONTROLS, "x"), ("b", "y")]),
    ("na_are_labels.csv", "text,label\na,nan\nb,NA\n", [("a", "nan"), ("b", "NA")]),
    *(
        (f"brackets{name}.csv", f"text,label\na,{name}\nb,y\n", [("a", name), ("b", "y")])
        for name in ("[NAME]", "[18-25]", "[1]", "[]", "[1")
    ),
    ("few_bits.jsonl", '{"text":"a","label":[0,1]}\n{"text":"b","label":[]}\n', [("a", "0", "1"), ("b",)]),
    ("equal.jsonl", '{"text":"a","label":[1,1]}\n{"text":"b","label":[0]}\n', [("a", "1"), ("b", "0")]),
    ("decimals.parquet", parquet(text=["a", "b"], label=[Decimal(0), Decimal(1)]), [("a", "0"), ("b", "1")]),
    ("columns.csv", "text1,question1,content,label\nu,v,a,x\nu,v,b,y\n", LABELED),
    ("bool.parquet", parquet(text=["a", "b"], label=[True, False]), [("a", "True"), ("b", "False")]),
    ("controls.txt", f"{CONTROLS}\r\n more\r\n\r\nb\r\n more", [f"{CONTROLS}\n more", "b\n more"]),
    ("quote.conll", '"\tO\na\u00a0b\tB-X\n#\tO\n', [['"', "a\u00a0b", "#"]]),
    ("docstart.conll", "-DOCSTART- -X- O\n\na N O \n1 N B-X \n", [["a", "1"]]),
    ("long.txt", "a\n" * 2000, ["\n".join("a" * 2000)]),
    ("number_squad.json", squad(id=1), 1),
]  # fmt: skip
REFUSED: list[tuple[str, str | bytes, str]] = [
    ("header.csv", "text,label\n", "has no rows"),
    ("twice.csv", "text,text\na,b\n", "line 1: needs a different name for each column: 'text', 'text'"),
    ("commas.tsv", "text,label\na,x\n", "line 1: its columns are separated by ',', not '\\t'"),
    ("no_label.csv", "text,kind\na,b\n", "which column? It has text, kind"),
    ("pair.csv", "premise,hypothesis,label\na,b,x\n", "has pairs of texts, in 'premise' and 'hypo"),
    ("no_text.csv", "text,label\n ,x\n", "line 2: column 'text' is empty"),
    ("empty_label.csv", "text,label\na,\n", "line 2: column 'label' is empty"),
    ("control.csv", b"text,label\na\x81,x\n", "is not UTF-8 (a byte 0x81)"),
    ("escapes.csv", 'text,label\n"say \\"hi\\"",x\n', "line 2: is not CSV"),
    ("utf16.tsv", ("text\tlabel\n" + XY.format("\t")).encode("utf-16"), "is UTF-16, not UTF-8"),
    ("late.csv", b"text,label\n" + b"ok,x\n" * 20_000 + b"caf\xe9,y\n", "which is 'é' in Windows-1252"),
    ("gzipped.csv", gzip.compress(b"text,label\n"), "is compressed by gzip"),
    ("cut.csv.gz", b"\x1f\x8b\x08 cut off", "is not gzip, or is cut off"),
    ("glue.tsv", GLUE, "line 3: a quotation mark begins a cell, and its end is in a later row"),
    ("rows.jsonl.zst", b"\x28\xb5", "its name does not say its format; unpack it, or compress it with"),
    ("tag_conll.tsv", "EU\tB-ORG\nruns\tO\n", "has EU, B-ORG; name it with --text-column; if its lines"),
    ("tag_conll.txt", "EU B-ORG\nruns O\n", "has text; name it with --text-column; if its lines have a word"),
    ("marks.csv", "\ufeff", "is empty"),
    ("deep.json", "[" * 100_000, "is nested too deeply"),
    ("text.json", '"text"', "is not a list of objects, nor "),
    ("none.json", "[]", "has no rows"),
    ("open.json", "{", "is not JSON: "),
    ("one_label.csv", "text,label\na,x\n", "has only the label 'x', and classification needs two"),
    ("by_column.json", '{"text": ["a", "b"], "label": ["x", "y"]}', "column 'text' is not a text"),
    ("twice.jsonl", GOOD + '{"text":"a","text":"c","label":"x"}\n', "line 3: is not JSON: an object has"),
    ("long_number.jsonl", GOOD + '{"text":"a","label":%s}\n' % ("9" * 5000), "line 3: is not JSON"),
    ("deep.jsonl", GOOD + '{"text":' + "[" * 100_000 + "\n", "line 3: is not JSON"),
    ("text_lacks.jsonl", GOOD + '{"label":"x"}\n', "line 3: has no column 'text'"),
    ("half.jsonl", GOOD + '{"text":"\\ud800","label":"x"}\n', "line 3: column 'text' contains half"),
    ("nan.jsonl", GOOD + '{"text":"a","label":NaN}\n', "line 3: column 'label' has no label"),
    ("one_number.jsonl", '{"text":"a","label":1}\n' + GOOD, "line 2: column 'label' is a text: 'x'; in"),
    ("true.jsonl", GOOD + '{"text":"a","label":true}\n', "line 3: column 'label' is true or false"),
    ("one_list.jsonl", '{"text":"a","label":["x"]}\n' + GOOD, "line 2: column 'label' has one label"),
    ("late_list.jsonl", GOOD + '{"text":"a","label":["x"]}\n', "line 3: column 'label' has a list of labels"),
    ("bits.jsonl", '{"text":"a","label":[0.0,1.0,0.0]}', "its lists of labels have a 0 or 1 for each class"),
    ("list.csv", "text,label\na,\"['x', 'y']\"\nb,[]\n", "line 2: column 'label' is a list, written as"),
    ("cut.parquet", b"PAR1", "can't be read as Parquet: "),
    ("twice.parquet", parquet(text=["a"], text_=["b"], label=["x"]), "two columns of the same name"),
    ("bytes.parquet", parquet(text=[b"a"], label=["x"]), "row 1: column 'text' is not a text"),
    ("numbers.parquet", parquet(text=["a"], label=[1.5]), "which is a text or a whole number: '1.5'"),
    ("numbered.conll", "1\tHe\tO\n2\tran\tB-X\n\n1-2\tdu\t_\n1\tde\tO\n\n1\tNo\tO\n", "numbers the words"),
    ("alone.conll", "alone\n", "line 1: has a word and no tag: 'alone'"),
    ("three.conll", "EU B\nNew Oslo B\n", "line 2: has 3 columns, and the first word 2"),
    ("comment.conll", "EU B\n\n# comment\nOslo B\n", "line 3: may be a comment, or the word '#'"),
    ("space.conll", "EU\tB\n\u00a0\tB\n", "line 1: column 'words', word 2 is empty"),
    ("tag.csv", "words,tags\na b,O O\n", "line 2: column 'words' is not a list"),
    ("tag_two.jsonl", '{"words": ["a", "b"], "tags": ["O"]}', "line 1: has 2 words and 1 tags"),
    ("tag_none.jsonl", '{"words": [], "tags": []}', "line 1: column 'words' is empty"),
    ("no_tag.conll", "a\tO\nb\t\nc\tB-X\n", "column 'tags', word 2 is empty"),
    ("nul.conll", "a\tO\nb\0\tB-X\n", "line 2: contains NUL bytes"),
    ("embed.csv", "question\nwhy", "has one column, question, and two are needed"),
    ("embed_none.csv", "query,positive,negative\nwhy,because,", "line 2: column 'negative' is empty"),
    ("embed_equal.csv", "query,answer\nwhy,because\nhow,because", "all its pairs have the same second text"),
    ("embed_no.csv", "question,sentence2, is_duplicate\na,b,False", "column ' is_duplicate' is False, and"),
    ("embed_not.csv", "sentence1,sentence2,label\na,b,not_equivalent", "column 'label' is not_equivalent, "),
    ("score.jsonl", '{"text": "a", "score": "many"}', "line 1: column 'score' is not a number: 'many'"),
    ("score_true.jsonl", '{"text": "a", "score": true}', "line 1: column 'score' is not a number: 'True'"),
    ("score_long.jsonl", '{"text": "a", "score": %s}' % ("9" * 400), "'score' is not a number: '999"),
    ("score_pair.jsonl", '{"text": "a", "rating": 1, "pair": ""}', "line 1: column 'pair' is empty"),
    ("score_rank.jsonl", '{"query": "a", "pos": "b"}', "ranking needs negatives"),
    ("score_rank_none.jsonl", '{"query": "a", "pos": "b", "neg": []}', "'neg' has no text to rank lower"),
    ("score_rank_no_pos.jsonl", '{"query": "a", "pos": [], "neg": ["c"]}', "column 'pos' has no text"),
    ("score_rank_empty.jsonl", '{"query": "a", "pos": "b", "neg": ["c", ""]}', "'neg': text 2 is empty"),
]  # fmt: skip


def options_for(path: Path, content: str | bytes) -> Any:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    first, names = re.split("[_.]", path.name)[0], {".conll": "tag", ".txt": "lm"}
    task = first if first in TASKS else names.get(path.suffix, "classify")
    task = "squad" if "paragraphs" in path.read_text(errors="ignore") else task
    more = {"objective": "ranking"} if "rank" in path.name else {}
    return TASKS[task].Options(model="scratch", data=str(path), **more)


@pytest.mark.parametrize(("name", "content", "wanted"), READ, ids=[each[0] for each in READ])
def test_what_is_read_is_what_is_there(
    tmp_path: Path, name: str, content: str | bytes, wanted: Any
) -> None:
    options = options_for(tmp_path / name, content)
    check_inputs(options)
    found = TASKS[options.task](options).read(lambda _: None).train
    if options.task == "classify":
        found = [(*each.texts, *each.labels) for each in found]
    elif options.task == "tag":
        found = [each.words for each in found]
    assert (len(found) if options.task == "squad" else list(found)) == wanted


@pytest.mark.parametrize(("name", "content", "said"), REFUSED, ids=[each[0] for each in REFUSED])
def test_what_can_not_be_read_is_refused_in_a_line(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    options = options_for(tmp_path / name, content)
    with pytest.raises(UsageError) as refused:
        check_inputs(options)
    assert refused.value.message.startswith(f"{tmp_path / name}: ")
    assert said in f"{refused.value.message}; {refused.value.hint}"
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("count", [1000, 1001])
def test_lines_that_may_be_texts_are_refused_where_each_text_counts(
    tmp_path: Path, count: int
) -> None:
    passages = tmp_path / "a.txt"
    passages.write_text("a\n\n" + "b\n" * count)
    corpus = replace(Embed.demo, corpus=str(passages), token_cache="none")
    place, row = f"{passages}: line 3", {"text": "\n".join("b" * count)}
    convert = make_converter(Lm, Table(str(passages), ("text",), []), PredictOptions("", "", ""))
    for use in (lambda: convert(place, row), lambda: Embed(corpus).check()):
        refusing = pytest.raises(DatasetError, match="line 3: has a text of more than 1000 lines")
        with refusing if count > 1000 else nullcontext():
            use()
