"""The job that runs on a cluster's head, if any: two jobs would share the same cores."""

from __future__ import annotations

from infra.errors import UsageError
from provision.host import Host

# After a reboot the PID may belong to another process, so its command line is checked, too.
FIND_RUNNING_JOB = (
    'for pid in ~/spr-jobs/*/pid; do [ -f "$pid" ] && [ ! -f "${pid%pid}exit" ] '
    '&& grep -qs "${pid%/pid}" "/proc/$(cat "$pid")/cmdline" '
    '&& basename "$(dirname "$pid")"; done'
)
"""Shell commands that print the ID of the running job."""
HOW_TO_END = "spr-cluster ssh -- pkill -x -TERM mpiexec.hydra"


def find_running_job(head: Host) -> str | None:
    """Return the ID of the job that is running now; ``None`` if the cluster is idle."""
    return head.run(f"{FIND_RUNNING_JOB}; true").stdout.strip() or None


def job_is_running(job: str) -> UsageError:
    """Return the error for a command that needs an idle cluster."""
    return UsageError(
        f"job {job} is still running on this cluster",
        hint=f"wait for it to end, or stop it and save a checkpoint: {HOW_TO_END}",
    )
