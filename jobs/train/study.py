"""What ``--tune`` varies: the words of the command line as a :class:`~jobs.worker.study.plan.StudyPlan`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from infra.errors import UsageError
from infra.words import nearest
from jobs.places.plan import PackageList
from jobs.train.request import FILES, OTHER_FILES
from jobs.worker.study.plan import Domain, StudyPlan
from jobs.worker.training.options import TrainOptions, defined_options, flag

OPTUNA = "optuna>=4.2,<5"
DEFAULT_TRIALS, MOST_TRIALS = 20, 1000
PLACEMENT = ("nodes", "ppn", "ccl_workers")
"""What changes how fast a job is, but not what it learns."""
WORDS: Mapping[str, tuple[str, ...]] = {"placement": ("ppn", "ccl_workers"), "nodes": ("nodes",)}
"""Words for options of which the values that suit the nodes are tried."""
# What decides which runs can be compared, and what the nodes or the study itself decide.
_FIXED = frozenset(
    {
        *(*FILES, *OTHER_FILES, "output", "resume", "trial_seconds", "push_to", "report_to"),
        *(
            "metric",
            "keep",
            "eval_every",
            "eval_fraction",
            "token_cache",
            "backend",
            "checkpoint_every",
        ),
        *("keep_checkpoints", "model"),
    }
)
_RANGE = re.compile(r"(?P<low>[^.].*?)\.\.(?P<high>.+?)(?P<log>:log)?")


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
                given[name.removeprefix("--").replace("-", "_")] = values
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


def _parse_domain(name: str, text: str, options: TrainOptions) -> Domain:
    if name in PLACEMENT:
        return Domain(_parse_counts(name, text))
    known = {each.name: each.metadata["kind"] for each in defined_options(type(options))}
    if name not in known or name in _FIXED:
        near = nearest(name.replace("_", "-"), [n.replace("_", "-") for n in known.keys() - _FIXED])
        raise UsageError(
            f"--tune {name.replace('_', '-')}: `train {options.task}` has no such option to vary{near}"
        )
    _require_use(name, options)
    kind, match = known[name], _RANGE.fullmatch(text)
    if kind in (int, float) and match:
        low, high = (_parse_value(name, match[end], kind, options) for end in ("low", "high"))
        domain = Domain(low=low, high=high, log=bool(match["log"]))
        if not low < high or (domain.log and low <= 0):
            raise UsageError(
                f"--tune {name.replace('_', '-')}={text}: expected a smaller number before a larger one"
                + (", both above 0" if domain.log else "")
            )
        return domain
    values = [_parse_value(name, word, kind, options) for word in text.split(",")]
    return Domain(tuple(dict.fromkeys(values)))


def _require_use(name: str, options: TrainOptions) -> None:
    """Raise :class:`UsageError` if the option would have no effect without another one."""
    (needs,) = (e.metadata["needs"] for e in defined_options(type(options)) if e.name == name)
    other, _, value = needs.removeprefix("--").partition(" ")
    current = getattr(options, other.replace("-", "_"), None) if needs else True
    if not current or (value and current != value):
        raise UsageError(f"--tune {name.replace('_', '-')} requires {needs}")


def _parse_value(name: str, word: str, kind: type, options: TrainOptions) -> Any:
    try:
        if kind is bool:
            value: Any = {"true": True, "false": False}[word]
        else:
            value = kind(word)
        replace(options, **{name: value})
    except (ValueError, KeyError) as error:
        why = str(error) if isinstance(error, ValueError) and flag(name) in str(error) else ""
        expected = {int: "whole numbers", float: "numbers", bool: "true or false"}.get(
            kind, "values"
        )
        raise UsageError(
            f"--tune {name.replace('_', '-')}: {why or f'{word!r}: expected {expected}'}"
        ) from None
    return value


def _parse_counts(name: str, text: str) -> tuple[int, ...]:
    words = text.split(",") if text else []
    if not all(re.fullmatch(r"[1-9]\d{0,2}", word) for word in words):
        raise UsageError(
            f"--tune {name.replace('_', '-')}={text}: expected whole numbers such as 1,2,4"
        )
    return tuple(dict.fromkeys(map(int, words)))


def is_placement(tune: Mapping[str, Domain]) -> bool:
    """Return whether a study compares speeds, not scores."""
    return any(name in PLACEMENT for name in tune)


def plan_study(
    tune: Mapping[str, Domain],
    trials: int | None,
    options: TrainOptions,
    max_time_s: float = 0.0,
) -> StudyPlan:
    """Return a study of scores. Raises :class:`UsageError` if no score compares its trials."""
    if not options.metrics:
        raise UsageError(f"--tune: `train {options.task}` has no score to compare trials by")
    if trials and trials > MOST_TRIALS:
        raise UsageError(f"--trials {trials} is out of range: 1 to {MOST_TRIALS}")
    every = math.prod(len(each.choices) for each in tune.values())
    if trials is None and every > MOST_TRIALS:
        raise UsageError(f"--tune: {every} combinations", hint=f"--trials N, at most {MOST_TRIALS}")
    most = trials or every or DEFAULT_TRIALS
    return StudyPlan(tune, min(most, every) if every else most, max_time_s)


def study_packages(report_to: PackageList | None) -> PackageList:
    """Return Optuna, and the clients of trackers, to install beside the stack."""
    if report_to is None:
        return PackageList("--tune", (OPTUNA,), hint="they need an index of Python packages")
    return replace(
        report_to, source=f"--tune, {report_to.source}", lines=(OPTUNA, *report_to.lines)
    )
