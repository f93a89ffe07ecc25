"""Distillation: students learn a teacher's outputs, which are computed once, and may have its layers."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, mse_loss

from jobs.worker.data.token_cache import TokenCache, compute_once
from jobs.worker.runtime.errors import DatasetError, ModelError
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.classify import Classify, ClassifyOptions
from jobs.worker.tasks.embed.options import EmbedOptions
from jobs.worker.tasks.embed.task import Embed
from jobs.worker.tasks.score import Score, ScoreOptions
from jobs.worker.training.batches import TrainingRun
from jobs.worker.training.losses import distill_loss
from jobs.worker.training.model import save_model
from jobs.worker.training.options import NO_CACHE, SMALL
from jobs.worker.training.teacher import ask_teacher, keep_layers
from tests.jobs.worker.tasks.test_classify_and_tag import prepare, write
from tests.jobs.worker.tasks.test_score import RANKED
from tests.jobs.worker.threaded_ranks import run_threaded, session, train_alone
from tests.jobs.worker.training.test_resume import AT_SEVEN, check_killed_and_resumed

ROWS = [{"text": f"{word} {n}", "label": word} for n in range(6) for word in ("tile", "core")]
NUMBERS = [{"text": row["text"], "score": n % 4} for n, row in enumerate(ROWS)]
DATA: dict[str, list[dict[str, Any]]] = {
    "classify": ROWS,
    "score": NUMBERS,
    "rank": RANKED,
    "embed": RANKED,
}


def task_of(kind: str, folder: Path, **more: Any) -> Any:
    """Return a task of a new model; "rank" is the other objective of `score`."""
    given = {**SMALL, "token_cache": NO_CACHE, "max_length": 32, **more}
    data = write(folder, DATA[kind])
    if kind == "classify":
        return Classify(ClassifyOptions(data=data, **given))
    if kind == "embed":
        return Embed(EmbedOptions(data=data, **given))
    objective = {"rank": "ranking", "score": "regression"}[kind]
    return Score(ScoreOptions(data=data, objective=objective, **given))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Untrained models of two layers with outputs that differ, by kind."""

    def make(kind: str) -> str:
        folder = root / kind
        if not folder.exists():
            folder.mkdir()
            torch.manual_seed(3)
            loaded, _ = prepare(task_of(kind, folder))
            if kind != "embed":
                with torch.no_grad():
                    loaded.model.classifier.weight.normal_(std=5)
            save_model(folder, loaded)
        return str(folder / "model")

    root = tmp_path_factory.mktemp("teachers")
    return make


@pytest.mark.parametrize("kind", ["classify", "score", "rank"])
def test_a_batch_has_the_outputs_of_the_teacher_and_their_loss(
    tmp_path: Path, teacher: Callable[[str], str], kind: str
) -> None:
    """They do not depend on the ranks; that the teacher has other tokens does not matter."""
    task = task_of(kind, tmp_path, teacher=teacher(kind), distill_alpha=0.25)
    data = task.read(lambda _: None)

    def work(ranks: Ranks) -> Any:
        context = session(task.options, ranks)
        loaded = task.load(context, data)
        samples = task.prepare(context, loaded, data.train)
        taught = ask_teacher(task, context, data.train)
        return TrainingRun(context, task, loaded, samples, taught)

    one, two = run_threaded(1, work) + run_threaded(2, work)[1:]
    assert np.array_equal(one.taught.outputs, two.taught.outputs)
    batch = one.batch(np.arange(5)).tensors
    assert one.digest() != one.samples.digest(), "so that no run resumes with another teacher"
    wanted = batch["teacher"]
    assert wanted.std() > 0.01
    model = one.loaded.model.eval()
    total = task.loss(model, dict(batch)).item()
    del batch["teacher"]
    plain = task.loss(model, dict(batch)).item()
    if kind == "rank":
        has = batch["attention_mask"].any(dim=-1)
        found = model(**{name: each[has] for name, each in batch.items()}).logits
        away = torch.zeros(has.shape).masked_scatter(has, (found - wanted[has]) ** 2)
        learned = (away.sum(1) / has.sum(1)).mean()
    elif kind == "score":
        learned = mse_loss(model(**batch).logits, wanted)
    else:
        soft = (model(**batch).logits / 2).log_softmax(1), (wanted / 2).softmax(1)
        learned = 4 * kl_div(*soft, reduction="batchmean")
    assert total == pytest.approx(0.25 * plain + 0.75 * learned.item(), rel=1e-5)
    assert total != pytest.approx(plain, abs=1e-3)


