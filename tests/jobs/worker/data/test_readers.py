"""Tables: every format gives the same rows, and what is wrong with a file is one line with its place."""

from __future__ import annotations

import errno
import gzip
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pyarrow
import pytest
from pyarrow.parquet import write_table

from infra.errors import UsageError
from jobs.train.request import check_inputs
from jobs.worker.data import readers, text_files
from jobs.worker.data.groups import Group
from jobs.worker.data.readers import EVAL, NoSplitError, read_table, read_unseen, stream_file
from jobs.worker.data.records import require_text
from jobs.worker.data.table import choose_column, read_records, with_class_names
from jobs.worker.pool.rank import child_environment
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.runtime.process import FOLDER, NODES
from jobs.worker.tasks.classify import Classify, ClassifyOptions
from jobs.worker.tasks.score import Score, ScoreOptions
from jobs.worker.training.text_task import split_off

ROWS = [{"text": "a, b", "label": "x"}, {"text": 'say "c"\nd', "label": "y"}]
CSV = 'text,label\n"a, b",x\n"say ""c""\nd",y\n'
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv.gz", CSV),
        ("A.CSV", "\ufeff" + CSV.replace("\n", "\r\n").replace('c""\r\n', 'c""\n')),
        ("a.tsv", CSV.replace("text,", "text\t").replace('b",', 'b"\t').replace('d",', 'd"\t')),
        ("a.json", json.dumps({"data": ROWS})),
        ("a.json", JSONL),
        ("a.ndjson.gz", "\n" + JSONL),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, content: str) -> None:
    table = read_table(str(write(tmp_path, name, content)))
    assert (list(table.rows), table.columns) == (ROWS, ("text", "label"))


@pytest.mark.parametrize("large", [False, True])
def test_parquet_and_saved_data_sets_give_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(readers, "MOST_IN_MEMORY", 1 if large else 1 << 30)
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["x", "y"])
    rows: list[Any] = [{**row, "label": n, "tags": [n, -1]} for n, row in enumerate(ROWS)]
    rows += [{"text": "c", "label": n, "tags": [0]} for n in (-1, None)]
    data = datasets.Dataset.from_list(rows).cast_column("label", names)
    data = data.cast_column("tags", datasets.Sequence(names))
    data.to_parquet(str(tmp_path / "a.parquet"))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "both"))
    data.save_to_disk(str(tmp_path / "one"))
    wanted: list[Any] = [{**row, "tags": [row["label"], None]} for row in ROWS]
    wanted += [{"text": "c", "label": None, "tags": ["x"]}] * 2
    for name in ("a.parquet", "both", "one"):
        found = with_class_names(read_table(str(tmp_path / name), mapped=tmp_path / "kept"))
        assert [*found.rows] == wanted, name
        assert found.columns == ("text", "label", "tags")
    both = read_unseen(str(tmp_path / "both"), None)
    assert both
    assert [*with_class_names(both).rows] == wanted
    assert read_unseen(str(tmp_path / "one"), None) is None


def test_a_folder_has_a_file_for_each_use(tmp_path: Path) -> None:
    for name in ("train.csv", "train.README.md", "validation.md"):
        write(tmp_path, name, CSV)
    assert read_unseen(str(tmp_path), None) is None
    for name in ("test.csv", "val.jsonl.gz", "valid.json", "validation.jsonl"):
        write(tmp_path, name, JSONL if "json" in name else CSV)
        unseen = read_unseen(str(tmp_path), None)
        assert unseen
        assert unseen.source == str(tmp_path / name)
    write(tmp_path, "more.csv", CSV)
    notes: list[str] = []
    write(tmp_path, "held.csv", CSV)
    place, held = str(tmp_path), str(tmp_path / "held.csv")
    Classify(ClassifyOptions(model="scratch", data=place, eval=held)).read(notes.append)
    left = "more.csv, test.csv, val.jsonl.gz, valid.json"
    assert notes[0].startswith(f"{tmp_path}: did not read {left}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("validation.csv", "text,label\n", "has no rows"),
        ("test.parquet", "broken", "can't be read as Parquet"),
        ("validation.b.csv", CSV, "several files for eval: validation.a.csv, validation.b.csv"),
        ("train.csv.gz", CSV, "several files for train: train.csv, train.csv.gz"),
    ],
)
def test_a_folder_with_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    for other in ("train.csv", "validation.a.csv")[: 1 + name.startswith("validation.b")]:
        write(tmp_path, other, CSV)
    write(tmp_path, name, content)
    with pytest.raises(DatasetError, match=message):
        Classify(ClassifyOptions(model="scratch", data=str(tmp_path))).read(lambda _: None)


