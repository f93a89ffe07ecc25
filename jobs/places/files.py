"""Copy a job's files to every node before it starts, and its results back after it ends."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

from infra.errors import ConnectionLostError, HostError, JobError, SprError, UsageError
from infra.words import format_size
from jobs import worker
from jobs.places.launcher import Fetched
from jobs.places.plan import FETCHED, JobPaths, own_folder
from jobs.places.record import complete_record, results_option
from jobs.worker.storage import ownership
from provision.host import Host, TextSink
from provision.install import VENV
from provision.run_on_nodes import send

# The head sends the archive to the workers over the cluster's network.
_DISTRIBUTE = """# distributing the job's files to the workers
set -e -o pipefail
tar -C ~ -xf %UPLOAD%
tail -n +2 ~/hosts | xargs -r -P 32 -I@ sh -c 'ssh @ "tar -C ~ -xf -" < %UPLOAD% \
  || { [ $? = 255 ] && echo "@ can not be reached" >&2 || echo "@ can not write them" >&2; exit 1; }'
rm -f %UPLOAD%
"""
# No hard links: they would change times, by which a result counts as fetched.
_COPY = """# distributing a folder of the head to the workers
set -e -o pipefail
cd {root} && mkdir -p "$(dirname {name})" && cp -r {source} {name}
tail -n +2 ~/hosts | xargs -r -P 8 -I@ sh -c 'tar -cf - {name} | ssh @ "tar -C {root} -xf -" \
  || {{ echo "@ can not take {name}" >&2; exit 1; }}'
"""
# A job that the queue has after all keeps its files.
_WITHDRAW = """# removing the files of a job that was not submitted
queue=$(squeue --noheader --name={job} --format=%A) && [ -z "$queue" ] || exit 0
rm -rf {root} {upload}
tail -n +2 ~/hosts | xargs -r -P 32 -I@ ssh -n -o ConnectTimeout=10 @ "rm -rf {root}" || true
echo removed
"""
# Prints the workers and, if the job is over, the time: later changes have not been fetched. If the plan wants
# the workers' whole output, each worker gets its own folder, because ranks may use the same file names; the
# first node's output is on the head.
_COLLECT = """# collecting the results
cd {root} || exit
now=$(date +%s.%N)
if [ -s end.json ] || {{ queue=$(squeue --noheader --name={job} --format=%A) && [ -z "$queue" ]; }}; then
  echo at "$now"
fi
tail -n +2 ~/hosts | sed 's/^/logs /'
! grep -qs '"gather_output": true' job.json || \
  grep -o '"nodes": [[][^]]*' begin.json | head -n 1 | grep -o 'node[0-9][0-9]*' |
  tail -n +2 | sed 's/^/output /'
"""
# What a user has at the top of the output, but for these names, is at the top of the results.
_RESERVED = re.compile(r"job|work|node\d+")
# sshd allows ten sessions in one connection.
_SESSIONS = 8
_NOTED = 32 << 20
_COPIED = 1 << 20
_TRANSFER_TIMEOUT_S = 1800
_RESTORE_TIMEOUT_S = 6 * 3600
# What reading and unpacking a damaged archive raises.
_DAMAGE = (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError)


def worker_files() -> dict[str, Path]:
    """Return the code and samples of ``jobs/worker`` by file name on the nodes: in the package ``worker``.

    The folder of :mod:`spr_cluster` there has nothing else that could hide a program's own modules.
    """
    root = Path(worker.__file__).parent
    # Not what another process compiles now.
    kept = (path for path in root.rglob("*.*") if path.parent.name != "__pycache__")
    sources = sorted(path for path in kept if path.is_file())
    files = {f"code/worker/{source.relative_to(root)}": source for source in sources}
    names = root.parents[1] / "spr_cluster/__init__.py"  # a package above this one
    return {**files, "code/worker/program/imports/spr_cluster/__init__.py": names}


def place_files(head: Host, paths: JobPaths, files: Mapping[str, Path | bytes]) -> None:
    """Put files, named relative to the job's folder, on every node.

    They cross the slow connection to the head only once.
    """
    named = {f"{paths.relative_root}/{name}": source for name, source in files.items()}
    upload_archive(head, named, paths.upload)
    script = _DISTRIBUTE.replace("%UPLOAD%", paths.upload)
    head.run(script, timeout_s=_TRANSFER_TIMEOUT_S)


def place_head_folders(head: Host, paths: JobPaths, folders: Mapping[str, str]) -> None:
    """Put folders of the head, by their names in the job's folder, on every node."""
    for name, source in folders.items():
        script = _COPY.format(root=paths.root, source=shlex.quote(source), name=name)
        head.run(script, timeout_s=_TRANSFER_TIMEOUT_S)


