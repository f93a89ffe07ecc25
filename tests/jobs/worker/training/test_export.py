"""A trained model for OpenVINO, and the promise about its score."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from jobs.train.study import job_packages
from jobs.worker.runtime.errors import TrainingError, WorkerError
from jobs.worker.tasks import TASKS
from jobs.worker.tasks.classify import ClassifyOptions
from jobs.worker.tasks.squad.task import Squad
from jobs.worker.training import export
from jobs.worker.training.export import _openvino, _trace, _uncertainty, require_packages
from tests.jobs.worker.fast.test_families import build
from tests.jobs.worker.forked_ranks import Ran, events_of, run_forked
from tests.jobs.worker.tasks.test_classify_and_tag import write
from tests.jobs.worker.threaded_ranks import train_alone
from tests.jobs.worker.tokenizer_families import bert

# Those of other packages that it imports.
pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = {"good": "an excellent and charming read", "bad": "a dull story without any point"}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate and measure forms of the model with few rows."""
    for name, count in {"CALIBRATED": 32, "MEASURED": 32, "SINGLE": 8}.items():
        monkeypatch.setattr(export, name, count)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, found = tmp_path_factory.mktemp("data"), {}
    for name in ("train", "eval"):
        rows = [
            {"text": f"{text} {name} {number}", "label": label}
            for number in range(40)
            for label, text in TEXTS.items()
        ]
        found[name] = write(folder, rows, f"{name}.jsonl")
    return found


def options(output: Path, task: str, **more: Any) -> Any:
    fixed = {"backend": "gloo", "token_cache": "none", "report_to": "none", "dtype": "fp32"}
    return replace(TASKS[task].demo, output=str(output), **{**fixed, "export": "int8", **more})


def export_alone(chosen: Any) -> tuple[Any, list[str]]:
    """Return the results of a single rank, and its notes."""
    said, output = io.StringIO(), Path(chosen.output)
    output.mkdir(exist_ok=True)
    found = train_alone(chosen, output, said)
    return found, [each["text"] for each in events_of(said.getvalue(), "note")]


