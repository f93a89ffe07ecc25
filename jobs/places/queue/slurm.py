"""Jobs in the cluster's Slurm: launch and batch script, submission, following, and end."""

from __future__ import annotations

import hashlib
import json
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from cluster.nodes import Cluster
from infra.errors import HostError, HostKeyError, JobError, UsageError
from infra.wait import wait_until
from infra.words import counted
from jobs.places.environment import CCL_SETUP, rank_environment
from jobs.places.launcher import JobEnd, parse_end
from jobs.places.placement import Placement
from jobs.places.plan import SCRIPT, STOP_SECONDS, JobPaths, JobPlan
from jobs.places.queue.history import LostHeadError, list_jobs
from jobs.worker.runtime.events import MARK, mark_of, prefix_of
from jobs.worker.runtime.process import FOLDER
from jobs.worker.supervisor import log_reader
from jobs.worker.supervisor.deadline import CHECKPOINTS
from jobs.worker.supervisor.launch import LAUNCH, SECRETS, Launch, build_argv
from jobs.worker.supervisor.nodes import PACK
from provision.host import Host, TextSink
from provision.install import MPIRUN_ENV, VENV
from provision.run_on_nodes import send
from provision.stacks.stack import Stack

# A replacement node has no files yet, and a node that did not answer has an earlier launch, or none.
_SCRIPT = f"""\
#!/bin/bash
#SBATCH --job-name={{job}}
#SBATCH --nodes={{nodes}}
#SBATCH --output=/dev/null
#SBATCH --{{requeue}}
{{share}}
mkdir -p {{root}} && cd {{root}} || exit 1
exec >> log 2>&1
for node in {{head}} $(cat ~/hosts); do
  [ -d code/worker ] && sha256sum --check --status <<< "{{digest}}  {LAUNCH}" && break
  ssh $node 'cd {{root}} && {PACK}' | tar -xPf -
done 2>/dev/null
export PYTHONPATH={{code}} {MARK}={{mark}} {FOLDER}={{root}} SPR_CORES={{cores}}
supervise="{{venv}}/bin/python -m worker.supervisor"
# This shell outlives it if it is killed; only a requeue ends it by TERM. Every TERM interrupts `wait`.
# If this shell is killed as well, the keeper runs it again, with the exit code.
code=$1 asked=
if [ -z "$code" ]; then
  $supervise &
  trap 'asked=1; kill -TERM $! 2>/dev/null' TERM
  asked=1
fi
while [ "$asked" ]; do asked=; wait $!; code=$?; done
[ $code -le 128 ] || [ $code = 143 ] || exec $supervise $code
exit $code
"""
# Otherwise Intel MPI ignores -ppn and starts as many ranks per node as Slurm counts tasks.
_IN_QUEUE = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "off"}
# From the job's start; longer than any laptop sleeps or any job runs.
_RECONNECT_DEADLINE_S = 7 * 24 * 3600
# Upper limit for a kill: Slurm needs this long to declare a silent node down.
_KILL_S = 60
# However long a job's output says that its checkpoints take.
_MOST_GRACE_S = 3600
_CHECKPOINT = '%s[{]"event": "checkpoint(_estimate)?"'
# The keeper looks twice a minute, and first stores the results.
END_S, _END_POLL_S = 120.0, 2.0
# The exit code of submit.sh for a job that is in the queue already.
_ACTIVE = 75
# Its exit code for a new job that another command has canceled.
_ENDED = 76
# Slurm lists a job until none of its processes is left on a node that answers. scancel alone would leave
# the ranks too little time for a checkpoint, so the batch script gets the signal first.
_CANCEL = """# ending a job on all nodes
cd {root} || exit
find() {{ squeue --noheader --name={job} --format='%A %T %N'; }}
is_left() {{ found=$(find) && [ -z "$found" ] && return 1; return 0; }}
# Before the search: a command that is submitting the job checks for this file once the job is queued.
[ -s end.json ] || touch cancelled
read -r job state nodes <<< "$(find)"
if [ -n "$job" ]; then
  touch cancelled
  if [ "$state" != PENDING ] && [ {grace} != 0 ]; then
    scancel --batch --signal=TERM "$job"
    # How long its last checkpoint took, or its first one may take.
    took=$(tac log | grep -m 1 -Eo '{checkpoint}.*"seconds": [0-9]{{1,5}}' | grep -o '[0-9]*$')
    grace=$(({checkpoints} * 10#${{took:-0}})); [ $grace -gt {grace} ] || grace={grace}
    [ $grace -lt {most} ] || grace={most}
    until=$((SECONDS + grace))
    # After the loss of a node, it is pending again, with no ranks left.
    while [ $SECONDS -lt $until ] && is_left && [[ $found != *" PENDING"* ]]; do sleep 0.2; done
  fi
  if is_left; then
    scancel --signal=KILL --full "$job" 2>/dev/null; scancel "$job"
    for i in $(seq 150); do is_left || break; sleep 0.2; done
  fi
  ! is_left || sinfo --noheader --Node --nodes="$nodes" --states=down,no_respond --format=%N
fi
rm -f {secrets}
# With the times and nodes of a job that was killed: the limits of a resumed job count them. One that is
# pending has only waited since its last attempt ended.
ended=$(date +%s.%N)
[ "$state" != PENDING ] || ended=$(date -r begin.json +%s.%N)
[ -s end.json ] || python3 -c 'import json, sys
begin = json.load(open("begin.json"))
known = {{name: begin[name] for name in begin if name not in ("rank", "host", "message")}}
known.update(state="cancelled", exit_code=None, ended=float(sys.argv[1]))
json.dump(known, sys.stdout)' "$ended" > end.json 2>/dev/null ||
  echo '{{"state": "cancelled", "exit_code": null}}' > end.json
# A worker that becomes the head must not start it again.
tail -n +2 ~/hosts | xargs -r -P 32 -I@ sh -c \
  'ssh -n -o ConnectTimeout=5 @ "cd {root} && touch cancelled && rm -f {secrets}" || :' 2>/dev/null
true
"""


