"""What the removal of a cluster would lose: running jobs, and results that exist only on its head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.context import Context
from cluster.head_answer import NoAnswer, ask_head
from cluster.job_queue import LIST_QUEUE
from infra.ec2.inventory import Inventory
from provision.host import Host

_DEADLINE_S = 10.0
ACTIVE = ("running", "waiting")
# `fetch` leaves the file `fetched`. It brings no checkpoints home, and an unfinished job needs them:
# ours, and those that transformers' Trainer leaves beside the model.
SCRIPT = rf"""# listing what would be lost
queue=$({LIST_QUEUE} 2>&1) || {{ echo "queue $(echo $queue)"; queue=; }}
active=$(echo "$queue" | cut -d "|" -f 5-)
echo "$queue" | awk -F "|" 'NF {{ print ($2 == "PENDING" ? "waiting" : "running"), $5 }}'
for d in ~/spr-jobs/*/; do
  [ -d "$d/output" ] || continue
  d=${{d%/}}; job=${{d##*/}}; out=$d/output
  echo "$active" | grep -qxF "$job" && continue
  if grep -qs '"resumable": true' "$d/job.json" && [ ! -f "$out/results.json" ] \
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
  [ -n "$new" ] || {{ [ -z "$since" ] && grep -qs '"gather_output": true' "$d/job.json"; }} || continue
  if [ -f "$out/model/config.json" ]; then echo "model $job"; else echo "results $job"; fi
done
"""
"""Prints running, waiting, checkpoint, checkpoints, model, or results, and a job's ID, line by line.

If the queue does not answer, ``queue`` and why.
"""


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
    answer = ask_head(ctx, found, _ask, _DEADLINE_S)
    return Losses(unknown=answer.why) if isinstance(answer, NoAnswer) else answer


def _ask(head: Host) -> Losses:
    lines = head.run(SCRIPT, timeout_s=_DEADLINE_S).stdout.splitlines()
    pairs = [line.partition(" ")[::2] for line in lines]
    found = tuple(pair for pair in pairs if pair[0] != "queue")
    why = next((f"its queue does not answer: {why}" for what, why in pairs if what == "queue"), "")
    return Losses(found, why)