@pytest.fixture(scope="module")
def trained(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A classifier that two ranks have trained and exported."""
    output = tmp_path_factory.mktemp("trained")
    chosen = options(
        output, "classify", data=data["train"], eval=data["eval"], epochs=8, max_loss=10.0
    )
    (ran,) = run_forked([(chosen, {})])
    return output, ran


def test_a_trained_model_is_exported_in_int8_with_its_score_and_speed(
    trained: tuple[Path, Ran],
) -> None:
    output, ran = trained

    assert ran.codes == [0, 0], ran.texts
    found = json.loads((output / "results.json").read_text())["export"]
    original, int8 = found["forms"]
    assert (found["metric"], found["max_loss"]) == ("accuracy", 10.0)
    assert (original["form"], int8["form"]) == ("PyTorch, fp32", "int8")
    assert original["score"] == 100.0
    assert int8["score"] > 90
    assert int8["loss"] == pytest.approx(100 - int8["score"], abs=0.001)
    assert int8["loss"] < int8["loss_at_most"] <= 10
    assert all(form["rows_per_second"] > 0 for form in found["forms"])
    assert all(0 < form["p50_ms"] <= form["p99_ms"] for form in found["forms"])
    card = (output / "model" / "README.md").read_text()
    assert "| int8 | " in card
    assert any(note["text"].startswith("export, int8: ") for note in ran.of("note"))


def test_openvino_alone_loads_it_and_finds_the_classes(trained: tuple[Path, Ran]) -> None:
    openvino = _openvino()
    folder = trained[0] / "model"
    graph = openvino.Core().read_model(folder / "openvino" / "openvino_model.xml")

    assert any(node.get_type_name() == "FakeQuantize" for node in graph.get_ops())
    compiled = openvino.compile_model(graph, "CPU")
    tokens = AutoTokenizer.from_pretrained(folder)([*TEXTS.values()], padding=True)
    inputs = {name: np.array(tokens[name]) for name in ("input_ids", "attention_mask")}
    classes = json.loads((folder / "config.json").read_text())["id2label"]
    best = compiled(inputs)[0].argmax(axis=1)
    assert [classes[str(each)] for each in best] == [*TEXTS]


def test_a_promise_that_no_form_keeps_is_said(
    trained: tuple[Path, Ran], data: dict[str, str], tmp_path: Path
) -> None:
    """Also: no training, and the model that is evaluated is the given one."""
    model = {"model": str(trained[0] / "model"), "epochs": 0, "max_loss": 0.0}
    chosen = options(tmp_path, "classify", data=data["train"], eval=data["eval"], **model)

    result, notes = export_alone(chosen)

    assert (result["accuracy"], result["loss_curve"]) == (100.0, [])
    assert "samples_per_second" not in result
    forms = [form["form"] for form in result["export"]["forms"]]
    # What is said of the last form is what the processor does.
    has_bf16 = "BF16" in _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    last = f"OpenVINO, {'bf16' if has_bf16 else 'fp32'}"
    assert forms == ["PyTorch, fp32", "int8", "int8 except the first and last layer", last]
    (warning,) = (text for text in notes if text.startswith("warning: no form"))
    assert "--max-loss 0" in warning


def test_a_model_for_other_classes_is_not_only_evaluated(
    trained: tuple[Path, Ran], tmp_path: Path
) -> None:
    rows = [{"text": text, "label": label} for label, text in (("a", "one"), ("b", "two"))]
    other = options(
        tmp_path / "output",
        "classify",
        model=str(trained[0] / "model"),
        data=write(tmp_path, rows),
        epochs=0,
    )
    for model, message in (
        (other.model, "--epochs 0: the model has no trained classifier.bias"),
        ("scratch", "--epochs 0 needs a trained model"),
    ):
        with pytest.raises(WorkerError, match=message):
            export_alone(replace(other, model=model))


@pytest.mark.parametrize(("task", "form"), [("embed", "int8"), ("score", "int8"), ("tag", "bf16")])
def test_each_task_with_an_encoder_exports(task: str, form: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    result, notes = export_alone(options(output, task, max_steps=2, max_loss=100.0, export=form))

    found = result["export"]
    _, last = found["forms"]
    assert (last["form"] == "int8") == (form == "int8")
    # Only the interval of a share of records is known.
    is_share = found["metric"] in TASKS[task].shares
    assert (last["loss_at_most"] > last["loss"]) == is_share
    assert len([text for text in notes if "certainty" in text]) == is_share
    assert (output / "model" / "openvino" / "openvino_model.bin").stat().st_size > 0


def test_a_form_is_scored_with_the_threshold_of_the_model(
    nodes_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads((nodes_folder / "data.json").read_text())
    question = content["data"][0]["paragraphs"][0]["qas"][0]
    question |= {"answers": [], "is_impossible": True}
    (nodes_folder / "v2.json").write_text(json.dumps(content))
    given = {"export": "bf16", "max_steps": 2, "data": str(nodes_folder / "v2.json")}
    chosen = options(nodes_folder / "out", "squad", **given)
    monkeypatch.setattr(f"{Squad.__module__}.fit_threshold", mock.Mock(side_effect=[0.25]))
    result, _ = export_alone(chosen)
    exported = result["export"]["forms"][-1]
    assert exported["loss_at_most"] > exported["loss"]
    assert (nodes_folder / "out/model/openvino/openvino_model.bin").stat().st_size > 0
    config = json.loads((nodes_folder / "out/model/config.json").read_text())
    assert config["no_answer_threshold"] == result["no_answer_threshold"] == 0.25


def test_a_model_that_openvino_can_not_convert_is_not_trained(
    data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(AutoModel, "fnet")  # its encoder takes no mask
    tokenizer = bert([*TEXTS.values()])
    model.resize_token_embeddings(len(tokenizer))
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    chosen = options(
        tmp_path / "output", "classify", data=data["train"], model=str(tmp_path / "model")
    )
    monkeypatch.setattr("jobs.worker.training.run.take_step", None)
    with pytest.raises(WorkerError, match="OpenVINO can't convert FNetForSequenceClassification: "):
        export_alone(chosen)


@pytest.mark.parametrize("name", ["roberta", "mpnet", "deberta-v2", "electra", "albert"])
def test_graphs_of_other_families_compute_the_same_at_any_length(name: str) -> None:
    model: Any = build(AutoModel, name)
    run: Any = SimpleNamespace(loaded=SimpleNamespace(model=model))

    def inputs(rows: int, width: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 32, (rows, width))
        mask = (torch.arange(width) < torch.tensor([[width // 2], [width]])[:rows]).long()
        return {"input_ids": tokens, "attention_mask": mask}

    names, graph = _trace(run, inputs(2, 24))
    exact = _openvino().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for given in (inputs(1, 8), inputs(2, 136), inputs(2, 504)):
        with torch.inference_mode():
            wanted = model(**given)[names[0]][given["attention_mask"] == 1]
        found = torch.from_numpy(exact({key: each.numpy() for key, each in given.items()})[0])
        assert (found[given["attention_mask"] == 1] - wanted).abs().max() < 1e-3


def test_a_loss_is_as_certain_as_the_changed_predictions_allow() -> None:
    def final(right: int) -> list[bool]:
        return [number < right for number in range(1000)]

    # Ten of a thousand changed: a loss of one point, and 1.96 x 100 x sqrt((0.01 - 0.0001) / 1000).
    assert _uncertainty(final(900), final(890), 1.0) == pytest.approx(0.617, abs=0.001)
    assert _uncertainty(final(900), final(900), 0.0) == pytest.approx(0.196, abs=0.001)


def test_a_missing_package_is_found_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    require_packages()
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "nncf" else name)
    with pytest.raises(TrainingError, match="--export needs the package nncf"):
        require_packages()


def test_the_nodes_install_what_the_export_needs() -> None:
    exported, plain = ClassifyOptions(data="x", export="int8", report_to="none"), ClassifyOptions()
    packages = job_packages(exported, {})
    assert packages
    assert packages.source == "--export"
    assert [line.partition(">")[0] for line in packages.lines] == ["openvino", "nncf"]
    both = job_packages(exported, {"trials": 3})
    assert both
    assert both.source == "--tune, --export"
    assert len(both.lines) == 3
    assert job_packages(replace(plain, report_to="none"), {}) is None


_BOUND = """
import os, sys, torch
cpus = sorted(os.sched_getaffinity(0))[:2]
torch.set_num_threads(2)
os.sched_setaffinity(0, cpus[:1])  # as Intel's OpenMP does
import numpy as np
from jobs.worker.training.export import Compiled, _openvino
from jobs.worker.runtime.pinning import format_cpus
ops = _openvino().opset13
x = ops.parameter([-1, 8], np.float32)
graph = _openvino().Model([ops.matmul(x, x, False, True)], [x], "m")
request = Compiled(None, ["y"], graph, format_cpus(cpus))._request
print(request.get_compiled_model().get_property("INFERENCE_NUM_THREADS"))
assert os.sched_getaffinity(0) == {cpus[0]}
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_openvino_has_a_ranks_cpus_also_where_its_main_thread_has_one() -> None:
    done = subprocess.run([sys.executable, "-c", _BOUND], capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr
