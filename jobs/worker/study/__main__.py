"""``python -m worker.study TASK PLAN OPTIONS [--resume]``: one rank of a study.

PLAN is a :class:`.plan.StudyPlan` as JSON; OPTIONS are those that all trials share. Every rank runs one trial
after another, each in its own process on the rank's cores, as a training run with one rank. Rank 0
serves the :class:`.coordinator.Coordinator` to all of them over XML-RPC. Then the best trial's output becomes
that of the job.

Exit code 1 is a failure, and 143 a stop by SIGTERM; the trials that it interrupted run again after a resume.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from xmlrpc.client import Error
from xmlrpc.server import SimpleXMLRPCServer

from ..runtime.checkpoint_names import CHECKPOINTS, newest, step_of
from ..runtime.errors import WorkerError, first_line
from ..runtime.events import Events, take_mark
from ..runtime.heartbeat import Heartbeat
from ..runtime.output import prepare_output, state_folder
from ..runtime.process import STOPPED, choose_interface, leave, read_identity
from ..tasks import TASKS
from .plan import STUDY, StudyPlan
from .trials import CONNECT_S, PAUSE_S, Remote, Stop, TrialRunner

if TYPE_CHECKING:
    from .coordinator import Coordinator

_ANSWER_S = 300.0
_SERVED = ("ask", "report", "is_better", "tell", "is_over", "join")
_UNSEEN = ("eval", "eval_fraction")


class _Server(SimpleXMLRPCServer):
    request_queue_size = 1024


@contextmanager
def serving(coordinator: Coordinator, address: str, port: int) -> Iterator[None]:
    """Serve the coordinator in its own thread: a context manager."""

    def call(text: Any) -> str:
        method, *arguments = json.loads(str(text))
        if method not in _SERVED:
            raise ValueError(method)
        return json.dumps(getattr(coordinator, method)(*arguments))

    with _Server((address, port), logRequests=False) as server:
        server.register_function(call, "call")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()


def main() -> int:
    """Run this rank's part of the study; returns its exit code."""
    task, plan, options, *more = sys.argv[1:]
    socket.setdefaulttimeout(_ANSWER_S)
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.on_signal)
    identity = read_identity(os.environ)
    events = Events(identity.rank, mark=take_mark())
    choose_interface(os.environ)
    heartbeat = Heartbeat(identity, events)
    heartbeat.start()
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
    try:
        shared = share_options(TASKS[task].Options.from_json(options))
        state = state_folder(Path(shared.output))
        runner = TrialRunner(identity.rank, shared, Remote(*address, stop), stop, state)
        if identity.rank:
            heartbeat.meet()
            runner.join()
            runner.run_all()
            code = STOPPED if stop.requested else 0
        else:
            studied = StudyPlan.from_fields(json.loads(plan))
            code = lead(studied, runner, identity.size, events, resume="--resume" in more)
    except WorkerError as error:
        events.error(error.message, error.hint)
        code = 1
    except OSError as error:
        code = STOPPED if stop.comes() else 1
        if code == 1:
            heartbeat.wait_for_verdict()
            events.error(f"rank {identity.rank} of the study fails: {error}", lost_peer=True)
    except Exception as error:
        traceback.print_exc()
        known = error if isinstance(error, Error) else type(error).__name__
        events.error(f"rank {identity.rank} of the study fails: {known}: {first_line(error)}")
        code = 1
    heartbeat.stop(goodbye=code != 1)
    return code


def share_options(options: Any) -> Any:
    """Return the options that all trials share: of a run with one rank and no checkpoints."""
    changed: dict[str, Any] = {"backend": "gloo", "checkpoint_every": 10**9}
    if options.eval_every == "auto" and any(getattr(options, name, None) for name in _UNSEEN):
        changed["eval_every"] = "epoch"  # it pays: bad trials end early
    return replace(options, **changed)


def lead(plan: StudyPlan, runner: TrialRunner, ranks: int, events: Events, *, resume: bool) -> int:
    """Run rank 0: the coordinator beside its own trials, and the study's results."""
    from .coordinator import Coordinator, restore

    options, state, stop, remote = runner.options, runner.state, runner.stop, runner.remote
    prepare_output(Path(options.output), resume=resume)
    shutil.rmtree(state / STUDY, ignore_errors=True)
    has_state = resume and restore(state)
    events.emit("phase", name="study")
    coordinator = Coordinator(plan, options, state, events, ranks)
    if has_state:
        events.note(f"{len(coordinator.ended())} of {plan.trials} trials have ended before")
    with serving(coordinator, remote.address, remote.port):
        runner.join()
        runner.run_all()
        until = time.monotonic() + CONNECT_S
        while not stop.requested and not remote.call("is_over"):
            if len(coordinator.hosts) < ranks and time.monotonic() > until:
                raise OSError(f"only {len(coordinator.hosts)} of {ranks} ranks have come")
            time.sleep(PAUSE_S)
    if not stop.requested:
        return coordinator.finish(Path(options.output))
    coordinator.save()
    if name := newest((state / CHECKPOINTS).glob("*")):
        events.emit("stopped", step=step_of(name), total=plan.trials, checkpoint=name)
    return STOPPED


if __name__ == "__main__":
    # Optuna, after the stack's packages: it replaces none.
    sys.path.append(str(Path("packages").absolute()))
    leave(main())
