"""Transfer of a job's files: to every node before it starts, and home after it ends."""

from __future__ import annotations

import io
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from infra.errors import JobError, SprError
from jobs import worker
from jobs.launch.plan import MANIFEST, JobPaths
from jobs.launch.record import FILE as RECORD
from jobs.launch.record import complete_record
from provision.host import Host

# What a resumed job needs on nodes that were replaced.
_PARTS = (MANIFEST, RECORD, "code", "data", "model", "output/.keep")
# The head sends the archive to the workers over the cluster's network.
_DISTRIBUTE = """# distributing the job's files to the workers
set -e -o pipefail
tar -C ~ -xf %UPLOAD%
tail -n +2 ~/hosts | xargs -r -P 32 -I@ sh -c 'ssh @ "tar -C ~ -xf -" < %UPLOAD% \
  || { echo "@ can not be reached" >&2; exit 1; }'
rm -f %UPLOAD%
"""
# Checkpoints, ours and those of transformers' Trainer, stay on the nodes for a resumed job.
_NOT_FETCHED = "--exclude=output/checkpoints --exclude='output/model/checkpoint-*' --exclude=.keep"
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
    _distribute(head, paths)


def upload_archive(head: Host, files: Mapping[str, Path | bytes], target: str) -> None:
    """Upload files and folders as one tar archive, under their names in it."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "upload.tar")
        # Links are followed: the hub's cache, for one, is made of links.
        with tarfile.open(bundle, "w", dereference=True) as archive:
            for name, source in files.items():
                _add(archive, name, source)
        head.upload(bundle, target)


def place_again(head: Host, paths: JobPaths) -> None:
    """Send a job's files from the head to its nodes again."""
    parts = " ".join(f"{paths.relative_root}/{name}" for name in _PARTS)
    head.run(f"cd ~ && tar -cf {paths.upload} $(ls -d {parts} 2>/dev/null)")
    _distribute(head, paths)


def _distribute(head: Host, paths: JobPaths) -> None:
    script = _DISTRIBUTE.replace("%UPLOAD%", paths.upload)
    head.run(script, timeout_s=_TRANSFER_TIMEOUT_S)


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


def _render_gathering(paths: JobPaths) -> str:
    """Return the commands that copy each worker's output to the head, if the job's plan asked for that.

    They print the workers that can't be reached; the others' files are kept.
    """
    # One folder each, because ranks may use the same file names.
    pull = (
        f"mkdir -p {paths.output}/@ && ssh @ 'cd {paths.output} && find . -type f ! -name .keep "
        f"-print0 | tar --null -T - -cf -' | tar -C {paths.output}/@ -xf - "
        f'|| echo "the output of @ could not be fetched"; '
        f"rmdir --ignore-fail-on-non-empty {paths.output}/@"
    )
    return (
        # Without the first node, whose output is on the head.
        f"[ ! -f {paths.gather} ] || grep -o '\"node[0-9]*\"' {paths.begin} | tr -d '\"' "
        f"| tail -n +2 | xargs -r -P 32 -I@ bash -o pipefail -c {shlex.quote(pull)}"
    )


def fetch(
    head: Host, paths: JobPaths, target: Path, on_log: Callable[[str], None], flags: str = ""
) -> tuple[str, ...]:
    """Download the job's output folder and every rank's logs, without checkpoints.

    ``flags`` name the cluster in messages. Returns a line about each worker whose output is missing.
    Raises :class:`JobError` if the files arrive damaged, or can't be written.
    """
    with say_how_to_fetch(paths.job_id, target, flags):
        return _fetch(head, paths, target, on_log)


@contextmanager
def say_how_to_fetch(job: str, target: Path, flags: str) -> Iterator[None]:
    """Let errors while results are brought home name the command that tries again."""
    elsewhere = f" --results {shlex.quote(str(target))}" if target != Path("results", job) else ""
    hint = f"to try again: spr-cluster fetch {job} {flags}".rstrip() + elsewhere
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        what = f"the results of job {job} could not be written to {target}"
        raise JobError(f"{what}: {why}", hint=hint) from error
    except SprError as error:
        error.hint = error.hint or hint
        raise


def _fetch(
    head: Host, paths: JobPaths, target: Path, on_log: Callable[[str], None]
) -> tuple[str, ...]:
    bundle = f"{paths.root}/output.tar"
    # A worker that is gone must not cost the others' files.
    collect = (
        "tail -n +2 ~/hosts | xargs -r -P 32 -I@ sh -c 'ssh -n -o ConnectTimeout=10 @ "
        f'"tar -C {paths.root} -cf - output/logs output/metrics 2>/dev/null" '
        f"| tar -C {paths.root} -xf - 2>/dev/null || true'"
    )
    done = head.run(
        f"# collecting the results\n{_render_gathering(paths)}\n{collect}; cd {paths.root}; "
        f"tar -C {paths.root} {_NOT_FETCHED} -cf {bundle} $(ls -d log* {RECORD} 2>/dev/null) output",
        timeout_s=_TRANSFER_TIMEOUT_S,
    )
    missing = tuple(done.stdout.splitlines())
    for line in missing:
        on_log(line)
    target.mkdir(parents=True, exist_ok=True)
    # Not in /tmp, which may be in memory: a model can be larger than that.
    with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as folder:
        local = Path(folder, "output.tar")
        head.download(bundle, local)
        try:
            with tarfile.open(local, "r:") as archive:
                _extract(archive, target)
        except _DAMAGE as error:
            raise JobError(f"the results of job {paths.job_id} arrived damaged: {error}") from error
    mark = "" if missing else f"touch -r {bundle} {paths.fetched}; "
    ended = head.run(f"{mark}rm -f {bundle}; cat {paths.end} 2>/dev/null || true")
    complete_record(target, ended.stdout)
    return missing


def save_on_head(head: Host, folder: str, text: str, now: datetime) -> None:
    """Save a text on the head, in a folder of the login user's home, named by its time."""
    head.run(f"mkdir -p ~/{folder}")
    head.put(text.encode(), f"{JobPaths('').home}/{folder}/{now:%Y%m%d-%H%M%S}.json", 0o644)


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
