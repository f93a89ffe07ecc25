"""Quality of `fast`: F1 on unseen questions after equal epochs, and the time to reach an F1.

python -m benchmarks.quality --seeds 5 [--epochs 4] [--batch-size 8] [--learning-rate 1e-4]
python -m benchmarks.quality --seen OUTPUT...   (of processes with some of the seeds each, such as those in
                                                 benchmarks/quality_seeds.jsonl)
python -m benchmarks.quality --unpadded --speed-ratio 2.6   (only F1, in less than half the time)

A pretrained encoder learns real questions twice per seed: with the product's training, and with run_qa.py's
settings (benchmarks.baseline). After each epoch, the same code scores both; its time is not counted. The time
to an F1 is interpolated between the ends of epochs, on the seeds' mean curve. Both sides keep their memory,
as on the cluster's nodes (see benchmarks.squad_speed).

With `--unpadded`, the baseline skips the masked positions, which does not change what it learns. Its seconds
are then meaningless: the times to an F1 are compared as epochs, times the ratio of speeds that
`benchmarks.squad_speed` measured.

The interval of the difference in F1 is from 10,000 samples of both the seeds and the questions, which are the
same for both sides (a paired bootstrap).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.baseline import TRAINER, Baseline, Settings
from benchmarks.common import finish
from benchmarks.squad_data import (
    DATA,
    MAX_LENGTH,
    STRIDE,
    add_arguments,
    find_encoder,
    load_tokenizer,
)
from benchmarks.squad_speed import preload
from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.ranks import Ranks, join
from jobs.worker.tasks.squad.answers import predict
from jobs.worker.tasks.squad.dataset import Question, read_dataset
from jobs.worker.tasks.squad.features import build_features
from jobs.worker.tasks.squad.metrics import score
from jobs.worker.tasks.squad.task import HEAD, Squad, SquadOptions
from jobs.worker.training.batches import TrainingRun, batches, plan_schedule
from jobs.worker.training.model import load_model
from jobs.worker.training.optimizer_step import prepare, take_step
from jobs.worker.training.task import Loaded

MOST_WORSE, LEAST_FASTER = 0.3, 2.5


class Curve(NamedTuple):
    """F1 after each epoch, the seconds of training until then, and each question's F1 at the end."""

    f1: list[float]
    seconds: list[float]
    questions: list[float]


class Course:
    """What both sides learn and answer."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.args, self.ranks = args, ranks
        self.encoder = str(find_encoder(args.encoder))
        self.train = read_dataset(args.data)[: args.questions]
        self.eval: list[Question] = read_dataset(args.eval)
        self.tokenizer = load_tokenizer(Path(self.encoder))
        self.features = build_features(self.train, self.tokenizer, MAX_LENGTH, STRIDE)

    def session(self, seed: int, attention_dropout: str) -> RankContext[SquadOptions]:
        """One run of the product on one rank."""
        import torch

        args = self.args
        options = SquadOptions(
            model=self.encoder,
            epochs=args.epochs,
            batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            seed=seed,
            backend="gloo",
            attention_dropout=attention_dropout,
            compile=args.compile,
        )
        torch.manual_seed(seed)
        return RankContext(options, self.ranks, Events(0, io.StringIO()), Precision(args.dtype, ""))

    def test(self, session: RankContext[SquadOptions], loaded: Loaded, curve: Curve) -> None:
        """Add F1 on the unseen questions; leave the model ready to train."""
        features = Squad(session.options).prepare(session, loaded, self.eval)
        answers = predict(session, loaded, self.eval, features).texts
        loaded.model.train()
        curve.f1.append(score(self.eval, answers).f1)
        curve.questions[:] = [score([each], answers).f1 for each in self.eval]


def learn_fast(course: Course, seed: int) -> Curve:
    """Run the product's training."""
    session = course.session(seed, course.args.attention_dropout)
    loaded = load_model(session.options, HEAD, [], course.ranks)
    curve = Curve([], [], [])

    def after_epoch(seconds: float) -> None:
        curve.seconds.append(seconds)
        course.test(session, loaded, curve)

    train(TrainingRun(session, Squad(session.options), loaded, course.features), after_epoch)
    return curve


