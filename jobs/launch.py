"""Starting a job on the head node, following it from here, stopping it, bringing its files home."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from infra.errors import HostError, HostKeyError, JobError, UsageError
from infra.wait import wait_until
from jobs.mpirun import LaunchCommand, render_run_script
from jobs.spec import JobPaths
from provision.host import Host, LineSink

_PARTS = ("start.json", "code", "data", "model", "output/.keep")
# Each worker unpacks what the head sends it over the cluster's own network.
_DISTRIBUTE = """# distributing the job's files to the workers
set -e -o pipefail
tar -C ~ -xf %UPLOAD%
%WORKERS% | xargs -r -P 32 -I@ sh -c 'ssh @ "tar -C ~ -xf -" < %UPLOAD% \
  || { echo "@ can not be reached" >&2; exit 1; }'
rm -f %UPLOAD%
"""
# Prints the job that runs now. After a restart of a node a pid may belong to anybody, so its command
# line is asked, too.
_RUNNING = (
    'for pid in ~/spr-jobs/*/pid; do [ -f "$pid" ] && [ ! -f "${pid%pid}exit" ] '
    '&& grep -qs "${pid%/pid}" "/proc/$(cat "$pid")/cmdline" '
    '&& basename "$(dirname "$pid")"; done'
)
_BUSY = 75
"""Exit code of a start that found another job: "try again later" in BSD's sysexits.h."""
HOW_TO_END = "spr-cluster ssh -- pkill -x -TERM mpiexec.hydra"
# Checkpoints, ours and those of transformers' Trainer, are for going on there.
_NOT_HOME = "--exclude=output/checkpoints --exclude='output/model/checkpoint-*' --exclude=.keep"
STOP_SECONDS = 10
"""How long a job that is told to end is waited for, before it is killed."""
# Counted from the job's start: as long as a laptop may well sleep, or a job may take.
_RECONNECT_DEADLINE_S = 7 * 24 * 3600


def running_job(head: Host) -> str | None:
    """The id of the job that runs now, if one does."""
    return head.run(f"{_RUNNING}; true").stdout.strip() or None


def require_idle(head: Host) -> None:
    """Raises :class:`UsageError` while another job runs: two would share the same cores."""
    busy = running_job(head)
    if busy:
        raise _busy(busy)


def _busy(job: str) -> UsageError:
    return UsageError(
        f"job {job} is still running on this cluster",
        hint=f"wait for it to end, or have it keep a checkpoint and end: {HOW_TO_END}",
    )


def place_files(
    head: Host, paths: JobPaths, files: Mapping[str, Path | bytes], nodes: int | None = None
) -> None:
    """Put files, by their names below the job's folder, on every node, or on the first ``nodes``.

    They travel once over the slow line.
    """
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "job.tar")
        # What is linked to is not on the nodes: the hub's cache, for one, is made of links.
        with tarfile.open(bundle, "w", dereference=True) as archive:
            for name, source in files.items():
                _add(archive, f"{paths.relative_root}/{name}", source)
        head.upload(bundle, paths.upload)
    _distribute(head, paths, nodes)


def _workers(nodes: int | None) -> str:
    """Lists the hostfile's workers, of the first ``nodes`` nodes; it reads the file to its end."""
    return f"awk 'NR > 1{'' if nodes is None else f' && NR <= {nodes}'}' ~/hosts"


def _distribute(head: Host, paths: JobPaths, nodes: int | None) -> None:
    script = _DISTRIBUTE.replace("%UPLOAD%", paths.upload).replace("%WORKERS%", _workers(nodes))
    head.run(script, timeout_s=1800)


def place_again(head: Host, paths: JobPaths, nodes: int) -> None:
    """Put what the head has of a job's files on its nodes, and its log aside for another run."""
    parts = " ".join(f"{paths.relative_root}/{name}" for name in _PARTS)
    head.run(
        f"cd ~ && tar -cf {paths.upload} $(ls -d {parts} 2>/dev/null) && {{ "
        f"cat {paths.log} >> {paths.earlier_log} 2>/dev/null; : > {paths.log}; }}"
    )
    _distribute(head, paths, nodes)


