"""Single questions to a model in a folder."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.worker.runtime.errors import DatasetError, ModelError
from jobs.worker.runtime.precision import autocast, choose_here
from jobs.worker.tasks.predict import load_trained, main, predict
from jobs.worker.tasks.squad.answers import PredictedAnswer, ask, run_windows
from jobs.worker.tasks.squad.dataset import Answer, Question
from jobs.worker.tasks.squad.features import build_features
from jobs.worker.training.batches import ALIGN
from jobs.worker.training.task import Loaded

NOTHING = Answer("", 0)
PAIRS = [
    ("What has eight rows?", "A tile has sixteen rows; a register has eight rows, or so."),
    ("Which core?", "The first physical core of each socket."),
]


def answer(model: Path, pairs: list[tuple[str, str]]) -> list[PredictedAnswer]:
    rows = [{"question": question, "context": context} for question, context in pairs]
    return [PredictedAnswer(**each) for each in predict(model, rows)]


@pytest.fixture(scope="module")
def folder(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("trained") / "model"
    loaded.model.save_pretrained(target)
    loaded.tokenizer.save_pretrained(target)
    return target


def test_weights_are_converted_once_where_bf16_is_fast(
    loaded: Loaded, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [Question("q", *pair, (NOTHING,)) for pair in PAIRS]
    for flags, dtype in (({"amx_bf16"}, torch.bfloat16), ({"avx2"}, torch.float32)):
        monkeypatch.setattr("jobs.worker.runtime.precision.read_cpu_flags", lambda f=flags: f)
        _, saved = load_trained(str(folder))
        assert saved.model.qa_outputs.weight.dtype == dtype
        assert ask(saved, questions) == ask(loaded, questions)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_score_is_the_probability_of_that_span(
    loaded: Loaded, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = frozenset({"amx_bf16"} if dtype == "bf16" else ())
    monkeypatch.setattr("jobs.worker.runtime.precision.read_cpu_flags", lambda: flags)
    question, context = PAIRS[1]
    ((text, score, start, _),) = ask(loaded, [Question("q", question, context, (NOTHING,))])
    encoded = loaded.tokenizer(
        question,
        context,
        return_tensors="pt",
        return_offsets_mapping=True,
        padding=True,
        pad_to_multiple_of=ALIGN,  # as batches are: in bf16 the shape counts
    )
    offsets = encoded.pop("offset_mapping")[0].tolist()
    sides = encoded.sequence_ids(0)
    inside = [n for n, side in enumerate(sides) if side == 1]
    with torch.inference_mode(), autocast(dtype):
        output = loaded.model(**encoded)
    starts, ends = (
        x[0, inside].float().softmax(0) for x in (output.start_logits, output.end_logits)
    )
    (first,) = [n for n, place in enumerate(inside) if offsets[place][0] == start]
    (last,) = [n for n, place in enumerate(inside) if offsets[place][1] == start + len(text)]
    assert score == pytest.approx(float(starts[first] * ends[last]), rel=1e-4)


def test_the_words_of_all_windows_share_the_probability(loaded: Loaded) -> None:
    asked = [Question("q", PAIRS[1][0], "tile register " * 500 + PAIRS[1][1], (NOTHING,))]
    features = build_features(asked, loaded.tokenizer, 384, 128)
    batch, (found,) = [np.arange(len(features))], ask(loaded, asked)
    ((_, spans, logits),) = run_windows(loaded, features, batch, autocast(choose_here()))
    total = sum(np.logaddexp.reduce(each.astype(float), axis=None) for each in logits)
    assert found.score == pytest.approx(float(np.exp(spans["score"].max() - total)), rel=1e-2)


def test_unusable_texts_are_named(folder: Path) -> None:
    for pair, name in ((("", "context"), "question"), (("Which?", " \n"), "context")):
        with pytest.raises(DatasetError, match=f"row 1: '{name}' is empty"):
            answer(folder, [pair])
    with pytest.raises(DatasetError, match=r"'row 1': its \d+ tokens leave no room"):
        answer(folder, [("which core? " * 130, "eight cores")])


def test_a_model_that_was_not_trained_for_a_task_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be loaded"):
        answer(tmp_path, PAIRS)
    loaded.model.distilbert.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its architecture is DistilBertModel") as caught:
        answer(tmp_path, PAIRS)
    assert caught.value.hint == "give the folder `model` in the results of `train`"


def test_lines_of_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"question": q, "context": c, "more": 1}) for q, c in PAIRS]
    bars = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")
    for name in bars:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n".join(lines)))

    assert main([str(folder)]) == 0

    assert answer(folder, []) == []
    found = [PredictedAnswer(**json.loads(x)) for x in capsys.readouterr().out.splitlines()]
    expected = answer(folder, PAIRS)
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected])
    assert [os.environ[name] for name in bars] == ["1", "1"], "they would be among the answers"

    monkeypatch.setattr("sys.stdin", io.StringIO(lines[0] + "\n{]\n"))
    assert main([str(folder)]) == 2
    assert "predict: error: line 2: is not JSON\n" in capsys.readouterr().err
