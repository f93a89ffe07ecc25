# ruff: noqa: PTH110,PTH116,PTH118,PTH119,PTH120,PTH123,PTH208
"""What in a job's folder on a node is the user's, and what of it must be kept.

output/        the user's, whole
work/          the project as it was sent; what the program adds or changes there is the user's
output.state/  ours: logs/ and metrics/ of this node's ranks, checkpoints/ for a resumed job, and the file
               ``started``, which is older than anything the program has written
workers/NODE/  output/ and work/ of other nodes, gathered on the head
               all else is ours, such as the log

Called as a program, with a JSON object of :class:`Options`, it prints an archive of what a user gets, whose
last member, :data:`REPORT`, says what is not in it. Runs on Python 3.8 and imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple

OUTPUT, WORK, STATE, WORKERS, RECORD = "output", "work", "output.state", "workers", "job.json"
PUSH_S = 1800.0
"""The longest time of a push."""
RANK_FILES = (f"{STATE}/logs", f"{STATE}/metrics")
STARTED = f"{STATE}/started"
OWN = ("log", "log.earlier", RECORD)
REPORT, GATHERED = "report.json", "gathered"
"""The last member of an archive; the mark on the head that it has the files of all nodes."""
WORK_LIMIT = 1 << 30
"""Bytes of a working folder that are fetched from a node unless --outputs says which files are results."""
_NAMED, _LONGEST = 3, 200
_CHECKPOINT = re.compile(r"((?:.*/)?)checkpoint-(\d+)/trainer_state\.json", re.DOTALL)


class Options(NamedTuple):
    """What to pack of the job's folder ``folder``.

    ``node`` is the node's name if the archive is for the head or for a user who has another node's files;
    ``first``: it has the job's output. ``without`` are the gathered nodes that are not needed.
    """

    folder: str
    node: str = ""
    first: bool = False
    rank_files_only: bool = False
    limit: int | None = None
    all_checkpoints: bool = True
    without: tuple = ()  # type: ignore[type-arg]
    since: float | None = None
    """Instead: print whether the working folder has results that are newer."""


class Item(NamedTuple):
    """A file, or an empty folder of size -1, and its name in the job's folder, which is valid Unicode."""

    name: str
    path: str
    size: int


class Found(NamedTuple):
    """Files; what has no content, such as links that lead outside; and what can't be read."""

    items: list[Item]
    skipped: list[str]
    left: list[str]


def find_all(folder: str, *, rank_files_only: bool = False, limit: int | None = None) -> Found:
    """Return what must be kept of a job's folder. Beyond ``limit`` bytes, files of work/ are left."""
    found = Found([], [], [])
    for name in (*OWN, *RANK_FILES, *(() if rank_files_only else (OUTPUT, WORKERS))):
        _look(folder, name, 0, found)
    if not rank_files_only:
        _add_work(folder, limit, found)
    return found


def _add_work(folder: str, limit: int | None, found: Found) -> None:
    try:
        since = os.stat(os.path.join(folder, STARTED)).st_ctime_ns
    except OSError:
        return  # no program of the user's has run here
    work, wanted = Found([], [], []), _read_outputs(folder)
    _look(folder, WORK, since, work)
    found.skipped.extend(work.skipped)
    total, beyond = 0, []
    for item in sorted(work.items, key=lambda item: item.size):
        total += item.size
        if wanted is None and limit is not None and total > limit:
            beyond.append(item)
        elif wanted is None or wanted(item.name[len(WORK) + 1 :]):
            found.items.append(item)
    if beyond:
        size = sum(item.size for item in beyond)
        found.left.append(f"{describe(item.name for item in beyond)} ({size / 1e6:,.0f} MB)")
    found.left.extend(name for name in work.left if wanted is None or wanted(name[5:]))


