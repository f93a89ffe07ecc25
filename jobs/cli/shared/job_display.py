"""Display of a training job: one live line, its log, and its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.console.display import PlainProgress, TreeProgress, format_seconds
from cluster.console.output import printable
from infra.cost.prices import Price
from infra.errors import JobError
from infra.words import counted
from jobs.places.launcher import JobEnd
from jobs.worker.supervisor.attempt import describe
from jobs.worker.tasks import SCORES, format_score
from jobs.worker.training.options import flag

_BAR = 20
_LISTED_SHARES = 4
_LINES = {
    "start": "{world_size} ranks on {hosts}; backend {backend}, {dtype}",
    "note": "{text}",
    "restarted": "attempt {attempt}, on {nodes}",
    "elements": "{done} of {total} done, {failed} failed",
    "resumed": "resuming after step {step} of {total}",
    "stopped": "stopped after step {step} of {total}, saved as checkpoint {checkpoint}",
}


class JobDisplay:
    """Shows a job's events as a live line, and its log as it arrives; ``cost`` is in USD."""

    def __init__(
        self, progress: PlainProgress | TreeProgress, cost: Callable[[], Price | None] | None = None
    ) -> None:
        self._progress = progress
        self._cost = cost
        self._last_note = (-1.0, 0.0)

    def log(self, text: str) -> None:
        """Show one or more lines."""
        console = getattr(self._progress, "console", None)
        if console is None:
            # A single write per line: print() would do two.
            sys.stderr.write(f"{text}\n")
        else:
            clean = "\n".join(map(printable, text.split("\n")))
            console.print(clean, markup=False, highlight=False)

    def event(self, event: dict[str, Any]) -> None:
        """Show one event of the job."""
        kind = event["event"]
        if kind == "phase":
            self._progress.note(event["name"])
        elif kind == "state":
            if hasattr(self._progress, "console"):
                self._progress.note(printable(event["text"]))
        elif kind == "elements":
            self._note(event["done"] / event["total"], render_event(event))
        elif kind == "step":
            self._step(event)
        # The job's end has its error.
        elif kind != "error" and (text := render_event(event)):
            self.log(text)

    def _step(self, event: dict[str, Any]) -> None:
        done, total = event["step"], event["total"]
        self._note(done / total, render_step(event, self._cost() if self._cost else None))

    def _note(self, share: float, text: str) -> None:
        if hasattr(self._progress, "console") or self._is_due(share):
            self._progress.note(text)

    def _is_due(self, share: float) -> bool:
        """Without a live display, print a line every ten seconds or every 5 % of the work."""
        now, (last_share, last) = time.monotonic(), self._last_note
        if share < min(1, last_share + 0.05) and now < last + 10:
            return False
        self._last_note = (share, now)
        return True


def render_event(event: Mapping[str, Any]) -> str:
    """Return an event as a line of text; "" for events without text."""
    kind = event["event"]
    if kind == "step":
        return render_step(event, None)
    if kind == "evaluation":
        return render_evaluation(event)
    if kind == "error":
        return str(JobError(describe(event), hint=event.get("hint")))
    names = {name: ", ".join(event.get(name, ())) for name in ("hosts", "nodes")}
    return _LINES[kind].format_map({**event, **names}) if kind in _LINES else ""


def render_evaluation(event: Mapping[str, Any]) -> str:
    """Render the scores after a step, the one that chooses the best model first."""
    names = sorted(event["scores"], key=lambda name: name != event["metric"])
    scores = ", ".join(
        f"{SCORES.get(name, name)} {format_score(name, event['scores'][name], 2)}" for name in names
    )
    best = ", the best so far" if event["best"] else ""
    return f"after step {event['step']} of {event['total']}: {scores}{best}"


def render_step(event: Mapping[str, Any], cost: Price | None) -> str:
    """Render the live line: progress, speed, the nodes' shares, remaining time, and cost."""
    done, total = event["step"], event["total"]
    filled = _BAR * done // total
    parts = [
        f"{'█' * filled}{'░' * (_BAR - filled)} step {done}/{total}",
        f"epoch {event['epoch']:.2f}",
        f"loss {event['loss']:.3f}",
        f"{event['samples_per_second']:.1f} samples/s",
        f"{event['tokens_per_second']:,.0f} tokens/s",
        render_shares(list(event["shares"].values())),
        f"{format_seconds(event['eta_seconds'])} left",
        f"{cost} so far" if cost else "",
    ]
    return "  ".join(part for part in parts if part)


