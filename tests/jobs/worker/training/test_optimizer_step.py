from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from jobs.worker.fast import int8
from jobs.worker.fast.attention import NAME
from jobs.worker.fast.compilation import (
    choose_compilation,
    compile_layers,
    count_compiled,
    estimate_tflop,
    find_layers,
    plain_layers,
    why_no_compiler,
)
from jobs.worker.fast.dropout import draw_seeds
from jobs.worker.fast.embedding import restore_words
from jobs.worker.fast.int8 import Int8Linear
from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.ranks import Ranks, join
from jobs.worker.tasks.squad.dataset import Question, all_texts
from jobs.worker.tasks.squad.features import build_features
from jobs.worker.tasks.squad.task import DEMO, HEAD, Squad, SquadOptions
from jobs.worker.training import optimizer_step as step_module
from jobs.worker.training.batches import TrainingRun
from jobs.worker.training.model import load_model
from jobs.worker.training.optimizer_step import Step, prepare, take_step
from tests.jobs.worker.threaded_ranks import session

# torch's own compiler warns of what its own parts still use.
COMPILING = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
ALBERT = {
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
"""One compiled layer, which each step calls three times, with other dropout each time."""
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}


@pytest.fixture(autouse=True)
def own_folder(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@contextmanager
def alone(
    options: SquadOptions, notes: io.StringIO | None = None, dtype: str = "fp32"
) -> Iterator[RankContext[SquadOptions]]:
    with join("gloo", environ={}) as ranks:
        yield session(options, ranks, notes, dtype)


def plan_run(
    context: RankContext[SquadOptions], questions: list[Question], tokenizer: Any, **loaded: Any
) -> TrainingRun:
    """Return a run on a part of the sample, before its first step."""
    torch.manual_seed(1)
    model = load_model(context.options, HEAD, all_texts(questions), context.ranks)
    features = build_features(questions[:8], tokenizer, 384, 128)
    return TrainingRun(context, Squad(context.options), model._replace(**loaded), features)


def one_step(
    options: SquadOptions, questions: list[Question], tokenizer: Any, dtype: str = "fp32"
) -> tuple[Step, dict[str, torch.Tensor]]:
    """Take a step on the sample; return it and its gradients (Adam's first step is only their sign)."""
    # torch's optimizer would clip the gradients in place.
    with alone(replace(options, max_grad_norm=1e6), dtype=dtype) as context:
        run = plan_run(context, questions, tokenizer)
        model, optimizer = prepare(run, steps=1)
        step = take_step(run, model, optimizer, run.batch(np.arange(8)))
        gradients = {
            n: p.grad.float().clone()
            for n, p in run.loaded.model.named_parameters()
            if p.requires_grad
        }
        return step, gradients


@pytest.mark.parametrize("trial", [None, 5])
def test_words_that_the_data_lack_are_trained_only_in_a_trial(
    trial: int | None, questions: list[Question], tokenizer: Any
) -> None:
    with alone(replace(DEMO, trial_seconds=trial)) as context:
        run = plan_run(context, questions, tokenizer)
        before = run.loaded.model.get_input_embeddings()
        prepare(run, steps=1)
        trained = run.loaded.model.get_input_embeddings()
        samples = [run.samples[n] for n in range(len(run.samples))]
        used = {int(token) for each in samples for token in each.inputs["input_ids"]}
        used.add(run.loaded.pad_token)
        assert len(used) < len(before.weight)
        assert len(trained.weight) == (len(used) if trial is None else len(before.weight))
        restore_words(run.loaded.model)
        assert run.loaded.model.get_input_embeddings() is before


@pytest.mark.parametrize("parts", [3, 100])
def test_a_batch_in_parts_gives_the_same_step(
    questions: list[Question], tokenizer: Any, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers' loss for questions depends on padding.
    monkeypatch.setattr("jobs.worker.training.batches.ALIGN", 32)
    whole, expected = one_step(DEMO, questions, tokenizer)
    step, gradients = one_step(replace(DEMO, accumulate=parts), questions, tokenizer)
    assert step.loss == pytest.approx(whole.loss, rel=1e-5)
    for name, values in gradients.items():
        assert torch.allclose(values, expected[name], rtol=1e-3, atol=1e-6), name


def test_the_same_seed_gives_the_same_step_and_its_seconds_by_activity(
    questions: list[Question], tokenizer: Any
) -> None:
    first, gradients = one_step(DEMO, questions, tokenizer)
    again, others = one_step(DEMO, questions, tokenizer)
    assert first.loss == again.loss > 0
    assert all(torch.equal(values, others[name]) for name, values in gradients.items())
    assert list(first.seconds) == ["forward", "backward", "communication", "optimizer"]
    assert min(first.seconds.values()) >= 0
    assert first.seconds["forward"] > 0


@pytest.mark.parametrize(
    ("asked", "dtype", "tflop", "enabled"),
    [
        ("auto", "fp32", 10**6, False),
        ("auto", "bf16", 5, False),
        ("auto", "bf16", 1400, True),
        ("on", "fp32", 1, True),
        ("off", "bf16", 10**6, False),
    ],
)
def test_compilation_is_chosen_if_it_pays(
    asked: str, dtype: str, tflop: float, enabled: bool
) -> None:
    chosen = choose_compilation(asked, dtype, tflop)
    assert chosen.enabled is enabled
    assert chosen.reason
    assert estimate_tflop(torch.nn.Linear(8, 8), 10**12) == 0, "it has no layers"


@pytest.mark.parametrize(
    ("kind", "shape", "tokens", "tflop", "enabled"),
    [
        # SQuAD: 2,000 steps of 16 features. Short texts: 575 steps of 8 on each of two ranks.
        ("distilbert", {}, 2000 * 16 * 170, 1387, True),
        ("bert", MINILM, 575 * 8 * 18, 5.3, False),
        ("albert", {**ALBERT, "num_hidden_layers": 24}, 10**9, 1180, True),
    ],
)
def test_computing_is_that_of_the_layers_products(
    kind: str, shape: dict[str, int], tokens: int, tflop: float, enabled: bool
) -> None:
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **shape))
    found = estimate_tflop(model, tokens)
    assert found == pytest.approx(tflop, rel=0.02)
    assert choose_compilation("auto", "bf16", found).enabled is enabled