def _read_outputs(folder: str) -> Callable[[str], bool] | None:
    try:
        with open(os.path.join(folder, RECORD), encoding="utf-8") as file:
            patterns = json.load(file)["more"]["outputs"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return None if patterns is None else lambda name: matches(name, patterns)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether patterns such as ``out/**`` and ``!*.tmp`` include a file. The last that fits decides.

    One without a slash fits in any folder; one that fits a folder fits all that is in it.
    """
    is_in = False
    for pattern in patterns:
        bare = pattern[pattern.startswith("!") :].strip("/")
        text = re.escape(bare if "/" in bare else f"**/{bare}")
        for glob, regex in (
            (r"\*\*/", "(.*/)?"),
            (r"\*\*", ".*"),
            (r"\*", "[^/]*"),
            (r"\?", "[^/]"),
        ):
            text = text.replace(glob, regex.replace("*", "\0"))
        if re.fullmatch(text.replace("\0", "*") + "(/.*)?", name, re.DOTALL):
            is_in = not pattern.startswith("!")
    return is_in


def _look(folder: str, name: str, since: int, found: Found) -> None:
    """Add what is at a name, if its inode changed ``since`` then, in ns: no program can set that back."""
    root = os.path.realpath(folder)
    users = tuple(f"{root}/{part}/" for part in (OUTPUT, WORK))
    stack = [(name, os.path.join(folder, name), False)]
    while stack:
        name, path, is_linked = stack.pop()
        try:
            known = os.lstat(path)
            if stat.S_ISLNK(known.st_mode):
                target = os.path.realpath(path)
                if known.st_ctime_ns < since:
                    continue
                if not f"{target}/".startswith(users) or not os.path.exists(target):
                    found.skipped.append(readable(name))
                    continue
                known = os.stat(target)
                # What is inside arrives under its own name; this also ends cycles.
                if stat.S_ISDIR(known.st_mode) and (is_linked or since or _holds(target, path)):
                    continue
                is_linked = True
            if stat.S_ISDIR(known.st_mode):
                below = [] if since and name.endswith("/__pycache__") else sorted(os.listdir(path))
                stack += [(f"{name}/{each}", f"{path}/{each}", is_linked) for each in below]
                if not below and not since and "/" in name:
                    found.items.append(Item(readable(name), path, -1))
            elif not stat.S_ISREG(known.st_mode):
                found.skipped.append(readable(name))
            elif known.st_ctime_ns >= since:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                found.items.append(Item(readable(name), path, known.st_size))
        except FileNotFoundError:
            continue  # a running job removes files
        except OSError:
            found.left.append(readable(name))


def _holds(folder: str, path: str) -> bool:
    return f"{os.path.realpath(os.path.dirname(path))}/".startswith(f"{folder}/")


def readable(name: str) -> str:
    """Return a name in valid Unicode without control characters, and another one for each name."""
    text = re.sub(r"\\(?=x[0-9a-f]{2})", r"\\x5c", name)
    text = os.fsencode(text).decode("utf-8", "backslashreplace")
    text = re.sub(r"[\0-\x1f\x7f]", lambda match: f"\\x{ord(match[0]):02x}", text)
    return "/".join(map(_shorten, text.split("/"))) if text != name else name


def _shorten(part: str) -> str:
    if len(part.encode()) <= _LONGEST:
        return part
    return f"{part[:50]}~{hashlib.sha256(part.encode()).hexdigest()[:16]}"


def find_superseded(sizes: Mapping[str, int], read: Callable[[str], str]) -> set[str]:
    """Return the checkpoints of transformers' Trainer, of which a newer one beside them has all files.

    The best one, as the newest says, is kept. ``read`` returns the text of a file in ``sizes``.
    """
    groups: dict[str, dict[int, str]] = {}
    files: dict[str, set[str]] = {}
    for name, size in sizes.items():
        folder, _, file = name.rpartition("/")
        files.setdefault(folder, set()).update([file] if size > 0 else [])
        if match := _CHECKPOINT.fullmatch(name):
            groups.setdefault(match[1], {})[int(match[2])] = folder
    found = set()
    for steps in groups.values():
        newest = steps[max(steps)]
        try:
            best = json.loads(read(f"{newest}/trainer_state.json"))["best_model_checkpoint"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        kept = {newest.rpartition("/")[2], os.path.basename(str(best))}
        found |= {
            each
            for each in steps.values()
            if each.rpartition("/")[2] not in kept and files[each] <= files[newest]
        }
    return found


def drop_superseded(found: Found) -> None:
    """Remove superseded checkpoints of a Trainer from the files, and name them."""
    paths = {item.name: item.path for item in found.items}

    def read(name: str) -> str:
        with open(paths[name], encoding="utf-8") as file:
            return file.read()

    sizes = {item.name: item.size for item in found.items}
    if old := find_superseded(sizes, read):
        dropped = [item for item in found.items if is_below(item.name, old)]
        found.items[:] = [item for item in found.items if not is_below(item.name, old)]
        found.skipped.append(explain_superseded(old, sum(item.size for item in dropped)))


def is_below(name: str, folders: set[str]) -> bool:
    """Return whether a name is in one of some folders."""
    return any(name.startswith(f"{folder}/") for folder in folders)


def explain_superseded(folders: Iterable[str], size: int) -> str:
    """Return the words about checkpoints that are not fetched."""
    named = describe(sorted(folders))
    return f"superseded {named} ({size / 1e6:,.0f} MB; `fetch --all-checkpoints` gets them)"


def describe(names: Iterable[str]) -> str:
    """Return some names in one line: the first ones and the number of the others."""
    each = [re.sub(r"[^ -~\u00a1-\U0010ffff]", "?", name) for name in names]
    more = f" and {len(each) - _NAMED:,} more" if len(each) > _NAMED else ""
    return ", ".join(each[:_NAMED]) + more


def _rename(name: str, options: Options) -> str:
    """Return a name of this node in the folder of all nodes."""
    top = name.partition("/")[0]
    moved = () if not options.node else (WORK,) if options.first else (OUTPUT, WORK)
    return f"{WORKERS}/{options.node}/{name}" if top in moved else name


def pack(options: Options, stream: IO[bytes]) -> list[str]:
    """Write the archive; return what is left."""
    found = find_all(options.folder, rank_files_only=options.rank_files_only, limit=options.limit)
    if not options.all_checkpoints:
        drop_superseded(found)
    ours = (*OWN, WORKERS) if options.node or options.first else ()
    unwanted = {*ours, *(f"{WORKERS}/{node}" for node in options.without)}
    work = []
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for item in found.items:
            if item.name in unwanted or is_below(item.name, unwanted):
                continue
            if not _add(archive, item._replace(name=_rename(item.name, options))):
                found.left.append(item.name)
            elif item.name.startswith(f"{WORK}/"):
                work.append((item.name[len(WORK) + 1 :], item.size))
        report = {"skipped": found.skipped, "left": found.left, "work": work}
        report["gathered"] = os.path.exists(os.path.join(options.folder, GATHERED))
        content = json.dumps(report).encode()
        info = tarfile.TarInfo(REPORT)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return found.left


class _Steady:
    """A file as long as it was when it was opened: the archive of one that shrinks stays whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.is_whole = file, True

    def read(self, size: int) -> bytes:
        try:
            block = self._file.read(size)
        except OSError:
            block = b""
        self.is_whole &= len(block) == size
        return block + b"\0" * (size - len(block))


def _add(archive: tarfile.TarFile, item: Item) -> bool:
    info = tarfile.TarInfo(item.name)
    if item.size < 0:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(info)
        return True
    try:
        descriptor = os.open(item.path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # a running job removes files
    with os.fdopen(descriptor, "rb") as file:
        known, steady = os.fstat(descriptor), _Steady(file)
        info.size, info.mtime, info.mode = known.st_size, int(known.st_mtime), known.st_mode & 0o777
        archive.addfile(info, steady)  # type: ignore[arg-type]
    return steady.is_whole


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    if options.since is None:
        left = pack(options, sys.stdout.buffer)
        # Whoever sets a limit reads the report.
        sys.exit(f"unreadable: {describe(left)}" if left and options.limit is None else 0)
    found: Any = Found([], [], [])
    _add_work(options.folder, None, found)
    newer = [each for each in found.items if os.lstat(each.path).st_ctime > options.since]
    print("newer" if newer or found.left else "")


if __name__ == "__main__":
    main()