def render_shares(shares: list[float]) -> str:
    """Return the nodes' shares of the computing power in percent; for many nodes the range."""
    percent = [f"{100 * share:.0f}" for share in shares]
    if len(shares) < 2:
        return ""
    if len(shares) <= _LISTED_SHARES:
        return f"nodes {'/'.join(percent)} %"
    return f"nodes {100 * min(shares):.1f} to {100 * max(shares):.1f} %"


def render_end(job: str, end: JobEnd, result: dict[str, Any], folder: Path) -> str:
    """Render a job's outcome, with the result of a training job."""
    if "scores" in result or "f1" in result or "smoke" in result:
        return render_result(result, folder)
    took = f" after {format_seconds(end.seconds)}" if end.seconds is not None else ""
    return f"job {job} {end.state}{took}\noutput, log, and job.json: {folder}/"


def render_result(result: dict[str, Any], folder: Path) -> str:
    """Render the result in a few lines. Raises :class:`JobError` if it is damaged."""
    try:
        return _render(result, folder)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise JobError(
            f"{folder / 'results.json'} is damaged: {error!r}", hint=f"the log is {folder / 'log'}"
        ) from None


def _render(result: dict[str, Any], folder: Path) -> str:
    if "smoke" in result:
        return f"smoke run of the published recipe: {result['smoke']}\nlog and job.json: {folder}/"
    rows = result.get("trials") or result["ranks"]
    hosts = len({row.get("host", row.get("hostname")) for row in rows})
    size = (
        counted(len(rows), "trial") if "trials" in result else f"world size {result['world_size']}"
    )
    speed = []
    # A run that only evaluates has no speed, and run_qa.py does not count tokens.
    for unit, digits in (("samples", 1), ("tokens", 0)):
        if (value := result.get(f"{unit}_per_second")) is not None:
            speed.append(f"{value:,.{digits}f} {unit}/s")
    # The best trial of a resumed study may have trained before, and `export` trains nothing.
    if (train := result["seconds"].get("train")) is not None and result.get("epochs") != 0:
        speed.append(f"{train:.1f} s of training")
    line = f"{', '.join(speed)}\n" if speed else ""
    return (
        f"{_render_study(result)}{_render_quality(result)}\n"
        f"{size} on {counted(hosts, 'host')}, "
        f"backend {result['backend']}, {result['dtype']}\n"
        f"{line}"
        f"{_render_export(result.get('export'))}"
        f"model, predictions, and results.json: {folder}/"
    )


def _render_export(export: dict[str, Any] | None) -> str:
    """Return a line about the model for OpenVINO; "" without one."""
    if not export:
        return ""
    original, *_, chosen = export["forms"]
    gain = chosen["rows_per_second"] / original["rows_per_second"]
    return (
        f"exported as {chosen['form']}: {gain:.2f} times the rows per second of {original['form']}, "
        f"a loss of {chosen['loss']:.2f} in {export['metric']}\n"
    )


def _render_study(result: dict[str, Any]) -> str:
    """Return a line about a study's best trial; "" for one run."""
    trials = result.get("trials", [])
    best = next((each for each in trials if each["best"]), None)
    if best is None:
        return ""
    tried = " ".join(f"{flag(name)} {value}" for name, value in best["options"].items())
    return f"the best trial: {tried}\n"


def _render_quality(result: dict[str, Any]) -> str:
    """Return the scores; run_qa.py may not have evaluated the model."""
    found = result.get("scores", {"f1": result.get("f1"), "em": result.get("em")})
    known = [
        f"{SCORES.get(name, name)} {format_score(name, value)}"
        for name, value in found.items()
        if value is not None
    ]
    quality = ", ".join(known) or "not evaluated"
    if result.get("recipe") == "reference":
        return f"published recipe: {quality}"
    return f"{quality} on {counted(result['eval_records'], 'record')}"
