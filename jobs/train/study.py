"""What ``--tune`` varies: the words of the command line as a :class:`~jobs.worker.study.plan.StudyPlan`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from infra.errors import UsageError
from infra.words import nearest
from jobs.places.plan import PackageList
from jobs.train.request import FILES, OTHER_FILES
from jobs.train.trackers import tracker_packages
from jobs.worker.study.plan import Domain, StudyPlan
from jobs.worker.training.options import TrainOptions, defined_options, flag

OPTUNA = "optuna>=4.2,<5"
OPENVINO = ("openvino>=2026.3,<2027", "nncf>=3.3,<4")
DEFAULT_TRIALS, MOST_TRIALS = 20, 1000
PLACEMENT = ("nodes", "ppn", "ccl_workers")
"""What changes how fast a job is, but not what it learns."""
WORDS: Mapping[str, tuple[str, ...]] = {"placement": ("ppn", "ccl_workers"), "nodes": ("nodes",)}
"""Words for options of which the values that suit the nodes are tried."""
# What decides which runs can be compared, and what the nodes or the study itself decide.
_FIXED = {
    *(*FILES, *OTHER_FILES, "backend", "checkpoint_every", "dataset", "digits", "eval_every"),
    *("eval_fraction", "keep", "keep_checkpoints", "label_column", "label_separator", "metric"),
    *("model", "negative_column", "objective", "output", "pair_column", "push_to", "report_to"),
    *("resume", "skip_bad_records", "text_column", "token_cache", "train_on", "trial_seconds"),
}
_RANGE = re.compile(r"(?P<low>.+?)\.\.(?P<high>.+?)(?P<log>:log)?")


def parse_tune(words: Sequence[str], options: TrainOptions) -> dict[str, Domain]:
    """Return what ``--tune`` varies, by the options' names.

    A word names one or several options: ``learning-rate=1e-5..1e-3:log,batch-size=8,16``. Raises
    :class:`UsageError` for unknown options, and for values that the options don't take.
    """
    given: dict[str, str] = {}
    for word in words:
        for part in re.split(r",(?=[a-z][a-z-]*=)", word):
            name, _, values = part.partition("=")
            if part in WORDS:
                given |= {each: "" for each in WORDS[part] if each not in given}
            elif not name or not values:
                raise UsageError(
                    f"--tune {part}: expected NAME=VALUES",
                    hint="such as learning-rate=1e-5..1e-3:log or batch-size=8,16,32, or one of "
                    + ", ".join(WORDS),
                )
            else:
                key = name.removeprefix("--").replace("-", "_")
                if given.get(key):
                    raise UsageError(f"--tune {name}: given twice", hint="give one list or range")
                given[key] = values
    found = {name: _parse_domain(name, text, options) for name, text in given.items()}
    placement = [name for name in found if name in PLACEMENT]
    if placement and "batch_size" in found and not found["batch_size"].choices:
        raise UsageError("--tune batch-size: a study of the speed needs a list, such as 8,16,32")
    learned = [name for name in found if name not in (*PLACEMENT, "batch_size")]
    if placement and learned:
        raise UsageError(
            f"--tune: {flag(placement[0])} changes the speed, {flag(learned[0])} what is learned",
            hint="run two studies, the one of the speed first",
        )
    return found


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _parse_domain(name: str, text: str, options: TrainOptions) -> Domain:
    if name in PLACEMENT:
        return Domain(_parse_counts(name, text))
    known = {each.name: each.metadata["kind"] for each in defined_options(type(options))}
    if name not in known or name in _FIXED:
        near = nearest(_dashed(name), map(_dashed, known.keys() - _FIXED))
        raise UsageError(
            f"--tune {_dashed(name)}: `train {options.task}` has no such option to vary{near}"
        )
    _require_use(name, options)
    if name == "seed" and getattr(options, "eval_fraction", None):
        raise UsageError("--tune seed: it also chooses the rows of --eval-fraction; use --eval")
    kind, match = known[name], _RANGE.fullmatch(text)
    if kind in (int, float) and match:
        low, high = (_parse_value(name, match[end], kind, options) for end in ("low", "high"))
        domain = Domain(low=low, high=high, log=bool(match["log"]))
        if not low < high or (domain.log and low <= 0):
            raise UsageError(
                f"--tune {_dashed(name)}={text}: expected a smaller number before a larger one"
                + (", both above 0" if domain.log else "")
            )
        return domain
    values = [_parse_value(name, word, kind, options) for word in text.split(",")]
    return Domain(_require_different(name, text, values))


def _require_use(name: str, options: TrainOptions) -> None:
    """Raise :class:`UsageError` if the option would have no effect without another one."""
    (needs,) = (e.metadata["needs"] for e in defined_options(type(options)) if e.name == name)
    if needs and not getattr(options, needs.removeprefix("--").replace("-", "_")):
        raise UsageError(f"--tune {_dashed(name)} requires {needs}")


def _parse_value(name: str, word: str, kind: type, options: TrainOptions) -> Any:
    what = f"--tune {_dashed(name)}"
    try:
        value: Any = {"true": True, "false": False}[word.lower()] if kind is bool else kind(word)
    except (ValueError, KeyError):
        expected = {int: "whole numbers", float: "numbers"}.get(kind, "true or false")
        raise UsageError(f"{what}: {word!r}: expected {expected}") from None
    try:
        replace(options, **{name: value})
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from None
    return value


def _parse_counts(name: str, text: str) -> tuple[int, ...]:
    words = text.split(",") if text else []
    if not all(re.fullmatch(r"[1-9]\d{0,2}", word) for word in words):
        raise UsageError(f"--tune {_dashed(name)}={text}: expected whole numbers such as 1,2,4")
    return _require_different(name, text, [*map(int, words)])


def _require_different(name: str, text: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if len({*values}) < len(values):
        raise UsageError(f"--tune {_dashed(name)}={text}: a value is there twice")
    return tuple(values)


def is_placement(tune: Mapping[str, Domain]) -> bool:
    """Return whether a study compares speeds, not scores."""
    return any(name in PLACEMENT for name in tune)


def plan_study(
    tune: Mapping[str, Domain],
    trials: int | None,
    options: TrainOptions,
) -> StudyPlan:
    """Return a study of scores. Raises :class:`UsageError` if no score compares its trials."""
    if not options.metrics:
        raise UsageError(f"--tune: `train {options.task}` has no score to compare trials by")
    if trials and trials > MOST_TRIALS:
        raise UsageError(f"--trials {trials} is out of range: 1 to {MOST_TRIALS}")
    every = StudyPlan(tune, 1).size
    if trials is None and every > MOST_TRIALS:
        raise UsageError(f"--tune: {every} combinations", hint=f"--trials N, at most {MOST_TRIALS}")
    most = trials or every or DEFAULT_TRIALS
    return StudyPlan(tune, min(most, every or most))


def job_packages(options: TrainOptions, study: Mapping[str, Any]) -> PackageList | None:
    """Return what to install beside the stack: the clients of trackers, and what options need."""
    needs: dict[str, tuple[str, ...]] = {"--tune": (OPTUNA,)} if study else {}
    needs |= {"--export": OPENVINO} if getattr(options, "export", None) else {}
    found = tracker_packages(options.report_to)
    if not needs:
        return found
    lines = tuple(chain.from_iterable(needs.values()))
    if found is None:
        return PackageList(", ".join(needs), lines, hint="they need an index of Python packages")
    return replace(found, source=", ".join([*needs, found.source]), lines=(*lines, *found.lines))