def build_launch(
    plan: JobPlan, placement: Placement, paths: JobPaths, cluster: Cluster, stack: Stack
) -> Launch:
    """Return the command that starts a job on nodes of ``cluster``; its placement covers all of them."""
    shares = placement.shares or ((),) * len(cluster.nodes)
    planned = len(cluster.first(plan.spec.resources.nodes).nodes)
    least = plan.spec.recovery.least_nodes
    if least > planned:
        raise UsageError(
            f"--elastic {least}: the job starts on {counted(planned, 'node')}",
            hint="it is the minimum number of nodes to continue with after a loss",
        )
    given = {word.partition("=")[0].lower() for word in plan.variables}  # in any case
    return Launch(
        spec=plan.spec,
        folder=paths.root,
        head=cluster.head.name,
        mpirun=f"{VENV}/bin/mpirun",
        program=(f"{VENV}/bin/python", "-m", plan.module, *plan.argv),
        resumes=plan.resumes,
        nproc_per_node=placement.nproc_per_node,
        env={
            **{k: v for k, v in cluster.environment.items() if k.lower() not in given},
            **rank_environment(plan, placement, paths.code, stack),
            MARK: mark_of(paths.job_id),
        },
        pinning=dict(zip((node.name for node in cluster.nodes), shares, strict=True)),
        omp_threads=placement.omp_threads,
        ccl=placement.backend == "ccl",
        exports={**MPIRUN_ENV, **_IN_QUEUE},
        setup=CCL_SETUP if plan.backend == "ccl" else (),
        planned_nodes=max(planned, plan.planned_nodes),
    )


def render_command(launch: Launch, address: str) -> str:
    """Return the mpirun command of a job if the first of its nodes, with this address, is idle."""
    return shlex.join(build_argv(launch, [*launch.pinning][: launch.planned_nodes], address))


def render_batch_script(launch: Launch, paths: JobPaths) -> str:
    """Return the script that the queue runs on the job's first node."""
    # A job that began on a larger cluster continues on this one.
    recovery = launch.spec.recovery
    least, most = recovery.least_nodes, min(launch.planned_nodes, len(launch.pinning))
    return _SCRIPT.format(
        job=paths.job_id,
        venv=VENV,
        nodes=f"{least}-{most}" if 0 < least < most else most,
        requeue="requeue" if recovery.retries else "no-requeue",
        share="\n".join(f"#SBATCH --{each}" for each in _render_share(launch)),
        cores=launch.spec.resources.cores or "",
        root=shlex.quote(paths.root),
        code=shlex.quote(paths.code),
        mark=mark_of(paths.job_id),
        head=launch.head,
        digest=hashlib.sha256(launch.render()).hexdigest(),
    )


def _render_share(launch: Launch) -> tuple[str, ...]:
    """Return the options of sbatch about each node's cores and memory."""
    cores, memory = launch.spec.resources.cores, launch.spec.resources.memory_gib
    if not cores:
        return ("exclusive", "mem=0")
    shares = next(iter(launch.pinning.values()))
    planned = Counter(share.numa for share in shares for _ in (*share.cpus, *share.workers))
    near: tuple[str, ...] = ()
    parts = len(planned) if len({*planned.values()}) == 1 else 1
    if parts > 1:
        # Otherwise Slurm fills one socket before it takes cores of the next [tried: 22.05, 24.11].
        near = ("ntasks-per-socket=1",)
    elif 0 in planned and len(planned) == 1:
        # Of cores that were planned on one NUMA node, none may be on another.
        near = (f"cores-per-socket={cores}",)
    return (
        *(f"ntasks-per-node={parts}", f"cpus-per-task={cores // parts}", *near),
        *((f"mem={memory}G",) if memory else ()),
    )


