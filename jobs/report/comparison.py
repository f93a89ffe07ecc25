"""Two runs side by side: what differs, and the interval of the difference between their scores."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.console.display import format_table
from infra.errors import UsageError
from infra.files import read_text
from jobs.places.record import training_options
from jobs.report.figures import format_fact, scores
from jobs.report.results_folder import Run
from jobs.worker.runtime.errors import WorkerError
from jobs.worker.tasks import SCORES
from jobs.worker.tasks.squad.dataset import read_dataset
from jobs.worker.tasks.squad.metrics import judge
from jobs.worker.training.options import flag

DRAWS, SEED = 1000, 0
MOST_GROUPS = 2000
"""More samples are resampled in so many groups, which takes a second."""
_MAX_BYTES = 1 << 30
_FACTS = (
    *("task", "recipe", "model", "data", "data_digest", "train_records", "train_samples"),
    *("eval_data", "eval_digest", "eval_records"),
    *("learning_rate", "batch_size_per_rank", "epochs", "seed"),
)
_HARDWARE = ("world_size", "backend", "dtype", "amx", "samples_per_second")
_OMITTED = {"output", "resume", "trial_seconds"}

Samples = Sequence[tuple[float, float, float]]
"""Each sample's scores in both runs, and its weight in the mean."""


@dataclass(frozen=True)
class Difference:
    """The second run's score minus the first's, with its 95 % interval by paired bootstrap."""

    score: str
    difference: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs, by name, and their ``scores``, with the values of both.

    Without ``differences``, ``reason`` says why the scores' difference has no interval.
    """

    runs: tuple[str, str]
    differing: Mapping[str, tuple[Any, Any]]
    scores: Mapping[str, tuple[Any, Any]]
    differences: Sequence[Difference]
    reason: str

    def as_text(self) -> str:
        """Return the table, and a line for each difference."""
        rows = [*self.differing.items(), *self.scores.items()]
        table = [("", *self.runs), *((name, *map(format_fact, both)) for name, both in rows)]
        one_line = [[" ".join(cell.split()) for cell in row] for row in table]
        lines = [
            f"{each.score}: {each.difference:+.2f}, 95 % interval {each.low:+.2f} to {each.high:+.2f}"
            f" ({each.samples:,} samples)"
            for each in self.differences
        ]
        return "\n".join([format_table(one_line), *(lines or [f"no interval: {self.reason}"])])


def compare(first: Run, second: Run) -> Comparison:
    """Compare two runs."""
    facts = _pair(dict(_facts(first)), dict(_facts(second)))
    found, reason = _differences(first, second)
    return Comparison(
        (first.name, second.name),
        {name: both for name, both in facts.items() if both[0] != both[1]},
        {SCORES.get(n, n): both for n, both in _pair(scores(first), scores(second)).items()},
        found,
        reason,
    )


def _pair(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (one.get(name), two.get(name)) for name in {**one, **two}}


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield a run's options, data, versions, and hardware."""
    for name, value in training_options(run.job).items():
        if name not in _OMITTED:
            yield flag(name), value
    yield from ((name.replace("_", " "), run.results.get(name)) for name in _FACTS)
    versions = run.results.get("versions")
    for name, version in versions.items() if isinstance(versions, dict) else ():
        yield f"version of {name}", version
    yield "stack", run.job.get("stack")
    yield "nodes", run.nodes
    yield "instance types", ", ".join(sorted({*run.instance_types})) or None
    yield "threads per rank", ", ".join(sorted({str(each.get("threads")) for each in run.ranks}))
    yield from ((name.replace("_", " "), run.results.get(name)) for name in _HARDWARE)
    yield "seconds of training", run.seconds.get("train")
    yield "step of the model", run.results.get("model_step")


