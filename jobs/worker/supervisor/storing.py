"""A job's folder in S3: its inputs and checkpoints while it runs, and its results when it has ended."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..storage.ownership import GATHERED
from .commands import LOW_PRIORITY
from .head import SSH, HeadFolder, render_pack, render_unpack
from .launch import Launch
from .nodes import newest_step, send_files
from .watch import announce

# Not imported here: boto3 would delay the start and the end of every job.
_MODULE, _RECORD = "worker.storage.push", "job.json"
_LOOK_S, _AGAIN_S = 1.0, 15.0
_ALL_S, _COMMAND_S = 1800.0, 600.0


def run_bounded(argv: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """Run a command in its own session; return its output, and why it failed; "" if it did not."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            start_new_session=True,
            check=False,
            **options,
        )
    except subprocess.TimeoutExpired:
        return "", f"it took longer than {timeout_s / 60:.0f} min"
    except OSError as error:
        return "", str(error)
    printed, said = (text.decode(errors="replace").strip() for text in (done.stdout, done.stderr))
    why = said.splitlines()[-1] if said else f"exit code {done.returncode}"
    return printed, why if done.returncode else ""


@dataclass
class Storing:
    """Stores a job's folder in its bucket; does nothing for a job without one."""

    launch: Launch
    head: HeadFolder
    nodes: Sequence[str]
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Store the inputs, and each new checkpoint, with low priority. No rank waits for it."""
        if self.launch.bucket:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self, limit_s: float) -> None:
        """Wait at most so long until the newest checkpoint is stored."""
        self._ended.set()
        if self._thread:
            self._thread.join(limit_s)

    def _watch(self) -> None:
        self._warn("its inputs", self._push("inputs"))
        stored, is_last, pause, is_warned = -1, False, 0.0, False
        while not is_last:
            is_last, pause = self._ended.wait(pause), _LOOK_S
            newest = newest_step(self.launch.folder)
            if newest <= stored:
                continue
            if why := self._push("checkpoint"):
                pause = _AGAIN_S
                if not is_warned:
                    self._warn(f"checkpoint step-{newest:06d}", why)
                is_warned = True
            else:
                stored = newest

    def _push(self, what: str) -> str:
        return run_bounded(["sh", "-c", self._render(what)], _ALL_S)[1]

    def _render(self, what: str) -> str:
        words = [sys.executable, "-m", _MODULE, what, ".", self.launch.bucket]
        folder = shlex.quote(self.launch.folder)
        return f"cd {folder} || exit; export PYTHONPATH=code; {LOW_PRIORITY} {shlex.join(words)}"

    @staticmethod
    def _warn(what: str, why: str) -> None:
        if why:
            announce(event="note", text=f"warning: {what} can't be stored: {why}")

    def finish(self) -> str:
        """Bring the workers' output to the head, and store everything from there; return why not."""
        if not self.launch.bucket:
            return ""
        if self.head.remote and not self.head.exists("code/worker"):
            send_files(self.launch.folder, [self.head.remote])
        gathers = self.head.read(_RECORD).get("gather_output", False)
        workers = [name for name in self.nodes[1:] if name != self.launch.head]
        gather = [self._render_gather(name, gathers=gathers) for name in workers]
        # A worker that is gone must not cost the others' files, nor count as stored.
        script = ["set -o pipefail; failed=", *(f"{line} || failed=1" for line in gather)]
        mark = f'[ -z "$failed" ] && touch {shlex.quote(self.launch.folder)}/{GATHERED}'
        gathering = f"bash -c {shlex.quote(chr(10).join([*script, mark]))}"
        lost = run_bounded(self._on_head(gathering), _ALL_S)[1]
        done, why = self.store()
        why = why or (f"of other nodes: {lost}" if lost and gathers else "")
        if why:
            self._warn("its folder", why)
            return why
        size = f"{done['files']:,} files, {done['bytes'] / 1e6:,.1f} MB"
        if done.get("skipped"):
            announce(
                event="note", text=f"links and special files are not stored: {done['skipped']}"
            )
        announce(event="note", text=f"stored in {self.launch.bucket} ({size})")
        return ""

    def store(self) -> tuple[Mapping[str, Any], str]:
        """Store what is on the head; return what is there, or why that is not possible."""
        if not self.launch.bucket:
            return {}, ""
        printed, why = run_bounded(self._on_head(self._render("all")), _ALL_S)
        return ({}, why) if why else (json.loads(printed.splitlines()[-1]), "")

    def _render_gather(self, node: str, *, gathers: bool) -> str:
        folder = self.launch.folder
        pack = shlex.join(render_pack(folder, node=node, rank_files_only=not gathers))
        return f"{shlex.join([*SSH, node, pack])} < /dev/null | {render_unpack(folder)}"

    def _on_head(self, script: str) -> list[str]:
        return [*SSH, self.head.remote, script] if self.head.remote else ["sh", "-c", script]

    def run_command(self, state: object) -> None:
        """Run the user's command on the head, with its output in the log."""
        if not self.launch.spec.ending.on_finish:
            return
        folder = self.launch.folder
        known = {"SPR_JOB": Path(folder).name, "SPR_STATE": str(state)}
        known["SPR_RESULTS"] = f"{folder}/output"
        known["SPR_CLUSTER"] = str(self.head.read(_RECORD).get("cluster", ""))
        variables = [f"{name}={value}" for name, value in known.items()]
        limit = ["timeout", "-k", "5", str(_COMMAND_S)]
        words = shlex.join(
            [*limit, "env", *variables, "sh", "-c", self.launch.spec.ending.on_finish]
        )
        script = f"cd {shlex.quote(folder)} && {words} 2>&1"
        printed, why = run_bounded(self._on_head(script), _COMMAND_S + 30)
        if printed:
            print(printed, flush=True)
        if why:
            announce(event="note", text=f"warning: --on-finish: {why}")
