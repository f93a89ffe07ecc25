"""What the removal of a cluster would lose: running jobs, and results that exist only on its head."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.context import Context
from cluster.job_queue import LIST_QUEUE
from cluster.nodes import Node, rank_nodes
from infra import tags
from infra.errors import SprError
from infra.instances import HEAD
from infra.inventory import Inventory

_DEADLINE_S = 10.0
ACTIVE = ("running", "waiting")
# `fetch` leaves the file `fetched`. It brings no checkpoints home, and an unfinished job needs them:
# ours, and those that transformers' Trainer leaves beside the model.
SCRIPT = rf"""# listing what would be lost
queue=$({LIST_QUEUE})
active=$(echo "$queue" | cut -d "|" -f 5-)
echo "$queue" | awk -F "|" 'NF {{ print ($2 == "PENDING" ? "waiting" : "running"), $5 }}'
for d in ~/spr-jobs/*/; do
  [ -d "$d/output" ] || continue
  d=${{d%/}}; job=${{d##*/}}; out=$d/output
  echo "$active" | grep -qxF "$job" && continue
  if [ -f "$d/start.json" ] && [ ! -f "$out/results.json" ] \
    && ls "$out/checkpoints" 2>/dev/null | grep -qx 'step-[0-9]*'; then
    echo "checkpoint $job"; continue
  fi
  if ls -d "$out"/model/checkpoint-* >/dev/null 2>&1 \
    && ! grep -q '"state": "succeeded"' "$d/end.json" 2>/dev/null; then
    echo "checkpoints $job"; continue
  fi
  since=; [ -f "$d/fetched" ] && since="-newer $d/fetched"
  new=$(find "$out" -type f ! -name .keep ! -path "$out/logs/*" ! -path "$out/metrics/*" \
    ! -path "$out/checkpoints/*" $since | head -n 1)
  # The workers may have written more.
  [ -n "$new" ] || {{ [ -f "$d/gather" ] && [ -z "$since" ]; }} || continue
  if [ -f "$out/model/config.json" ]; then echo "model $job"; else echo "results $job"; fi
done
"""
"""Prints running, waiting, checkpoint, checkpoints, model, or results, and a job's ID, line by line."""


@dataclass(frozen=True)
class Losses:
    """Pairs of what would be lost and the job's ID; ``unknown`` is why the head could not be asked."""

    found: tuple[tuple[str, str], ...] = ()
    unknown: str = ""

    def describe(self, flags: str) -> Iterator[str]:
        """Return the lines for a user; ``flags`` name the cluster in a command."""
        if self.unknown:
            yield f"The head could not be asked what would be lost: {self.unknown}"
        yield from (f"Job {job} is {what}." for what, job in self.found if what in ACTIVE)
        if kept := [f"the {what} of {job}" for what, job in self.found if what not in ACTIVE]:
            how = f"To keep results: spr-cluster fetch JOB {flags}"
            yield f"Only on the nodes: {', '.join(kept)}. {how}"


def find_losses(ctx: Context, found: Inventory) -> Losses:
    """Ask the head what the cluster's removal would lose. Takes seconds, and never fails."""
    heads = [node for node in rank_nodes(found.alive) if node.instance.role == HEAD]
    # Jobs run only on a cluster that was connected.
    if not heads or tags.MESH not in heads[0].instance.tags:
        return Losses()
    if heads[0].instance.state != "running":
        return Losses(unknown=f"it is {heads[0].instance.state}")
    try:
        jump = found.record.options["jump"] if found.record else None
    except SprError as error:
        return Losses(unknown=error.message)
    return _ask(ctx, replace(heads[0], jump=jump or ""))


def _ask(ctx: Context, head: Node) -> Losses:
    answers: list[Losses] = []
    # A question about this machine's address could not be answered in time.
    quiet = replace(ctx, allow=lambda _: False)

    def ask() -> None:
        try:
            lines = quiet.host_opener()(head).run(SCRIPT, timeout_s=_DEADLINE_S).stdout.splitlines()
        except SprError as error:
            answers.append(Losses(unknown=error.message))
        else:
            pairs = (line.partition(" ")[::2] for line in lines)
            answers.append(Losses(tuple(pairs)))

    # Connecting alone may take longer than that. A daemon does not delay this process's end.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    return answers[0] if answers else Losses(unknown=f"no answer within {_DEADLINE_S:g} s")
