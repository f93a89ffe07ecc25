"""The folders that a program needs: the project as git sees it, and data that stays on the nodes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from cluster.local_files import machine_id
from infra.errors import UsageError
from infra.project_file import PROJECT_FILE, find_project_file
from infra.s3_url import parse_s3_url
from infra.words import counted, format_size
from jobs.places.plan import JobFolder
from jobs.places.record import read_job_id
from jobs.program.plan import CACHES, name_largest
from jobs.worker.storage.ownership import describe

IGNORE_FILE = ".sprignore"
"""Patterns, in the syntax of ``.gitignore``, of files that jobs don't need."""
_ENOUGH = 1 << 20
_GIT_S = 60
_NO_TREE = re.compile("not a git repository|must be run in a work tree")
# Ignored by git, and of no use to a job.
_NOT_MISSED = re.compile(
    r"(^|/)(\.|__pycache__/|node_modules/|v?env/|\S+\.egg-info/)|^results/|\.pyc$"
)
# Such as what a hook's git sets for its own repository. The configuration may have a container's
# safe.directory, and the others are about all repositories.
_OF_A_REPOSITORY = re.compile(r"GIT_(?!CONFIG|EXEC_PATH|CEILING|DISCOVERY).*")
_PART_OF_PROJECT = re.compile(r"\.py$|^requirements\.txt$|^pyproject\.toml$")


def find_project(folder: Path) -> Path | None:
    """Return the folder of the nearest ``spr-cluster.toml``, else the git repository, if there is one."""
    path = find_project_file(folder)
    if path.is_file():
        return path.absolute().parent
    top = _git(folder, "rev-parse", "--show-toplevel", may_lack=True).removesuffix("\n")
    # Some keep their home folder's settings in git.
    return Path(top) if top and Path(top) != Path.home().resolve() else None


@dataclass(frozen=True)
class SentFolders:
    """A job's project, if it has one, with its data; the command runs in ``subfolder``.

    That is the working folder, or the folder that the user named.
    """

    project: JobFolder | None = None
    data: tuple[JobFolder, ...] = ()
    subfolder: str = "."

    @property
    def folders(self) -> tuple[JobFolder, ...]:
        return (*([self.project] if self.project else []), *self.data)


def choose_folders(
    given: str | None, data: Sequence[str], here: Path, max_bytes: int | None
) -> SentFolders:
    """Return what to send from the working folder ``here``. ``given`` is a folder, ``none``, or ``None``.

    Raises :class:`UsageError` for a missing folder, two with one place in the job, or a project of more
    than ``max_bytes``.
    """
    root = None if given == "none" else find_project(here)
    if given not in (None, "none"):
        root = (here / os.path.expanduser(given)).resolve()  # noqa: PTH111 - pathlib's fails for unknown users
        if not root.is_dir():
            raise UsageError(f"--folder {given}: no such folder", hint="`none` sends no folder")
    found = tuple(dict.fromkeys(read_data(each, root or here) for each in data))
    for number, each in enumerate(found):
        _require_free(each.target, each.root, (other.target for other in found[:number]))
    if root is None:
        return SentFolders(data=found)
    subfolder = here.resolve().relative_to(root.resolve()).as_posix() if given is None else "."
    places = {each.target.removeprefix("work/"): each.root for each in found}
    without = (
        place
        for place, data in places.items()
        # The project may have a link to data elsewhere.
        if data.is_relative_to(root) or (root / place).resolve() == data.resolve()
    )
    project = read_project(root, max_bytes=max_bytes, without=tuple(without))
    for each in found:
        _require_free(each.target, each.root, project.targets)
    return SentFolders(project, found, subfolder)


def _require_free(target: str, given: str | Path, taken: Iterable[str]) -> None:
    if any(
        f"{a}/".startswith(f"{b}/") for each in taken for a, b in ((each, target), (target, each))
    ):
        raise UsageError(
            f"--data-dir {given}: the job has another {target.removeprefix('work/')}",
            hint="rename one of them, or list that of the project in .sprignore",
        )