def test_the_loss_of_softened_probabilities() -> None:
    logits, teacher = torch.randn(3, 4), torch.randn(3, 4)
    found = distill_loss(logits, teacher, 3.0, None, several=False)
    entropy = -(torch.softmax(teacher / 3, 1) * torch.log_softmax(teacher / 3, 1)).sum(1).mean()
    crossed = cross_entropy(logits / 3, torch.softmax(teacher / 3, 1))
    assert found.item() == pytest.approx(9 * (crossed - entropy).item(), abs=1e-5)
    weights = torch.tensor([1.0, 0.0, 3.0])
    rows = [
        distill_loss(a[None], b[None], 3.0, None, several=False)
        for a, b in zip(logits, teacher, strict=True)
    ]
    weighted = distill_loss(logits, teacher, 3.0, weights, several=False)
    assert weighted.item() == pytest.approx(((rows[0] + 3 * rows[2]) / 4).item(), abs=1e-5)
    same = distill_loss(teacher.requires_grad_(), teacher.detach(), 2.0, None, several=True)
    (gradient,) = torch.autograd.grad(same, teacher)
    assert gradient.abs().max() < 1e-6, "equal logits are the best ones"


def test_a_students_layers_are_evenly_chosen() -> None:
    import transformers

    def model(layers: int) -> Any:
        shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        config = transformers.BertConfig(vocab_size=30, num_hidden_layers=layers, **shape)
        return transformers.BertForSequenceClassification(config)

    for total, count, kept in ((12, 4, [0, 3, 6, 9]), (6, 2, [0, 3]), (6, 6, [*range(6)])):
        whole = model(total)
        layers = [*whole.bert.encoder.layer]
        keep_layers(whole, count)
        assert [layers.index(each) for each in whole.bert.encoder.layer] == kept
        assert whole.config.num_hidden_layers == count
    with pytest.raises(ModelError, match="--student-layers 7: the teacher has 6 layers"):
        keep_layers(model(6), 7)


def test_a_decoders_student_counts_its_layers_anew() -> None:
    import transformers

    shape = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"intermediate_size": 8, "num_hidden_layers": 6, "pad_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=30, **shape, **more)
    model = transformers.LlamaForSequenceClassification(config)
    keep_layers(model, 2)

    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1]
    assert model(torch.tensor([[1, 2, 3]]), use_cache=True).logits.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "by_layer"),
    [
        ("Longformer", {"attention_window": [4, 4, 4, 8, 8, 8]}),
        ("SmolLM3", {"no_rope_layers": [1, 1, 1, 0, 1, 1]}),
    ],
)
def test_a_saved_student_has_the_settings_of_its_layers(
    tmp_path: Path, kind: str, by_layer: dict[str, Any]
) -> None:
    import transformers

    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    more = {"intermediate_size": 8, "num_hidden_layers": 6, "pad_token_id": 0, "vocab_size": 30}
    config = getattr(transformers, f"{kind}Config")(**shape, **more, **by_layer)
    model = transformers.AutoModel.from_config(config).eval()
    keep_layers(model, 2)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path).eval()
    inputs = {"input_ids": torch.arange(1, 21)[None], "attention_mask": torch.ones(1, 20).long()}
    assert torch.allclose(again(**inputs)[0], model(**inputs)[0], atol=1e-5)


def test_a_student_that_could_not_be_loaded_is_refused() -> None:
    import transformers

    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.EsmConfig(vocab_size=30, num_hidden_layers=6, pad_token_id=0, **shape)
    refused = r"--student-layers 2: the student could not be loaded: size mismatch for contact_head"
    with pytest.raises(ModelError, match=refused):
        keep_layers(transformers.AutoModel.from_config(config), 2)


def test_a_teacher_of_scores_has_one_output(teacher: Callable[[str], str], tmp_path: Path) -> None:
    data = tmp_path / "scores.csv"
    data.write_text("text,score\na,1\nb,2\n")
    options = ScoreOptions(data=str(data), teacher=teacher("classify"), token_cache="none")

    with pytest.raises(ModelError, match=r"has \d+ outputs, and a score is one"):
        Score(options).open_teacher()


def test_a_student_of_the_teachers_layers_loads(
    tmp_path: Path, teacher: Callable[[str], str]
) -> None:
    import transformers

    options: dict[str, Any] = {
        "teacher": teacher("classify"),
        "student_layers": 1,
        "token_cache": NO_CACHE,
    }
    task = Classify(ClassifyOptions(data=write(tmp_path, ROWS), max_length=32, **options))
    loaded, _ = prepare(task)
    save_model(tmp_path, loaded)
    again, found = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    ids = torch.tensor([[2, 7, 9, 3]])
    assert torch.allclose(again.eval()(ids).logits, loaded.model.eval()(ids).logits, atol=1e-6)
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(teacher("classify"))
    assert torch.equal(whole.classifier.weight, again.classifier.weight), "it keeps the head"
    assert (again.config.n_layers, whole.config.n_layers) == (1, 2)