def restore_files(
    head: Host,
    paths: JobPaths,
    url: str,
    note: TextSink,
    *,
    is_new: bool,
    cloud: str = "",
) -> dict[str, Any]:
    """Bring a job's folder back from S3 to the head, whose job then sends it to the other nodes.

    Returns what :mod:`jobs.worker.storage.restore` prints. Raises :class:`UsageError` for a job that can't be
    resumed. ``is_new``: the head does not have the job yet. ``cloud`` is the option for the hint's command.
    """
    if is_new:
        # The marker: a job that is only half here must not look like one that is being submitted.
        files: dict[str, Path | bytes] = {**worker_files(), "cancelled": b""}
        named = {f"{paths.relative_root}/{name}": source for name, source in files.items()}
        upload_archive(head, named, paths.upload)
        unpack = f"tar -C ~ -xf {paths.upload} && rm -f {paths.upload}"
        head.run(f"# placing the worker code on the head\n{unpack}")
    script = f"# restoring the job\n{_worker_command(paths, 'restore', url, '.')}"
    done = head.run(script, timeout_s=_RESTORE_TIMEOUT_S, on_text=lambda line: _show(line, note))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "message" in found:
        if is_new:
            head.run(f"# removing a job that is not restored\nrm -rf {paths.root}")
        hint = found["hint"] and found["hint"].replace(url, f"{url}{cloud}")
        raise UsageError(found["message"], hint=hint)
    return found


def _worker_command(paths: JobPaths, module: str, *words: str) -> str:
    argv = [f"{VENV}/bin/python", "-m", f"worker.storage.{module}", *words]
    return f"cd {shlex.quote(paths.root)} && PYTHONPATH=code {shlex.join(argv)}"


def _show(line: str, note: TextSink) -> None:
    for each in line.splitlines():
        if each.strip() and not each.startswith("{"):
            note(each.strip())


def check_stage(head: Host, paths: JobPaths, stage: Sequence[tuple[str, str]]) -> None:
    """Ask S3 from the head for a job's data, before it waits in the queue for a typing error.

    Raises :class:`UsageError` for data that the nodes can't read, or whose format is unknown.
    """
    for url, target in stage:
        script = _worker_command(paths, "stage", "--check", url)
        found: dict[str, Any] = json.loads(head.run(script).stdout.splitlines()[-1])
        if "message" in found:
            raise UsageError(found["message"], hint=found["hint"])
        if not (found["is_folder"] or PurePath(target).suffix or target.startswith("work/")):
            raise UsageError(
                f"{url}: is an object whose name does not say its format",
                hint="give it a name such as train.csv or train.jsonl",
            )


def check_places(head: Host, paths: JobPaths, bucket: str, outputs: Iterable[str] = ()) -> None:
    """Write to a job's places in S3 from the head: its folder's, and those of --output.

    Raises :class:`UsageError` if the nodes may not.
    """
    hint = "`up --bucket s3://…` gives a cluster's nodes access"
    places = {url: (f"--output {url}", hint) for url in outputs}
    if bucket:
        known = f"--bucket {bucket}", f"{hint}; `--bucket none` stores nothing"
        places[f"{bucket}/{paths.job_id}"] = known
    for place, (option, remedy) in places.items():
        done = head.run(_worker_command(paths, "push", "probe", ".", place), check=False)
        if done.exit_code:
            why = (done.stderr.strip().splitlines() or ["the nodes can't write there"])[-1]
            why = why.removeprefix(f"{place.rstrip('/')}: ")
            raise UsageError(f"{option}: {why}", hint=remedy)


def withdraw_files(head: Host, paths: JobPaths) -> bool:
    """Remove a job's folder from every node, unless the job is in the queue; return whether that is done."""
    names = {"job": paths.job_id, "root": paths.root, "upload": paths.upload}
    return "removed" in head.run(_WITHDRAW.format(**names)).stdout


