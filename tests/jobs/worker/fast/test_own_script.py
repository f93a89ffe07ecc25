"""The fast path for a user's own script, as it runs under `spr-cluster run`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import RemoveColumnsCollator

from jobs.worker.fast import compilation
from jobs.worker.fast.own_model import joined_ranks, use_fast_layers
from jobs.worker.fast.own_trainer import StepReports, Trimmed, _trim_training
from jobs.worker.fast.speed_up import speed_up
from jobs.worker.program.environment import program_environment
from jobs.worker.runtime.events import MARK, parse_event
from jobs.worker.runtime.output import state_folder
from tests.harness.forked import Forked
from tests.jobs.worker.training.test_run import Ended, finish, rank_environs

LOOP = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from spr_cluster import speed_up
from spr_cluster.fast.communication import Replica
from spr_cluster.fast.own_model import joined_ranks

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(10, 8), nn.Linear(8, 3)

    def get_input_embeddings(self):
        return self.words

    def forward(self, ids):
        return self.layer(self.words(ids)).pow(2).mean()

def gradients(wrap):
    torch.manual_seed(3)
    model = wrap(Small())
    with model.no_sync():
        model(ids[:1]).backward()
    assert model(ids).requires_grad  # of which no backward pass follows
    model(ids).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [norm, *(each.grad for each in model.module.parameters())]

dist.init_process_group("gloo")
rank = dist.get_rank()
ids = torch.tensor([[1, 2, 2], [3, 4, 4 + rank]])
wanted = gradients(DistributedDataParallel)
found = gradients(lambda model: speed_up(model, bf16=False))
torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
found = gradients(lambda model: Replica(model, joined_ranks(), True, 1 / dist.get_world_size()))
torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-5)
dist.barrier()
dist.destroy_process_group()
print("equal", rank, flush=True)
"""
TRAIN = """
import gc, os, signal, sys, torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification
from transformers import Trainer, TrainerCallback, TrainingArguments
from spr_cluster import speed_up
resume, output = sys.argv[1], os.environ["SPR_OUTPUT"]
gc.get_freeze_count = None  # it counts all objects, for longer than a small step takes

def train(fast, stop_at=0, **options):
    torch.manual_seed(1)
    none = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    shape = dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=99, **shape, **none))
    rows = []
    for number in range(64):
        ids, mask = torch.zeros(32, dtype=torch.long), torch.zeros(32, dtype=torch.long)
        count = 5 + number % 11
        ids[:count], mask[:count] = torch.randint(3, 99, (count,)), 1
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": number % 2})
    options = {"max_steps": 6, "learning_rate": 1e-3, "report_to": "none", **options}
    arguments = TrainingArguments(
        output + "/model", use_cpu=True, per_device_train_batch_size=4, logging_steps=1,
        gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True, **options
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
    if fast:
        speed_up(trainer)

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **more):
            if state.global_step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)  # as mpirun sends it to every rank

    if stop_at:
        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume if fast and not stop_at else None)
    losses = {x["step"]: x["loss"] for x in trainer.state.log_history if "loss" in x}
    return losses, trainer.evaluate()["eval_loss"], sorted(trainer.model.state_dict())

if not resume:
    train(True, stop_at=2)
    raise AssertionError("it goes on after SIGTERM")
wanted, plain_eval, names = train(False)
found, fast_eval, same_names = train(True)
assert sorted(found) == [1, 2, 3, 4, 5, 6], found  # the checkpoint has the first ones
torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
torch.testing.assert_close(fast_eval, plain_eval, rtol=1e-5, atol=1e-6)
assert same_names == names
"""

PAIRS = """
import os, sys, torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
)
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast
from spr_cluster import speed_up
output = os.environ["SPR_OUTPUT"] + "/" + os.environ["RANK"]

def train(fast):
    torch.manual_seed(1)
    os.makedirs(output, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(50))]
    with open(output + "/vocab.txt", "w") as file:
        file.write("\\n".join(words))
    BertTokenizerFast(output + "/vocab.txt").save_pretrained(output)
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(BertConfig(vocab_size=len(words), **shape, **none)).save_pretrained(output)
    model = SentenceTransformer(modules=[Transformer(output), Pooling(32)], device="cpu")
    pairs = {"anchor": [f"w{i % 50}" for i in range(64)]}
    pairs["positive"] = [f"w{i % 50} w{(i + 1) % 50}" for i in range(64)]
    arguments = SentenceTransformerTrainingArguments(
        output + "/model", use_cpu=True, per_device_train_batch_size=4, logging_steps=1,
        max_steps=6, learning_rate=1e-2, report_to="none", save_strategy="no", disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_dict(pairs),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    if fast:
        speed_up(trainer)
    trainer.train()
    return {x["step"]: x["loss"] for x in trainer.state.log_history if "loss" in x}

torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)
"""