def _differences(first: Run, second: Run) -> tuple[list[Difference], str]:
    task = first.text("task")
    if task not in _MEASURES or task != second.text("task"):
        return [], f"only two runs of {', '.join(_MEASURES)} have one"
    digests = {each.text("eval_digest") for each in (first, second)}
    if None in digests:
        return [], "a run does not say what it was evaluated on (eval_digest in results.json)"
    if len(digests) > 1:
        return [], _OTHER
    predictions = _predictions(first), _predictions(second)
    if None in predictions:
        return [], "predictions.json is missing or unreadable"
    try:
        measured = _MEASURES[task](first, *predictions)
    except (KeyError, TypeError, ValueError, AttributeError):  # files of any origin
        return [], "predictions.json has another form"
    if isinstance(measured, str):
        return [], measured
    scale = _perplexity if task == "lm" else float
    return [bootstrap(name, samples, scale) for name, samples in measured.items()], ""


def _predictions(run: Run) -> Any:
    try:
        return json.loads(read_text(run.folder / "predictions.json", max_bytes=_MAX_BYTES))
    except (UsageError, ValueError, RecursionError):
        return None


Measured = Mapping[str, Samples] | str
"""The samples by the score's name, or why they can't be compared."""
_OTHER = "the runs were evaluated on different data"


def _classify(run: Run, *predictions: Any) -> Measured:
    one, two = ([each for each in rows if isinstance(each, dict)] for rows in predictions)
    if [each.get("labels") for each in one] != [each.get("labels") for each in two] or not one:
        return _OTHER

    def right(row: Mapping[str, Any]) -> float:
        return 100.0 * ({*row["labels"]} == {*row["predicted"]})

    name = "exact_match" if "exact_match" in scores(run) else "accuracy"
    return {name: [(right(a), right(b), 1.0) for a, b in zip(one, two, strict=True)]}


def _squad(run: Run, one: Any, two: Any) -> Measured:
    path = Path(run.text("eval_data") or "")
    if one.keys() != two.keys():
        return _OTHER
    try:
        questions = [each for each in read_dataset(path) if each.id in one]
    except (WorkerError, OSError) as error:
        return f"the evaluation data can't be read here: {error}"
    if len(questions) != len(one) or not questions:
        return f"{path} has other questions now"
    judged = [(judge(each, one[each.id]), judge(each, two[each.id])) for each in questions]
    return {
        name: [(100 * getattr(a, name), 100 * getattr(b, name), 1.0) for a, b in judged]
        for name in ("f1", "em")
    }


def _lm(_: Run, *predictions: Any) -> Measured:
    one, two = predictions
    counts = [[int(row["tokens"]) for row in rows] for rows in predictions]
    if counts[0] != counts[1] or not counts[0]:
        return _OTHER
    if not all(math.isfinite(row["loss"]) for rows in predictions for row in rows):
        return "a run has diverged"
    # The perplexity is that of the mean over tokens.
    samples = zip(one, two, counts[0], strict=True)
    return {"perplexity": [(a["loss"], b["loss"], float(tokens)) for a, b, tokens in samples]}


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


_MEASURES: dict[str, Callable[..., Measured]] = {"classify": _classify, "squad": _squad, "lm": _lm}


def bootstrap(score: str, samples: Samples, scale: Callable[[float], float]) -> Difference:
    """Return the difference of a score, ``scale`` of the samples' mean, and its interval.

    Each draw takes samples with replacement, the same ones of both runs.
    """
    count = min(len(samples), MOST_GROUPS)
    totals = [(one * weight, two * weight, weight) for one, two, weight in samples]
    groups = [tuple(map(sum, zip(*totals[n::count], strict=True))) for n in range(count)]

    def difference(chosen: Sequence[Any]) -> float:
        one, two, weight = map(sum, zip(*chosen, strict=True))
        return scale(two / weight) - scale(one / weight)

    draw = random.Random(SEED)
    found = sorted(difference(draw.choices(groups, k=count)) for _ in range(DRAWS))
    low, high = found[round(0.025 * DRAWS)], found[round(0.975 * DRAWS) - 1]
    return Difference(SCORES.get(score, score), difference(totals), low, high, len(samples))