def upload_archive(head: Host, files: Mapping[str, Path | bytes], target: str) -> None:
    """Upload files and folders as one tar archive, under their names in it."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "upload.tar")
        # Links are followed: the hub's cache, for one, is made of links.
        with tarfile.open(bundle, "w", dereference=True) as archive:
            for name, source in files.items():
                _add(archive, name, source)
        head.upload(bundle, target)


def _add(archive: tarfile.TarFile, name: str, source: Path | bytes) -> None:
    if isinstance(source, Path):
        archive.add(source, name, filter=_without_owner)
        return
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(source), 0o700 if source.startswith(b"#!") else 0o600
    archive.addfile(info, io.BytesIO(source))


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return the member without its local owner; ``None`` (skip it) for compiled Python."""
    if "__pycache__" in info.name:
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def fetch(
    head: Host,
    paths: JobPaths,
    target: Path,
    note: TextSink,
    flags: str = "",
    *,
    all_checkpoints: bool = False,
) -> Fetched:
    """Download what is the user's of a job, its log, and the logs and metrics of its ranks.

    Nothing is written on the nodes. ``note`` receives the progress; ``flags`` name the cluster in
    messages. Raises :class:`JobError` if the files arrive damaged, or can't be written.
    """
    hint = f"to try again: spr-cluster fetch {paths.job_id} {flags}".rstrip()
    hint += results_option(paths.job_id, target)
    try:
        return _fetch(head, paths, target, note, all_checkpoints=all_checkpoints)
    except OSError as error:
        why = error.strerror or error
        what = f"the results of job {paths.job_id} could not be written to {target}"
        raise JobError(f"{what}: {why}", hint=hint) from error
    except SprError as error:
        error.hint = error.hint or hint
        raise


def _fetch(
    head: Host, paths: JobPaths, target: Path, note: TextSink, *, all_checkpoints: bool
) -> Fetched:
    rows = head.run(_COLLECT.format(root=paths.root, job=paths.job_id)).stdout.splitlines()
    asked = [tuple(row.split()) for row in rows if row.count(" ") == 1]
    options = {"folder": paths.root, "limit": ownership.WORK_LIMIT}
    options["all_checkpoints"] = all_checkpoints

    def fetch_from(node: str, what: str) -> tuple[str, dict[str, Any] | None]:
        """Fetch a node's files; a worker that is gone must not cost the others' files."""
        chosen = {**options, "node": node, "rank_files_only": what == "logs"}
        program = send(ownership, json.dumps(chosen))
        command = program.render("sending the results", f"-o ConnectTimeout=10 {node}")
        try:
            return node, unpack_results(head.download(command), target, paths.job_id, note)
        except ConnectionLostError:
            raise
        except (HostError, JobError):
            return node, None if what == "output" else {}

    # A node of which all is wanted is asked once.
    workers = {node: what for what, node in asked if what in ("logs", "output")}
    with ThreadPoolExecutor(_SESSIONS) as pool:
        try:
            reports = dict(pool.map(lambda row: fetch_from(*row), workers.items()))
        except BaseException:
            head.close()  # ends the other transfers
            raise
    # Its copies of the workers' files are for a worker that is gone.
    options["without"] = [node for node in workers if workers[node] == "output" and reports[node]]
    command = send(ownership, json.dumps(options)).render("sending the results")
    own = unpack_results(head.download(command), target, paths.job_id, note)
    lost = [] if own.get("gathered") else [node for node in reports if reports[node] is None]
    missing = [f"the output of {node} could not be fetched" for node in lost]
    known = {"node0": own, **{node: report for node, report in reports.items() if report}}
    fetched = describe_reports(known, target, missing)
    at = next((value for key, value in asked if key == "at"), None)
    mark = f"touch -d @{at} {paths.root}/{FETCHED}; " if at and not fetched.missing else ""
    ended = head.run(f"{mark}cat {paths.end} 2>/dev/null || true")
    complete_record(target, ended.stdout)
    return fetched


