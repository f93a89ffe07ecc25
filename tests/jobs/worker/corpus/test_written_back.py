"""The rows in the output of `predict` are those of its input, for every format of both."""

from __future__ import annotations

import csv
import json
import math
import tempfile
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.worker.corpus.coordinator import predict_corpus
from jobs.worker.corpus.files import list_sources, local_files
from jobs.worker.corpus.options import PredictOptions
from jobs.worker.corpus.writers import merge_parts, write_part
from jobs.worker.runtime.errors import DatasetError, TrainingError
from jobs.worker.tasks.classify import Classify
from jobs.worker.training.task import Loaded

Rows = list[dict[str, Any]]
FOUND = {"labels": {"x": 0.5}}
ADDED = {"predicted_label": "x", "probability": 0.5}

texts = st.text(
    st.one_of(
        st.sampled_from("a,;#\"'\t\n\r \u00a0\u2028\x0b"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    ),
    min_size=1,
    max_size=12,
).filter(str.strip)
rows = st.lists(
    st.fixed_dictionaries({"text": texts, " note": texts, "label": texts}), min_size=1, max_size=5
)


def predict(source: Path, name: str) -> Rows:
    """Return the rows of the output file, as another library reads them."""
    output = source.with_name(name)
    options = PredictOptions("", str(source), str(output), parts=str(source.with_name("parts")))
    loaded = Loaded(SimpleNamespace(config=0))
    with (
        patch("jobs.worker.corpus.shards.predict_sorted", lambda *given: [FOUND] * len(given[2])),
        patch("jobs.worker.corpus.coordinator.find_task", lambda _: Classify),
        patch("jobs.worker.tasks.predict.load_trained", lambda *_: (Classify, loaded)),
    ):
        predict_corpus(options, lambda _: None)
    if name.endswith(".parquet"):
        found: Rows = pq.read_table(output).to_pylist()
    elif name.endswith(".csv"):
        with output.open(newline="", encoding="utf-8") as file:
            found = [dict(row) for row in csv.DictReader(file, strict=True)]
    else:
        with output.open(newline="\n", encoding="utf-8") as file:
            found = [json.loads(line) for line in file]
    return found


def write_csv(path: Path, given: Rows, **how: Any) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*given[0]], **how)
        writer.writeheader()
        writer.writerows(given)


def write_lines(path: Path, given: Rows) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in given]
    path.write_text("".join(lines), encoding="utf-8")


WRITERS: dict[str, Callable[[Path, Rows], object]] = {
    "a.csv": write_csv,
    "a.tsv": partial(write_csv, delimiter="\t"),
    "a.json": lambda path, given: path.write_text(json.dumps(given)),
    "a.jsonl": write_lines,
    "a.parquet": lambda path, given: pq.write_table(pa.Table.from_pylist(given), path),
}


@pytest.mark.parametrize("output", ["b.csv", "b.jsonl", "b.parquet"])
@pytest.mark.parametrize("name", WRITERS)
@given(given=rows)
@example(given=[{"text": "one\n\ntwo", " note": "a\rb", "label": '"'}])
@settings(max_examples=8, deadline=None, derandomize=True)
def test_every_row_is_written_back(name: str, output: str, given: Rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, name)
        WRITERS[name](source, given)
        try:
            found = predict(source, output)
        except DatasetError as error:
            # In quotes, tabs and line breaks can look like rows.
            if name != "a.tsv" or "a quotation mark begins a cell" not in error.message:
                raise
            return
    expected = [{**row, **ADDED} for row in given]
    if output == "b.csv":
        expected = [{key: str(value) for key, value in row.items()} for row in expected]
    assert found == expected


def test_only_what_is_no_data_in_a_folder_is_left_out(tmp_path: Path) -> None:
    beside = (
        "README.txt notice.txt.gz one/state.json one/dataset_info.json dataset_dict.json _x.csv"
    )
    data = "requirements.csv license.jsonl readme.parquet state.json two/dataset_info.json a.txt"
    for name in f"{beside} {data} a.md".split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "empty.csv").touch()
    assert sorted(local_files(tmp_path)) == sorted(data.split())
    found = {"requirements.txt": Mock(etag="", size=1), "_a.md": Mock()}
    objects = Mock(objects=found, is_folder=False)
    with (
        patch("jobs.worker.corpus.files.connected"),
        patch("jobs.worker.storage.stage.resolve", return_value=objects),
    ):
        assert len(list_sources("s3://b/requirements.txt")) == 1