@pytest.mark.parametrize("steps", [1000, 0])
def test_the_note_says_why_a_short_run_is_not_compiled(
    questions: list[Question], tokenizer: Any, steps: int
) -> None:
    options, result = replace(DEMO, compile="auto"), io.StringIO()
    with alone(options, result, "bf16") as context:
        run = plan_run(context, questions, tokenizer)
        prepare(run, steps=steps)
    # Two layers: four matrices of 128 x 128, and two of 128 x 256.
    weights = 2 * (4 * 128**2 + 2 * 128 * 256)
    tflop = 6 * weights * steps * options.batch_size * run.samples.lengths.mean() / 1e12
    expected = (
        f"the run is too short to pay for it ({tflop:.1f} TFLOP per rank, at least 200 needed)"
    )
    assert f"torch.compile is not used: {expected}" in result.getvalue()


def test_without_a_compiler_training_continues_with_a_note(
    questions: list[Question], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "why_no_compiler", lambda: "no C++ compiler found")
    options, result = replace(DEMO, compile="on"), io.StringIO()
    with alone(options, result) as context:
        in_int8 = replace(context, precision=Precision("fp32", "", int8=True))
        run = plan_run(in_int8, questions, tokenizer)
        prepare(run, steps=1000)
        assert all(layer._compiled_call_impl is None for layer in find_layers(run.loaded.model))
    why = "torch.compile is not used: rank 0: no C++ compiler"
    assert f"warning: products are in fp32, not int8: {why}" in result.getvalue()