def _add(archive: tarfile.TarFile, name: str, source: Path | bytes) -> None:
    if isinstance(source, Path):
        archive.add(source, name, filter=_as_anybody)
        return
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(source), 0o600
    archive.addfile(info, io.BytesIO(source))


def _as_anybody(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The member without this machine's owner; compiled Python stays at home."""
    if "__pycache__" in info.name:
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def submit(head: Host, command: LaunchCommand, paths: JobPaths) -> None:
    """Start a job on the head, detached: it outlives this connection.

    One folder may see several runs, one after another, such as the trials of `tune`. Raises
    :class:`UsageError` where another job was started in the meantime.
    """
    head.put(render_run_script(command, paths).encode(), paths.script, 0o700)
    # The lock is for the start alone: the job itself does not inherit it.
    started = head.run(
        "exec 9> ~/spr-jobs/.lock; flock -w 30 9 || exit 1; "
        f'busy=$({_RUNNING}); [ -z "$busy" ] || {{ echo "$busy"; exit {_BUSY}; }}; '
        f"rm -f {paths.pid} {paths.exit_code} {paths.log}; "
        f"setsid -f {paths.script} < /dev/null > /dev/null 2>&1 9>&-; "
        f"for i in $(seq 100); do [ -s {paths.pid} ] && exit 0; sleep 0.1; done; exit 1",
        check=False,
    )
    if started.exit_code == _BUSY:
        raise _busy(started.stdout.strip())
    if started.exit_code:
        raise JobError(
            f"job {paths.job_id} did not start on the head: {started.stderr.strip() or 'no word of it'}"
        )


def follow(head: Host, paths: JobPaths, on_line: LineSink) -> int:
    """Hand on the job's output line by line until it ends; returns its exit code.

    The job goes on when the connection breaks, and so does this, from the line where it was. Raises
    :class:`JobError` where the head is gone for good, :class:`HostKeyError` where another machine
    answers in its place.
    """
    seen = 0

    def count(line: str) -> None:
        nonlocal seen
        seen += 1
        on_line(line)

    def watch() -> bool | None:
        try:
            head.run(
                f"touch {paths.log}; tail -n +{seen + 1} -F -s 0.2 --pid=$(cat {paths.pid}) "
                f"{paths.log} 2>/dev/null",
                timeout_s=None,
                on_line=count,
            )
        except HostKeyError:
            raise
        except HostError as error:
            _require_there(head, paths)
            on_line(f"{error.message}; the job may go on without it, trying again")
            return None
        return True

    wait_until(
        f"connection to the head, on which job {paths.job_id} goes on",
        watch,
        deadline_s=_RECONNECT_DEADLINE_S,
        every_s=15,
    )
    ended = head.run(f"cat {paths.exit_code}", check=False)
    if ended.exit_code != 0:
        raise JobError(
            f"job {paths.job_id} ended without an exit code: the head node was shut down, or "
            "somebody ended it"
        )
    return int(ended.stdout)


def _require_there(head: Host, paths: JobPaths) -> None:
    gone = head.why_gone()
    if gone:
        raise JobError(
            f"job {paths.job_id} ended with its head node: {gone}",
            hint="what it had not sent here is lost; `spr-cluster status` shows the rest",
        )


def cancel(head: Host, paths: JobPaths, grace_s: int = STOP_SECONDS) -> None:
    """End a job on all nodes, and return when it has; after ``grace_s`` it is killed.

    mpirun's own process hands the signal on to the ranks of every node, and waits for them. The
    others of its group must not have it: without them mpirun would have nobody to wait for.
    """
    # The group, not its first process: that one is gone before mpirun and the ranks are.
    alive = "kill -0 -- -$pid 2>/dev/null || exit 0; sleep 0.1; done"
    head.run(
        f"pid=$(cat {paths.pid}); "
        "pkill -TERM -g $pid -x mpiexec.hydra || kill -TERM -- -$pid; "
        f"for i in $(seq {grace_s * 10}); do {alive}; "
        f"kill -KILL -- -$pid; for i in $(seq {STOP_SECONDS * 10}); do {alive}",
        check=False,
        timeout_s=grace_s + 2 * STOP_SECONDS,
    )


def gather(head: Host, paths: JobPaths, nodes: int, on_log: LineSink) -> None:
    """Bring the workers' output to the head: each one's files into a folder of its name.

    A worker that can't be reached any more is told, and the others' files are kept.
    """
    # The link between the nodes is fast; a folder each, as ranks may use the same names.
    pull = (
        f"mkdir -p {paths.output}/@ && ssh @ 'cd {paths.output} && find . -type f ! -name .keep "
        f"-print0 | tar --null -T - -cf -' | tar -C {paths.output}/@ -xf - "
        f'|| echo "the output of @ could not be fetched"; '
        f"rmdir --ignore-fail-on-non-empty {paths.output}/@"
    )
    done = head.run(
        f"# gathering the workers' output\n"
        f"{_workers(nodes)} "
        f"| xargs -r -P 32 -I@ bash -o pipefail -c {shlex.quote(pull)}",
        timeout_s=1800,
    )
    for line in done.stdout.splitlines():
        on_log(line)


def fetch(head: Host, paths: JobPaths, target: Path) -> None:
    """Bring the job's output folder and logs here, every rank's from its own node; no checkpoints."""
    bundle = f"{paths.root}/output.tar"
    # A worker that is gone takes its ranks' files with it, and must not cost those of the others.
    collect = (
        "tail -n +2 ~/hosts | xargs -r -P 32 -I@ sh -c 'ssh -n -o ConnectTimeout=10 @ "
        f'"tar -C {paths.root} -cf - output/logs output/metrics 2>/dev/null" '
        f"| tar -C {paths.root} -xf - 2>/dev/null || true'"
    )
    head.run(
        f"{collect}; cd {paths.root}; "
        f"tar -C {paths.root} {_NOT_HOME} -cf {bundle} $(ls -d log*) output",
        timeout_s=1800,
    )
    target.mkdir(parents=True, exist_ok=True)
    # Not in /tmp, which may be memory: a model may be larger than that.
    with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as folder:
        local = Path(folder, "output.tar")
        head.download(bundle, local)
        with tarfile.open(local) as archive:
            _extract(archive, target)
    head.run(f"rm -f {bundle}")


def _extract(archive: tarfile.TarFile, target: Path) -> None:
    """``output/*`` straight into the target, beside the log; nothing may lead out of it.

    Not by tarfile's own filters, which Debian 12's Python 3.11.2 does not have yet.
    """
    for member in archive:
        name = member.name.removeprefix("output").lstrip("/")
        path = (target / name).resolve()
        content = archive.extractfile(member) if member.isfile() else None
        if content is not None and path.is_relative_to(target.resolve()):
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("wb") as file:
                shutil.copyfileobj(content, file)


def explain_failure(lines: list[str]) -> str | None:
    """The cause that mpirun's own words name, as one line; ``None`` where it names none.

    Intel MPI's Hydra reports a node that it can't start on as ``Unable to run bstrap_proxy on HOST``.
    """
    for line in lines:
        if match := re.search(r"[Uu]nable to run bstrap_proxy on (\S+)", line):
            return (
                f"mpirun can't start on {match[1].rstrip('.,')}: does the head reach it over SSH?"
            )
        if match := re.search(r"@(\S+?)\] HYD_spawn .* unable to bind process", line):
            return f"mpirun can't pin a rank on {match[1]}: may it still use the CPUs it showed before?"
        if "cannot open shared object file" in line or "mpirun: not found" in line:
            return line.strip()
        if match := re.search(r"KILLED BY SIGNAL: (\d+) \(([^)]*)\)", line):
            return f"a rank was killed by signal {match[1]} ({match[2]})"
    return None