def test_a_column_of_an_earlier_prediction_is_kept(tmp_path: Path) -> None:
    given = [{"text": "a", "label": "y", "predicted_label": "z"}]
    write_lines(tmp_path / "a.jsonl", given)
    (found,) = predict(tmp_path / "a.jsonl", "b.jsonl")
    assert found == {**given[0], "predicted_predicted_label": "x", "probability": 0.5}


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (None, 5, [None, 5]),
        (None, ["x"], [None, ["x"]]),
        ([], ["x"], [[], ["x"]]),
        (1, 1.5, [1.0, 1.5]),
        (None, None, [None, None]),
        (1, "b", ["1", "b"]),
        ([1], {"n": "é"}, ["[1]", '{"n": "é"}']),
        (date(2026, 1, 2), [b"\xff", float("nan")], ["2026-01-02", '["/w==", null]']),
        (2**70, None, [str(2**70), None]),
        ({}, "\ud800", ["{}", "\\ud800"]),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_columns_of_different_types_become_one(
    tmp_path: Path, one: Any, other: Any, wanted: list[Any], together: bool
) -> None:
    rows: Rows = [{"a": one, "": 1}, {"a": other, "": 1}]
    shards = [rows] if together else [[each] for each in rows]
    parts = [tmp_path / f"{number}.parquet" for number in range(len(shards))]
    for part, shard in zip(parts, shards, strict=True):
        write_part(part, ".parquet", shard)
    merge_parts(parts, tmp_path / "all.parquet")
    found = pq.read_table(tmp_path / "all.parquet")
    assert found.column("a").to_pylist() == wanted
    assert not pa.types.is_null(found.schema.field("a").type)


def test_numbers_that_no_type_holds_leave_no_file(tmp_path: Path) -> None:
    parts = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    for part, value in zip(parts, (2**60 + 1, 1.5), strict=True):
        write_part(part, ".parquet", [{"n": value}])
    with pytest.raises(TrainingError, match="column 'n': not all values are double: Integer value"):
        merge_parts(parts, tmp_path / "out/all.parquet")
    assert not [*tmp_path.glob("out/*")]


@pytest.mark.parametrize("value", ["x", 5, ["x"], {"n": 1}])
def test_a_folder_of_predictions_is_one_data_set(tmp_path: Path, value: Any) -> None:
    rows: Rows = [{"a": None}, {"a": value, "b": value}, {"a": None}]
    for number, row in enumerate(rows):
        write_part(tmp_path / f"{number}.parquet", "output/predictions", [row], first=rows)
    assert pq.read_table(tmp_path).to_pylist() == [{"b": None, **row} for row in rows]


@pytest.mark.parametrize(
    ("first", "values", "wanted"),
    [
        ([], [None], pa.string()),
        ([None], [5, None], pa.string()),
        ([1, "b"], [5, None], pa.string()),
        ([1.5], [5, None], pa.float64()),
        ([1], ["b", None], pa.string()),
        ([1], [1.5], pa.float64()),
        ([{"a": 1, "b": 2}], [{"a": 5}], pa.struct({"a": pa.int64(), "b": pa.int64()})),
    ],
)
def test_shards_have_the_types_of_the_first_rows(
    tmp_path: Path, first: list[Any], values: list[Any], wanted: Any
) -> None:
    given = [[{"a": each} for each in rows] for rows in (values, first)]
    write_part(tmp_path / "0.parquet", "s3://b/out/", given[0], first=given[1])
    found = pq.read_table(tmp_path / "0.parquet")["a"]
    assert found.type == wanted
    assert [each is None for each in found.to_pylist()] == [each is None for each in values]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.jsonl", [None, [1.5, {"x": None}], "/w==", [""], "2026-01-02"]),
        ("a.csv", ["", '[1.5, {"x": null}]', "/w==", '[""]', "2026-01-02"]),
    ],
)
def test_texts_have_only_what_json_has(tmp_path: Path, name: str, wanted: list[Any]) -> None:
    numbers = [1.5, {"x": -math.inf}]
    values = [float("nan"), numbers, b"\xff", [b""], date(2026, 1, 2)]
    write_part(tmp_path / "part", name, [dict(zip("abcde", values, strict=True))])
    merge_parts([tmp_path / "part"], tmp_path / name)
    *_, line = (tmp_path / name).read_text().splitlines()
    is_csv = name == "a.csv"
    assert (next(csv.reader([line])) if is_csv else [*json.loads(line).values()]) == wanted
