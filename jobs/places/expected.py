"""How long a job will probably take and cost: what the same command took before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from infra.errors import UsageError
from infra.files import read_object
from infra.words import counted, spoken_duration
from jobs.places.plan import RECORD, own_folder
from jobs.places.record import read_results
from jobs.worker.supervisor.attempt import SUCCEEDED

_PREPARATION = ("load", "tokenize")


@dataclass(frozen=True)
class Expected:
    """The seconds of the finished runs of a command on as many nodes, by job, oldest first."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    preparation_s: float = 0.0
    """The least that reading and tokenizing the data took; 0 if unknown."""

    @property
    def median_s(self) -> float:
        return median(self.seconds.values())

    def describe(self, usd_per_hour: float | None) -> str:
        """Return the expectation in one line; ``usd_per_hour`` is the price of all nodes."""

        def show(seconds: float) -> str:
            usd = (usd_per_hour or 0.0) * seconds / 3600
            return spoken_duration(seconds) + (f" (${usd:.2f})" if usd >= 0.005 else "")

        text = f"the same command took {show(self.median_s)}"
        if len(self.seconds) == 1:
            return f"{text} in {next(iter(self.seconds))}"
        low, high = min(self.seconds.values()), max(self.seconds.values())
        jobs = counted(len(self.seconds), "job")
        return f"{text} in the median of {jobs}, {show(low)} to {show(high)}"

    def as_dict(self, usd_per_hour: float | None) -> dict[str, Any] | None:
        """Return it for ``--json``; ``None`` if there was no such job."""
        if not self.seconds:
            return None
        known = {"median": self.median_s}
        known |= {"low": min(self.seconds.values()), "high": max(self.seconds.values())}
        usd = {
            f"usd_{k}": usd_per_hour and round(usd_per_hour * s / 3600, 4) for k, s in known.items()
        }
        return {"jobs": [*self.seconds], **{f"seconds_{k}": s for k, s in known.items()}, **usd}


def find_expected(
    command: str,
    nodes: int,
    cores: int | None,
    type_: str,
    others: Mapping[str, float],
    root: Path = Path("results"),
) -> Expected:
    """Return what is known from the results here; ``others`` are the seconds of jobs known otherwise."""
    asked = command, nodes, cores, {type_}
    found, preparations = dict(others), []
    for path in sorted(root.glob(f"*/{own_folder(Path()).name}/{RECORD}")):
        try:
            record = read_object(path)
            results = read_results(path.parents[1], record)
        except UsageError:
            continue
        types = {str(node.get("type")) for node in record.get("nodes", ())}
        same = (*(record.get(name) for name in ("command", "nnodes", "cores")), types)
        if same == asked and record.get("state") == SUCCEEDED and record.get("seconds"):
            spent = record.get("more", {}).get("spent", {}).get("seconds", 0.0)
            took = float(record["seconds"]) + record.get("earlier_s", 0.0) + spent
            found.setdefault(str(record.get("job")), took)
            known = results.get("seconds", {})
            preparations.append(sum(float(known.get(name, 0)) for name in _PREPARATION))
    return Expected(found, min(preparations, default=0.0))
