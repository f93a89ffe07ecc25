"""Run a job's function as one rank. The engine and the benchmark each provide one such function.

The runtime checks the rank's placement, joins the ranks, and chooses the precision. It keeps ``logs/``,
prints the events of :mod:`.events`, and ends all ranks if one is lost. A function that stops on SIGTERM
raises :class:`StoppedError` (exit code 143). Rank 0 writes what the function returns to ``results.json``,
together with :meth:`.RankContext.facts`.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from .context import Hardware, Phases, RankContext, RankFacts, package_versions
from .errors import StoppedError, WorkerError, first_line
from .events import Events, take_mark
from .heartbeat import Heartbeat
from .output import RESULTS, keep_log, prepare_output, save_json
from .pinning import RankPlacement, explain_unpinned, take_place
from .precision import choose_precision, read_cpu_flags
from .process import STOPPED, RankIdentity, hide_progress_bars, read_identity
from .ranks import Ranks, join, lost_peer
from .trackers import TrackedRun, report_to


@dataclass(frozen=True)
class RunSettings:
    """The options of a job that the runtime needs."""

    backend: str
    output: Path | None
    """Folder for logs, metrics, and results; ``None`` writes no files."""
    dtype: str = "auto"
    resume: bool = False
    """Continue the run in ``output`` instead of replacing it."""
    model: str | None = None
    """The model's name for the ``start`` event."""
    report_to: str = "none"
    """Where rank 0's metrics go, as in ``--report-to``."""


Own = TypeVar("Own")
Main = Callable[[RankContext[Own]], "Mapping[str, Any] | None"]


def run_job(main: Main[Own], options: Own, settings: RunSettings) -> int:
    """Run a job's function as this rank, and return the process's exit code.

    It is 1 after a failure, which is printed as an ``error`` event, and 143 after a stop request. Rank 0
    saves and prints the results that the function returns; ``None`` stands for no results.
    """
    hide_progress_bars()
    mark = take_mark()
    events = Events(mark=mark)
    try:
        identity = read_identity(os.environ)
        events = Events(identity.rank, mark=mark)
        with _watch_peers(identity, events):
            _run(main, options, settings, events)
    except StoppedError as stopped:
        events.note(str(stopped))
        return STOPPED
    except WorkerError as error:
        events.error(error.message, error.hint)
    except Exception as error:
        _explain(error, events)
    else:
        return 0
    return 1


@contextmanager
def _watch_peers(identity: RankIdentity, events: Events) -> Iterator[None]:
    """End this process if another rank is lost: a context manager."""
    heartbeat = Heartbeat(identity, events)
    heartbeat.start()
    try:
        yield
    except Exception as error:
        if lost_peer(error):
            heartbeat.wait_for_verdict()  # the backend's error does not name the lost rank
        heartbeat.stop(goodbye=isinstance(error, StoppedError))
        raise
    heartbeat.stop(goodbye=True)


def _explain(error: Exception, events: Events) -> None:
    if lost_peer(error):
        hint = "the rank that failed first reports the cause; if none does, one of them hangs"
        events.error(f"lost contact with another rank: {first_line(error)}", hint, lost_peer=True)
        return
    traceback.print_exc()
    hint = "this is a bug in the job or in a library: see the traceback in the log"
    if "BFloat16" in str(error):  # for example in the masks of DeBERTa
        hint = "the model can't be computed in bf16: use --dtype fp32"
    events.error(f"{type(error).__name__}: {first_line(error)}", hint)


def _run(main: Main[Own], options: Own, settings: RunSettings, events: Events) -> None:
    phases, output = Phases(), settings.output
    if output is not None:
        keep_log(output, events.rank, append=settings.resume)
    planned, found = take_place(os.environ, torch.get_num_threads, torch.set_num_threads)
    unpinned = planned is not None and planned.cpus is None
    if unpinned and (warning := explain_unpinned(os.environ, found.threads)):
        events.warn(warning)
    with join(settings.backend) as ranks:
        hardware = ranks.gather(_this_machine(ranks, planned, found))
        flags = {each.facts.hostname: each.flags for each in hardware}
        precision = choose_precision(settings.dtype, flags)
        folder = output or RankContext.output
        context = RankContext(options, ranks, events, precision, hardware, folder, phases)
        _announce(context, settings.model)
        if output is not None and ranks.first:
            prepare_output(output, resume=settings.resume)
        with _report(context, settings):
            own = main(context)
            if own is None or not ranks.first:
                return
            results = {**context.facts(), **own}
            if output is not None:
                save_json(output / RESULTS, results)
            events.emit("result", **results)


def _report(context: RankContext[Own], settings: RunSettings) -> AbstractContextManager[None]:
    """Report to the trackers, on rank 0 of a run that writes files."""
    ranks, output = context.ranks, settings.output
    if output is None or not ranks.first or settings.report_to == "none":
        return nullcontext()
    chosen = {name: value for name, value in vars(context.options).items() if value is not None}
    facts = {"ranks": ranks.size, "backend": ranks.backend, "dtype": context.precision.name}
    return report_to(settings.report_to, TrackedRun(output, {**chosen, **facts}), context.events)


def _announce(context: RankContext[Own], model: str | None) -> None:
    ranks, precision, events = context.ranks, context.precision, context.events
    events.emit(
        "start",
        world_size=ranks.size,
        hosts=list(dict.fromkeys(context.hosts)),
        backend=ranks.backend,
        dtype=precision.name,
        model=model,
        versions=package_versions(),
    )
    events.note(f"{precision.name}: {precision.reason}")
    events.note(f"{ranks.backend}: {ranks.backend_reason}")
    place = context.hardware[0].facts.found
    events.note(f"rank 0: CPUs {place.cpus}, threads {place.threads}, memory {place.memory}")


def _this_machine(ranks: Ranks, planned: RankPlacement | None, found: RankPlacement) -> Hardware:
    host, cpus = socket.gethostname(), len(os.sched_getaffinity(0))
    facts = RankFacts(ranks.rank, host, os.getpid(), found.threads, cpus, planned, found)
    return Hardware(facts, read_cpu_flags())
