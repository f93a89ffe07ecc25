"""Saved models as others get them: the code on their cards loads them without this project."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from jobs.worker.runtime.ranks import join
from jobs.worker.tasks import TASKS, find_task
from jobs.worker.tasks.digits import Digits
from jobs.worker.tasks.embed.task import Embed
from jobs.worker.tasks.predict import load_trained
from jobs.worker.tasks.score import Score
from jobs.worker.training.card import find_intervals
from jobs.worker.training.options import BASE_MODEL
from tests.harness.forked import Forked
from tests.jobs.worker.tasks.chat_models import CHATML
from tests.jobs.worker.threaded_ranks import session, train_alone

ADAPTERS = "lm with adapters"
CHATS = f"{ADAPTERS} and chats"
NAMES = (*TASKS, ADAPTERS, CHATS)
OWN = ("jobs", "worker", "infra", "provision", "cluster", "spr_cluster")
TEXT = "Where is the tile with eight cores?"
_LOAD = """
import json, os, re, sys
found = {}
own, text, *folders = sys.argv[1:]
sys.modules.update(dict.fromkeys(own.split()))
for folder in folders:
    os.chdir(folder)
    code = re.search(r"```python\\n(.*?)```", open("model/README.md").read(), re.DOTALL)[1]
    known = {}
    exec(code, known)
    model = known.get("model")
    if "weights" in known:
        output = known["weights"]["0.weight"]
    elif "SentenceTransformer" in known:
        output = model.encode(text)
        asked = model.encode("Frage: How hot is it?")
        assert abs(known["question"] - asked).max() < 1e-5
    else:
        tokenizer = known.get("tokenizer") or model.tokenizer
        model = model if "tokenizer" in known else model.model
        out = model.eval()(**tokenizer(text, return_tensors="pt"))
        output = out["start_logits"] if "start_logits" in out else out["logits"]
    found[folder] = {"output": output.flatten().tolist(), "lines": len(code.split("\\n"))}
print("FOUND" + json.dumps(found))
"""


def train(name: str, root: Path) -> Mapping[str, Any]:
    """Train for two steps, and return the results."""
    task, more = TASKS[name.split()[0]], {"lora": True, "model": str(root / "lm" / "model")}
    options = replace(task.demo, max_steps=2, dtype="fp32", compile="off", eval_every="never")
    if name != "digits":
        options = replace(options, token_cache="none", **(more if ADAPTERS in name else {}))
    if name == CHATS:
        (root / "chat.jinja").write_text(CHATML)
        options = replace(options, chat_template=str(root / "chat.jinja"))
    if name == "embed":
        options = replace(options, query_prompt="Frage: ")
    torch.manual_seed(3)
    (root / name).mkdir()
    return train_alone(options, root / name)


def compute(name: str, folder: Path) -> Any:
    """Return what this project's own code computes with a saved model."""
    if name == "digits":
        from safetensors.torch import load_file

        return load_file(folder / "model.safetensors")["0.weight"]
    _, loaded = load_trained(str(folder))
    tokens = loaded.tokenizer(TEXT, return_tensors="pt")
    with torch.inference_mode():
        found = loaded.model.eval()(**tokens)
    if name == "embed":
        return torch.nn.functional.normalize(found[0].mean(1), dim=-1)
    return found["start_logits"] if "start_logits" in found else found["logits"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, Mapping[str, Any]]:
    return {name: train(name, root) for name in NAMES}


