"""The trials of one rank: each in its own process on the rank's cores, followed by its output."""

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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Timer
from typing import IO, Any
from xmlrpc.client import ServerProxy, Transport

from ..runtime.errors import TrainingError
from ..runtime.events import MARK, parse_event
from ..runtime.output import RESULTS, state_folder
from ..runtime.process import PLANNED, STOPPED
from ..training.best import pick_scores
from .plan import STUDY

CONNECT_S, SOON_S, PAUSE_S = 120.0, 5.0, 0.2
_TRIALS = Path("trials")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_OF_MPIRUN = ("PMI_", "HYD", "I_MPI_", "MASTER_", PLANNED, MARK)
_SSH = ("ssh", "-o", "ConnectTimeout=10")


@dataclass
class Stop:
    """Whether SIGTERM has come or the study's time is over, and the trial that either ends."""

    requested: bool = False
    expired: bool = False
    process: subprocess.Popen[str] | None = None

    def on_signal(self, *_: object) -> None:
        self.requested = True
        self.kill()

    def expire_after(self, seconds: float) -> None:
        """End the trials when so much time has passed."""
        timer = Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()

    def _expire(self) -> None:
        self.expired = True
        self.kill()

    def kill(self) -> None:
        """End the trial. It would only save a checkpoint that nothing needs."""
        if self.process is not None:
            self.process.kill()

    def comes(self) -> bool:
        """Return whether SIGTERM has come, or comes soon: others may get it first."""
        until = time.monotonic() + SOON_S
        while not self.requested and time.monotonic() < until:
            time.sleep(PAUSE_S)
        return self.requested


class _OneTry(Transport):
    """Sends no request a second time: the first may have been answered."""

    def request(self, host: Any, handler: str, request_body: Any, verbose: bool = False) -> Any:
        return self.single_request(host, handler, request_body, verbose)


@dataclass
class Remote:
    """The coordinator, from any rank."""

    address: str
    port: int
    stop: Stop
    _until: float = field(default_factory=lambda: time.monotonic() + CONNECT_S)
    """When a rank 0 that does not answer is no longer only starting."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method. Raises ``OSError`` if rank 0 does not answer."""
        text = json.dumps([method, *arguments])
        while True:
            try:
                proxy = ServerProxy(f"http://{self.address}:{self.port}", transport=_OneTry())
                answer = json.loads(str(proxy.call(text)))
            except ConnectionRefusedError:
                if self.stop.requested or time.monotonic() > self._until:
                    raise
                time.sleep(PAUSE_S)
            else:
                self._until = 0.0
                return answer


@dataclass
class TrialRunner:
    """Runs trials, each in its own process."""

    rank: int
    options: Any
    """What all trials share."""
    remote: Remote
    stop: Stop
    state: Path
    _to: str = ""
    """The node of rank 0, if it is another one."""
    _offline: bool = False
    """Whether a trial has succeeded, so that the node has all it needs from the hub."""

    @property
    def _folder(self) -> Path:
        return _TRIALS / str(self.rank)

    def _output(self, number: int) -> Path:
        # Trackers name a run after this folder.
        return self._folder / f"{Path.cwd().name}-trial-{number + 1}"

    def join(self) -> None:
        """Find the node that gets the best trial's output, and how much time is left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        host, node, left = self.remote.call("join", self.rank, socket.gethostname())
        # SSH knows nodes by Slurm's names.
        self._to = "" if host == socket.gethostname() else node or host
        if left is not None:
            self.stop.expire_after(left)

    def run_all(self) -> None:
        """Run trials until none is left, or this process is to stop."""
        while not self.stop.requested:
            trial = self.remote.call("ask")
            if not trial:
                return
            number = trial["number"]
            outcome = self._run(number, trial["options"])
            if outcome is not None:
                if outcome.get("scores") and self.remote.call("is_better", outcome["scores"]):
                    self._send(number)
                self.remote.call("tell", number, outcome)
            for each in (self._output(number), state_folder(self._output(number))):
                shutil.rmtree(each, ignore_errors=True)

    def _run(self, number: int, chosen: Mapping[str, Any]) -> dict[str, Any] | None:
        """Run one trial; return its outcome, ``None`` if it was interrupted."""
        begin = time.monotonic()
        known: dict[str, Any] = {"host": socket.gethostname()}
        try:
            options = replace(self.options, **chosen, output=str(self._output(number)))
        except ValueError as error:
            return {**known, "seconds": 0.0, "failure": str(error)}
        log = self.state / "logs" / f"trial-{number + 1}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8", errors="replace") as lines:
            process = self._start(options)
            self.stop.process = process
            if self.stop.requested or self.stop.expired:
                self.stop.kill()
            with process:
                assert process.stdout is not None
                failure, is_pruned = self._follow(number, process, process.stdout, lines)
            self.stop.process = None
        known["seconds"] = round(time.monotonic() - begin, 3)
        if is_pruned:
            return known
        results = self._output(number) / RESULTS
        if process.returncode or not results.exists():
            # By its own handler, or before it had one.
            by_signal = process.returncode in (STOPPED, -signal.SIGTERM) and self.stop.comes()
            if by_signal or self.stop.requested or self.stop.expired:
                return None
            why = failure or f"exit code {process.returncode}, see logs/{log.name}"
            return {**known, "failure": why}
        self._offline = True
        content = json.loads(results.read_text(encoding="utf-8"))
        return {**known, "scores": pick_scores(content), "model_step": content.get("model_step")}

    def _start(self, options: Any) -> subprocess.Popen[str]:
        offline = {"HF_HUB_OFFLINE": "1"} if self._offline else {}
        return subprocess.Popen(
            [sys.executable, "-m", "worker.tasks", options.task, options.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**trial_environment(os.environ), **offline},
            preexec_fn=_die_with_parent,
        )

    def _follow(
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
        """Bring a trial's output to rank 0's host. Raises :class:`TrainingError`."""
        output, target = self._output(number), self.state / STUDY / f"new-{number}"
        if not self._to:
            output.rename(target)
            return
        take = f"mkdir -p {target} && tar -C {target} -xf -"
        script = f"set -o pipefail; tar -C {output} -cf - . | {' '.join(_SSH)} {self._to} '{take}'"
        code = subprocess.run(
            ["bash", "-c", script], stdin=subprocess.DEVNULL, check=False
        ).returncode
        if code:
            raise TrainingError(f"{output.name} can't be copied to {self._to}: exit code {code}")


def trial_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a trial: this rank's, for a run with one rank on the same cores."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OF_MPIRUN)}
    return {**kept, "PMI_RANK": "0", "PMI_SIZE": "1"}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