@COMPILING
@pytest.mark.parametrize("least", [32, 256])
def test_int8_is_used_in_large_modules_with_bf16_weights(
    questions: list[Question], tokenizer: Any, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(int8, "LEAST_SIZE", least)
    options, result = replace(DEMO, compile="on", dtype="int8"), io.StringIO()
    with alone(options, result) as context:
        in_int8 = replace(context, precision=Precision("bf16", "", int8=True))
        run = plan_run(in_int8, questions, tokenizer)
        prepare(run, steps=1000)
        layer = find_layers(run.loaded.model)[0]
        kinds = {type(each) for each in layer.modules() if isinstance(each, nn.Linear)}
    assert kinds == {nn.Linear if least > 128 else Int8Linear}
    assert ", bf16 weights" in result.getvalue()
    why = "no linear module of a layer has 256 inputs and as many outputs"
    warned = f"warning: products are in bf16, not int8: {why}" in result.getvalue()
    assert warned is (least > 128)


@pytest.mark.parametrize(("asked", "dropout"), [("off", 0.0), ("on", 0.3)])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_attention_dropout_does_not_depend_on_compilation(
    asked: str,
    dropout: float,
    compiled: str,
    tmp_path: Path,
    questions: list[Question],
    tokenizer: Any,
) -> None:
    from transformers import DistilBertConfig, DistilBertForQuestionAnswering

    config = DistilBertConfig(
        **DISTILBERT, vocab_size=len(tokenizer), attention_dropout=0.3, dropout=0.0
    )
    DistilBertForQuestionAnswering(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = replace(DEMO, model=str(tmp_path), compile=compiled, attention_dropout=asked)
    with alone(options) as context:
        run = plan_run(context, questions, tokenizer)
        prepare(run, steps=1)
        found = [each.attention.dropout.p for each in run.loaded.model.distilbert.transformer.layer]
    assert found == [dropout] * 2
    saved = run.loaded.own.get("attention_dropout", run.loaded.model.config.attention_dropout)
    assert saved == 0.3


@COMPILING
@pytest.mark.full
@pytest.mark.parametrize(("dtype", "exact"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_compiled_layers_give_the_same_step(
    questions: list[Question], tokenizer: Any, dtype: str, exact: float
) -> None:
    assert why_no_compiler() is None
    plain, expected = one_step(DEMO, questions, tokenizer, dtype)
    step, gradients = one_step(replace(DEMO, compile="on"), questions, tokenizer, dtype)
    assert step.loss == pytest.approx(plain.loss, rel=exact)
    # Of all gradients: those of some biases are zero but for rounding.
    scale = max(float(values.abs().max()) for values in expected.values())
    for name, values in gradients.items():
        assert torch.allclose(values, expected[name], rtol=1e-3, atol=5 * exact * scale), name


@COMPILING
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "shape", "layers"), [("distilbert", DISTILBERT, 2), ("albert", ALBERT, 1)]
)
def test_compiled_dropout_and_attention_are_those_of_eager_mode(
    kind: str, shape: dict[str, Any], layers: int
) -> None:
    from torch._dynamo.utils import compilation_time_metrics
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    torch.manual_seed(2)
    config = AutoConfig.for_model(kind, vocab_size=99, **shape)
    model: Any = AutoModelForQuestionAnswering.from_config(config).train()
    ids = torch.randint(1, 99, (4, 48))
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0
    place = torch.tensor([1, 2, 3, 4])

    def take() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        torch.manual_seed(3)
        draw_seeds(model)
        loss = model(
            input_ids=ids, attention_mask=mask, start_positions=place, end_positions=place + 9
        ).loss
        loss.backward()
        return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}

    without, _ = take()
    assert compile_layers(model) == layers
    compilation_time_metrics.clear()
    loss, gradients = take()
    assert "compile_attempt_0" in compilation_time_metrics
    assert "compile_attempt_1" not in compilation_time_metrics, "a layer was traced twice"
    with torch.compiler.set_stance("fail_on_recompile"):
        assert take()[0] == loss
    for module in model.modules():
        module._compiled_call_impl = None
    eager, expected = take()

    assert loss == pytest.approx(eager, rel=1e-5)
    for name, values in gradients.items():
        assert torch.allclose(values, expected[name], rtol=1e-3, atol=1e-5), name
    assert model.config._attn_implementation == NAME
    assert loss != pytest.approx(without, rel=1e-5)
    compile_layers(model, shared=True)
    assert [layer_is_whole(model, each) for each in range(layers)] == [False, True][:layers]
    assert count_compiled(model) == layers
    assert take()[0] == pytest.approx(eager, rel=1e-5)
    plain_layers(model)
    assert count_compiled(model) == 0
    assert take()[0] == without


def layer_is_whole(model: Any, number: int) -> bool:
    """Whether a layer is compiled as one graph, not in parts."""
    return find_layers(model)[number]._compiled_call_impl is not None


# After the one that compiles: torch remembers which compiler it has found.
@COMPILING
def test_a_missing_compiler_is_detected() -> None:
    from torch._inductor import config

    # Its own way to set these: pytest's would delete them afterwards.
    with config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}):
        assert "no-such-compiler" in (why_no_compiler() or "")


