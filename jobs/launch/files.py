"""Transfer of a job's files: to every node before it starts, and home after it ends."""

from __future__ import annotations

import io
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from infra.errors import JobError, SprError
from jobs import worker
from jobs.launch.plan import RECORD, JobPaths
from jobs.launch.record import complete_record
from provision.host import Host

# The head sends the archive to the workers over the cluster's network.
_DISTRIBUTE = """# distributing the job's files to the workers
set -e -o pipefail
tar -C ~ -xf %UPLOAD%
tail -n +2 ~/hosts | xargs -r -P 32 -I@ sh -c 'ssh @ "tar -C ~ -xf -" < %UPLOAD% \
  || { echo "@ can not be reached" >&2; exit 1; }'
rm -f %UPLOAD%
"""
# A worker that is gone must not cost the others' files. If the job's plan asked for the workers' whole
# output, each of them has its own folder for it, because ranks may use the same file names; the first node's
# output is on the head, and a worker that can't be reached is named. Checkpoints, ours and those of
# transformers' Trainer, stay on the nodes for a resumed job.
_COLLECT = """# collecting the results
cd {root} || exit
! grep -qs '"gather_output": true' {record} || grep -o '"node[0-9]*"' {begin} | tr -d '"' | tail -n +2 | \
  xargs -r -P 32 -I@ bash -o pipefail -c '
    mkdir -p output/@
    ssh @ "cd {output} && find . -type f ! -name .keep -print0 | tar --null -T - -cf -" \
      | tar -C output/@ -xf - || echo "the output of @ could not be fetched"
    rmdir --ignore-fail-on-non-empty output/@'
tail -n +2 ~/hosts | xargs -r -P 32 -I@ sh -c 'ssh -n -o ConnectTimeout=10 @ \
  "tar -C {root} -cf - output/logs output/metrics 2>/dev/null" | tar -xf - 2>/dev/null || true'
tar --exclude=output/checkpoints --exclude='output/model/checkpoint-*' --exclude=.keep \
  -cf {bundle} $(ls -d log* {record} 2>/dev/null) output
"""
_TRANSFER_TIMEOUT_S = 1800
# What reading and unpacking a damaged archive raises.
_DAMAGE = (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError)


def worker_files() -> dict[str, Path]:
    """Return the code of ``jobs/worker`` by its names on the nodes, where it is imported as ``worker``."""
    root = Path(worker.__file__).parent
    sources = sorted(root.rglob("*.py"))
    return {f"code/worker/{source.relative_to(root)}": source for source in sources}


def place_files(head: Host, paths: JobPaths, files: Mapping[str, Path | bytes]) -> None:
    """Put files, named relative to the job's folder, on every node.

    The slow connection to the head carries them once.
    """
    named = {f"{paths.relative_root}/{name}": source for name, source in files.items()}
    upload_archive(head, named, paths.upload)
    script = _DISTRIBUTE.replace("%UPLOAD%", paths.upload)
    head.run(script, timeout_s=_TRANSFER_TIMEOUT_S)


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
    info.size, info.mode = len(source), 0o600
    archive.addfile(info, io.BytesIO(source))


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return the member without this machine's owner; ``None`` for compiled Python."""
    if "__pycache__" in info.name:
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def fetch(
    head: Host, paths: JobPaths, target: Path, on_log: Callable[[str], None], flags: str = ""
) -> tuple[str, ...]:
    """Download the job's output folder and every rank's logs, without checkpoints.

    ``flags`` name the cluster in messages. Returns a line about each worker whose output is missing.
    Raises :class:`JobError` if the files arrive damaged, or can't be written.
    """
    elsewhere = f" --results {shlex.quote(str(target))}"
    hint = f"to try again: spr-cluster fetch {paths.job_id} {flags}".rstrip()
    hint += elsewhere if target != Path("results", paths.job_id) else ""
    try:
        return _fetch(head, paths, target, on_log)
    except OSError as error:
        why = error.strerror or error
        what = f"the results of job {paths.job_id} could not be written to {target}"
        raise JobError(f"{what}: {why}", hint=hint) from error
    except SprError as error:
        error.hint = error.hint or hint
        raise


def _fetch(
    head: Host, paths: JobPaths, target: Path, on_log: Callable[[str], None]
) -> tuple[str, ...]:
    bundle = f"{paths.root}/output.tar"
    names = {name: getattr(paths, name) for name in ("root", "output", "begin")}
    script = _COLLECT.format(**names, bundle=bundle, record=RECORD)
    done = head.run(script, timeout_s=_TRANSFER_TIMEOUT_S)
    missing = tuple(done.stdout.splitlines())
    for line in missing:
        on_log(line)
    target.mkdir(parents=True, exist_ok=True)
    # Not in /tmp, which may be in memory: a model can be larger than that.
    with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as folder:
        local = Path(folder, "output.tar")
        head.download(bundle, local)
        unpack_results(local, target, paths.job_id)
    mark = "" if missing else f"touch -r {bundle} {paths.fetched}; "
    ended = head.run(f"{mark}rm -f {bundle}; cat {paths.end} 2>/dev/null || true")
    complete_record(target, ended.stdout)
    return missing


def save_on_head(head: Host, folder: str, text: str, now: datetime) -> None:
    """Save a text on the head, in a folder of the login user's home, named by its time."""
    head.run(f"mkdir -p ~/{folder}")
    head.put(text.encode(), f"{JobPaths('').home}/{folder}/{now:%Y%m%d-%H%M%S}.json", 0o644)


def unpack_results(bundle: Path, target: Path, job: str) -> None:
    """Extract a job's archive into its results folder. Raises :class:`JobError` if it is damaged."""
    try:
        with tarfile.open(bundle, "r:") as archive:
            _extract(archive, target)
    except _DAMAGE as error:
        raise JobError(f"the results of job {job} arrived damaged: {error}") from error


def _extract(archive: tarfile.TarFile, target: Path) -> None:
    """Extract ``output/*`` into the target, beside the log; no member may leave the target.

    tarfile's own filters are missing in Debian 12's Python 3.11.2.
    """
    for member in archive:
        name = member.name.removeprefix("output").lstrip("/")
        path = (target / name).resolve()
        content = archive.extractfile(member) if member.isfile() else None
        if content is not None and path.is_relative_to(target.resolve()):
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("wb") as file:
                shutil.copyfileobj(content, file)