def test_a_failure_of_the_hub_does_not_mean_that_there_is_no_evaluation_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = Mock(side_effect=DatasetError("data 'org/data' can't be loaded from the hub"))
    monkeypatch.setattr(readers, "load_hub", failing)
    with pytest.raises(DatasetError, match="can't be loaded"):
        read_unseen("org/data", None)


def test_rows_have_places_and_sentences_that_lack_words_are_left_out(tmp_path: Path) -> None:
    for name, text, places in (
        ("a.conll", "-DOCSTART- -X- O\n\nEU NNP B\nran VBZ O\n\n\nAda NNP B\n", "line 3, line 7"),
        ("a.json", '[1, {"text": "a"}]', "row 2"),
        ("a.txt", "\n\n \nthree\nfour\n", "line 4"),
    ):
        table = read_table(str(write(tmp_path, name, text)))
        found = (table.place(n).partition(f"{name}: ")[2] for n in range(len(table.rows)))
        assert ", ".join(found) == places
    problems = list[DatasetError]()
    table = read_table(str(write(tmp_path, "b.conll", "a O\nb\nc O\n\nd B\n\ne\n")))
    assert [*read_records(table, lambda _, row: row["words"], problems)] == [["d"]]
    assert len(problems) == 2


def test_comments_of_conll_are_no_words(tmp_path: Path) -> None:
    for mark in ("\t", " "):
        sentence = f"# id = 7\n#{mark}O\n" if mark == "\t" else "# id = 7\n"
        text = (
            f"# a comment of one file\n{sentence}EU{mark}B\n#1{mark}O\n\n# id\t=\t8\nDelft{mark}O\n"
        )
        table = read_table(str(write(tmp_path, "a.conll", text)))
        own = ["#"] * (mark == "\t")
        assert [row["words"] for row in table.rows] == [[*own, "EU", "#1"], ["Delft"]], mark


GLUE = 'text\tlabel\none, 0\tbad\n"fresh bread, 1\tgood\nfine, 2\tbad\nvisit 3"\tgood\nlast\tbad\n'


IN_TEXTS = ["one, 0", '"fresh bread, 1', "fine, 2", 'visit 3"', "last"]
AROUND = ["one, 0", "fresh bread, 1\tgood\nfine, 2\tbad\nvisit 3", "last"]


@pytest.mark.parametrize(
    ("added", "texts"),
    [
        ('"good" food\tgood\n', [*IN_TEXTS, '"good" food']),
        ('"no end\tgood\n', [*IN_TEXTS, '"no end']),
        ('"a\nb"\tgood\n', [*AROUND, "a\nb"]),
    ],
)
def test_quotation_marks_of_tsv_files_belong_to_texts_or_are_around_cells(
    tmp_path: Path, added: str, texts: list[str]
) -> None:
    table = read_table(str(write(tmp_path, "a.tsv", GLUE + added)))
    assert [row["text"] for row in table.rows] == texts


GOOD = '{"text": "fine", "label": "x"}\n{"text": "good", "label": "y"}\n'