def test_an_old_compiler_is_asked_which_instructions_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import config

    asked = []

    def compile_unless_asked(function: Any, **_: Any) -> Any:
        asked.append(config.cpp.vec_isa_ok)
        if config.cpp.vec_isa_ok:
            raise RuntimeError("unrecognized option -mamx-tile")
        return function

    monkeypatch.setattr(torch, "compile", compile_unless_asked)
    with config.patch({"cpp.vec_isa_ok": None}):
        assert why_no_compiler() is None
    assert asked == [True, None]


@pytest.mark.parametrize(
    ("batch", "ranks", "rate"),
    [(16, 1, 5e-5), (8, 2, 5e-5), (32, 2, 1e-4), (32, 16, 2.83e-4), (64, 128, 5e-4)],
)
def test_the_rate_follows_the_features_per_step(batch: int, ranks: int, rate: float) -> None:
    assert SquadOptions(batch_size=batch).highest_rate(ranks) == pytest.approx(rate, rel=1e-3)
    assert SquadOptions(batch_size=batch, learning_rate=3e-5).highest_rate(ranks) == 3e-5


@COMPILING
@pytest.mark.parametrize(
    ("dtype", "accumulate", "halved"), [("bf16", 1, True), ("bf16", 2, False), ("fp32", 1, False)]
)
def test_weights_are_in_bf16_if_gradients_are_not_added_up(
    questions: list[Question], tokenizer: Any, dtype: str, accumulate: int, halved: bool
) -> None:
    options, notes = replace(DEMO, compile="on", accumulate=accumulate), io.StringIO()
    with alone(options, notes, dtype) as context:
        run = plan_run(context, questions, tokenizer)
        prepare(run, steps=1)
        layers = find_layers(run.loaded.model)
        types = {each.dtype for layer in layers for each in layer.parameters()}
    assert (torch.bfloat16 in types) is halved, notes.getvalue()
    parts = "2 compiled layers, attention as products"
    more = ", bf16 weights" if halved else ""
    words = ", only the data's words; set by --compile on"
    assert f"fast: {parts}{more}{words}" in notes.getvalue()


def test_layers_and_experts_that_a_step_skips_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    shape = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads"), 2)
    config = BartConfig(
        d_model=16, vocab_size=32, encoder_layerdrop=0.99, decoder_layerdrop=0.99, **shape
    )
    model = BartForConditionalGeneration(config)
    assert step_module._skips_parts(model)
    model.get_encoder().eval()
    model.idle = torch.nn.Parameter(torch.zeros(2))
    model.experts = nn.ModuleDict({"expert_0": nn.Linear(2, 2)})
    ids = torch.arange(3, 11).view(1, 8)
    run: Any = mock.Mock()
    run.loaded.model, run.samples, run.lengths = model, [None], np.array([8])
    run.task.collate = lambda *_: {"input_ids": ids, "labels": ids}
    run.task.loss = lambda model, batch: model(**batch).loss
    run.context.ranks = Ranks()
    names = {id(each): name for name, each in model.named_parameters()}
    assert [names[id(each)] for each in step_module.find_idle(run)] == ["idle"]
    lists = {"experts": nn.ModuleList([nn.Linear(2, 2)]), "shared_experts": nn.Linear(2, 2)}
    assert [step_module._skips_parts(nn.ModuleDict({k: v})) for k, v in lists.items()] == [1, 0]
    assert (model.training, model.get_encoder().training) == (True, False)
