"""What follows the end of a job: its folder in S3, and the user's command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..storage.ownership import GATHERED, PUSH_S, RECORD
from .commands import Running
from .head import SSH, HeadFolder, render_pack, render_unpack
from .launch import Launch
from .nodes import send_files
from .transfers import render_push
from .watch import announce, say

_COMMAND_S = 600.0


@dataclass(frozen=True)
class Storing:
    """Stores a job's folder in its bucket when the job has ended; does nothing for a job without one."""

    launch: Launch
    head: HeadFolder
    nodes: Sequence[str]

    def finish(self) -> str:
        """Bring the workers' output to the head, and store everything from there; return why not."""
        if not self.launch.bucket:
            return ""
        if self.head.remote and not self.head.exists("code/worker"):
            send_files(self.launch.folder, [self.head.remote])
        gathers = self.head.read(RECORD).get("gather_output", False)
        workers = [name for name in self.nodes[1:] if name != self.launch.head]
        gather = [self._render_gather(name, gathers=gathers) for name in workers]
        # A worker that is gone must not cost the others' files, nor count as stored.
        script = ["set -o pipefail; failed=", *(f"{line} || failed=1" for line in gather)]
        mark = f'[ -z "$failed" ] && touch {shlex.quote(self.launch.folder)}/{GATHERED}'
        gathering = f"bash -c {shlex.quote(chr(10).join([*script, mark]))}"
        lost = Running(self.head.argv(gathering), PUSH_S).wait().why
        done, why = self.store()
        why = why or (f"of other nodes: {lost}" if lost and gathers else "")
        if why:
            announce(event="note", text=f"warning: its folder can't be stored: {why}")
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
        done = Running(self.head.argv(render_push(self.launch, "all")), PUSH_S).wait()
        return ({}, done.why) if done.why else (json.loads(done.printed.splitlines()[-1]), "")

    def _render_gather(self, node: str, *, gathers: bool) -> str:
        folder = self.launch.folder
        pack = shlex.join(render_pack(folder, node=node, rank_files_only=not gathers))
        return f"{shlex.join([*SSH, node, pack])} < /dev/null | {render_unpack(folder)}"

    def run_command(self, state: object) -> None:
        """Run the user's command on the head, with its output in the log."""
        if not self.launch.spec.ending.on_finish:
            return
        folder = self.launch.folder
        known = {"SPR_JOB": Path(folder).name, "SPR_STATE": str(state)}
        known["SPR_RESULTS"] = f"{folder}/output"
        known["SPR_CLUSTER"] = str(self.head.read(RECORD).get("cluster", ""))
        variables = [f"{name}={value}" for name, value in known.items()]
        limit = ["timeout", "-k", "5", str(_COMMAND_S)]
        words = shlex.join(
            [*limit, "env", *variables, "sh", "-c", self.launch.spec.ending.on_finish]
        )
        script = f"cd {shlex.quote(folder)} && {words} 2>&1"
        done = Running(self.head.argv(script), _COMMAND_S + 30).wait()
        if done.printed:
            say(done.printed)
        if done.why:
            announce(event="note", text=f"warning: --on-finish: {done.why}")