def test_a_line_or_text_without_an_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "LONGEST_LINE", 1000)
    for name in ("a.csv", "a.jsonl", "a.conll"):
        path = write(tmp_path, name, "x" * 5000)
        with pytest.raises(DatasetError, match="line 1: is longer than 1000 characters"):
            read_table(str(path))
    path = write(tmp_path, "a.txt", "x\n" * 5000)
    for limit, size in ((None, 5000), (1000, 500)):
        (row,) = read_table(str(path), limit=limit).rows
        assert row["text"].count("x") == size


BAD_LINE = '{"text": "", "label": "x"}\n'
LATE = GOOD * 800 + BAD_LINE * 3


@pytest.mark.parametrize("name", ["data/test.csv", "eval.csv"])
def test_evaluation_data_are_checked_before_they_are_sent(tmp_path: Path, name: str) -> None:
    train, path = (
        write(tmp_path, "data/train.jsonl", GOOD),
        write(tmp_path, name, "text,label\na,z\n"),
    )
    unseen = str(path) if name == "eval.csv" else None
    with pytest.raises(UsageError) as refused:
        check_inputs(ClassifyOptions(model="scratch", data=str(train.parent), eval=unseen))
    assert f"{path}: line 2: the training data has no label 'z'" in refused.value.message


def test_of_large_files_the_first_rows_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MOST_CHECKED", 100)
    path = write(tmp_path, "a.jsonl", LATE)
    check_inputs(ClassifyOptions(model="scratch", data=str(path)))
    write(tmp_path, "a.jsonl", BAD_LINE * 3 + LATE)
    with pytest.raises(
        UsageError, match=r"line 1: .* \(and 2 more .*\); only the first 1,000 rows were"
    ):
        check_inputs(ClassifyOptions(model="scratch", data=str(path)))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("data/sub/", "data: has no file for train: train.csv, .jsonl"),
        ("data/model.safetensors", "data: has no file for train"),
        ("data/sub/test.parquet", "data: has no file for train"),
        ("data/training/0.parquet data/test/0.parquet", "if training/0.parquet is for train, move"),
        ("data/a/train-0-of-2.jsonl", "put the rows of a/train-0-of-2.jsonl, … into"),
        ("data/train.csv", ""),
        ("data/sub/part-0.parquet", ""),
        ("data/dataset_info.json", ""),
    ],
)
def test_a_folder_that_is_not_read_here_needs_a_file_to_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, why: str
) -> None:
    monkeypatch.setattr(readers, "MOST_CHECKED", 0)
    for name in names.split():
        path = tmp_path / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True)
        if not name.endswith("/"):
            path.write_text("x")
    options = ClassifyOptions(model="scratch", data=str(tmp_path / "data"))
    with pytest.raises(UsageError) if why else nullcontext() as refused:
        check_inputs(options)
    assert not refused or why in f"{refused.value.message}; {refused.value.hint}"
    if names == "data/train.csv":
        (path.parent / "test-00000-of-00002.parquet").touch()
        with pytest.raises(UsageError, match="has 1 of 2 files"):
            check_inputs(options)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("text", ['{"text": "a", "label": 0.5}\n', "{oops}\n"])
