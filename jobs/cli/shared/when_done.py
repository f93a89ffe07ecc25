"""``--on-finish`` and ``--down-when-done``: actions after a job has ended and its results are fetched."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from cluster.cli.chosen_cluster import ClusterRequest, confirm_owner
from cluster.cli.down import remove_cluster
from cluster.console.options import option, switch
from cluster.console.output import emit, say
from cluster.context import Context
from cluster.slurm.job_queue import ACTIVE, Losses, find_losses
from infra.aws.clients import translate_boto_error
from infra.aws.cloud import CredentialsError, describe_end
from infra.ec2.inventory import Inventory, describe_inventory
from infra.errors import DeadlineError, JobError, SprError
from infra.wait import wait_until
from infra.words import counted
from jobs.places.launcher import QUEUED, Outcome
from jobs.places.queue.job_output import how_to_come_back
from jobs.places.queue.session import DetachedError, JobContext
from jobs.places.record import results_option
from jobs.train.train import resume_command, task_of
from jobs.worker.supervisor.attempt import SUCCEEDED
from provision.run_on_nodes import Program, query_all

# Slurm may still be cleaning up an ended job's nodes, for at most its `KillWait`.
_LEAVES_QUEUE_S = 60.0
# The head, which tells the others, must not end before the last of them has been told.
_OFF = Program(
    ("sh", "-c", "sudo -n systemd-run --on-active=180 systemctl poweroff && echo off"), ""
)
_OFF_LIMIT_S = 30.0
OnCluster = Callable[[Context, JobContext], None]
"""Is called when a command knows its cluster."""


@dataclass(frozen=True, kw_only=True)
class EndRequest(ClusterRequest):
    """Actions after a job has ended."""

    on_finish: str | None = option(
        "when the job has ended and its results are here, run this shell command on this machine (with "
        "--detach: on the head), with SPR_JOB, SPR_STATE (succeeded, failed, or cancelled), "
        "SPR_RESULTS, and SPR_CLUSTER in its environment",
        metavar="COMMAND",
        section="queue",
    )
    down_when_done: bool = switch(
        "when the job has ended and its results are here, remove the cluster without asking; it stays if "
        "anything would be lost with it, such as a checkpoint or another job. With --detach, the nodes "
        "end by themselves when the job is in its bucket; `down` or `gc` removes the rest, of which only the "
        "image's snapshot costs money",
        section="queue",
    )

    @property
    def pushes(self) -> bool:
        """Whether the results also go to S3."""
        return False


def follow_to_end(
    request: EndRequest, run: Callable[[OnCluster], int], *, detach: bool = False
) -> int:
    """Run a command that follows a job, and these actions afterward; return the exit code.

    The command calls what it gets when it knows its cluster. With ``detach``, it leaves the job, and this
    prints how to come back to it.
    """
    if detach:
        try:
            # The nodes do both actions: see provision.on_node.keeper and the job's supervisor.
            return run(lambda ctx, _: _require_own(ctx, request))
        except DetachedError as left:
            text = how_to_come_back(left.job, left.flags)
            emit(request, text, {"job": left.job, "state": QUEUED})
            return 0
    if request.on_finish is None and not request.down_when_done:
        return run(lambda _ctx, _job: None)
    begun: list[Ends] = []

    def begin(ctx: Context, job: JobContext) -> None:
        ends = Ends(request, ctx, job)
        ends.announce()
        begun.append(ends)

    try:
        try:
            code = run(begin)
        except Exception as failure:
            for ends in begun:
                ends.finish(failure)
            raise
        return max([code, *(ends.finish() for ends in begun)])
    except KeyboardInterrupt:
        for ends in begun:
            ends.say_interrupted()
        raise


def _require_own(ctx: Context, request: EndRequest) -> None:
    """Check that the user may end the cluster, if it is to end."""
    if request.down_when_done:
        confirm_owner(ctx, _find(ctx), sure=request.is_named)


def _find(ctx: Context) -> Inventory:
    """Return the cluster's inventory, with its owner and head."""
    return describe_inventory(ctx.clients.ec2, ctx.name, ("instances", "security_groups"))


def run_command(request: EndRequest, outcome: Outcome, cluster: str) -> int:
    """Run the command of ``--on-finish``; its failure is shown and gives exit code 1."""
    command = request.on_finish or ""
    names = {
        "SPR_JOB": outcome.job,
        "SPR_STATE": outcome.state,
        "SPR_RESULTS": str((outcome.results or Path()).absolute()),
        "SPR_CLUSTER": cluster,
    }
    # Its output must not mix with our JSON.
    stdout = sys.__stderr__ if request.json else None
    done = subprocess.run(
        ["sh", "-c", command], env={**os.environ, **names}, stdout=stdout, check=False
    )
    if done.returncode:
        say(f"--on-finish failed with exit code {done.returncode}: {command}")
    return int(done.returncode != 0)


