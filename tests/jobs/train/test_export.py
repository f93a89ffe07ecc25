"""`export`: the run of a model's job that only evaluates, with its data, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from infra.errors import UsageError
from jobs.cli import main
from jobs.cli.shared.job_display import render_result
from jobs.train.export import export_options
from jobs.worker.runtime.events import NAMES
from jobs.worker.tasks.adapters import ADAPTERS
from jobs.worker.tasks.classify import ClassifyOptions
from tests.harness.json_output import require_schema
from tests.jobs.worker.fast.test_families import SIZES
from tests.jobs.worker.tokenizer_families import bert

TEXTS = {"good": "an excellent and charming read", "bad": "a dull story without any point"}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results of a job with a classifier, whose data are in the working folder."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"body": text, "label": label}) for label, text in TEXTS.items()]
    Path("train.jsonl").write_text("\n".join(rows * 10))
    Path("dev.jsonl").write_text(rows[0])  # a single row
    results, tokenizer = Path("results", "classify-20261124-142501-k3f"), bert([*TEXTS.values()])
    known = vars(AutoConfig.for_model("bert"))
    sizes = {name: size for name, size in SIZES.items() if name in known}
    config = AutoConfig.for_model("bert", **{**sizes, "vocab_size": len(tokenizer)})
    config.label2id, config.id2label = {"bad": 0, "good": 1}, {0: "bad", 1: "good"}
    model = AutoModelForSequenceClassification.from_config(config)
    for each in (model, tokenizer):
        each.save_pretrained(results / "model")
    options = ClassifyOptions(
        data="data/train.jsonl",
        text_column="body",
        eval_fraction=0.2,
        epochs=9,
        patience=2,
        max_length=64,
        report_to="mlflow",
        dtype="int8",
        backend="ccl",
    )
    record = {
        "argv": ["python", "-m", "worker.tasks", "classify", options.to_json()],
        "env": {NAMES: json.dumps({"data/train.jsonl": "train.jsonl"})},
    }
    (results / "job").mkdir()
    (results / "job" / "job.json").write_text(json.dumps(record))
    return results


def test_a_run_that_only_evaluates_has_the_options_of_the_job(job: Path) -> None:
    found = export_options(job / "model", {"export": "int8", "max_loss": 1.0})
    assert (found.data, found.eval, found.epochs) == ("train.jsonl", None, 0)
    assert (found.dtype, found.backend, found.ipex) == ("auto", "auto", False)
    assert found.model == str((job / "model").absolute())
    assert (found.export, found.max_loss, found.report_to) == ("int8", 1.0, "none")
    kept: Any = found
    assert (kept.text_column, kept.eval_fraction, found.max_length) == ("body", 0.2, 64)
    other: Any = export_options(job / "model", {"eval": "dev.jsonl"})
    assert (other.eval, other.eval_fraction) == ("dev.jsonl", None)


def test_a_model_without_a_job_needs_data_and_other_kinds_are_refused(
    job: Path, tmp_path: Path
) -> None:
    (job / "job" / "job.json").rename(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"/model does not name the data of its job"):
        export_options(job / "model", {})
    record, config = job / "job" / "job.json", json.loads((job / "model/config.json").read_text())
    record.write_text(json.dumps({"argv": ["python", "run_qa.py"]}))  # of the published recipe
    assert export_options(job / "model", {"data": "mine.jsonl"}).data == "mine.jsonl"
    answers = {**config, "architectures": ["BertForQuestionAnswering"]}
    (job / "model" / "config.json").write_text(json.dumps(answers))
    record.write_text(json.dumps({"argv": [json.dumps({"dataset": "own/squad"})]}))
    assert export_options(job / "model", {"data": "mine.json"}).data == "mine.json"
    record.unlink()
    names = (("LlamaForCausalLM", "train lm"), ("BertModel", "of no task"))
    for name, why in names:
        (job / "model" / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
        with pytest.raises(UsageError, match=why) as refused:
            export_options(job / "model", {"data": "train.jsonl"})
        assert ("uvx --from optimum-intel" in str(refused.value.hint)) == (name != "BertModel")
    own = {"base_model_name_or_path": "org/base", "task_type": "CAUSAL_LM", "peft_type": "LORA"}
    (job / "model" / ADAPTERS).write_text(json.dumps(own))
    with pytest.raises(UsageError, match="train lm") as refused:
        export_options(job / "model", {"data": "train.jsonl"})
    hint = str(refused.value.hint)
    assert f"spr-cluster predict --model {job / 'model'} --merge WHOLE; then: uvx" in hint
    assert hint.endswith("--model WHOLE OUTPUT")


@pytest.mark.parametrize(
    ("head", "file", "content", "lengths"),
    [
        ("ForTokenClassification", "tokenizer_config", {"model_max_length": 64}, (64, None, None)),
        (
            "ForTokenClassification",
            "tokenizer_config",
            {"model_max_length": 10**30},
            (256, None, None),
        ),
        ("Model", "sentence_bert_config", {"max_seq_length": 48}, (48, None, None)),
        ("ForQuestionAnswering", "config", {"answer_window": [128, 32]}, (128, 32, 30)),
        ("ForQuestionAnswering", "config", {"max_answer_length": 60}, (384, 128, 60)),
    ],
)
def test_a_model_without_a_job_keeps_its_lengths(
    tmp_path: Path, head: str, file: str, content: dict[str, Any], lengths: tuple[int | None, ...]
) -> None:
    files = {"config": {"architectures": [f"Bert{head}"]}, "modules": {}, "tokenizer_config": {}}
    for name, own in {**files, file: {**files.get(file, {}), **content}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(own))
    found = export_options(tmp_path, {"data": "train.jsonl", "max_loss": 1.0})
    names = ("max_length", "stride", "max_answer_length")
    assert tuple(getattr(found, name, None) for name in names) == lengths
    assert export_options(tmp_path, {"data": "x", "max_length": 300}).max_length == 300


def test_it_runs_here_on_one_row_of_evaluation_data(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["export", job.name, "--eval", "dev.jsonl", "--max-loss", "100"]

    assert main([*words, "--results", "out", "--json"]) == 0

    result = json.loads(capfd.readouterr().out)
    require_schema(["export"], result)
    assert result == json.loads(Path("out/results.json").read_text())
    assert render_result(result, Path("out")).splitlines()[-2].startswith("exported as int8: ")
    original, int8 = result["export"]["forms"]
    # A loss of at most all that there is to lose.
    assert int8["loss_at_most"] <= original["score"]
    assert result["eval_records"] == 1
    assert Path("out/model/openvino/openvino_model.xml").exists()
    assert Path("out/job/logs").is_dir()
    assert main([*words, "--results", "new", "--data", "gone.jsonl"]) == 2
    assert main([*words, "--results", "out"]) == 2  # is not empty
    assert not (job / "model" / "openvino").exists()
    with pytest.raises(UsageError, match=r"100\.5 is out of range"):
        export_options(job / "model", {"max_loss": 100.5})