@pytest.fixture(scope="module")
def loaded(root: Path, results: object) -> dict[str, Any]:
    """What the code on the cards gives in a process that can't import this project."""
    words = ["-c", _LOAD, " ".join(OWN), TEXT, *(str(root / name) for name in NAMES)]
    environ = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(root)}
    code, said = Forked(words, root, environ).finish(300)
    assert code == 0, said
    found: dict[str, Any] = json.loads(said.rpartition("FOUND")[2].splitlines()[0])
    return {Path(folder).name: each for folder, each in found.items()}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_the_same_without_this_project(
    loaded: dict[str, Any], root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Language models would be loaded in bf16 where that is fast.
    monkeypatch.setattr("jobs.worker.runtime.precision.read_cpu_flags", frozenset)
    expected = compute(name, root / name / "model").flatten()
    assert torch.allclose(torch.tensor(loaded[name]["output"]), expected, atol=1e-5)
    assert loaded[name]["lines"] <= 10, "not more than a screen shows"


LIBRARIES = {"embed": "sentence-transformers", "digits": "pytorch", ADAPTERS: "peft", CHATS: "peft"}


@pytest.mark.parametrize("name", NAMES)
def test_a_card_tells_the_hub_and_people_what_a_model_is(
    results: dict[str, Mapping[str, Any]], root: Path, name: str
) -> None:
    card, found = ModelCard.load(root / name / "model" / "README.md"), results[name]
    assert card.data.get("library_name") == LIBRARIES.get(name, "transformers")
    assert card.data.get("pipeline_tag") == (TASKS[name.split()[0]].pipeline_tag or None)
    assert card.data.get("tags") == ["spr-cluster", name.split()[0]]
    assert card.data.get("metrics") == [*found["scores"]]
    # Neither folders of this machine nor names that the hub does not know.
    assert not {"base_model", "license", "datasets"} & card.data.to_dict().keys()
    assert str(root) not in card.text
    for title, score in found["scores"].items():
        shown = format(score, ".3g" if title == "mse" else ".2f")
        assert f"| {shown} |" in card.text
    for text in ("`--max-steps 2`", "of step 2", "1 rank on 1 × ", "torch 2", "add `license`"):
        assert text in card.text
    assert ("Trained from model on" in card.text) is (ADAPTERS in name)
    assert ("apply_chat_template" in card.text) is (name == CHATS)


def test_a_card_names_what_is_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.worker.tasks.classify import Classify, ClassifyOptions
    from jobs.worker.training.card import render_card
    from jobs.worker.training.task import Loaded

    figures = {
        "task": "classify",
        "data": "org/data: train",
        "eval_data": "org/data: test",
        "train_records": 4000,
        "eval_records": 100,
        "train_samples": 4000,
        "learning_rate": 1e-4,
        "model_step": 250,
        "scores": {"accuracy": 90.0},
        "evaluations": [{}, {}],
    }
    options = ClassifyOptions(
        model="org/base",
        data="org/data",
        push_to="hub:me/news",
        epochs=7,
        text_column="review text",
    )
    monkeypatch.chdir(tmp_path)
    record = {"nodes": [{"type": "r7iz.metal-16xl"}], "billed": True, "usd_per_hour": 3.6e6}
    Path("job.json").write_text(json.dumps(record))

    def render(task: Any) -> ModelCard:
        with join("gloo", {}) as ranks:
            context = session(task.options, ranks)
            return ModelCard(render_card(context, task, Loaded(None), figures, "d1e5"))

    card = render(Classify(options))
    assert card.data.get("base_model") == "org/base"
    assert card.data.get("datasets") == ["org/data"]
    for text in (
        "# news\n",
        "Trained from org/base on 4,000 records of org/data: train",
        "| accuracy | 90.00 | 82.56 to 94.48 |",
        'pipeline("text-classification", "me/news")',
        "with the digest `d1e5`",
        " `--text-column 'review text'`",
        " `--epochs 7`",
        "of step 250, the best of 2 evaluations",
        "r7iz.metal-16xl, ",
        "at on-demand prices",
    ):
        assert text in card.text
    monkeypatch.setenv(BASE_MODEL, "/home/me/secret/my-base")
    figures["data"] = "0.9 of secret/rows.csv.gz"
    figures["eval_data"] = "s3://secret/x/rows.parquet"
    card = render(Classify(options))
    assert "records of 0.9 of rows.csv.gz" in card.text
    assert "of rows.parquet:" in card.text
    assert card.data.get("base_model") is None
    assert "Trained from my-base on" in card.text
    assert "secret" not in card.text
    evaluated = replace(options, model="m", eval_fraction=0.2, epochs=0)
    figures["eval_data"], figures["export"] = "0.2 of x.csv", {"metric": "accuracy", "forms": []}
    for own in ("", "# My model\n\n## Training\n\nBy hand.\n", card.content):
        Path("m").mkdir(exist_ok=True)
        Path("m/README.md").write_text(own)
        again = render(Classify(evaluated)).text
        assert "On 100 records, 0.2 of x.csv:" in again
        assert "## OpenVINO" in again
        for trained in ("Trained from my-base on", "## Training", "of step 250", "`--epochs 7`"):
            assert (trained in again) is (own == card.content)
        assert ("For the task `classify`." in again) is (own != card.content)
        assert "--epochs 0" not in again
    figures["scores"] = {"mse": 0.01234}
    assert "| mean squared error | 0.0123 |" in render(Score(Score.demo)).text


def test_intervals_are_those_of_wilson_and_of_new_samples() -> None:
    scores = {"accuracy": 100.0, "loss": 1.0}
    found = find_intervals(Digits(Digits.demo), {"scores": scores, "eval_records": 10})
    # https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval: 1 / (1 + z²/n)
    assert found.keys() == {"accuracy"}
    assert found["accuracy"] == pytest.approx((72.246, 100), abs=1e-3)
    anchors = {"scores": {"recall_at_1": 100.0}, "eval_records": 90, "anchors": 10}
    assert find_intervals(Embed(Embed.demo), anchors)["recall_at_1"] == found["accuracy"]

    matrix = [[40, 10], [5, 45]]
    figures = {"scores": {"macro_f1": 84.96}, "eval_records": 100, "confusion": matrix}
    low, high = find_intervals(Digits(Digits.demo), figures)["macro_f1"]
    rows = np.random.default_rng(7).integers(0, 100, (10_000, 100))
    truth, predicted = np.repeat([[0, 0, 1, 1], [0, 1, 0, 1]], np.ravel(matrix), axis=1)
    pairs = [(truth[rows] == n, predicted[rows] == n) for n in (0, 1)]
    draws = sum(100 * (a & b).sum(1) / (a.sum(1) + b.sum(1)) for a, b in pairs)
    assert (low, high) == pytest.approx(np.percentile(draws, (2.5, 97.5)), abs=0.3)


def test_a_model_without_a_card_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise KeyError("processor")

    monkeypatch.setattr("jobs.worker.training.run.render_card", fail)
    found = train("digits", tmp_path)

    assert found["task"] == "digits"
    assert (tmp_path / "digits/model/model.safetensors").exists()
    assert not (tmp_path / "digits/model/README.md").exists()


@pytest.mark.parametrize(
    ("task", "head"),
    [("squad", "QUESTION_ANSWERING"), ("tag", "TOKEN_CLASSIFICATION"), ("lm", "CAUSAL_LM")],
)
def test_the_task_of_each_architecture_is_known(tmp_path: Path, task: str, head: str) -> None:
    from transformers.models.auto import modeling_auto

    # The decoders of BERT are not those of texts alone.
    others = ("Decoder", "ReformerModelWithLMHead")
    known = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").values()
    names = {name for each in known for name in ((each,) if isinstance(each, str) else each)}
    names = {name for name in names if not name.endswith(others)}
    assert len(names) > 30
    for name in names:
        config = {"architectures": [name], "text_config": {}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert find_task(str(tmp_path)).name == task, name