def list_project(root: Path) -> tuple[str, ...]:
    """Return the files that git tracks or would add, submodules' as well, without ``.sprignore``'s.

    Without a repository, all files but caches. Raises :class:`UsageError` if git fails.
    """
    if not shutil.which("git"):
        return tuple(sorted(_without_fetched(root, _walk(root))))
    inside = _is_inside(root)
    with tempfile.TemporaryDirectory() as scratch:
        # An empty repository elsewhere gives a plain folder git's patterns.
        _git(Path(scratch), "init", "--quiet")
        where = ["-C", str(root)]
        if not inside:
            where = [f"--git-dir={scratch}/.git", f"--work-tree={root}"]
        names = {*_list_names(root, where, inside=inside)}
        names -= _find_unwanted(root, names, Path(scratch))
        for name in [name for name in names if name.endswith("/")]:
            names.remove(name)
            if (root / name / ".git").exists():  # another repository, of which git lists no files
                nested = {f"{name}{each}" for each in list_project(root / name)}
                names |= nested - _find_unwanted(root, nested, Path(scratch))
    return tuple(sorted(name for name in names if _is_file(root / name)))


def _is_inside(root: Path) -> bool:
    """Return whether a folder is in a repository that does not ignore it as a whole."""
    inside = _git(root, "rev-parse", "--is-inside-work-tree", may_lack=True).strip() == "true"
    return inside and not _git(root, "check-ignore", ".")


def _is_file(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_dir())


def _list_names(root: Path, where: list[str], *, inside: bool) -> Iterator[str]:
    """Yield the names of files, and of other repositories, which end in ``/``."""
    skipped = [] if inside else [f"--exclude={name}/" for name in CACHES]
    ignore = root / IGNORE_FILE
    if ignore.is_file() and not (inside and _git(root, "rev-parse", "--show-prefix").strip()):
        # So that git does not walk these folders. Of all patterns, those given first count least.
        skipped.append(f"--exclude-from={ignore}")
    untracked = ("ls-files", "-z", "--others", *skipped, "--exclude-standard")
    yield from _without_fetched(root, _git(root, *where, *untracked).split("\0")[:-1])
    if inside:
        for entry in _git(root, *where, "ls-files", "-z", "--stage").split("\0")[:-1]:
            mode, _, name = entry.partition("\t")
            yield f"{name}/" if mode.startswith("160000") else name  # a submodule


def _find_unwanted(root: Path, names: Iterable[str], scratch: Path) -> set[str]:
    """Return the names that ``.sprignore`` excludes, tracked or not; ``scratch`` is an empty repository."""
    if not (root / IGNORE_FILE).is_file():
        return set()
    exclude = scratch / ".git/info/exclude"
    exclude.parent.mkdir(exist_ok=True)
    shutil.copyfile(root / IGNORE_FILE, exclude)
    for name in names:
        if name.endswith("/"):  # some patterns are for folders only
            (scratch / name).mkdir(parents=True, exist_ok=True)
    only = ("-C", str(scratch), "-c", f"core.excludesFile={os.devnull}")
    words = ("check-ignore", "--no-index", "--verbose", "-z", "--stdin")
    # A name that begins with a colon would be one of git's special patterns.
    found = _git(scratch, *only, *words, given="\0".join(f"./{name}" for name in sorted(names)))
    fields = found.split("\0")
    pairs = zip(fields[2::4], fields[3::4], strict=False)  # the pattern and the name
    return {name.removeprefix("./") for pattern, name in pairs if not pattern.startswith("!")}


