"""Time and memory from texts to features.

python -m benchmarks.tokenize --data train.json [--model FOLDER] [--questions 10000] [--runs 5]

Four ways, each run in a process of its own and in turn:

ours     each passage once, windows as a table over its tokens (no cache)
cached   the same, tokens read from the cache of an earlier job
pairs    each question with its passage through the tokenizer, an object per window (the job until
         now)
map      the same pairs by ``datasets.map`` in as many processes as there are cores, padded to 384 tokens
         and written to Arrow files, as training scripts commonly do
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, finish
from benchmarks.postprocess import load_tokenizer
from jobs.worker.data.token_cache import TokenCache, token_key
from jobs.worker.data.tokens import encode
from jobs.worker.tasks.squad.dataset import Answer, Question, read_dataset
from jobs.worker.tasks.squad.features import (
    Encoded,
    Feature,
    build_features,
    collect_texts,
    cut_windows,
)
from jobs.worker.tasks.squad.task import SAMPLE

MAX_LENGTH, STRIDE = 384, 128


def main() -> None:
    """Run all methods in turn; print the medians of their seconds and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=str(SAMPLE), help="SQuAD v1.1 JSON")
    parser.add_argument(
        "--model", help="folder with a tokenizer (default: one trained on the data)"
    )
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.runs):
            for way in WAYS:
                seen[way].append(_run(way, folder))
                print(f"{way}: {seen[way][-1]}", flush=True)
    figures = {
        way: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for way, runs in seen.items()
    }
    seconds = {way: statistics.median(run["seconds"] for run in runs) for way, runs in seen.items()}
    finish(
        [],
        benchmark="tokenize",
        questions=args.questions,
        ways=figures,
        times_as_fast={way: round(seconds[way] / seconds["ours"], 1) for way in WAYS},
        runs=args.runs,
    )


def _run(way: str, folder: str) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks.tokenize", *sys.argv[1:]]
    argv += [f"--way={way}", f"--folder={folder}"]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run one method in this process: seconds, features, and the MiB that it added at its peak."""
    some = read_dataset(args.data)
    tokenizer = load_tokenizer(args.model, some)
    questions = multiply(some, args.questions)
    before = _peak_mib()
    begin = time.perf_counter()
    features = WAYS[args.way](questions, tokenizer, Path(args.folder))
    seconds = time.perf_counter() - begin
    return {
        "seconds": round(seconds, 3),
        "features": len(features),
        "peak_mib": round(_peak_mib() - before),
    }


def _peak_mib() -> float:
    """Return the peak of this process and of its largest child."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024


def multiply(questions: list[Question], count: int) -> list[Question]:
    """Return ``count`` questions; every copy has other passages, so that none is tokenized twice."""
    many = []
    for number in range(count):
        question, copy = questions[number % len(questions)], number // len(questions)
        context = f"{question.context} Copy {copy}."
        many.append(replace(question, id=str(number), context=context))
    return many


def ours(questions: list[Question], tokenizer: Any, _: Path) -> Any:
    return build_features(questions, tokenizer, MAX_LENGTH, STRIDE)


def cached(questions: list[Question], tokenizer: Any, folder: Path) -> Any:
    cache, texts = TokenCache(folder), collect_texts(questions)
    key = token_key(texts.columns, tokenizer)
    encoded = cache.load(key)
    if encoded is None:
        encoded = encode(texts.columns, tokenizer)
        cache.store(key, encoded)
    return cut_windows(questions, texts, Encoded(*encoded), tokenizer, (MAX_LENGTH, STRIDE))


def pairs(questions: list[Question], tokenizer: Any, _: Path) -> Any:
    features = []
    for first in range(0, len(questions), 1000):
        chunk = questions[first : first + 1000]
        encoded = _windows(
            tokenizer, [each.text for each in chunk], [each.context for each in chunk], False
        )
        for index, owner in enumerate(encoded["overflow_to_sample_mapping"]):
            offsets = np.array(encoded["offset_mapping"][index], dtype=np.int32)
            offsets[[side != 1 for side in encoded.sequence_ids(index)]] = -1
            ids = {"input_ids": np.array(encoded["input_ids"][index], dtype=np.int32)}
            start, end = _find(offsets, chunk[owner].answers[0])
            features.append(Feature(first + owner, ids, offsets, start, end))
    return features


def by_map(questions: list[Question], tokenizer: Any, folder: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict(
        {
            "question": [each.text for each in questions],
            "context": [each.context for each in questions],
            "text": [each.answers[0].text for each in questions],
            "start": [each.answers[0].start for each in questions],
        }
    )

    def prepare(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = _windows(tokenizer, rows["question"], rows["context"], True)
        labels = []
        for index, owner in enumerate(encoded.pop("overflow_to_sample_mapping")):
            offsets = np.array(encoded["offset_mapping"][index], dtype=np.int32)
            offsets[[side != 1 for side in encoded.sequence_ids(index)]] = -1
            labels.append(_find(offsets, Answer(rows["text"][owner], rows["start"][owner])))
        del encoded["offset_mapping"]
        starts, ends = (list(side) for side in zip(*labels, strict=True))
        return {**encoded, "start_positions": starts, "end_positions": ends}

    with tempfile.TemporaryDirectory(dir=folder) as target:
        return table.map(
            prepare,
            batched=True,
            num_proc=len(os.sched_getaffinity(0)),
            remove_columns=table.column_names,
            cache_file_name=f"{target}/features.arrow",
        )


def _windows(tokenizer: Any, questions: list[str], contexts: list[str], padded: bool) -> Any:
    return tokenizer(
        [text.strip() for text in questions],
        contexts,
        truncation="only_second",
        max_length=MAX_LENGTH,
        stride=STRIDE,
        padding="max_length" if padded else False,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def _find(offsets: Any, answer: Answer) -> tuple[int, int]:
    """Return the answer's first and last token in one window, or (0, 0)."""
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    begin, end = answer.start, answer.start + len(answer.text)
    if not len(inside) or offsets[inside[0], 0] > begin or offsets[inside[-1], 1] < end:
        return 0, 0
    first = inside[np.searchsorted(offsets[inside, 1], begin, side="right")]
    last = inside[np.searchsorted(offsets[inside, 0], end, side="left") - 1]
    return int(first), int(last)


WAYS: dict[str, Callable[[list[Question], Any, Path], Any]] = {
    "ours": ours,
    "cached": cached,
    "pairs": pairs,
    "map": by_map,
}

if __name__ == "__main__":
    main()