@dataclass
class Ends:
    """The actions after a command's job on a cluster has ended."""

    request: EndRequest
    ctx: Context
    job: JobContext
    is_removing: bool = False
    found: Inventory = field(default_factory=Inventory)
    """What existed at the start."""

    def announce(self) -> None:
        """Announce the actions; ask now for approval if the cluster is another user's."""
        if not self.request.down_when_done:
            return
        self.found = found = _find(self.ctx)
        confirm_owner(self.ctx, found, sure=self.request.is_named)
        where = "here and in S3" if self.request.pushes else "here"
        say(
            f"Cluster {self.ctx.name} will be removed when the job has ended and its results are {where}."
        )
        if ends := describe_end(self.ctx.cloud.session):
            say(
                f"These AWS credentials expire {ends}. If the job ends later, its nodes are powered off over "
                f"SSH, and the rest, such as an image, is billed until you run {self._down}"
            )
        losses = find_losses(self.ctx, found).found
        ended = Losses(tuple(loss for loss in losses if loss[0] not in ACTIVE))
        for line in ended.describe(self.ctx.flags):
            say(f"{line}. As long as that is so, the cluster stays.")

    def say_interrupted(self) -> None:
        """After Ctrl-C, say what will not be done, and which command does it."""
        attach = ["spr-cluster", "attach", *filter(None, (self.job.outcome.job,))]
        text, then = "--on-finish was not run", "run it"
        if self.request.on_finish:
            attach += ["--on-finish", self.request.on_finish]
        if self.request.down_when_done:
            attach += ["--down-when-done"]
            text, then = self._stays, "remove it"
        text += f"\n  to {then} at the job's end: {shlex.join(attach)} {self.ctx.flags}"
        if self.is_removing:
            text = f"the cluster may be removed in part; to remove the rest: {self._down}"
        with suppress(OSError):
            say(text)

    def finish(self, failure: Exception | None = None) -> int:
        """Run the command, and remove the cluster; return the exit code.

        An action that fails is added to the job's ``failure``, or raised as an error.
        """
        code, undone = 0, []
        if self.request.on_finish and self.job.outcome.is_home:
            code = run_command(self.request, self.job.outcome, self.ctx.name)
        elif self.request.on_finish:
            undone.append("--on-finish was not run: the results are not here")
        if self.request.down_when_done:
            undone += self._remove(failure)
        if undone and isinstance(failure, SprError):
            failure.hint = _join(failure.hint, *undone)
        elif undone:
            raise JobError(undone[0], hint=_join(*undone[1:])) from failure
        return code

    def _remove(self, failure: Exception | None) -> list[str]:
        """Remove the cluster; return why it remains, with the commands that help."""
        try:
            reasons = self._why_stays(failure)
            if reasons is not None:
                return [*reasons, f"{self._stays}; to remove it: {self._down}"]
            self.is_removing = True
            remove_cluster(replace(self.ctx, command="down"), yes=True, sure=True)
        except Exception as error:
            if (problem := translate_boto_error(error)) is None:
                raise
            hints = [problem.hint] if problem.hint else []
            if isinstance(problem, CredentialsError) and self.is_removing:
                hints += self._power_off()
            return [f"`down` failed: {problem.message}", *hints, f"to try again: {self._down}"]
        say(f"Nothing left of cluster {self.ctx.name}.")
        return []

    def _power_off(self) -> list[str]:
        """End the nodes without AWS's API; return what became of them."""
        head = self.job.open_host(self.job.cluster.head)
        try:
            answers = query_all(head, "power-off", _OFF, ["off"].index, _OFF_LIMIT_S)
        except SprError as error:
            return [f"{error.message}: {self._stays}"]
        on = [f"{node} ({answer.reason})" for node, answer in answers.items() if answer.reason]
        if len(on) == len(answers):
            return [
                f"no machine could be told to power off: {', '.join(on) or 'none is known'}; {self._stays}"
            ]
        count = counted(len(answers) - len(on), "machine")
        text = f"{count} told over SSH to power off, which EC2 terminates; an image is still billed"
        return [text, *([f"not reached, and still billed: {', '.join(on)}"] if on else [])]

    def _why_stays(self, failure: Exception | None) -> list[str] | None:
        """Return why the cluster must remain, unless ``failure`` already says so; ``None`` to remove it."""
        outcome = self.job.outcome
        if outcome.missing:
            again = f"to try again: spr-cluster fetch {outcome.job} {self.ctx.flags}"
            again += results_option(outcome.job, outcome.results)
            return [f"not all results are here: {'; '.join(outcome.missing)}", again]
        # A failed job has also ended. Any other failure left something undone.
        is_expected = isinstance(failure, JobError) and outcome.state != SUCCEEDED
        if not outcome.is_home or (failure and not is_expected):
            return []
        losses = self._find_losses(outcome)
        lines = [*losses.describe(self.ctx.flags)]
        for job in (job for what, job in losses.found if what == "checkpoint"):
            resume = shlex.join(resume_command(task_of(job)))
            lines.append(f"to continue its training: {resume} {job} {self.ctx.flags}")
        return lines or None

    def _find_losses(self, outcome: Outcome) -> Losses:
        """Return what removing the cluster would lose, once this job has left the queue."""
        try:
            found = _find(self.ctx)
        except (BotoCoreError, ClientError) as error:
            if not isinstance(translate_boto_error(error), CredentialsError):
                raise
            found = self.found
        own = {(what, outcome.job) for what in ACTIVE}
        asked: list[Losses] = []

        def ask() -> bool | None:
            asked.append(find_losses(self.ctx, found))
            return None if own & set(asked[-1].found) else True

        with suppress(DeadlineError):
            wait_until("the job's end", ask, deadline_s=_LEAVES_QUEUE_S, clock=self.ctx.clock)
        return asked[-1]

    @property
    def _down(self) -> str:
        return f"spr-cluster down {self.ctx.flags}"

    @property
    def _stays(self) -> str:
        """The note that the cluster remains, with its cost."""
        text, cloud = f"cluster {self.ctx.name} stays", self.job.cloud
        if not cloud.billed:
            return text
        if cloud.usd_per_hour is None:
            return f"{text}, and costs money"
        nodes = len(self.job.cluster.nodes)
        usd = f"${cloud.usd_per_hour * nodes:.2f}"
        return f"{text}, and its {counted(nodes, 'machine')} cost {usd} an hour {cloud.market}"


def _join(*lines: str | None) -> str | None:
    return "\n  → ".join(filter(None, lines)) or None