def test_a_teacher_of_other_classes_is_refused_and_another_order_is_not(
    tmp_path: Path, teacher: Callable[[str], str]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(teacher("classify"), folder)
    outputs = []
    for names in (("core", "tile"), ("tile", "core"), ("tile", "bus")):
        config = json.loads((folder / "config.json").read_text())
        config |= {"id2label": dict(enumerate(names)), "label2id": {names[0]: 0, names[1]: 1}}
        (folder / "config.json").write_text(json.dumps(config))
        cache = str(tmp_path / "cache")
        task = task_of("classify", tmp_path, teacher=str(folder), token_cache=cache)
        data = task.read(lambda _: None)

        def work(ranks: Ranks, task: Any = task, data: Any = data) -> Any:
            return ask_teacher(task, session(task.options, ranks), data.train)

        if "bus" in names:
            with pytest.raises(ModelError, match=r"--teacher .*: has other classes: tile, bus"):
                run_threaded(1, work)
        else:
            outputs.append(run_threaded(1, work)[0].outputs)
    assert np.array_equal(outputs[0], outputs[1][:, ::-1])


def test_a_run_that_only_evaluates_has_no_use_for_a_teacher_or_negatives(
    tmp_path: Path, teacher: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(Embed, "compute_outputs", None)
    model = teacher("embed")
    given = {"model": model, "teacher": model, "mine_negatives": 1, "epochs": 0}
    task = task_of("embed", tmp_path, report_to="none", **given)
    assert train_alone(task.options, tmp_path)["anchors"] > 0


def test_outputs_in_a_file(tmp_path: Path) -> None:
    def outputs(kind: str, rows: list[dict[str, Any]]) -> Any:
        file = write(tmp_path, rows, "scores.jsonl")
        task = task_of(kind, tmp_path, teacher=file)
        data = task.read(lambda _: None)
        (found,) = run_threaded(
            1, lambda ranks: ask_teacher(task, session(task.options, ranks), data.train)
        )
        assert found is not None
        return found.outputs.tolist()

    wide = [{"tile": n, "core": -n} for n in range(12)]
    assert outputs("classify", wide)[3] == [-3, 3]
    assert outputs("classify", [{"scores": each} for each in wide])[3] == [-3, 3]
    assert outputs("score", [{"score": n} for n in range(12)])[3] == [3]
    ranked = [{"scores": [1] + [n] * len(row["neg"])} for n, row in enumerate(RANKED)]
    assert outputs("rank", ranked)[:2] == [[1], [0]]
    for kind, rows, message in (
        ("classify", wide[:3], "has 3 rows, and --data 12"),
        ("classify", [{"tile": 1}] * 12, "scores.jsonl: line 1: has no usable `scores`: 'core'"),
        ("score", [{"score": "x"}] * 12, "line 1: has no usable `scores`: could not convert"),
        ("score", [{"score": "nan"}] * 12, "line 1: has no usable `scores`: [nan]"),
        ("rank", [{"scores": [1]}] * len(RANKED), "line 1: has no usable `scores`: 1 for 2 texts"),
    ):
        with pytest.raises(DatasetError) as refused:
            outputs(kind, rows)
        assert message in refused.value.message
        # On the laptop as well, before anything is bought.
        with pytest.raises(DatasetError) as refused:
            task_of(kind, tmp_path, teacher=str(tmp_path / "scores.jsonl")).check()
        assert message in refused.value.message


def test_an_array_is_computed_once_and_is_that_of_the_node_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, nodes = [], threading.local()

    def compute() -> Any:
        calls.append(1)
        return np.arange(6, dtype=np.float32).reshape(3, 2) + len(calls) // 3

    def work(ranks: Ranks) -> Any:
        nodes.name = f"node{ranks.rank}"
        cache = TokenCache(tmp_path / nodes.name)
        return compute_once(ranks, cache, "key", compute, lambda _: None)

    monkeypatch.setattr("jobs.worker.data.token_cache.socket.gethostname", lambda: nodes.name)
    found = run_threaded(2, work)
    assert len(calls) == 2  # by both together
    for lost in ("node1", "node0"):
        shutil.rmtree(tmp_path / lost)
        found += run_threaded(2, work)
        assert (tmp_path / lost).exists()
    assert len(calls) == 2
    assert all(np.array_equal(each, found[0]) for each in found)
    # Two that were computed separately, and may differ in their last bits: both ranks take one of them.
    shutil.rmtree(tmp_path / "node0")
    run_threaded(1, work)
    assert len(calls) == 3
    one, other = run_threaded(2, work)
    assert np.array_equal(one, other)
    assert one[0, 0] == 1.0


@pytest.mark.parametrize("kind", ["classify", "embed"])
def test_a_run_with_a_teacher_is_killed_and_resumed(
    nodes_folder: Path, teacher: Callable[[str], str], kind: str
) -> None:
    options: dict[str, Any] = {"data": write(nodes_folder, DATA[kind]), "teacher": teacher(kind)}
    options["eval_every"] = "2"
    options["eval"] = write(nodes_folder, DATA[kind][:6], "few.jsonl")
    if kind == "embed":
        options |= {"mine_negatives": 2, "text_column": "query", "pair_column": "pos"}
    ranks = 2 if kind == "embed" else 1
    check_killed_and_resumed(nodes_folder, [AT_SEVEN], ranks, task=kind, **options)
    results = json.loads((nodes_folder / "whole" / "results.json").read_text())
    assert "teacher" in results["seconds"]
    if kind == "classify":
        assert results["loss_curve"][0][1] > 1.2, "without the teacher, 0.69"
