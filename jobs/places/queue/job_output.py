"""Follow a job: its wait in the queue, output, silence, Ctrl-C, and the cause of a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cluster.slurm.job_queue import describe_reason, how_to_end
from infra.errors import HangupError, HostError, JobError
from jobs.places.launcher import JobEnd
from jobs.places.plan import STOP_SECONDS, JobPaths
from jobs.places.queue.slurm import SlurmLauncher
from jobs.worker.runtime.events import mark_of, parse_event, prefix_of
from provision.install import explain_mpi_failure

Event = dict[str, Any]
_KEPT_LOG_LINES = 200
# The caller gets the last event of each kind; there are thousands of steps.
_NOT_KEPT = {"step", "phase", "elements"}


@dataclass
class JobOutput:
    """A job's output: events for the display, the last log lines, and errors."""

    on_event: Callable[[Event], None]
    on_log: Callable[[str], None]
    job: str = ""
    """The job's ID, which determines the mark of its events; "" if they have none."""
    quiet: bool = False
    """Keep the job's log lines without showing them or its command."""
    lines: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    """Reasons for waiting that were shown already."""
    on_eta: Callable[[float], None] = lambda _: None
    """Called with the seconds that training still needs."""
    may_be_silent: bool = False
    heard: float = field(default_factory=time.monotonic)
    """When the job printed its last line."""

    @cached_property
    def _mark(self) -> str:
        return mark_of(self.job) if self.job else ""

    def add(self, text: str) -> None:
        """Add one or more lines of the job's output."""
        self.heard = time.monotonic()
        # Lines without events are handled together: programs print millions of them.
        for part in text.split("\n") if prefix_of(self._mark) in text else [text]:
            if event := parse_event(part, self._mark):
                self._take(event)
                continue
            self.lines += part.rsplit("\n", _KEPT_LOG_LINES)[-_KEPT_LOG_LINES:]
            del self.lines[:-_KEPT_LOG_LINES]
            if not self.quiet:
                self.show(part)

    def _take(self, event: Event) -> None:
        if event["event"] == "restarted":
            # The earlier attempt's reports are out of date.
            self.events.clear()
            self.lines.clear()
        if event["event"] == "step":
            self.on_eta(event["eta_seconds"])
        if event["event"] not in _NOT_KEPT:
            self.events.append(event)
        # The job matters more than its display, whose terminal may be gone.
        with suppress(OSError):
            self.on_event(event)

    def show(self, text: str) -> None:
        """Show lines of text unless the display is off or gone."""
        with suppress(OSError):
            self.on_log(text)

    def note_state(self, state: str) -> None:
        """Show the current state of a line that rewrites itself, such as a progress bar."""
        self.heard = time.monotonic()
        with suppress(OSError):
            self.on_event({"event": "state", "text": state})

    def note_waiting(self, reason: str) -> None:
        """Show once why the job waits in the queue."""
        self.heard = time.monotonic()
        # For a moment, Slurm gives new jobs no reason or only a generic one.
        if reason not in (*self.waits, "None"):
            self.waits.append(reason)
            self.show(f"waiting in the queue: {describe_reason(reason)}")


def how_to_come_back(job: str, flags: str) -> str:
    """Return the commands that reattach to a job that runs on without this process, and that end it."""
    return (
        f"job {job} continues without this command\n"
        f"  to follow it: spr-cluster attach {job} {flags}\n"
        f"  to end it:    {how_to_end(job, flags)}"
    )


@contextmanager
def note_silence(
    output: JobOutput, minute_s: float = 60, tick: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Show for how long a job has printed nothing: after 1, 2, 4, 8, … minutes. Call ``tick`` often."""
    ended = threading.Event()

    def watch() -> None:
        minutes = 1
        while not ended.wait(minute_s / 12):
            tick()
            if output.may_be_silent:
                continue
            silent = (time.monotonic() - output.heard) / minute_s
            if silent < 1:
                minutes = 1
            elif silent >= minutes:
                output.show(f"no output for {minutes} min")
                minutes *= 2

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def stop_job(
    launcher: SlurmLauncher, paths: JobPaths, grace_s: int, on_log: Callable[[str], None]
) -> tuple[str, ...]:
    """End a job on all nodes and report the outcome; see :meth:`SlurmLauncher.cancel` for its time.

    Ctrl-C kills it immediately. Returns the names of nodes that can't be reached. Raises :class:`JobError` if
    the head can't.
    """
    if grace_s > STOP_SECONDS:
        on_log(
            "stopping; a job that has begun to train saves a checkpoint first; press Ctrl-C again to "
            "stop immediately"
        )
    try:
        silent = _cancel(launcher, paths, grace_s)
    except HostError as error:
        if gone := launcher.head.why_gone():
            on_log(f"the job ended with its head node: {gone}")
            return ()
        raise JobError(
            f"job {paths.job_id} may still be running and costing money: {error.message}",
            hint=f"once the head is reachable: {how_to_end(paths.job_id, launcher.flags)}, or "
            f"`spr-cluster down {launcher.flags}`",
        ) from None
    if silent:
        on_log(
            f"{', '.join(silent)} can't be reached, and ranks may still be running there: "
            f"`spr-cluster repair {launcher.flags}` replaces nodes that don't answer"
        )
    on_log(f"Job stopped on all nodes{' that can be reached' if silent else ''}")
    return silent


def _cancel(launcher: SlurmLauncher, paths: JobPaths, grace_s: int) -> tuple[str, ...]:
    try:
        return launcher.cancel(paths, grace_s)
    except HangupError:
        raise  # the head still ends it
    except KeyboardInterrupt:
        launcher.head.close()
        return launcher.cancel(paths, 0)


def explain(end: JobEnd, output: JobOutput, hint: str) -> JobError:
    """Return the root cause of a failure."""
    if end.message:
        errors = (event for event in output.events if event["event"] == "error")
        causes = [event for event in errors if event.get("rank") == end.rank]
        own = causes[0].get("hint") if causes else None
        return JobError(end.cause, hint=f"{own}; {hint}" if own else hint)
    known = explain_mpi_failure(output.lines)
    last = next((line for line in reversed(output.lines) if line.strip()), "no output")
    code = f"with exit code {end.exit_code}"
    return JobError(known or f"the job ended {code}: {last.strip()}", hint=hint)
