"""Predictions for files: the same from any number of ranks, complete or not there, and in order."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from infra.errors import UsageError
from jobs.train.predict import check_prediction
from jobs.worker.corpus import runner, shards
from jobs.worker.corpus.coordinator import predict_corpus
from jobs.worker.corpus.files import Output, present
from jobs.worker.corpus.options import PredictOptions, Shard, Source
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks.classify import Classify
from jobs.worker.tasks.predict import predict
from jobs.worker.training.text_task import TextTask

WORDS = ["the", "first", "physical", "core", "of", "each", "socket", "has", "eight", "tile"]
ROWS = [
    {
        "id": n,
        "text": " ".join(WORDS[n % 5 : n % 5 + n % 7 + 1]),
        "question": "which core?",
        "context": " ".join(WORDS * (n % 3 + 1)),
        "label": "known",
    }
    for n in range(50)
]
MODELS = {
    "squad": "DistilBertForQuestionAnswering",
    "classify": "DistilBertForSequenceClassification",
    "score": "DistilBertForSequenceClassification",
    "tag": "DistilBertForTokenClassification",
    "embed": "DistilBertModel",
}


@pytest.fixture(autouse=True)
def _small_blocks_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextTask, "shard_rows", 16)
    monkeypatch.setattr(shards, "GROUP", 4)
    monkeypatch.setattr("jobs.worker.runtime.precision.read_cpu_flags", frozenset)


@pytest.fixture(scope="module")
def models(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Random models with clear preferences, by their tasks."""
    import transformers

    root = tmp_path_factory.mktemp("models")

    def make(task: str) -> str:
        folder = root / task
        if not folder.exists():
            torch.manual_seed(1)
            config = transformers.DistilBertConfig(
                vocab_size=len(tokenizer),
                dim=32,
                n_layers=1,
                n_heads=2,
                hidden_dim=32,
                max_position_embeddings=64,
                initializer_range=0.5,
                id2label=dict(enumerate("x" if task == "score" else "xy")),
            )
            getattr(transformers, MODELS[task])(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            if task == "embed":  # as sentence-transformers marks a model of vectors
                (folder / "modules.json").write_text("[]")
        return str(folder)

    return make


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(options: PredictOptions, parts: Path) -> dict[str, Any]:
    return predict_corpus(replace(options, parts=str(parts)), lambda _: None)


@pytest.mark.parametrize("task", MODELS)
def test_a_folder_gets_what_a_file_gets(
    tmp_path: Path, models: Callable[[str], str], task: str
) -> None:
    from pyarrow.parquet import read_table

    (tmp_path / "in").mkdir()
    data = write(tmp_path / "in/a.jsonl")
    one = PredictOptions(models(task), data, str(tmp_path / "one.jsonl"))
    assert run(one, tmp_path / "parts")["rows"] == len(ROWS)
    assert not (tmp_path / "parts").exists()
    lines = Path(one.output).read_text()

    write(tmp_path / "in/b.ndjson", ROWS[:16])  # exactly one shard
    for name in ("_SUCCESS", "README.txt", "state.json", "dataset_info.json"):
        (tmp_path / "in" / name).touch()
    folder = tmp_path / "out"
    run(replace(one, data=str(tmp_path / "in"), output=str(folder)), tmp_path / "parts")
    manifest = json.loads((folder / "_manifest.json").read_text())
    assert [(each["rows"], len(each["files"])) for each in manifest["files"]] == [(50, 4), (16, 1)]
    tables = [read_table(folder / name) for each in manifest["files"] for name in each["files"]]
    assert sorted(manifest["files"][0]["files"] + manifest["files"][1]["files"]) == sorted(
        path.name for path in folder.glob("*.parquet")
    )
    assert read_table(folder).num_rows == 66
    found = [row for table in tables for row in table.to_pylist()]
    expected = [json.loads(line) for line in lines.splitlines()]
    expected += [{**row} for row in expected[:16]]
    if task == "embed":
        assert (
            str(tables[0].schema.field("embedding").type) == "fixed_size_list<element: float>[32]"
        )
        for row, other in zip(expected, found, strict=True):
            assert row.pop("embedding") == pytest.approx(other.pop("embedding"), abs=1e-6)
    assert [row["id"] for row in found] == [row["id"] for row in expected]
    assert found == expected

    rows = [json.loads(line) for line in lines.splitlines()]
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS
    for row, direct in zip(rows, predict(one.model, ROWS), strict=True):
        if task == "classify":
            ((label, probability),) = direct.pop("labels").items()
            direct |= {"predicted_label": label, "probability": probability}
        if task == "squad":
            direct["answer"] = direct.pop("text")
        for name, value in direct.items():
            assert row[name] == pytest.approx(value, abs=1e-3)


def test_files_with_and_without_a_label_share_the_names(
    tmp_path: Path, models: Callable[[str], str]
) -> None:
    (tmp_path / "in").mkdir()
    asked = PredictOptions(models("classify"), str(tmp_path / "in"), str(tmp_path / "out"))
    write(tmp_path / "in/b.jsonl", [{"text": row["text"]} for row in ROWS])
    run(asked, tmp_path)
    write(tmp_path / "in/a.jsonl")
    with pytest.raises(DatasetError, match="has other predictions"):
        run(asked, tmp_path)
    whole = replace(asked, output=str(tmp_path / "out.jsonl"))
    run(whole, tmp_path / "parts")
    rows = [json.loads(line) for line in Path(whole.output).read_text().splitlines()]
    assert {row.get("label") for row in rows[:50]} == {"known"}
    assert not any("label" in row for row in rows[50:])
    assert {row["predicted_label"] for row in rows} <= {"x", "y"}

    late = [{"text": "the tile"}] * shards._LOOK_AT + [{"text": "the tile", "label": "x"}]
    write(tmp_path / "late.jsonl", late)
    with pytest.raises(DatasetError, match="has a column 'label', as the predictions"):
        run(replace(whole, data=str(tmp_path / "late.jsonl")), tmp_path / "parts")


def test_a_tables_own_lists_of_words_are_tagged(
    tmp_path: Path, models: Callable[[str], str]
) -> None:
    from pyarrow.parquet import read_table

    rows: list[dict[str, Any]] = [
        {"more": {"a": [n]}, "own": str(row["text"]).split(), "tags": n}
        for n, row in enumerate(ROWS)
    ]
    asked = PredictOptions(models("tag"), write(tmp_path / "in.jsonl", rows), "", {"text": "own"})
    run(replace(asked, output=str(tmp_path / "out.parquet")), tmp_path / "parts")
    table = read_table(tmp_path / "out.parquet")
    assert table.schema.names == [*rows[0], "predicted_tags"]
    assert table.select([*rows[0]]).to_pylist() == rows
    tags = table["predicted_tags"].to_pylist()
    assert [*map(len, tags)] == [len(row["own"]) for row in rows]


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_texts_are_cut_as_in_training_and_counted(
    tmp_path: Path, models: Callable[[str], str], tokenizer: Any, task: str
) -> None:
    model, notes = tmp_path / "model", list[str]()
    shutil.copytree(models(task), model)
    known = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**known, "model_max_length": 6}))
    rows: list[dict[str, Any]] = [*ROWS[:9], {"text": "the " * 300}]
    options = PredictOptions(
        str(model), write(tmp_path / "in.jsonl", rows), str(tmp_path / "out.csv")
    )
    predict_corpus(replace(options, parts=str(tmp_path / "parts")), notes.append)
    cut = sum(len(tokenizer(row["text"])["input_ids"]) > 6 for row in rows)
    assert 1 < cut < 9
    assert notes[-2] == f"{cut} rows have more tokens than the model reads, and were cut"


