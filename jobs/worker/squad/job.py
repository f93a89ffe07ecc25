"""One training run from its options to its results: the phases, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..runtime.errors import DatasetError
from ..runtime.events import Events
from ..runtime.job import RunSettings, run_job
from ..runtime.output import save_json
from .dataset import Question, all_texts, load_hub_dataset, read_dataset, skip_note
from .evaluation import predict
from .features import Features, prepare_features
from .model import Loaded, load_model, save_model
from .optimizer_step import load_ipex
from .options import TrainOptions, parse_argv
from .scoring import score
from .speed_trial import enough_for_trial, measure
from .state import TrainContext, TrainingProgress
from .training_loop import train


class Data(NamedTuple):
    """The questions to learn and to evaluate on, each with their source."""

    train: list[Question]
    train_source: str
    eval: list[Question]
    eval_source: str


class Inputs(NamedTuple):
    """What training and evaluation start from; ``asked`` are the features to evaluate on."""

    data: Data
    loaded: Loaded
    features: Features
    asked: Features


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job as this rank; returns its exit code."""
    options = parse_argv(argv)
    settings = RunSettings(
        backend=options.backend,
        dtype=options.dtype,
        output=Path(options.output) if options.trial_seconds is None else None,
        resume=options.resume,
        model=options.model,
    )
    return run_job(train_and_evaluate, options, settings)


def train_and_evaluate(context: TrainContext) -> dict[str, Any] | None:
    """Train, save the model, and evaluate it; a trial only measures its speed.

    Returns this job's part of results.json: ``em`` and ``f1`` are percentages, and a sample is one
    feature (token window). ``samples_per_second`` is that of training, all ranks together; so is
    ``tokens_per_second``, without padding. ``resumed_after`` are the steps after which an interrupted
    run was resumed; its ``seconds`` count all training, but no interruption.
    """
    options, ranks = context.options, context.ranks
    torch.manual_seed(options.seed)
    if options.ipex:
        load_ipex()  # now: a missing extension must not show after minutes
    data, loaded, features, asked = _prepare(context)
    if options.trial_seconds is not None:
        with context.phase("measure"):
            speed = measure(context, loaded, features, options.trial_seconds)
        context.events.emit("trial", **speed._asdict())
        return None
    with context.phase("train"):
        trained = train(context, loaded, features)
    if trained.resumed:
        context.phases.add("train", trained.resumed[-1][1], interrupted=True)
    with context.phase("save"):
        if ranks.first:
            save_model(context.output, loaded)
    with context.phase("evaluate"):
        predictions = predict(context, loaded, data.eval, asked)
        scores = score(data.eval, predictions)
    if ranks.first:
        save_json(context.output / "predictions.json", predictions)
    return {
        "em": round(scores.em, 3),
        "f1": round(scores.f1, 3),
        **_describe_training(options, trained, ranks.planned),
        "eval_questions": len(data.eval),
        "train_questions": len(data.train),
        "train_features": len(features),
        "data": data.train_source,
        "eval_data": data.eval_source,
    }


def _prepare(context: TrainContext) -> Inputs:
    """Load the data and the model, and tokenize on all ranks together."""
    options, ranks, events = context.options, context.ranks, context.events
    with context.phase("load"):
        data = _load_data(options, events)
        loaded = load_model(options, all_texts(data.train), ranks)
        if loaded.new_weights:
            events.note(f"new weights, not from the model: {', '.join(loaded.new_weights)}")
    with context.phase("tokenize"):
        questions = enough_for_trial(options, data.train, ranks.size)
        features = prepare_features(context, loaded.tokenizer, questions)
        # Before training: a question that can't be asked must not show after hours.
        asked = features
        if data.eval is not data.train and options.trial_seconds is None:
            asked = prepare_features(context, loaded.tokenizer, data.eval)
    return Inputs(data, loaded, features, asked)


def _describe_training(
    options: TrainOptions, trained: TrainingProgress, ranks: int
) -> dict[str, Any]:
    return {
        "loss_curve": trained.curve,
        "resumed_after": [step for step, _ in trained.resumed],
        "samples_per_second": round(trained.samples / trained.seconds, 3),
        "tokens_per_second": round(trained.tokens / trained.seconds, 1),
        "batch_size_per_rank": options.batch_size,
        "epochs": options.epochs,
        "learning_rate": options.highest_rate(ranks),
        "seed": options.seed,
        "model": options.model,
        "recipe": "fast",
    }


def _load_data(options: TrainOptions, events: Events) -> Data:
    skipped: list[DatasetError] = []
    bad = skipped if options.skip_bad_records else None
    if options.data is None:
        train_set, eval_set = load_hub_dataset(options.dataset, bad)
        train_source, eval_source = (f"{options.dataset} ({x})" for x in ("train", "validation"))
    else:
        train_set = eval_set = read_dataset(options.data, bad)
        train_source = eval_source = options.data
    if options.eval is not None:
        eval_set, eval_source = read_dataset(options.eval, bad), options.eval
    if skipped:
        events.note(skip_note(skipped))
    if eval_source == train_source:
        events.note("no --eval: the figures are on the training data itself, not on unseen data")
    return Data(train_set, train_source, eval_set, eval_source)