@pytest.fixture
def eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark modules as compiled, but run them as they are: compilation takes most of a minute."""

    def compile_eagerly(module: Any, **_: Any) -> None:
        module._compiled_call_impl = module._call_impl

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    for name in ("why_no_compiler", "keep_compiled"):
        monkeypatch.setattr(f"jobs.worker.fast.own_model.{name}", lambda *_: None)
    monkeypatch.setattr(compilation, "read_cpu_flags", frozenset)


def run_script(node: Path, script: str, *argv: str, mark: str = "", local: int = 2) -> list[Ended]:
    """Run a script on two ranks as their programs, on nodes without anything else of ours.

    With one ``local`` rank, ``node`` has a folder for each node: ``0`` and ``1``.
    """
    ranks = []
    for rank, environ in enumerate(rank_environs(2, local)):
        folder = node if local == 2 else node / str(rank)
        (folder / "work").mkdir(exist_ok=True, parents=True)
        program = program_environment(environ, str(folder / "output"), [f"{MARK}={mark}"])
        program["PYTHONPATH"] = str(node / "code/worker/program/imports")
        ranks.append(Forked(["-c", script, *argv], folder / "work", program))
    return [finish(each) for each in ranks]


def test_a_loop_gets_the_gradients_of_distributed_data_parallel(node: Path) -> None:
    ended = run_script(node, LOOP)
    assert [each.code for each in ended] == [0, 0], ended[0].output
    assert [each.output.splitlines()[-1] for each in ended] == ["equal 0", "equal 1"]


def test_a_trainer_reports_stops_with_a_checkpoint_and_resumes_with_the_same_losses(
    node: Path,
) -> None:
    stopped, other = run_script(node, TRAIN, "", mark="0a")

    assert [stopped.code, other.code] == [143, 143], stopped.output
    lines = stopped.output.splitlines()
    events = [event for line in lines if (event := parse_event(line, "0a"))]
    assert "@spr 0a" not in other.output
    kinds, last = [event["event"] for event in events], events[-1]
    assert [kinds[:2], kinds[-3:]] == [["start", "step"], ["step", "checkpoint", "stopped"]]
    assert (last["total"], last["checkpoint"]) == (6, f"checkpoint-{last['step']}")
    assert 3 <= last["step"] < 6
    folder = node / "output"
    for rank in range(2):
        file = state_folder(folder) / f"metrics/rank-{rank}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, last["step"] + 1))
        assert all(row["samples"] == 8 and 0 < row["loss"] < 3 for row in rows)
        # All rows of 5 to 15 tokens are padded to 32, and trimmed to 16.
        assert all(40 <= row["tokens"] <= 120 and row["padded"] in (96, 128) for row in rows)
        assert all(row["seconds"]["compute"] > 0 for row in rows)

    resumed, other = run_script(node, TRAIN, str(folder / "model" / last["checkpoint"]))

    assert [resumed.code, other.code] == [0, 0], resumed.output
    assert "resumed" in resumed.output


def test_a_trainer_of_sentence_transformers_has_its_own_losses_and_reports(node: Path) -> None:
    ended = run_script(node, PAIRS)
    assert [each.code for each in ended] == [0, 0], ended[0].output
    file = state_folder(node / "output") / "metrics/rank-0.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    # Beside the words, each text has a token before and after it.
    counts = [(row["samples"], row["tokens"], row["padded"]) for row in rows]
    assert counts == [(4, 4 * (3 + 4), 4 * (3 + 4))] * 6


def new_model(**options: Any) -> Any:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=99, **shape, **options))


def logits(model: Any) -> Any:
    ids = torch.arange(24).view(2, 12) + 3
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return model(input_ids=ids, attention_mask=mask).logits


def test_one_rank_keeps_its_model_whose_layers_are_fast_only_in_training(eagerly: None) -> None:
    model = new_model()
    names, attention = list(model.state_dict()), model.config._attn_implementation
    expected, random = logits(model.eval()), torch.get_rng_state()
    model.train().distilbert.embeddings.eval()  # as a frozen part
    assert speed_up(model) is model
    assert model.training
    assert not any(each.training for each in model.distilbert.embeddings.modules())
    assert torch.equal(torch.get_rng_state(), random), "a script's own random numbers stay"
    assert list(model.state_dict()) == names

    first, second = logits(model), logits(model)
    assert not torch.allclose(first, second), "each step draws another dropout"
    layers = model.distilbert.transformer.layer
    assert [each._compiled_call_impl is not None for each in layers] == [True, True]
    assert model.config._attn_implementation == "products"

    assert torch.equal(logits(model.eval()), expected)
    assert [each._compiled_call_impl for each in layers] == [None, None]
    assert model.config._attn_implementation == attention

    torch.manual_seed(5)
    first = logits(model.train())
    assert layers[0]._compiled_call_impl is not None
    torch.manual_seed(5)
    assert torch.equal(logits(model), first), "the script's seed decides the dropout"


@pytest.mark.parametrize("already", ["", "all", "a layer"])
def test_without_a_compiler_or_if_already_compiled_a_model_stays_as_it_is(
    already: str, eagerly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "the model is already compiled" if already else "no g++"
    monkeypatch.setattr(
        "jobs.worker.fast.own_model.why_no_compiler", lambda: None if already else reason
    )
    model = new_model()
    if already == "all":
        model = torch.compile(model, backend="eager")
    elif already:
        model.distilbert.transformer.layer[0].compile()
    assert use_fast_layers(model, joined_ranks()) == f"layers are not compiled: rank 0: {reason}"
    assert not any(each._forward_pre_hooks for each in model.modules())
    assert any(type(each) is nn.Dropout for each in model.modules())


def batch(width: int, *lengths: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.tensor([[1] * each + [0] * (width - each) for each in lengths])
    return {"input_ids": mask * 7, "attention_mask": mask, **more}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (batch(32, 3, 9), 16),
        (batch(32, 3, 32), 32),
        (batch(12, 3, 9), 12),
        (batch(32, 3, 9, labels=torch.tensor([0, 1])), 16),
        (batch(32, 3, 9, labels=torch.full((2, 32), -100)), 16),
        # Perhaps 32 labels per text, or a label for padding.
        (batch(32, 3, 9, labels=torch.zeros(2, 32)), 32),
        (batch(32, 3, 9, pixels=torch.zeros(2, 32)), 32),
        (batch(32, 0, 0), 32),
    ],
)
def test_columns_of_padding_are_trimmed_if_that_is_safe(
    given: dict[str, torch.Tensor], kept: int
) -> None:
    wanted = {n: each[:, :kept] if each.dim() > 1 else each for n, each in given.items()}
    found = Trimmed(dict)(given)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_padding_on_the_left_and_other_batches_stay() -> None:
    mask = torch.tensor([[0, 0, 1], [0, 1, 1]])
    given: Any
    for given in ({"attention_mask": mask}, {"pixels": mask}, [mask]):
        assert Trimmed(lambda samples: samples)(given) is given


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield {}


COUNTS = ("_samples", "_tokens", "_padded", "_loss", "_computed", "_waited")


@pytest.mark.parametrize(
    ("made", "collator", "ranks", "is_trimmed"),
    [
        ({}, dict, 2, True),
        ({}, RemoveColumnsCollator(dict, ()), 2, True),
        ({}, list, 2, False),
        ({"dispatch_batches": True}, dict, 1, True),
        ({"dispatch_batches": True}, dict, 2, False),  # it joins the batches of several ranks
        ({"dispatch_batches": True, "split_batches": True}, dict, 2, True),
        (None, dict, 2, False),
    ],
)
@pytest.mark.parametrize("rows", [[{}], Stream()])
def test_only_a_trainers_own_batches_are_trimmed(
    made: dict[str, bool] | None, collator: Any, ranks: int, is_trimmed: bool, rows: Any
) -> None:
    loader = DataLoader(rows, collate_fn=collator)
    given: Any = loader
    if made is not None:
        made = {"dispatch_batches": False, **made}
        given = prepare_data_loader(loader, put_on_device=True, **made)
    trainer, team = SimpleNamespace(data_collator=dict, get_train_dataloader=lambda: given), Mock()
    team.size = ranks
    _trim_training(trainer, team)
    assert isinstance(trainer.get_train_dataloader().collate_fn, Trimmed) is is_trimmed
    assert loader.collate_fn is collator


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({"positive_input_ids": [[1, 2]]}, 12),  # a collator may keep the tokens of a pair as lists
        ({"scale": torch.tensor(2.0)}, 12),
        ({"anchor_attention_mask": torch.ones(3, 4).triu().long()}, 9),
        ({"anchor_attention_mask": torch.full((3, 1, 4, 4), -torch.inf)}, 12),
        ({"anchor_attention_mask": torch.full((3, 4), -torch.inf)}, 12),
        ({"anchor_attention_mask": torch.ones(3, 4, 4, dtype=torch.long)}, 12),
    ],
)
def test_only_tensors_of_tokens_are_counted(more: dict[str, Any], tokens: int) -> None:
    counts: Any = SimpleNamespace(**dict.fromkeys(COUNTS, 0), _plain=lambda *_: 1.0)
    counts._trainer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 1.0}]))
    StepReports._training_step(counts, None, {**more, "anchor_input_ids": torch.ones(3, 4)})
    assert (counts._samples, counts._tokens, counts._padded) == (3, tokens, 12)


@pytest.mark.parametrize(("batches", "parts", "steps"), [(8, 2, 4), (9, 2, 5), (1, 4, 1)])
def test_an_epochs_last_step_may_have_fewer_parts(
    batches: int, parts: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPR_OUTPUT", str(tmp_path))
    reporter = Mock()
    monkeypatch.setattr("jobs.worker.fast.own_trainer.StepReporter", reporter)
    reports = StepReports(Mock(), joined_ranks(), "fp32")
    state = SimpleNamespace(global_step=0, max_steps=20)
    arguments = SimpleNamespace(gradient_accumulation_steps=parts)
    reports.on_train_begin(arguments, state, None, train_dataloader=range(batches))
    reports._stack.close()
    assert reporter.call_args.args[5:7] == (20, steps)