def test_skipping_is_no_hint_if_all_rows_are_bad(tmp_path: Path, text: str, skip: bool) -> None:
    path = write(tmp_path, "a.jsonl", text * 3)
    options = ClassifyOptions(model="scratch", data=str(path), skip_bad_records=skip)
    with pytest.raises(UsageError, match=r"and 2 more") as refused:
        check_inputs(options)
    assert "--skip-bad-records" not in (refused.value.hint or "")
    write(tmp_path, "a.jsonl", GOOD + text)
    check_inputs(replace(options, skip_bad_records=True))
    with pytest.raises(UsageError) as refused:
        check_inputs(replace(options, skip_bad_records=False))
    assert "--skip-bad-records" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("names", "train", "unseen"),
    [
        ("default/test/0000 default/partial-train/0000 default/partial-train/0001", "12", "0"),
        ("test/part-0 train/part-0 train/_temporary/part-1 .cache/train-0", "1", "0"),
        ("split=train/a=1/x split=train/a=2/x split=validation/a=1/x split=test/y", "01", "2"),
        ("train-00000-of-00002-6ef3991c train-00001-of-00002-0ab42c9d", "01", "none"),
        ("train_b-0 train_a-0 dev_a-0-of-1 dev_b-0-of-1", "10", "23"),
        ("date=1/train-0 date=2/train-0 date=1/en/test/0 date=1/de/test-0", "01", "32"),
        (
            "train_sft-00000-of-00001 train_gen-00000-of-00001",
            "several data sets for train, in train_gen, train_sft",
            "none",
        ),
        ("part-0 part-1 test/part-0", "none", "2"),
        ("Train/0 TEST/0", "0", "1"),
        ("end-of-2023 best-of-10 2-of-10", "210", "none"),
        ("a/train-0 b/train/0 a/test-0", "several data sets for train, in a, b", "2"),
        ("train-00000-of-00003", "1 of 3 files with names that contain -of-00003", "none"),
        ("train/000000-of-000003", "1 of 3 files with names that contain -of-000003", "none"),
    ],
)
def test_folders_and_names_say_what_shards_are_for(
    tmp_path: Path, names: str, train: str, unseen: str
) -> None:
    for number, name in enumerate(names.split()):
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(pyarrow.table({"text": [str(number)]}), path)

    def read(split: str) -> str:
        try:
            return "".join(row["text"] for row in read_table(str(tmp_path), split).rows)
        except NoSplitError:
            return "none"
        except DatasetError as error:
            return error.message.removeprefix(f"{tmp_path}: has ")

    assert (read("train"), read(EVAL)) == (train, unseen)


@pytest.mark.parametrize("large", [False, True])
def test_shards_whose_columns_differ_in_type_or_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(readers, "MOST_IN_MEMORY", 1 if large else 1 << 30)
    columns: list[dict[str, Any]] = [
        {"a": pyarrow.array(["x", "y"]).dictionary_encode(), "b": [1, 2], "c": [None, None]},
        {"c": ["k", None], "b": [1.5, 2.0], "a": pyarrow.array(["z", "y"]).dictionary_encode()},
    ]
    never = pyarrow.array([10**13] * 2, pyarrow.timestamp("s"))
    data = tmp_path / "above=1/data"
    folders = ("d=__HIVE_DEFAULT_PARTITION__", "d=so%3Dso", "stray")
    for folder, each in zip(folders, [*columns, columns[1]], strict=True):
        (data / folder).mkdir(parents=True)
        write_table(pyarrow.table({**each, "when": never}), data / folder / "0.parquet")
    found, table = (
        read_table(str(place), mapped=tmp_path / "kept") for place in (data, data / folders[1])
    )
    assert {*found.columns} - {*table.columns} == {"d"}
    assert "above" not in found.columns
    assert [[row[name] for name in "abcd"] for row in found.rows] == [
        ["x", 1, None, None],
        ["y", 2, None, None],
        ["z", 1.5, "k", "so=so"],
        ["y", 2.0, None, "so=so"],
        ["z", 1.5, "k", None],
        ["y", 2.0, None, None],
    ]
    for name in (folders[0], "stray"):
        (data / name / "0.parquet").unlink()
    assert read_table(str(data), mapped=tmp_path / "kept").rows[0]["d"] == "so=so"
    assert read_unseen(str(data), None) is None
    write_table(pyarrow.table({"a": ["x"], "m": [1]}), data / folders[1] / "1.parquet")
    with pytest.raises(DatasetError, match=r"1\.parquet: has other columns than 0\.parquet"):
        read_table(str(data), mapped=tmp_path / "kept")


def write_classes(path: Path, *names: str, first: int = 0) -> None:
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    known = {"huggingface": json.dumps({"info": {"features": features}})}
    numbers = range(first, len(names))
    columns: Any = {"text": ["a"] * len(numbers), "label": numbers}
    write_table(pyarrow.table(columns).replace_schema_metadata(known), path)


