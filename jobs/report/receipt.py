"""A job's receipt: where its time and money went, and what would have been cheaper."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.console.display import format_seconds
from infra.errors import UsageError
from infra.words import counted
from jobs.report.figures import (
    EVALUATION,
    OTHER,
    PREPARATION,
    SAVING,
    HourlyPrice,
    find_price,
    format_costs,
    format_usd,
    split_phase,
)
from jobs.report.results_folder import RESULTS, Run, as_number, read_record, read_run
from jobs.worker.runtime.errors import TrainingError
from jobs.worker.runtime.output import save_json

BOOT, IDLE = "boot and installation", "idle before it"
FORMER = "failed or replaced nodes"
EARLIER, START = "earlier attempts and pauses", "staging and start"
COMPUTING, WAITING = "computing", "waiting for ranks"
_NAMES = {
    "load": "reading the data",
    "tokenize": "tokenizing",
    "teacher": "teacher",
    "measure": "compiling and measuring",
    "predict": COMPUTING,
    "push": SAVING,
}
_PARTS = {PREPARATION: "preparation", EVALUATION: EVALUATION, SAVING: SAVING}
_PARTS |= {"communication": WAITING, OTHER: OTHER}
_MUCH = 0.3


@dataclass(frozen=True)
class Receipt:
    """The seconds of each part of a job on its nodes; together, all that it took.

    Those before its last attempt count as longer ones if they were on more nodes.
    """

    seconds: Mapping[str, float]
    nodes: int
    price: HourlyPrice | None

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def usd(self, seconds: float) -> float | None:
        """Return the price of so many seconds of all nodes, if it is known."""
        return self.price.usd(seconds) if self.price else None

    @property
    def advice(self) -> str:
        """What would have been cheaper, if the ranks waited much; "" otherwise. A projection."""
        waiting, computing = (self.seconds.get(name, 0.0) for name in (WAITING, COMPUTING))
        half = self.nodes // 2
        total = self.usd(self.total_s)
        if not half or not total or waiting <= _MUCH * (waiting + computing):
            return ""
        # Fewer nodes compute longer, and wait as long.
        slower = self.total_s + computing * (self.nodes / half - 1)
        usd = total / self.total_s * slower * half / self.nodes
        share = 100 * waiting / (waiting + computing)
        fewer = f"{counted(half, 'node')} instead of {self.nodes}"
        return (
            f"{share:.0f} % of training was waiting: {fewer} would cost about {format_usd(usd)} instead of "
            f"{format_usd(total)}, and take {format_seconds(slower)}."
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Return each part, its time, and its price, and the total."""
        parts = {**self.seconds, "total": self.total_s}
        return format_costs((name, seconds, self.usd(seconds)) for name, seconds in parts.items())

    def as_dict(self) -> dict[str, Any]:
        """Return it for ``results.json``."""
        return {
            "seconds": self.total_s,
            "usd": self.usd(self.total_s),
            "usd_per_hour": self.price and self.price.usd_per_hour,
            "price_source": self.price and self.price.source,
            "parts": {n: {"seconds": s, "usd": self.usd(s)} for n, s in self.seconds.items()},
            "advice": self.advice or None,
        }


def make_receipt(run: Run, price: HourlyPrice | None) -> Receipt | None:
    """Return a job's receipt; ``None`` if its record does not say how long it took.

    The boot and installation of the nodes belong to the first job on them. Idle time, and the machines that
    the cluster gave up, belong to the job after it.
    """
    keys = ("seconds", "boot_s", "idle_s", "former_s", "earlier_s", "resumed_s")
    took, boot, idle, former, earlier, resumed = (
        as_number(run.job.get(key)) or 0.0 for key in keys
    )
    if not took or not run.nodes:
        return None
    used = len(run.recorded_nodes) or run.nodes
    started = as_number(run.job.get("run_nodes")) or as_number(run.job.get("nnodes"))
    more = (started or used) / used
    paid = (as_number(run.job.get("earlier_node_s")) or earlier * used) / used
    before = {BOOT: boot, IDLE: idle, FORMER: former, EARLIER: resumed}
    parts = {name: seconds * more for name, seconds in before.items()}
    parts[EARLIER] += paid
    phases = {name: seconds for name, seconds in run.seconds.items() if name != "total"}
    program = max(run.seconds.get("total", 0.0), sum(phases.values()))
    parts[START] = max(0.0, took - program) if program else 0.0
    # A resumed run's own times include those of the run before.
    scale = min(1.0, took / program) if program else 0.0
    for phase, seconds in phases.items():
        for part, part_s in split_phase(phase, seconds, run.series).items():
            name = _NAMES.get(phase) or _PARTS.get(part, COMPUTING)
            parts[name] = parts.get(name, 0.0) + part_s * scale
    own = sum(seconds for name, seconds in parts.items() if name not in (*before, OTHER))
    parts[OTHER] = max(0.0, took - own)
    if boot or idle:  # the nodes had nothing else to do until it started
        parts[START] += _waited_to_start(run, took + earlier) * more
    return Receipt({name: s for name, s in parts.items() if s > 0}, run.nodes, price)


def _waited_to_start(run: Run, took: float) -> float:
    """Return the seconds from the submission to the first start."""
    with suppress(KeyError, TypeError, ValueError):
        when, ended = (datetime.fromisoformat(run.job[key]) for key in ("when", "ended"))
        return max(0.0, (ended - when).total_seconds() - took)
    return 0.0


def read_receipt(folder: Path, *, whole: bool = True) -> tuple[Run, Receipt] | None:
    """Return an ended job and its receipt, from its results or only its record, if they are in a folder.

    Without ``whole``, only the record is read, which has no metrics of many steps; the total is the same.
    """
    with suppress(UsageError):
        try:
            run = read_run(folder) if whole else read_record(folder)
        except UsageError:  # it has failed
            run = read_record(folder)
        if receipt := make_receipt(run, find_price(run, None, None)):
            return run, receipt
    return None


def add_receipt(folder: Path) -> dict[str, Any]:
    """Write the receipt into our ``results.json``, if there is one; return what was added."""
    run, receipt = read_receipt(folder) or (None, None)
    if not (run and receipt and run.results):
        return {}
    added = {"receipt": receipt.as_dict()}
    try:
        save_json(folder / RESULTS, {**run.results, **added})
    except (TrainingError, ValueError):  # on a full disk, the job has its results all the same
        return {}
    return added