def test_the_columns_of_training_are_found(tmp_path: Path, models: Callable[[str], str]) -> None:
    model, config = tmp_path / "model", {"data_columns": {"text": "review", "pair": "other"}}
    shutil.copytree(models("classify"), model)
    known = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**known, **config}))
    rows = [{"text": "the tile", "review": row["text"], "other": "core"} for row in ROWS]
    asked = PredictOptions(str(model), write(tmp_path / "in.jsonl", rows), "")
    named = replace(asked, model=models("classify"), columns=config["data_columns"])
    found = []
    for number, options in enumerate((asked, named, replace(named, columns={}))):
        output = tmp_path / f"{number}.jsonl"
        run(replace(options, output=str(output)), tmp_path / "parts")
        found.append(output.read_text())
    assert found[0] == found[1] != found[2]
    write(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(DatasetError, match="which column") as raised:
        run(asked, tmp_path / "parts")
    assert raised.value.hint == "name it with --pair-column"
    notes = list[str]()
    write(tmp_path / "in.jsonl", [{"text": "a", "other": "b", "question": "c"}])
    asked = replace(asked, output=str(tmp_path / "3.jsonl"), parts=str(tmp_path / "parts"))
    predict_corpus(asked, notes.append)
    assert "in.jsonl: reading column 'text', not 'review' as in training" in notes[0]
    write(tmp_path / "in.jsonl", [{"other": "b", "question": "c"}])  # a guess without training
    with pytest.raises(DatasetError, match="which column"):
        run(asked, tmp_path / "parts")


def test_bad_rows_are_named_or_left_out(tmp_path: Path, models: Callable[[str], str]) -> None:
    rows = [dict(row) for row in ROWS]
    rows[30]["question"] = "which core? " * 30  # only the tokenizer knows that it is too long
    asked = PredictOptions(models("squad"), write(tmp_path / "in.jsonl", rows), "")
    asked = replace(asked, output=str(tmp_path / "out.jsonl"))
    with pytest.raises(DatasetError, match=r"--text-column: .* reads question and context"):
        run(replace(asked, columns={"text": "context"}), tmp_path / "parts")
    with pytest.raises(DatasetError, match=r"in\.jsonl: line 31.*leave no room"):
        run(asked, tmp_path / "parts")
    rows[3]["context"] = " "
    write(tmp_path / "in.jsonl", rows)
    with pytest.raises(DatasetError, match=r"in\.jsonl: line 4: column 'context' is empty"):
        run(asked, tmp_path / "other")
    assert not Path(asked.output).exists()

    found = run(replace(asked, skip_bad_records=True), tmp_path / "other")
    assert (found["rows"], found["skipped"]) == (48, 2)
    assert "skipped 2 bad records, the first: " in found["skip_note"]
    kept = [json.loads(line)["id"] for line in Path(asked.output).read_text().splitlines()]
    assert kept == [n for n in range(50) if n not in (3, 30)]


def test_a_file_without_any_good_row_ends_no_corpus(
    tmp_path: Path, models: Callable[[str], str]
) -> None:
    (tmp_path / "in").mkdir()
    texts = {"0.csv": "text\n", "a.csv": "", "b.jsonl": "{\n" * 3, "c.csv": "text\ncore\n"}
    for name, text in texts.items():
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "in/a.csv.gz").write_bytes(gzip.compress(b""))
    asked = PredictOptions(models("classify"), str(tmp_path / "in"), str(tmp_path / "out"))
    skipping = replace(asked, skip_bad_records=True)
    with pytest.raises(UsageError, match=r"b\.jsonl: line 1.* \(and 2 more bad records\)"):
        check_prediction(asked)
    check_prediction(skipping)
    with pytest.raises(DatasetError, match=r"b\.jsonl: line 1.* \(and 2 more bad records\)"):
        run(asked, tmp_path / "parts")
    found = run(skipping, tmp_path / "parts")
    assert (found["rows"], found["skipped"]) == (1, 3)
    with pytest.raises(DatasetError, match=r"a\.csv: is empty"):
        run(replace(asked, data=str(tmp_path / "in/a.csv")), tmp_path / "parts")