def test_score_learns_the_numbers_of_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "a.parquet", "1 star", "2 stars", first=-1)
    options = ScoreOptions(model="scratch", data=str(tmp_path / "a.parquet"), skip_bad_records=True)
    found = Score(options).read(print).train
    assert [each.score for each in found] == [0, 1], "-1 is no label"


def test_shards_with_other_class_names_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "0.parquet", "x", "y")
    write_classes(tmp_path / "1.parquet", "y", "x")
    with pytest.raises(DatasetError, match=r"1\.parquet: column 'label' has other class names"):
        read_table(str(tmp_path))


def test_without_pyarrow_the_ends_of_a_file_are_checked_and_no_more_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; import jobs.worker.data.readers"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    monkeypatch.setattr(readers, "find_spec", lambda _: None)
    monkeypatch.delattr(Path, "read_bytes")
    write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    assert read_table(str(tmp_path / "a.parquet")).columns == ()
    for name, content in (("b.parquet", b"PAR1"), ("c.parquet", b"PAR1" + b"-" * 20)):
        with pytest.raises(DatasetError, match="is not Parquet, or is cut off"):
            read_table(str(write(tmp_path, name, content)))


def test_missing_data_of_a_time_zone_is_named(tmp_path: Path) -> None:
    times = pyarrow.array([0], pyarrow.timestamp("s", "Nowhere/City"))
    write_table(pyarrow.table({"text": ["a"], "at": times}), tmp_path / "a.parquet")
    for read in (read_table, lambda path: [*stream_file(Path(path))]):
        with pytest.raises(DatasetError, match=r"a\.parquet: has times in a zone") as refused:
            read(str(tmp_path / "a.parquet"))
        assert "tzdata" in str(refused.value.hint)


def test_data_is_required_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`train classify` needs --data"):
        check_inputs(ClassifyOptions(model="scratch"))
    for name in ("./none.csv", "none.jsonl", str(tmp_path / "none")):
        with pytest.raises(UsageError, match="No such file"):
            check_inputs(ClassifyOptions(model="scratch", data=name))
    check_inputs(ClassifyOptions(model="scratch", data="imdb"))  # on the hub


def test_columns_are_guessed_or_named_and_keep_the_spaces_of_their_names(tmp_path: Path) -> None:
    table = read_table(str(write(tmp_path, "a.csv", "id, text , label\n1,a,b\n")))
    assert table.columns == ("id", " text ", " label")
    choose: Any = choose_column
    wanted = {None: " text ", "label": " label", " label": " label", "id": "id"}
    assert {name: choose(table, name, ("words", "text"), "") for name in wanted} == wanted
    with pytest.raises(DatasetError, match=r"a.csv: has no column 'body'; it has id,  text , "):
        choose(table, "body", (), "--text-column")


@pytest.fixture
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MOST_IN_MEMORY", 1)
    monkeypatch.setattr("jobs.worker.data.mapped.TOGETHER", 2)