def _without_fetched(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the names that are not in a folder with a job's results."""

    @cache
    def is_fetched(folder: str) -> bool:
        if not folder:
            return False
        return is_fetched(folder.rpartition("/")[0]) or bool(read_job_id(root / folder))

    return (name for name in names if not is_fetched(name.rpartition("/")[0]))


def describe_left_out(sent: SentFolders, files: Collection[str], here: Path) -> str:
    """Return a line on what jobs lack of the project, largest first; "" for nothing.

    A script without a project may lack what looks like one ``here``.
    """
    shown = _find_left_out(sent.project) if sent.project else {}
    instead = {*files, *(each.target.removeprefix("work/") for each in sent.data)}
    lines = [f"{name} ({why})" for name, why in shown.items() if name.strip("/") not in instead]
    hint = "--data-dir sends a folder, --files a file"
    if links := [f"{name} (a link to {end})" for each in sent.data for name, end in each.lost]:
        lines += links
        hint = "replace links in data by what they lead to" if links == lines else hint
    if files and not sent.project and not lines:
        wanted = sorted(each.name for each in here.iterdir() if _PART_OF_PROJECT.search(each.name))
        lines = [name for name in wanted if name not in {Path(file).name for file in files}]
        hint = "`--folder .` sends this folder, which has neither spr-cluster.toml nor git"
    return f"not sent: {describe(lines)}; {hint}" if lines else ""


def _find_left_out(project: JobFolder) -> dict[str, str]:
    """Return what is not sent of a project, largest first, and why."""
    root, sizes = project.root, dict[str, int]()
    words = ("ls-files", "-z", "--others", "--ignored", "--directory", "--exclude-standard")
    ignored = _git(root, *words).split("\0")[:-1] if _is_inside(root) else ()
    for name in _without_fetched(root, ignored):
        found = () if _NOT_MISSED.search(name) else [*_measure(root / name)]
        if found:
            sizes[name] = sum(found)
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)
    shown = {name: f"ignored by git, {format_size(sizes[name])}" for name in largest}
    links = [name for name in project.names or () if _leads_out(root / name, root)]
    return shown | {name: f"a link to {(root / name).readlink()}" for name in links}


def _measure(path: Path) -> Iterator[int]:
    """Yield the sizes of a file, or of all in a folder, perhaps millions, except fetched results."""
    alone: list[tuple[str, list[str], list[str]]] = [(str(path.parent), [], [path.name])]
    for where, folders, names in os.walk(path) if path.is_dir() else alone:
        if read_job_id(Path(where)):
            folders.clear()
            continue
        for name in names:
            with suppress(OSError):  # a program may remove it meanwhile
                yield os.lstat(f"{where}/{name}").st_size


def _leads_out(path: Path, root: Path) -> bool:
    """Whether a path is a link that is dangling, is absolute, or leads out of a folder."""
    if not path.is_symlink():
        return False
    is_inside = path.exists() and path.resolve().is_relative_to(root.resolve())
    return path.readlink().is_absolute() or not is_inside


def _walk(root: Path) -> Iterator[str]:
    if (root / IGNORE_FILE).is_file():
        raise UsageError(f"{root / IGNORE_FILE} needs git, which is not installed here")
    for below, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in CACHES]
        yield from (str(Path(below, name).relative_to(root)) for name in names)