def test_a_model_that_a_rank_can_not_load_is_its_error(tmp_path: Path) -> None:
    """An error at the start of a pool's process would look like one that is killed again and again."""
    shard = Shard(Source("in.jsonl", "", 1, "digest"), 0, 16, "name")
    options = PredictOptions(str(tmp_path), "in.jsonl", "out.jsonl")
    found = runner._predict(options, shard, Output(str(tmp_path)))
    assert found["message"].startswith(f"model {tmp_path} can't be loaded")


def test_a_repeated_job_computes_only_the_rest(
    tmp_path: Path, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = PredictOptions(
        models("classify"), write(tmp_path / "in.jsonl"), str(tmp_path / "a.csv")
    )
    run(asked, tmp_path / "parts")
    whole, compute, calls = Path(asked.output).read_bytes(), Classify.predict, 0

    def fail_later(*values: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:  # in the second of the shards of four groups
            raise KeyboardInterrupt
        return compute(*values)

    monkeypatch.setattr(Classify, "predict", fail_later)
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "parts")
    assert Path(asked.output).read_bytes() == whole, "the file of an earlier run"
    Path(asked.output).unlink()
    assert run(asked, tmp_path / "parts")["rows_now"] == 50 - 16
    assert calls == 7 + 4 + 4 + 1
    assert Path(asked.output).read_bytes() == whole


def test_a_folder_is_completed_and_takes_no_other_predictions(
    tmp_path: Path, models: Callable[[str], str]
) -> None:
    asked = PredictOptions(
        models("classify"), write(tmp_path / "in.jsonl"), str(tmp_path / "out"), {}, True
    )
    run(asked, tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")}
    next((tmp_path / "out").glob("*.parquet")).unlink()
    found = run(replace(asked, skip_bad_records=False), tmp_path)
    assert (found["rows"], found["rows_now"] <= 16) == (50, True)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")}
    for other in (replace(asked, model=models("score")), replace(asked, columns={"text": "label"})):
        with pytest.raises(DatasetError, match="has other predictions, such as"):
            run(other, tmp_path)
    write(tmp_path / "in.jsonl", ROWS[1:])
    with pytest.raises(DatasetError, match="or data that have changed"):
        run(asked, tmp_path)


def test_ranks_of_a_node_share_a_copy_and_the_last_one_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = list[int]()

    def download(_: Any, found: Any) -> None:
        copies.append(found[0].target.write_text("rows\n"))

    source = Source("s3://bucket/rows.csv", "version", 4, "digest")
    monkeypatch.setattr("jobs.worker.corpus.files.connected", Mock())
    monkeypatch.setattr("jobs.worker.storage.download.download_all", download)
    with present(source, tmp_path) as path:
        with present(source, tmp_path):
            pass
        assert path.exists()
    assert len(copies) == 1
    assert {each.suffix for each in tmp_path.iterdir()} == {".lock"}
