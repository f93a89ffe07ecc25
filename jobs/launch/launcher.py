"""How a job starts: the protocol, and its implementation by mpirun on the head node.

Another way to start jobs, such as a queue, is another implementation of :class:`Launcher`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.running_job import FIND_RUNNING_JOB, end_job, find_running_job, job_is_running
from infra.errors import HostError, HostKeyError, JobError
from infra.wait import wait_until
from jobs.launch.mpirun import LaunchCommand, render_run_script
from jobs.launch.plan import JobPaths
from provision.host import Host, LineSink

_BUSY = 75
"""Exit code of a start that found another job: EX_TEMPFAIL in BSD's sysexits.h."""
# Counted from the job's start: the longest that a laptop sleeps or a job runs.
_RECONNECT_DEADLINE_S = 7 * 24 * 3600


class Launcher(Protocol):
    """Starts jobs on a cluster, and watches and ends them. ``flags`` name it in messages."""

    @property
    def flags(self) -> str: ...

    def running_job(self) -> str | None:
        """Return the ID of the job that is running now; ``None`` if there is none."""

    def start(self, command: LaunchCommand, paths: JobPaths) -> None:
        """Start a job that outlives this process. Raises :class:`UsageError` if another job runs."""

    def follow(self, paths: JobPaths, on_line: LineSink) -> int:
        """Pass on the job's output line by line until it ends; returns its exit code."""

    def cancel(self, paths: JobPaths, grace_s: int) -> tuple[str, ...]:
        """End a job on all nodes; kill it after ``grace_s`` seconds. Returns the nodes out of reach."""

    def disconnect(self) -> None:
        """Drop the connection that follows a job, so that others can be made."""

    def why_gone(self) -> str:
        """Return why the jobs' machine will never answer again; "" if it may."""


LauncherFactory = Callable[[Host, str], Launcher]
"""Takes the head, and the options that name the cluster."""


@dataclass(frozen=True)
class HeadLauncher:
    """Runs mpirun on the head node, detached from the SSH connection that starts it."""

    head: Host
    flags: str = ""

    def running_job(self) -> str | None:
        return find_running_job(self.head)

    def start(self, command: LaunchCommand, paths: JobPaths) -> None:
        """One folder may see several runs, one after another, such as the trials of ``tune``."""
        self.head.put(render_run_script(command, paths).encode(), paths.new_script, 0o700)
        # The lock covers only the start: the job itself does not inherit it.
        started = self.head.run(
            f"trap 'rm -f {paths.new_script}' EXIT; "
            "exec 9> ~/spr-jobs/.lock; flock -w 30 9 || exit 1; "
            f'busy=$({FIND_RUNNING_JOB}); [ -z "$busy" ] || {{ echo "$busy"; exit {_BUSY}; }}; '
            f"mv {paths.new_script} {paths.script}; "
            f"[ ! -s {paths.log} ] || cat {paths.log} >> {paths.earlier_log}; "
            f"rm -f {paths.pid} {paths.exit_code} {paths.log}; "
            f"setsid -f {paths.script} < /dev/null > /dev/null 2>&1 9>&-; "
            f"for i in $(seq 100); do [ -s {paths.pid} ] && exit 0; sleep 0.1; done; exit 1",
            check=False,
        )
        if started.exit_code == _BUSY:
            raise job_is_running(started.stdout.strip(), self.flags)
        if started.exit_code:
            why = started.stderr.strip() or "it printed nothing"
            raise JobError(f"job {paths.job_id} did not start on the head: {why}")

    def follow(self, paths: JobPaths, on_line: LineSink) -> int:
        """The job survives a broken connection; following continues at the next line.

        Raises :class:`JobError` if the head is gone for good, :class:`HostKeyError` if another
        machine answers at its address.
        """
        seen = 0

        def count(line: str) -> None:
            nonlocal seen
            seen += 1
            on_line(line)

        def watch() -> bool | None:
            try:
                self.head.run(
                    f"touch {paths.log}; tail -n +{seen + 1} -F -s 0.2 --pid=$(cat {paths.pid}) "
                    f"{paths.log} 2>/dev/null",
                    timeout_s=None,
                    on_line=count,
                )
            except HostKeyError:
                raise
            except HostError as error:
                self._require_head(paths)
                on_line(f"{error.message}; the job may still be running; reconnecting")
                return None
            return True

        wait_until(
            f"connection to the head, where job {paths.job_id} is running",
            watch,
            deadline_s=_RECONNECT_DEADLINE_S,
            every_s=15,
        )
        ended = self.head.run(f"cat {paths.exit_code}", check=False)
        if not ended.stdout.strip().isdecimal():
            raise JobError(
                f"job {paths.job_id} ended without an exit code: the head node was shut down, or "
                "the job was killed"
            )
        return int(ended.stdout)

    def _require_head(self, paths: JobPaths) -> None:
        gone = self.why_gone()
        if gone:
            raise JobError(
                f"job {paths.job_id} ended with its head node: {gone}",
                hint="output that was not fetched is lost; `spr-cluster status` shows the cluster",
            )

    def cancel(self, paths: JobPaths, grace_s: int) -> tuple[str, ...]:
        return end_job(self.head, paths.job_id, grace_s)

    def disconnect(self) -> None:
        self.head.close()

    def why_gone(self) -> str:
        return self.head.why_gone()
