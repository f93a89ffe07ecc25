"""Answers of a trained model to single questions: in Python, or as lines of JSON.

    python -m worker.tasks.squad.answer MODEL < questions.jsonl > answers.jsonl

Each input line is ``{"question": …, "context": …}``; each output line, in the same order, is
``{"text": …, "score": …, "start": …}``. Exit code 2 is a question that can't be used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from ...runtime.errors import DatasetError, ModelError, WorkerError
from ...runtime.precision import autocast, choose_precision, read_cpu_flags
from ...training.evaluation import plan_batches
from ...training.model import load_pretrained, longest_input
from ...training.task import Loaded
from .answers import run_windows
from .dataset import Answer, Question, read_text
from .features import Features, build_features
from .spans import Spans, best_per_question, best_spans, within
from .task import HEAD

MAX_LENGTH, STRIDE = 384, 128
"""Tokens of a window and of the overlap of two, as in training; fewer if the model takes fewer."""
LINES = 256
"""Questions per batch of lines, which bounds the memory."""


class PredictedAnswer(NamedTuple):
    """A span of the question's context, or ""; ``start`` counts characters.

    ``score`` is the model's probability, 0 to 1, that the answer has this first and last word, among all
    words of the context, however it was cut into windows.
    """

    text: str
    score: float
    start: int


def answer(model: str | Path, asked: Sequence[tuple[str, str]]) -> list[PredictedAnswer]:
    """Return the answers to (question, context) pairs by the model in a folder, in order.

    Raises :class:`ModelError`, or :class:`DatasetError` for a text that can't be used.
    """
    records = [{"question": question, "context": context} for question, context in asked]
    places = [f"question {number}" for number in range(1, len(records) + 1)]
    return ask(_load_trained(str(model)), [*map(_question, places, records)])


def _load_trained(model: str) -> Loaded:
    loaded = load_pretrained(model, HEAD)
    if loaded.new_weights:
        raise ModelError(
            f"model {model} was not trained to answer questions: it has no {', '.join(loaded.new_weights)}",
            hint="give the folder `model` in the results of `train squad`",
        )
    return loaded


def ask(
    loaded: Loaded, questions: Sequence[Question], dtype: str = "auto"
) -> list[PredictedAnswer]:
    """Return a loaded model's answers, computed in ``dtype``; the questions' own are ignored."""
    if not questions:
        return []
    dtype = choose_precision(dtype, {"this machine": read_cpu_flags()}).dtype
    size = min(MAX_LENGTH, longest_input(loaded) or MAX_LENGTH)
    features = build_features(questions, loaded.tokenizer, size, min(STRIDE, size // 3))
    owner = features.windows.question
    # Sums over all windows of a question, to normalize its spans' probabilities.
    starts, ends = np.full((2, len(questions)), -np.inf)
    found, order = [], []
    for batch in run_windows(loaded, features, plan_batches(features.lengths), autocast(dtype)):
        chosen = features.take(batch.chosen)
        found.append(best_spans(batch.start, batch.end, chosen))
        order.append(batch.chosen)
        for total, logits in ((starts, batch.start), (ends, batch.end)):
            np.logaddexp.at(total, owner[batch.chosen], _log_sum(logits, chosen))
    spans = Spans.join(found).take(np.argsort(np.concatenate(order)))
    best = best_per_question(spans, owner, len(questions))
    return [
        PredictedAnswer(
            question.context[spans.begin[window] : spans.end[window]],
            float(np.exp(min(0.0, spans.score[window] - starts[number] - ends[number]))),
            int(spans.begin[window]),
        )
        if window >= 0
        else PredictedAnswer("", 0.0, 0)
        for number, (question, window) in enumerate(zip(questions, best, strict=True))
    ]


def _log_sum(logits: Any, features: Features) -> Any:
    return np.logaddexp.reduce(within(logits, features).astype(np.float64), axis=1)


def _question(place: str, record: Any) -> Question:
    text, context = (read_text(place, record, key) for key in ("question", "context"))
    return Question(place, text, context, (Answer("", 0),))


def _read_lines(stream: TextIO) -> Iterator[Question]:
    for number in count(1):
        place = f"line {number}"
        try:
            line = stream.readline()
            if not line:
                return
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{place}: is not JSON") from error
        if record is not None:
            yield _question(place, record)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the lines on standard input. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="squad.answer", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a trained model, as `train squad` writes it")
    model: str = parser.parse_args(argv).model
    # Progress bars would mix with the answers.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        _answer_lines(_load_trained(model), sys.stdin, sys.stdout)
    except WorkerError as error:
        hint = f" ({error.hint})" if error.hint else ""
        print(f"squad.answer: error: {error.message}{hint}", file=sys.stderr)
        return 2 if isinstance(error, DatasetError) else 1
    return 0


def _answer_lines(loaded: Loaded, source: TextIO, target: TextIO) -> None:
    questions = _read_lines(source)
    while some := list(islice(questions, LINES)):
        for found in ask(loaded, some):
            target.write(json.dumps(found._asdict(), ensure_ascii=False) + "\n")
        target.flush()


if __name__ == "__main__":
    raise SystemExit(main())
