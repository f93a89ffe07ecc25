"""The trials of one rank: each in its own process on the rank's cores, followed by its output."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ..pool.rank import child_environment, die_with_parent, send_below
from ..pool.remote import Remote
from ..pool.stop import Stop
from ..runtime.events import MARK, parse_event
from ..runtime.output import METRICS, RESULTS, state_folder
from ..runtime.process import node_name
from ..training.task import pick_scores
from .plan import OWN_METRICS, STUDY

_TRIALS = Path("trials")


@dataclass
class TrialRunner:
    """Runs trials, each in its own process."""

    rank: int
    options: Any
    """What all trials share."""
    remote: Remote
    stop: Stop
    state: Path
    mark: str = ""
    """That of the job's events: `logs --element` shows those of a trial as text."""
    _to: str = ""
    """The node of rank 0, if it is another one."""
    _offline: bool = False
    """Whether a trial has succeeded, so that the node has all it needs from the hub."""

    def _output(self, number: int) -> Path:
        # Trackers name a run after this folder.
        return _TRIALS / str(self.rank) / f"{Path.cwd().name}-trial-{number + 1}"

    def run_all(self) -> None:
        """Run trials until none is left, or this process is to stop."""
        shutil.rmtree(_TRIALS / str(self.rank), ignore_errors=True)
        host, node, left = self.remote.call("join", self.rank, socket.gethostname())
        # SSH knows nodes by Slurm's names.
        self._to = "" if host == socket.gethostname() else node or host
        if left is not None:
            self.stop.expire_after(left)
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
        known: dict[str, Any] = {"host": node_name()}
        try:
            options = replace(self.options, **chosen, output=str(self._output(number)))
        except ValueError as error:
            return {**known, "seconds": 0.0, "failure": str(error)}
        log = self.state / "logs" / f"trial-{number + 1}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8", errors="replace") as lines:
            process = self._start(options)
            self.stop.watch(process)
            with process:
                assert process.stdout is not None
                failure, is_pruned = self._follow(number, process, process.stdout, lines)
            self.stop.process = None
        known["seconds"] = round(time.monotonic() - begin, 3)
        if is_pruned:
            return known
        results = self._output(number) / RESULTS
        if process.returncode or not results.exists():
            if self.stop.has_ended(process.returncode):
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
            env={**child_environment(os.environ), MARK: self.mark, **offline},
            preexec_fn=die_with_parent,
        )

    def _follow(
        self, number: int, process: subprocess.Popen[str], stream: IO[str], log: IO[str]
    ) -> tuple[str, bool]:
        """Follow a trial's output; return its error and whether it was pruned."""
        failure, evaluation = "", 0
        for line in stream:
            log.write(line)
            event = parse_event(line, self.mark) or {}
            if event.get("event") == "error":
                failure = failure or event["message"]
            if str(event.get("text", "")).startswith("warning: "):
                self.remote.call("warn", event["text"])
            if event.get("event") != "evaluation" or self.stop.requested:
                continue
            evaluation += 1
            is_pruned = self.remote.call("report", number, evaluation, event["scores"])
            if is_pruned and event["step"] < event["total"]:
                process.kill()
                return "", True
        return failure, False

    def _send(self, number: int) -> None:
        """Bring a trial's output, with its metrics, to rank 0's host. Raises ``OSError``."""
        output, target = self._output(number), self.state / STUDY / f"new-{number}"
        with suppress(FileNotFoundError):  # it had no step
            (state_folder(output) / METRICS).rename(output / OWN_METRICS)
        if not self._to:
            output.rename(target)
            return
        send_below(output, ["."], self._to, f"mkdir -p {target} && tar -C {target} -xf -")
