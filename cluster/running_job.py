"""The job that runs on a cluster's head, if any, and its end: two jobs would share the same cores."""

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
JOB_VARIABLE = "SPR_JOB_FOLDER"
"""Variable of every process of a job, on every node: the job's folder."""
NODES_LINE = "# nodes: "
"""Start of a line in a job's script, before the number of nodes on which the job runs."""

# Processes are found by their environment, since Hydra starts some in sessions of their own. The job's
# script, the leader, ends last: it writes the exit code.
_END_JOB = """# ending a job on all nodes
d=~/spr-jobs/%JOB%
cd "$d" || exit
find="grep -lszxF %VARIABLE%=$d /proc/[0-9]*/environ | cut -d / -f 3"
started=$(cat pid 2>/dev/null)
leader=$started
grep -qs "$d/" "/proc/$leader/cmdline" || leader=
is_left() {
  # Another end of the job may have been faster, and the job may be running again.
  [ "$(cat pid 2>/dev/null)" = "$started" ] || exit
  [ -n "$leader" ] && kill -0 "$leader" 2>/dev/null || [ -n "$(eval "$find")" ]
}
if [ -n "$leader" ]; then
  # mpirun passes the signal on and waits for everything else. The script ends after mpirun, with 143.
  kill -TERM "$leader"
  pkill -TERM -g "$leader" -x mpiexec.hydra || kill -TERM -- "-$leader"
else
  kill -TERM $(eval "$find")
fi 2>/dev/null
for i in $(seq %POLLS%); do is_left || break; sleep 0.2; done
if is_left; then
  kill -KILL $(eval "$find") 2>/dev/null
  awk "NR > 1" ~/hosts | xargs -r -P 64 -I@ sh -c "timeout 20 ssh -n -o ConnectTimeout=10 @ \\
    \\"\\$0\\" > /dev/null 2>&1 || echo @" "kill -KILL \\$($find) 2>/dev/null; true"
  for i in $(seq 25); do is_left || break; kill -KILL $(eval "$find") 2>/dev/null; sleep 0.2; done
  [ -z "$leader" ] || kill -KILL -- "-$leader" 2>/dev/null
fi
[ -s exit ] || echo 137 > exit
"""
# What killing takes at most, with 255 nodes that do not answer.
_KILL_S = 120


def find_running_job(head: Host) -> str | None:
    """Return the ID of the job that is running now; ``None`` if the cluster is idle."""
    return head.run(f"{FIND_RUNNING_JOB}; true").stdout.strip() or None


def find_job_addresses(head: Host, job: str) -> tuple[str, ...]:
    """Return the private addresses of the nodes on which a job runs."""
    found = head.run(
        f"# listing a job's nodes\n"
        f"count=$(sed -n 's/^{NODES_LINE}//p' ~/spr-jobs/{job}/run.sh)\n"
        'awk \'$1 == "HostName" { print $2 }\' ~/.ssh/config | head -n "${count:-256}"'
    )
    return tuple(found.stdout.split())


def render_end_of_job(job: str, grace_s: int) -> str:
    """Return the shell commands for the head that end a job; they print the nodes out of reach."""
    values = {"JOB": job, "VARIABLE": JOB_VARIABLE, "POLLS": str(5 * grace_s)}
    script = _END_JOB
    for name, value in values.items():
        script = script.replace(f"%{name}%", value)
    return script


def end_job(head: Host, job: str, grace_s: int) -> tuple[str, ...]:
    """End a job on all nodes, and return the names of those that could not be reached.

    mpirun passes SIGTERM to the ranks on every node. What is left after ``grace_s`` seconds is killed.
    The job has an exit code afterwards, so that the next one can start.
    """
    script = render_end_of_job(job, grace_s)
    done = head.run(script, check=False, timeout_s=grace_s + _KILL_S)
    return tuple(sorted(done.stdout.split()))


def how_to_end(flags: str) -> str:
    """Return the command that ends the running job of the cluster that ``flags`` name."""
    return f"spr-cluster cancel {flags}".rstrip()


def job_is_running(job: str, flags: str) -> UsageError:
    """Return the error for a command that needs an idle cluster."""
    return UsageError(
        f"job {job} is still running on this cluster",
        hint=f"wait for it to end, or save a checkpoint and end it: {how_to_end(flags)}",
    )