@dataclass(frozen=True)
class SlurmLauncher:
    """Runs jobs through the queue of the cluster's head. ``flags`` name the cluster in messages."""

    head: Host
    flags: str = ""

    def submit(self, launch: Launch, paths: JobPaths, variables: Sequence[str] = ()) -> None:
        """Queue a job. It runs as soon as nodes are free, even if this process has ended by then.

        Several runs may use one folder in turn, such as the trials of a placement study. ``variables`` are
        the user's: they come last, so that a job that is not submitted leaves none on the nodes.
        Raises :class:`UsageError` if a job to resume is in the queue, :class:`JobError` if that refuses, or
        if another command has canceled a new job.
        """
        if variables:
            self.head.put(json.dumps([*variables]).encode(), paths.uploaded(SECRETS))
        self.head.put(launch.render(), paths.uploaded(LAUNCH))
        script = render_batch_script(launch, paths).encode()
        self.head.put(script, paths.uploaded(SCRIPT), 0o700)
        values = {
            "job": paths.job_id,
            "root": paths.root,
            "new": paths.new,
            "secrets": SECRETS,
            "resumed": launch.spec.recovery.resumed_job or "",
            "active": str(_ACTIVE),
            "ended": str(_ENDED),
        }
        lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
        submit = resources.files("jobs.places.queue").joinpath("submit.sh").read_text()
        done = self.head.run("\n".join(["# submitting a job", *lines, submit]), check=False)
        if done.exit_code == _ACTIVE:
            raise UsageError(
                f"job {paths.job_id} is queued or running already",
                hint=f"to follow it: spr-cluster attach {paths.job_id} {self.flags}".rstrip(),
            )
        if done.exit_code == _ENDED:
            raise JobError(f"job {paths.job_id} was canceled before it was in the queue")
        if done.exit_code:
            why = done.stderr.strip() or "it printed nothing"
            raise JobError(
                f"the queue did not take job {paths.job_id}: {why}",
                hint=f"`spr-cluster verify {self.flags}` checks the queue",
            )

    def follow(
        self,
        paths: JobPaths,
        on_text: TextSink,
        on_wait: TextSink,
        on_state: TextSink = lambda _: None,
    ) -> JobEnd:
        """Stream a job's output, in whole lines, until it ends.

        ``on_wait`` gets the reason why it is not running yet, ``on_state`` the current text of a line that
        rewrites itself, such as a progress bar.
        The job survives a broken connection; following continues at the next line. Raises
        :class:`JobError` if the head is gone for good, :class:`HostKeyError` if another machine answers
        at its address.
        """
        seen, mark = 0, f"@queue-{secrets.token_hex(4)} "

        def take(text: str) -> None:
            nonlocal seen
            for part in text.split("\n") if mark in text else [text]:
                if part.startswith(mark):
                    _, is_state, state = part.partition("\t")
                    (on_state if is_state else on_wait)(state or part[len(mark) :])
                else:
                    seen += 1 + part.count("\n")
                    on_text(part)

        def watch() -> bool | None:
            what = (paths.root, "log", paths.job_id, str(seen + 1), mark)
            program = send(log_reader, *what).render("following a job")
            try:
                self.head.run(program, timeout_s=None, on_text=take)
            except HostKeyError:
                raise
            except HostError as error:
                if gone := self.head.why_gone():
                    raise LostHeadError(paths.job_id, gone) from None
                on_text(f"{error.message}; the job may still be running; reconnecting")
                return None
            return True

        wait_until(
            f"connection to the head, where job {paths.job_id} is running",
            watch,
            deadline_s=_RECONNECT_DEADLINE_S,
            every_s=15,
        )
        return self._find_end(paths)

    def _find_end(self, paths: JobPaths) -> JobEnd:
        """Return a job's end. If it was killed, the head's keeper records it soon."""
        until = time.monotonic() + END_S
        while not (end := parse_end(self.head.run(f"cat {paths.end}", check=False).stdout)):
            states = {job.job: job.state for job in list_jobs(self.head)}
            if paths.job_id not in states or time.monotonic() > until:
                raise JobError(
                    f"job {paths.job_id} is {states.get(paths.job_id, 'gone')}: it left the queue without "
                    "an exit code, for example because the head node was shut down, or the job was killed"
                )
            time.sleep(_END_POLL_S)
        return end

    def cancel(self, paths: JobPaths, grace_s: int) -> tuple[str, ...]:
        """End a job on all nodes; kill it after ``grace_s`` seconds.

        A job with more than :data:`STOP_SECONDS` saves a checkpoint: it has more if those take long, at most
        an hour. Returns the unreachable nodes.
        """
        saves = grace_s > STOP_SECONDS
        script = _CANCEL.format(
            root=paths.root,
            job=paths.job_id,
            grace=grace_s,
            most=max(grace_s, _MOST_GRACE_S) if saves else grace_s,
            checkpoints=CHECKPOINTS,
            checkpoint=_CHECKPOINT % prefix_of(mark_of(paths.job_id)),
            secrets=SECRETS,
        )
        limit_s = (_MOST_GRACE_S if saves else 2 * grace_s) + _KILL_S
        done = self.head.run(script, check=False, timeout_s=limit_s)
        return tuple(sorted(set(done.stdout.split())))
