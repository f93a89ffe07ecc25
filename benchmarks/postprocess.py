"""Time from logits to answers and scores: 10,000 features of real lengths, on few cores.

python -m benchmarks.postprocess --data dev.json [--model FOLDER] [--features 10000] [--runs 5]

Beside it, in turn, the straightforward way: for each feature the 20 best starts times the 20 best ends in
Python's own loops, as training scripts commonly do. Logits are random: it is the worst case for neither.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import finish
from jobs.worker.tasks.squad.answers import MAX_ANSWER_TOKENS, Batch, answers, best_spans
from jobs.worker.tasks.squad.dataset import Question, all_texts, read_dataset
from jobs.worker.tasks.squad.features import Features, build_features
from jobs.worker.tasks.squad.metrics import score
from jobs.worker.tasks.squad.task import SAMPLE
from jobs.worker.training.evaluation import plan_batches

LIMIT_S = 10.0
N_BEST = 20


class Work(NamedTuple):
    """Questions, their windows (those of ``base``, repeated), and logits by batch."""

    questions: list[Question]
    base: Features
    features: Features
    batches: list[Batch]


def main() -> None:
    """Run both methods in turn; print their medians and whether their answers agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=str(SAMPLE), help="SQuAD v1.1 JSON")
    parser.add_argument(
        "--model", help="folder with a tokenizer (default: one trained on the data)"
    )
    parser.add_argument("--features", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    work = make_work(read_dataset(args.data), args.model, args.features)
    ways: dict[str, Callable[[Work], dict[str, str]]] = {"ours": ours, "loops": loops}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, dict[str, str]] = {}
    for _ in range(args.runs):
        for name, way in ways.items():
            begin = time.perf_counter()
            found[name] = way(work)
            score(work.questions, found[name])
            seconds[name].append(time.perf_counter() - begin)
            print(f"{name}: {seconds[name][-1]:.3f} s", flush=True)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    other = sum(found["ours"][key] != answer for key, answer in found["loops"].items())
    finish(
        [] if median["ours"] < LIMIT_S else [f"{args.features} features under {LIMIT_S} s"],
        benchmark="postprocess",
        limit_s=LIMIT_S,
        features=len(work.features),
        questions=len(work.questions),
        mean_tokens=round(float(work.features.lengths.mean()), 1),
        ours_s=round(median["ours"], 3),
        loops_s=round(median["loops"], 3),
        times_as_fast=round(median["loops"] / median["ours"], 1),
        answers_that_differ=other,
        runs=args.runs,
    )


def make_work(questions: Sequence[Question], model: str | None, count: int) -> Work:
    """Return ``count`` windows: those of the questions, repeated as those of other questions."""
    base = build_features(questions, load_tokenizer(model, questions), 384, 128)
    copies = -(-count // len(base))
    many = [
        replace(question, id=f"{question.id} {copy}")
        for copy in range(copies)
        for question in questions
    ]
    chosen = base.take(np.resize(np.arange(len(base)), count))
    shift = np.arange(count) // len(base) * len(questions)
    windows = chosen.windows._replace(question=chosen.windows.question + shift)
    features = replace(chosen, windows=windows)
    random = np.random.default_rng(1)
    batches = []
    for indices in plan_batches(features.lengths):
        shape = (2, len(indices), -(-int(features.lengths[indices].max()) // 8) * 8)
        batches.append(Batch(indices, *random.normal(size=shape).astype(np.float32)))
    return Work(many, base, features, batches)


def load_tokenizer(model: str | None, questions: Sequence[Question]) -> Any:
    """Return the folder's tokenizer, or a new one."""
    if model:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)
    from jobs.worker.training.model import new_tokenizer, train_tokenizer

    return new_tokenizer(train_tokenizer(all_texts(list(questions))))


def ours(work: Work) -> dict[str, str]:
    """Answer as the job does."""
    parts = [
        (batch.chosen, best_spans(batch.start, batch.end, work.features.take(batch.chosen)))
        for batch in work.batches
    ]
    return dict(answers(work.questions, work.features, parts).texts)


def loops(work: Work) -> dict[str, str]:
    """Answer feature by feature, from all pairs of its best starts and ends."""
    best: dict[int, tuple[float, str]] = {}
    for batch in work.batches:
        for index, start, end in zip(*batch, strict=True):
            feature = work.base[int(index) % len(work.base)]
            number = int(work.features.windows.question[index])
            context = work.questions[number].context
            for points, first, last in _candidates(start, end, feature.offsets.tolist()):
                if number not in best or points > best[number][0]:
                    best[number] = points, context[first:last]
    return {
        question.id: best.get(number, (0.0, ""))[1]
        for number, question in enumerate(work.questions)
    }


def _candidates(start: Any, end: Any, offsets: list[list[int]]) -> list[tuple[float, int, int]]:
    found = []
    ends = np.argsort(-end)[:N_BEST].tolist()
    for first in np.argsort(-start)[:N_BEST].tolist():
        for last in ends:
            if max(first, last) >= len(offsets) or offsets[first][0] < 0 or offsets[last][0] < 0:
                continue
            if last < first or last - first + 1 > MAX_ANSWER_TOKENS:
                continue
            found.append((float(start[first] + end[last]), offsets[first][0], offsets[last][1]))
    return sorted(found, reverse=True)[:N_BEST]


if __name__ == "__main__":
    main()
