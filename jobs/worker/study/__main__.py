"""``python -m worker.study TASK PLAN OPTIONS [--resume]``: one rank of a study.

PLAN is a :class:`.plan.StudyPlan` as JSON; OPTIONS are those that all trials share. Every rank runs one trial
after another, each in a process of its own on the rank's cores, as a training run with one rank. Rank 0
serves the :class:`.coordinator.Coordinator` to all of them over XML-RPC. Then the best trial's output becomes
that of the job.

Exit code 1 is a failure, and 143 a stop by SIGTERM; the trials that it interrupted run again after a resume.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any
from xmlrpc.client import ServerProxy
from xmlrpc.server import SimpleXMLRPCServer

from ..runtime.checkpoint_names import CHECKPOINTS, newest, step_of
from ..runtime.errors import WorkerError
from ..runtime.events import MARK, Events, parse_event, take_mark
from ..runtime.output import RESULTS, prepare_output, state_folder
from ..runtime.process import PLANNED, STOPPED, choose_interface, leave, read_identity
from ..tasks import TASKS
from ..training.best import pick_scores
from .plan import STUDY, StudyPlan

if TYPE_CHECKING:
    from .coordinator import Coordinator

_CONNECT_S, _ANSWER_S, _SOON_S, _PAUSE_S = 120.0, 300.0, 5.0, 0.2
_TRIALS = Path("trials")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_OF_MPIRUN = ("PMI_", "HYD", "I_MPI_", "MASTER_", PLANNED, MARK)
_SERVED = ("ask", "report", "is_better", "tell", "is_over", "join")
_UNSEEN = ("eval", "eval_fraction")
_SSH = ("ssh", "-o", "ConnectTimeout=10")


@dataclass
class Stop:
    """Whether SIGTERM has come, and the trial that it ends."""

    requested: bool = False
    process: subprocess.Popen[str] | None = None

    def comes(self) -> bool:
        """Return whether SIGTERM has come, or comes soon: mpirun and Slurm may first send it to the trial."""
        until = time.monotonic() + _SOON_S
        while not self.requested and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        return self.requested

    def __call__(self, *_: object) -> None:
        self.requested = True
        if self.process is not None:
            self.process.terminate()


class Remote:
    """The coordinator, from any rank."""

    def __init__(self, address: str, port: int, stop: Stop) -> None:
        self._url, self._stop = f"http://{address}:{port}", stop

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method. Raises ``OSError`` if rank 0 does not answer."""
        until = time.monotonic() + _CONNECT_S
        while True:
            try:
                return json.loads(
                    str(ServerProxy(self._url).call(json.dumps([method, *arguments])))
                )
            except ConnectionRefusedError:
                # Rank 0 may still start.
                if self._stop.requested or time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_S)


@contextmanager
def serving(coordinator: Coordinator, address: str, port: int) -> Iterator[None]:
    """Serve the coordinator in a thread of its own: a context manager."""

    def call(text: Any) -> str:
        method, *arguments = json.loads(str(text))
        if method not in _SERVED:
            raise ValueError(method)
        return json.dumps(getattr(coordinator, method)(*arguments))

    with SimpleXMLRPCServer((address, port), logRequests=False) as server:
        server.register_function(call, "call")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()