def train(run: TrainingRun, after_epoch: Callable[[float], None]) -> None:
    """Run the product's training on one rank.

    ``after_epoch`` gets the seconds so far, without its own. The first steps' include compilation.
    """
    import torch

    options, lengths = run.context.options, run.samples.lengths
    schedule = plan_schedule(options, len(lengths), 1)
    model, optimizer = prepare(run, schedule.total)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.rate)
    taken, begin = 0.0, time.perf_counter()
    for step, chosen in enumerate(batches(run.context, lengths, schedule), start=1):
        take_step(run, model, optimizer, run.batch(chosen))
        scheduler.step()
        if step % schedule.per_epoch == 0:
            taken += time.perf_counter() - begin
            after_epoch(taken)
            begin = time.perf_counter()


def learn_baseline(course: Course, seed: int) -> Curve:
    """Train with run_qa.py's settings, by Trainer."""
    from transformers import TrainerCallback

    args = course.args
    session = course.session(seed, "on")
    loaded = load_model(session.options, HEAD, [], course.ranks)
    curve = Curve([], [], [])

    class Scorer(TrainerCallback):
        taken = begin = 0.0

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.taken += time.perf_counter() - self.begin
            curve.seconds.append(self.taken)
            course.test(session, loaded, curve)

    settings = Settings(
        args.batch_size,
        args.dtype,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=seed,
        padded=not args.unpadded,
    )
    baseline = Baseline(loaded.model, course.tokenizer, settings)
    baseline.trainer.add_callback(Scorer())
    baseline.train(course.features)
    return curve


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the means over seeds."""

    def mean(columns: Sequence[Sequence[float]]) -> list[float]:
        return [statistics.mean(column) for column in zip(*columns, strict=True)]

    return Curve(*(mean(column) for column in zip(*curves, strict=True)))


def in_epochs(curve: Curve) -> Curve:
    """Return the curve with the number of each epoch instead of its seconds."""
    return curve._replace(seconds=[float(number) for number, _ in enumerate(curve.f1, start=1)])


def time_to(f1: float, curve: Curve) -> float | None:
    """Return the seconds to an F1, interpolated between epochs; None if it was not reached."""
    before, when = 0.0, 0.0
    for reached, seconds in zip(curve.f1, curve.seconds, strict=True):
        if reached >= f1:
            return when + (seconds - when) * (f1 - before) / (reached - before)
        before, when = reached, seconds
    return None


def interval(some: Sequence[Curve], others: Sequence[Curve]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the difference in the questions' mean score.

    With few seeds, it is a little too narrow.
    """
    import numpy as np

    differences = np.array([each.questions for each in some])
    differences -= np.array([each.questions for each in others])
    seeds, questions = differences.shape
    random = np.random.default_rng(1)
    drawn = [
        differences[random.integers(seeds, size=seeds)][
            :, random.integers(questions, size=questions)
        ].mean()
        for _ in range(10_000)
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return round(float(low), 2), round(float(high), 2)


SIDES: dict[str, Callable[[Course, int], Curve]] = {
    "baseline": learn_baseline,
    "fast": learn_fast,
}


def main() -> None:
    """Run all seeds of both sides; print mean F1, their difference, and the times to F1."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--eval", type=Path, default=DATA / "dev.json", help="SQuAD v1.1 JSON")
    parser.add_argument("--questions", type=int, help="learn only N")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--target-f1", type=float, default=50.0)
    parser.add_argument("--attention-dropout", choices=("on", "off"), default="off")
    parser.add_argument("--compile", choices=("on", "off"), help="of fast (default: on in bf16)")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side"
    )
    parser.add_argument("--unpadded", action="store_true", help="see above")
    parser.add_argument("--speed-ratio", type=float, help="of squad_speed, with --unpadded")
    parser.add_argument("--seen", nargs="+", type=Path, help="outputs to summarize")
    args = parser.parse_args()
    if args.unpadded and not args.speed_ratio:
        parser.error("--unpadded goes with --speed-ratio")
    args.compile = args.compile or ("on" if args.dtype == "bf16" else "off")
    curves: dict[str, list[Curve]] = {side: [] for side in args.sides}
    if args.seen:
        lines = sorted(_read(args), key=lambda line: int(line["seed"]))
        seeds = [[line["seed"] for line in lines if line["side"] == side] for side in args.sides]
        if not seeds[0] or any(each != seeds[0] for each in seeds):
            parser.error(f"--seen has other seeds for each side, or none: {seeds}")
        args.seeds = len(seeds[0])
        for line in lines:
            if line["side"] in curves:
                curves[line["side"]].append(Curve(line["f1"], line["seconds"], line["questions"]))
    else:
        require_environment("benchmarks.quality", args.threads)
        _learn(args, curves)
    _finish(args, {side: mean_curve(each) for side, each in curves.items()}, curves)


def require_environment(module: str, threads: int) -> None:
    """Restart a benchmark if a variable that libraries read at their start is missing."""
    wanted = preload() | {"OMP_NUM_THREADS": str(threads)}
    if not wanted.items() <= os.environ.items():
        os.execve(
            sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | wanted
        )


def _learn(args: argparse.Namespace, curves: dict[str, list[Curve]]) -> None:
    """Run all seeds of both sides in turn, and print a line each."""
    with join("gloo", environ={}) as ranks:
        course = Course(args, ranks)
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for side in args.sides:
                curve = SIDES[side](course, seed)
                curves[side].append(curve)
                dropout = "on" if side == "baseline" else args.attention_dropout
                line = {"seed": seed, "side": side, "attention_dropout": dropout}
                print(json.dumps({**line, **curve._asdict()}), flush=True)


def _read(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the lines of :func:`_learn` in the files, of ``fast`` those with the given dropout."""
    for path in args.seen:
        for text in path.read_text().splitlines():
            if text.startswith('{"seed"'):
                line = json.loads(text)
                if (
                    line["side"] == "baseline"
                    or line["attention_dropout"] == args.attention_dropout
                ):
                    yield line


def _finish(
    args: argparse.Namespace, means: dict[str, Curve], curves: dict[str, list[Curve]]
) -> None:
    if args.unpadded:
        means = {side: in_epochs(mean) for side, mean in means.items()}
    unit = "epochs" if args.unpadded else "seconds"
    found: dict[str, Any] = {
        side: {
            "f1_by_epoch": [round(each, 2) for each in mean.f1],
            "f1_of_seeds": [round(each.f1[-1], 2) for each in curves[side]],
            f"{unit}_to_target": time_to(args.target_f1, mean),
        }
        for side, mean in means.items()
    }
    missed = []
    if len(means) == 2:
        found["f1_difference"] = round(means["fast"].f1[-1] - means["baseline"].f1[-1], 3)
        found["f1_difference_95_percent"] = interval(curves["fast"], curves["baseline"])
        slow, quick = (found[side][f"{unit}_to_target"] for side in ("baseline", "fast"))
        ratio = args.speed_ratio if args.unpadded else 1.0
        found["faster_to_target"] = round(ratio * slow / quick, 3) if slow and quick else None
        if found["f1_difference_95_percent"][0] < -MOST_WORSE:
            missed.append(f"with 95 % confidence at most {MOST_WORSE} below the baseline")
        if (found["faster_to_target"] or 0) < LEAST_FASTER:
            missed.append(f"{LEAST_FASTER} x faster to F1 {args.target_f1}")
    names = (
        "seeds",
        "epochs",
        "threads",
        "batch_size",
        "learning_rate",
        "dtype",
        "target_f1",
        "unpadded",
        "speed_ratio",
        "compile",
    )
    result = {name: getattr(args, name) for name in (*names, "attention_dropout")}
    finish(missed, benchmark="quality", **found, baseline_by=TRAINER, **result)


if __name__ == "__main__":
    main()
