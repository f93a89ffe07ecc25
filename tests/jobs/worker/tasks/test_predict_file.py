"""Predictions for files: the same from any number of ranks, complete or not there, and in order."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.worker.runtime.errors import DatasetError, TrainingError
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks import predict_file as module
from jobs.worker.tasks.classify import Classify
from jobs.worker.tasks.predict import predict
from jobs.worker.tasks.predict_file import PredictOptions, predict_file
from tests.jobs.worker.threaded_ranks import run_threaded
from tests.jobs.worker.training.test_run import run_ranks

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
    monkeypatch.setattr(module, "BLOCK", 20)
    monkeypatch.setattr(module, "GROUP", 4)
    for name in ("training.evaluation", "tasks.squad.answers"):
        monkeypatch.setattr(f"jobs.worker.{name}.read_cpu_flags", frozenset)


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


def run(options: PredictOptions, parts: Path, ranks: Any = None) -> dict[str, Any]:
    return predict_file(options, ranks or Ranks(), parts, lambda _: None)


@pytest.mark.parametrize("task", MODELS)
def test_two_ranks_write_what_one_writes(
    tmp_path: Path, models: Callable[[str], str], task: str
) -> None:
    data = write(tmp_path / "in.jsonl")
    one = PredictOptions(models(task), data, str(tmp_path / "one.jsonl"))
    two = replace(one, output=str(tmp_path / "two.jsonl"))

    assert run(one, tmp_path / "parts")["rows"] == len(ROWS)
    found = run_threaded(2, lambda ranks: run(two, tmp_path / "parts", ranks))
    assert ([each.get("rows") for each in found], [*(tmp_path / "parts").iterdir()]) == (
        [len(ROWS), None],
        [],
    )
    lines = Path(one.output).read_text()
    assert Path(two.output).read_text() == lines

    rows = [json.loads(line) for line in lines.splitlines()]
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS
    for row, direct in zip(rows, predict(one.model, ROWS), strict=True):
        if task == "classify":
            ((label, probability),) = direct["labels"].items()
            assert row["predicted_label"] == label
            assert row["probability"] == pytest.approx(probability, abs=1e-3)
        elif task == "score":
            assert row["score"] == pytest.approx(direct["score"], abs=1e-3)
        elif task == "embed":
            assert row["embedding"] == pytest.approx(direct["embedding"], abs=1e-3)
        elif task == "tag":
            assert (row["words"], row["tags"]) == (direct["words"], direct["tags"])
        else:
            assert (row["answer"], row["start"]) == (direct["text"], direct["start"])
            assert row["score"] == pytest.approx(direct["score"], abs=1e-3)


def test_each_format_holds_every_column(tmp_path: Path, models: Callable[[str], str]) -> None:
    from pyarrow.parquet import read_table

    rows = [{"review": row["text"], "more": {"a": [n]}, "n": n} for n, row in enumerate(ROWS)]
    asked = PredictOptions(
        models("tag"), write(tmp_path / "in.jsonl", rows), "", {"text": "review"}
    )
    for name in ("out.jsonl", "out.csv", "out.parquet"):
        run(replace(asked, output=str(tmp_path / name)), tmp_path / "parts")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert list(lines[0]) == ["review", "more", "n", "words", "tags"]
    table = read_table(tmp_path / "out.parquet")
    assert table.to_pylist() == lines
    with (tmp_path / "out.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [(row["review"], *map(json.loads, [*row.values()][1:])) for row in cells] == [
        tuple(line.values()) for line in lines
    ]
    # A table's own lists of words, and its types.
    again = PredictOptions(
        models("tag"), str(tmp_path / "out.parquet"), str(tmp_path / "b.parquet")
    )
    run(again, tmp_path / "parts")
    assert read_table(tmp_path / "b.parquet").schema.names == [*lines[0], "predicted_tags"]


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


def test_bad_rows_are_named_or_left_out(tmp_path: Path, models: Callable[[str], str]) -> None:
    rows = [dict(row) for row in ROWS]
    rows[30]["question"] = "which core? " * 30  # only the tokenizer knows that it is too long
    asked = PredictOptions(models("squad"), write(tmp_path / "in.jsonl", rows), "")
    asked = replace(asked, output=str(tmp_path / "out.jsonl"))
    with pytest.raises(DatasetError, match=r"in\.jsonl: line 31.*leave no room"):
        run_threaded(2, lambda ranks: run(asked, tmp_path / "parts", ranks))
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


def test_columns_that_the_model_does_not_read_are_refused(
    tmp_path: Path, models: Callable[[str], str]
) -> None:
    asked = PredictOptions(models("squad"), write(tmp_path / "in.jsonl"), "out.jsonl")
    with pytest.raises(DatasetError, match="of `train squad` reads question and context"):
        run(replace(asked, columns={"text": "text"}), tmp_path)
    with pytest.raises(DatasetError, match=r"has no column 'q'; it has id, text"):
        run(replace(asked, columns={"question": "q"}), tmp_path)


def test_large_files_stay_on_the_disk(
    tmp_path: Path, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [dict(row) for row in ROWS]
    rows[30]["text"] = ""
    asked = PredictOptions(models("classify"), write(tmp_path / "in.jsonl", rows), "")
    asked = replace(asked, skip_bad_records=True, output=str(tmp_path / "memory.csv"))
    found = run(asked, tmp_path / "parts")
    monkeypatch.setattr("jobs.worker.data.readers.MOST_IN_MEMORY", 1000)
    mapped = replace(asked, output=str(tmp_path / "mapped.csv"))
    assert run(mapped, tmp_path / "parts")["skip_note"] == found["skip_note"]
    assert [*(tmp_path / "parts").glob("*.arrow")]
    assert Path(mapped.output).read_text() == Path(asked.output).read_text()


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
        if calls == 7:  # in the second of the blocks of five groups
            raise KeyboardInterrupt
        return compute(*values)

    monkeypatch.setattr(Classify, "predict", fail_later)
    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "parts")
    assert Path(asked.output).read_bytes() == whole, "the file of an earlier run"
    Path(asked.output).unlink()
    run(asked, tmp_path / "parts")
    assert calls == 7 + 5 + 3
    assert Path(asked.output).read_bytes() == whole


def test_values_that_parquet_lacks_leave_no_file(
    tmp_path: Path, models: Callable[[str], str]
) -> None:
    rows = [{"text": "a", "n": n} for n in (1, "one")]
    target = tmp_path / "out" / "b.parquet"
    asked = PredictOptions(models("classify"), write(tmp_path / "in.jsonl", rows), str(target))
    with pytest.raises(TrainingError, match="not all values fit Parquet"):
        run(asked, tmp_path / "parts")
    assert [*target.parent.iterdir()] == []


def test_ranks_are_processes(nodes_folder: Path, models: Callable[[str], str]) -> None:
    write(nodes_folder / "in.jsonl")
    options = {"model": models("classify"), "data": "in.jsonl", "output": "output/a.jsonl"}
    argv = ["-m", "worker.tasks.predict_file", json.dumps(options), "--resume"]
    assert [each.code for each in run_ranks(nodes_folder, [argv] * 2)] == [0, 0]
    results = json.loads((nodes_folder / "output/results.json").read_text())
    assert (results["rows"], results["world_size"], results["task"]) == (50, 2, "classify")
    rows = (nodes_folder / "output/a.jsonl").read_text().splitlines()
    assert [json.loads(row)["id"] for row in rows] == [*range(50)]