@pytest.mark.usefixtures("_all_are_large")
@pytest.mark.parametrize(
    ("name", "no_locks"),
    [
        *((f"a.{kind}", 0) for kind in ("csv", "csv.gz", "jsonl", "json.gz", "txt", "parquet")),
        *(("a.jsonl", why) for why in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)),
    ],
)
def test_rows_of_large_files_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, no_locks: int
) -> None:
    if no_locks:
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(no_locks, "no locks")))
    rows = [{"text": f"text {n}", "label": "xy"[n % 2]} for n in range(5)]
    contents = {
        "csv": "text,label\n\n" + "".join("{text},{label}\n".format(**row) for row in rows),
        "json": "".join(json.dumps(row) + "\n" for row in rows),
        "jsonl": "\n" + "".join(json.dumps(row) + "\n" for row in rows),
        "txt": "\n\n".join(row["text"] for row in rows),
    }
    path = tmp_path / name
    if name.endswith(".parquet"):
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(str(path))
    else:
        path = write(tmp_path, name, contents[name.split(".")[1]])
    in_memory, folder = read_table(str(path)), tmp_path / "kept"
    for _ in range(2):  # the second time from the first one's file
        table = read_table(str(path), mapped=folder)
        assert not isinstance(table.rows, list)
        records = read_records(table, lambda place, row: (place, row["text"]), None)
        assert not isinstance(records, list)
        assert [*records] == read_records(in_memory, lambda place, row: (place, row["text"]), None)
        assert (records[3], [*records[1:3]]) == (list(records)[3], list(records)[1:3])
        assert table.columns == in_memory.columns
    assert len([*folder.glob("*.arrow")]) == 1
    again = write(tmp_path, "b.jsonl", "".join(json.dumps(row) + "\n" for row in rows[:1]))
    assert len(read_table(str(again), mapped=folder).rows) == 1
    one, other = split_off(records, 0.4, 1, print)
    assert sorted([*one, *other]) == sorted(records)
    assert len(other) == 2


@pytest.mark.usefixtures("_all_are_large")
def test_bad_rows_of_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = '{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n'
    path = write(tmp_path, "a.jsonl", good + "[1]\n{\n" + '{"text": ""}\n{"text": "d"}\n')

    def convert(place: str, row: Any) -> str:
        return require_text(row.get("text"), place)

    table = read_table(str(path), mapped=tmp_path)
    with pytest.raises(DatasetError, match=r"a.jsonl: line 4: is not an object .*\(and 2 more"):
        read_records(table, convert, None)
    skipped: list[DatasetError] = []
    assert [*read_records(table, convert, skipped)[1:]] == ["b", "c", "d"]
    assert [each.message.split(": ")[1][:6] for each in skipped] == ["line 4", "line 5", "line 6"]
    path = write(tmp_path, "c.csv", "text\nx\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"c.csv: its rows can't be kept in .*Not a directory"):
        read_table(str(path), mapped=tmp_path / "file" / "kept")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("jobs.worker.data.mapped.new_file", Mock(side_effect=full))
    trial = child_environment({FOLDER: "job", NODES: "node0"})  # also of a rank
    for environ, hint in (({}, "free space on the file system"), (trial, "up --volume-gib")):
        refusal = pytest.raises(DatasetError, match="No space left")
        with patch.dict("os.environ", environ), refusal as refused:
            read_table(str(path), mapped=tmp_path / "kept")
        assert hint in str(refused.value.hint)


@pytest.mark.usefixtures("_all_are_large")
@pytest.mark.parametrize(
    "later",
    [
        {"a": 1.5},
        {"a": "text", "new": [1]},
        {"a": 2**70, "none": 1},
        {"a": [{"role": "user", "tool_calls": [{"x": None}]}]},
        {"a": "half \ud800"},
    ],
)
def test_mapped_rows_keep_values_unlike_the_first_ones(tmp_path: Path, later: Any) -> None:
    rows = [{"a": 1, "none": None}, {"a": [{"role": "user"}]}, later]
    path = write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    in_memory, table = read_table(str(path)), read_table(str(path), mapped=tmp_path)
    assert [*map(repr, table.rows)] == [*map(repr, rows)]
    assert (table.rows[2], table.columns) == (later, in_memory.columns)


def test_all_groups_of_a_query_are_in_one_part() -> None:
    records = [Group((f"query {n // 3}", f"text {n}")) for n in range(60)]
    for seed in range(5):
        one, other = split_off(records, 0.2, seed, print)
        assert len(one) + len(other) == 60
        assert 9 <= len(other) <= 12
        assert not {each.texts[0] for each in one} & {each.texts[0] for each in other}
    with pytest.raises(DatasetError, match="--eval-fraction needs"):
        split_off(records[:3], 0.2, 1, print)
