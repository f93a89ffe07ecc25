"""The sides of benchmarks.squad_speed, each a separate process that trains on request.

python -m benchmarks.squad_sides --side fast|baseline|grouped|published …   (by benchmarks.squad_speed)

Each input line is a round: the number of steps, and a seed, which decides the features. The answer is a line
of JSON. In a round, all sides get the same features, each of them once.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.baseline import Baseline, Settings, drive_run_qa
from benchmarks.common import ROOT
from benchmarks.squad_data import (
    SHAPES,
    add_arguments,
    draw,
    find_encoder,
    load_features,
    load_tokenizer,
    longest,
    new_model,
)
from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.ranks import Ranks, join
from jobs.worker.tasks.squad.dataset import read_dataset
from jobs.worker.tasks.squad.features import Feature
from jobs.worker.tasks.squad.task import Squad, SquadOptions
from jobs.worker.training.batches import SampleList, Schedule, TrainingRun, batches
from jobs.worker.training.model import take_attention_dropouts
from jobs.worker.training.optimizer_step import prepare, take_step
from jobs.worker.training.run import exempt_from_collection
from jobs.worker.training.task import Loaded

SIDES = ("baseline", "grouped", "published", "strong", "strong-dropout", "fast", "int8", "run_qa")
LONGEST = -1
"""The seed that selects the longest features."""
RUN_STEPS = 2000
"""Length of the run to which preparation and compilation are spread."""


class Round(NamedTuple):
    """``teraflop`` is the work for these features, without padding."""

    features: int
    tokens: int
    teraflop: float
    seconds: float
    memory_gb: float


def parse_round(line: str) -> Round:
    """Return the round of a side's answer."""
    return Round(**json.loads(line))


class Side(Protocol):
    """Trains on features, and returns the seconds that it took."""

    def train(self, features: Sequence[Feature]) -> float: ...


class Fast:
    """The product's training, on one rank; of all embeddings, because these features are only a part."""

    def __init__(
        self, model: Any, tokenizer: Any, ranks: Ranks, options: SquadOptions, *, int8: bool
    ) -> None:
        own = take_attention_dropouts(model.config)
        self._loaded, self._task = Loaded(model, tokenizer, own=own), Squad(options)
        precision = Precision(options.dtype, "", int8)
        events = Events(0, io.StringIO())
        self._session = RankContext(options, ranks, events, precision)
        self._prepared: Any = None

    def train(self, features: Sequence[Feature]) -> float:
        steps = -(-len(features) // self._session.options.batch_size)
        samples = SampleList(features)
        run = TrainingRun(self._session, self._task, self._loaded, samples)
        fresh = self._prepared is None
        self._prepared = self._prepared or prepare(run, RUN_STEPS)
        model, optimizer = self._prepared
        begin = time.perf_counter()
        for chosen in batches(self._session, samples.lengths, Schedule(steps, steps, 0)):
            take_step(run, model, optimizer, run.batch(chosen))
        if fresh:
            exempt_from_collection()
        return time.perf_counter() - begin


class RunQa:
    """The original script, one process per round; ``seconds`` are those that it reports.

    It reads questions, not features: its own number of features may be a little larger, and what
    counts is its features a second. Its first step, which is slower, is among them.
    """

    def __init__(
        self, script: Path, model: Any, tokenizer: Any, args: argparse.Namespace, folder: Path
    ) -> None:
        self._script, self._folder = script, folder
        self._questions = read_dataset(args.data)
        self._settings = Settings(args.batch_size, args.dtype)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")

    def train(self, features: Sequence[Feature]) -> float:
        numbers = sorted({feature.question for feature in features})
        questions = [self._questions[number] for number in numbers]
        model, output = str(self._folder / "model"), self._folder / "output"
        results = drive_run_qa(self._script, model, questions, self._settings, output)
        return float(len(features) / results["train_samples_per_second"])


def serve(side: Side, features: Sequence[Feature], args: argparse.Namespace) -> None:
    """Train as each input line says."""
    for line in sys.stdin:
        steps, seed = map(int, line.split())
        if seed == LONGEST:
            chosen = longest(features, steps * args.batch_size)
        else:
            chosen = draw(features, steps, args.batch_size, seed)
        seconds = side.train(chosen)
        sizes = [len(feature) for feature in chosen]
        operations = sum(map(SHAPES[args.shape].operations, sizes))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        answer = Round(len(chosen), sum(sizes), operations / 1e12, seconds, round(memory, 3))
        print(json.dumps(answer._asdict()), flush=True)


def add_side_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both a side and the benchmark that starts it."""
    add_arguments(parser)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="distilbert")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--run-qa", type=Path, help="transformers' own script, one more side")
    parser.add_argument("--attention-dropout", choices=("on", "off"), default="off")


def side_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments for a side."""
    argv = [
        f"--{name.replace('_', '-')}={getattr(args, name)}"
        for name in (
            "data",
            "shape",
            "batch_size",
            "dtype",
            "threads",
            "compile",
            "attention_dropout",
        )
    ]
    argv += [f"--encoder={args.encoder}"] if args.encoder else []
    argv += [f"--run-qa={args.run_qa.absolute()}"] if args.run_qa else []
    return argv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    add_side_arguments(parser)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(find_encoder(args.encoder))
    features: Sequence[Feature] = load_features(args.data, tokenizer)
    if args.shape == "distilbert":  # it knows no kinds of tokens
        features = [without_kinds(feature) for feature in features]
    if args.side == "run_qa":
        # Standard output is for the benchmark, the script's output for the user.
        model = new_model(args.shape, attention_dropout=True)
        with tempfile.TemporaryDirectory() as folder:
            serve(RunQa(args.run_qa, model, tokenizer, args, Path(folder)), features, args)
        return
    if args.side not in ("fast", "int8"):
        dtype = "bf16" if args.side == "published" else args.dtype
        strong = args.side.startswith("strong")
        grouped = strong or args.side == "grouped"
        settings = Settings(args.batch_size, dtype, grouped=grouped, strong=strong)
        model = new_model(args.shape, attention_dropout=args.side != "strong")
        # Trainer prints its own figures.
        answers, sys.stdout = sys.stdout, sys.stderr
        side = Baseline(model, tokenizer, settings, sorted_batches=grouped)
        sys.stdout = answers
        serve(side, features, args)
        return
    options = SquadOptions(
        batch_size=args.batch_size,
        dtype=args.dtype,
        backend="gloo",
        compile=args.compile,
        attention_dropout=args.attention_dropout,
    )
    with join("gloo", environ={}) as ranks:
        model = new_model(args.shape, attention_dropout=args.attention_dropout == "on")
        serve(Fast(model, tokenizer, ranks, options, int8=args.side == "int8"), features, args)


def without_kinds(feature: Feature) -> Feature:
    """Return the feature for a model without ``token_type_ids``."""
    inputs = {"input_ids": feature.inputs["input_ids"]}
    return Feature(feature.question, inputs, feature.start, feature.end)


if __name__ == "__main__":
    assert Path.cwd() == ROOT
    main()