@dataclass
class TrialRunner:
    """Runs trials in processes of their own."""

    options: Any
    """What all trials share."""
    remote: Remote
    stop: Stop
    state: Path
    to: str = ""
    """The node of rank 0, if it is another one."""

    def join(self, rank: int) -> None:
        """Find the node that gets the best trial's output."""
        host, node = self.remote.call("join", rank, socket.gethostname())
        # SSH knows nodes by Slurm's names.
        self.to = "" if host == socket.gethostname() else node or host

    def run_all(self) -> None:
        """Run trials until none is left, or this process is to stop."""
        while not self.stop.requested:
            trial = self.remote.call("ask")
            if not trial:
                return
            number = trial["number"]
            outcome = self._run(number, trial["options"])
            if outcome is None:
                return
            if outcome.get("scores") and self.remote.call("is_better", outcome["scores"]):
                self._send(number)
            self.remote.call("tell", number, outcome)
            for each in (_output(number), state_folder(_output(number))):
                shutil.rmtree(each, ignore_errors=True)

    def _run(self, number: int, chosen: Mapping[str, Any]) -> dict[str, Any] | None:
        """Run one trial; return its outcome, ``None`` if it was interrupted."""
        begin = time.monotonic()
        known: dict[str, Any] = {"host": socket.gethostname()}
        try:
            options = replace(self.options, **chosen, output=str(_output(number)))
        except ValueError as error:
            return {**known, "seconds": 0.0, "failure": str(error)}
        argv = [sys.executable, "-m", "worker.tasks", options.task, options.to_json()]
        log = self.state / "logs" / f"trial-{number + 1}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        failure, pruned = "", False
        with log.open("w", encoding="utf-8", errors="replace") as lines:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=trial_environment(os.environ),
                preexec_fn=_die_with_parent,
            )
            self.stop.process = process
            if self.stop.requested:
                process.terminate()
            with process:
                assert process.stdout is not None
                failure, pruned = self._read(number, process, process.stdout, lines)
            self.stop.process = None
        # By its own handler, or before it has one.
        if process.returncode in (STOPPED, -signal.SIGTERM) and self.stop.comes():
            return None
        known["seconds"] = round(time.monotonic() - begin, 3)
        if pruned:
            return known
        results = _output(number) / RESULTS
        if process.returncode or not results.exists():
            why = failure or f"exit code {process.returncode}, see logs/{log.name}"
            return {**known, "failure": why}
        content = json.loads(results.read_text(encoding="utf-8"))
        return {**known, "scores": pick_scores(content), "model_step": content.get("model_step")}

    def _read(
        self, number: int, process: subprocess.Popen[str], stream: IO[str], log: IO[str]
    ) -> tuple[str, bool]:
        """Follow a trial's output; return its error and whether it was pruned."""
        failure, evaluation = "", 0
        for line in stream:
            log.write(line)
            event = parse_event(line) or {}
            if event.get("event") == "error":
                failure = failure or event["message"]
            if event.get("event") != "evaluation" or self.stop.requested:
                continue
            evaluation += 1
            is_pruned = self.remote.call("report", number, evaluation, event["scores"])
            if is_pruned and event["step"] < event["total"]:
                process.kill()
                return "", True
        return failure, False

    def _send(self, number: int) -> None:
        """Bring a trial's output to rank 0's host."""
        target = self.state / STUDY / f"new-{number}"
        if not self.to:
            _output(number).rename(target)
            return
        pack = f"tar -C {_output(number)} -cf - ."
        take = f"mkdir -p {target} && tar -C {target} -xf -"
        script = f"set -o pipefail; {pack} | {' '.join(_SSH)} {self.to} '{take}'"
        subprocess.run(["bash", "-c", script], check=True, stdin=subprocess.DEVNULL)


def _output(number: int) -> Path:
    return _TRIALS / str(number)


def trial_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a trial: this rank's, for a run with one rank on the same cores."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OF_MPIRUN)}
    return {**kept, "PMI_RANK": "0", "PMI_SIZE": "1"}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run this rank's part of the study; returns its exit code."""
    task, plan, options, *more = sys.argv[1:]
    socket.setdefaulttimeout(_ANSWER_S)
    stop = Stop()
    signal.signal(signal.SIGTERM, stop)
    identity = read_identity(os.environ)
    events = Events(identity.rank, mark=take_mark())
    choose_interface(os.environ)
    shutil.rmtree(_TRIALS, ignore_errors=True)
    shared = TASKS[task].Options.from_json(options)
    # A trial has no checkpoints: it is short, and the study has its own.
    more_options = {"backend": "gloo", "checkpoint_every": 10**9}
    if shared.eval_every == "auto" and any(getattr(shared, name, None) for name in _UNSEEN):
        more_options["eval_every"] = "epoch"  # it pays: bad trials end early
    shared = replace(shared, **more_options)
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
    state = state_folder(Path(shared.output))
    runner = TrialRunner(shared, Remote(*address, stop), stop, state)
    try:
        if identity.rank:
            runner.join(identity.rank)
            runner.run_all()
            return STOPPED if stop.requested else 0
        studied = StudyPlan.from_fields(json.loads(plan))
        return lead(studied, runner, address, identity.size, events, resume="--resume" in more)
    except WorkerError as error:
        events.error(error.message, error.hint)
    except (OSError, subprocess.SubprocessError) as error:
        if stop.requested:
            return STOPPED
        events.error(f"a rank of the study can't go on: {error}")
    return 1


def lead(
    plan: StudyPlan,
    runner: TrialRunner,
    address: tuple[str, int],
    ranks: int,
    events: Events,
    *,
    resume: bool,
) -> int:
    """Run rank 0: the coordinator beside its own trials, and the study's results."""
    from .coordinator import Coordinator, restore

    options, state, stop = runner.options, runner.state, runner.stop
    prepare_output(Path(options.output), resume=resume)
    shutil.rmtree(state / STUDY, ignore_errors=True)
    has_state = resume and restore(state)
    events.emit("phase", name="study")
    coordinator = Coordinator(plan, options, state, events, ranks)
    if has_state:
        events.note(f"{len(coordinator.ended())} of {plan.trials} trials have ended before")
    with serving(coordinator, *address):
        runner.join(0)
        runner.run_all()
        while not stop.requested and not runner.remote.call("is_over"):
            time.sleep(_PAUSE_S)
    if not stop.requested:
        return coordinator.finish(Path(options.output))
    if name := newest((state / CHECKPOINTS).glob("*")):
        events.emit("stopped", step=step_of(name), total=plan.trials, checkpoint=name)
    return STOPPED


if __name__ == "__main__":
    # Optuna, after the stack's packages: it replaces none.
    sys.path.append(str(Path("packages").absolute()))
    leave(main())