def _git(folder: Path, *words: str, may_lack: bool = False, given: str = "") -> str:
    """Return git's output. With ``may_lack``, it is "" without git or a work tree, but not if git refuses."""
    argv = ["git", *([] if words[0].startswith("-") else ["-C", str(folder)]), *words]
    items = os.environ.items()
    others = {name: text for name, text in items if not _OF_A_REPOSITORY.fullmatch(name)}
    try:
        done = subprocess.run(
            argv,
            input=os.fsencode(given),
            capture_output=True,
            timeout=_GIT_S,
            check=False,
            env={**others, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if may_lack and isinstance(error, FileNotFoundError):
            return ""
        raise UsageError(f"git can't list {folder}: {error}") from None
    said = done.stderr.decode(errors="replace").strip()
    found_none = done.returncode == 1 and not said  # check-ignore's way to say so
    if done.returncode and not found_none and not (may_lack and _NO_TREE.search(said)):
        cure = said.rpartition("\n")[2].strip()
        hint = f"{cure}; or " if cure.startswith("git config") else ""
        raise UsageError(
            f"git can't list {folder}: {said.partition(chr(10))[0]}",
            hint=f"{hint}`--folder none` sends no folder",
        )
    return os.fsdecode(done.stdout)


def read_project(root: Path, *, max_bytes: int | None, without: tuple[str, ...] = ()) -> JobFolder:
    """Return a project's files with the digest of their content; ``without`` are folders in it.

    Raises :class:`UsageError` if they exceed ``max_bytes``, and names the largest.
    """
    names = [
        name
        for name in list_project(root)
        if not any(f"{name}/".startswith(f"{each}/") for each in without)
    ]
    return _read_names(root, names, max_bytes)


def replace_links(sent: SentFolders, files: Iterable[str]) -> SentFolders:
    """Leave out the project's links at whose places ``files``, or folders of them, are sent."""
    if sent.project is None:
        return sent
    root, names = sent.project.root, sent.project.names or ()
    places = {str(each) for file in files for each in (Path(file), *Path(file).parents)}
    kept = [name for name in names if not (name in places and (root / name).is_symlink())]
    changed = len(kept) < len(names)
    return replace(sent, project=_read_names(root, kept, None)) if changed else sent


def _read_names(root: Path, names: Sequence[str], max_bytes: int | None) -> JobFolder:
    folder, digest = JobFolder(root, "", "work", 0, tuple(names)), hashlib.sha256()
    try:
        known = folder.stamp()
        sizes = {name: size for name, (size, *_) in zip(names, known, strict=True)}
        if max_bytes is not None and sum(sizes.values()) > max_bytes:
            raise _too_large(root, sizes, max_bytes)
        for name in names:
            digest.update(os.fsencode(name) + b"\0" + _digest(root / name))
    except OSError as error:
        raise UsageError(f"{error.filename or root}: can't be read: {error.strerror}") from None
    store = f"spr-folders/{_slug(root)}-{digest.hexdigest()[:16]}"
    return replace(folder, store=store, size=sum(sizes.values()), stamped=known)


def _slug(root: Path) -> str:
    """Return a name that no shell changes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", root.name)[:32].strip(".-") or "project"


def _digest(path: Path) -> bytes:
    """Return a digest of a file's kind, mode, and content."""
    content, mode = hashlib.sha256(), path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return b"l" + hashlib.sha256(os.fsencode(path.readlink())).digest()
    if not stat.S_ISREG(mode):
        return b"-"
    with path.open("rb") as file:
        while block := file.read(_ENOUGH):
            content.update(block)
    return (b"x" if mode & 0o100 else b"f") + content.digest()


def read_data(given: str, project: Path) -> JobFolder:
    """Return a folder of data, sent once and shared by all jobs. Raises :class:`UsageError` if it is none.

    A folder of the project keeps its place in it; any other keeps its name.
    """
    root = Path(os.path.abspath(os.path.expanduser(given)))  # noqa: PTH100, PTH111 - keeps links' names
    if not root.is_dir():
        raise UsageError(f"--data-dir {given}: no such folder")
    place = Path(root.name)
    # A link above the project changes nothing; the data itself may be a link to elsewhere.
    for path, base in ((root.parent.resolve() / root.name, project.resolve()), (root, project)):
        if path.is_relative_to(base):
            place = path.relative_to(base)
    if not place.parts:
        raise UsageError(f"--data-dir {given} is the project itself", hint="name a folder in it")
    size, lost = 0, list[tuple[str, str]]()
    for path in root.rglob("*"):
        if _leads_out(path, root):
            lost.append((f"{root.name}/{path.relative_to(root)}", str(path.readlink())))
        elif path.is_file():
            size += path.lstat().st_size
    # Two machines may have different data at one path.
    known = hashlib.sha256(machine_id().encode() + os.fsencode(root)).hexdigest()[:12]
    store, target = f"spr-data/{_slug(root)}-{known}", f"work/{place.as_posix()}"
    return JobFolder(root, store, target, size, lost=tuple(sorted(lost)))


def read_urls(given: Sequence[str], sent: SentFolders) -> tuple[tuple[str, str], ...]:
    """Return S3 URLs with their places in the job, each named like its last part.

    Raises :class:`UsageError` for a name that is taken.
    """
    found: dict[str, str] = {}
    taken = [target for folder in sent.folders for target in folder.targets]
    for url in given:
        place = parse_s3_url(url, "--data-dir")
        target = f"work/{place.prefix.rpartition('/')[2] or place.bucket}"
        _require_free(target, url, (*taken, *found))
        found[target] = url
    return tuple((url, target) for target, url in found.items())


def _too_large(root: Path, sizes: dict[str, int], max_bytes: int) -> UsageError:
    total = f"{counted(len(sizes), 'file')}, {format_size(sum(sizes.values()))}"
    return UsageError(
        f"{root}: {total} exceed {format_size(max_bytes)}; the largest: {name_largest(sizes)}",
        hint=f"list what jobs don't need in {IGNORE_FILE}, send data once with --data-dir, or send all "
        f"with --large-files (the project is the folder of {PROJECT_FILE} or the git repository)",
    )