def describe_reports(
    reports: Mapping[str, Mapping[str, Any]], target: Path, missing: Iterable[str] = ()
) -> Fetched:
    """Return in words what the nodes' archives say of what is in them, and what is not. Pure."""
    left, said = [*missing], []
    for node, report in reports.items():
        if names := report.get("left"):
            left.append(f"only on {node}: {ownership.describe(names)}")
        if names := report.get("skipped"):
            said.append(f"not fetched from {node}: {ownership.describe(names)}")
    work = [
        (f"{node}/{name}", size) for node in reports for name, size in reports[node].get("work", ())
    ]
    if work:
        work.sort(key=lambda each: -each[1])
        shown = ownership.describe(f"{name} ({format_size(size)})" for name, size in work)
        text = f"written to the working folder, and now in {target / 'work'}/: {shown}"
        said.append(text)
    return Fetched(tuple(left), tuple(said))


def save_on_head(head: Host, folder: str, text: str, now: datetime) -> None:
    """Save a text on the head, below the login user's home, under a timestamp."""
    head.run(f"mkdir -p ~/{folder}")
    head.put(text.encode(), f"{JobPaths('').home}/{folder}/{now:%Y%m%d-%H%M%S}.json", 0o644)


def unpack_results(
    chunks: Iterator[bytes], target: Path, job: str, note: TextSink
) -> dict[str, Any]:
    """Extract a job's archive into its results folder while it arrives: all of its files, or none.

    Returns the archive's report, if it has one. Raises :class:`JobError` if it is damaged.
    """
    target.mkdir(parents=True, exist_ok=True)
    # Beside the target: not in /tmp, which may be in memory, and never half a model under its final name.
    with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as folder:
        arriving = _Arriving(chunks, note)
        try:
            with tarfile.open(fileobj=arriving, mode="r|") as archive:  # type: ignore[call-overload]
                report = _extract(archive, Path(folder))
        except _DAMAGE as error:
            raise JobError(f"the results of job {job} arrived damaged: {error}") from error
        for _ in chunks:  # at whose end a failure is raised
            pass
        move_results(Path(folder), target)
    return report


def move_results(folder: Path, target: Path) -> None:
    """Move all files and folders of a folder into a results folder, in place of what is there."""
    for path in sorted(folder.rglob("*")):
        place = target / path.relative_to(folder)
        if path.is_dir():
            if not place.is_dir():
                place.unlink(missing_ok=True)
            place.mkdir(parents=True, exist_ok=True)
        else:
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            path.replace(place)


@dataclass
class _Arriving:
    """What arrives, as a file for :mod:`tarfile`."""

    chunks: Iterator[bytes]
    note: TextSink
    size: int = 0

    def read(self, _: int) -> bytes:
        chunk = next(self.chunks, b"")
        if (self.size + len(chunk)) // _NOTED > self.size // _NOTED:
            self.note(format_size(self.size + len(chunk)))
        self.size += len(chunk)
        return chunk


def _extract(archive: tarfile.TarFile, target: Path) -> dict[str, Any]:
    """Extract the files at their places in the results; no member may leave the target.

    tarfile's own filters are missing in Debian 12's Python 3.11.2.
    """
    report: dict[str, Any] = {}
    for member in archive:
        content = archive.extractfile(member) if member.isfile() else None
        if content is not None and member.name == ownership.REPORT:
            report = json.loads(content.read())
            continue
        place = place_locally(member.name)
        path = (target / place).resolve()
        if not place or not path.is_relative_to(target.resolve()):
            continue
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
        elif content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("wb") as file:
                shutil.copyfileobj(content, file, _COPIED)
            path.chmod(member.mode & 0o777 | 0o600)
            os.utime(path, (member.mtime, member.mtime))
    return report


def place_locally(name: str) -> str:
    """Return where a file of a job's folder is in its results; "" for one that is not fetched. Pure."""
    top, _, rest = name.partition("/")
    own = own_folder(Path()).name
    if top == ownership.WORKERS:
        node, _, rest = rest.partition("/")
        what, _, rest = rest.partition("/")
        return f"{node}/{rest}" if what == ownership.OUTPUT else f"work/{node}/{rest}"
    if top == ownership.WORK:
        return f"work/node0/{rest}"
    if top == ownership.OUTPUT:
        return f"node0/{rest}" if _RESERVED.fullmatch(rest.partition("/")[0]) else rest
    is_own = name in ownership.OWN or name.startswith(ownership.RANK_FILES)
    return f"{own}/{name.removeprefix(f'{ownership.STATE}/')}" if is_own else ""
