"""``run``: run any program with its files on a cluster's nodes, placed like a training job."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import UsageError
from infra.files import check_file, read_text
from infra.words import counted, format_size
from jobs.places.plan import JobFolder, JobPlan, PackageList
from jobs.program.pyproject import OwnPackage
from jobs.worker.array.plan import ARRAY, ArrayPlan
from jobs.worker.spec import JobSpec
from jobs.worker.supervisor.launch import SECRETS
from provision.stacks.stack import Stack

MAX_BYTES = 256 << 20
"""Largest total without ``--large-files``: minutes over a laptop's connection."""
CACHES = {"__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".git"}
"""Folders that no job needs."""
_SHELLS = frozenset({"python", "python3", "bash", "sh"})


@dataclass(frozen=True)
class ProgramFiles:
    """Files by name, relative to the program's working folder."""

    files: Mapping[str, Path]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(path.stat().st_size for path in self.files.values())

    def __str__(self) -> str:
        return f"{counted(len(self.files), 'file')}, {format_size(self.size)}"


def collect_files(
    command: Sequence[str],
    named: Iterable[str],
    folder: Path,
    project: JobFolder | None = None,
    start: Path | None = None,
    *,
    data: Sequence[JobFolder] = (),
    large: bool = False,
) -> ProgramFiles:
    """Return the command's script and the files and folders in ``named``, but those of project and data.

    A path inside the project, by default ``folder``, stays relative on the nodes; any other keeps only its
    last part. The command runs in ``start``, by default ``folder``. Raises :class:`UsageError` if a file
    is missing, if two have one name, and, unless ``large``, if they exceed :data:`MAX_BYTES`.
    """
    found: dict[str, Path] = {}
    root = project.root if project else folder
    start = start or folder
    script = find_script(command, start, root)
    wanted = [*([(script, start)] if script else []), *((each, folder) for each in named)]
    names = frozenset(project.names or ()) if project else frozenset[str]()
    for given, here in dict.fromkeys(wanted):
        for place, path in _expand(given, here, root):
            is_own = (root / place).resolve() == path
            name = _follow(place, root, names) if is_own else place
            if _is_data(name, path, data):
                continue
            if found.setdefault(name, path) != path:
                raise UsageError(f"--files: {found[name]} and {path} would both be {name}")
    # A file takes the place of a link that leads nowhere on the nodes.
    sent = {name for name in names if not (root / name).is_symlink()}
    files = ProgramFiles({name: path for name, path in found.items() if name not in sent})
    if files.size > MAX_BYTES and not large:
        raise _too_large(files)
    return files


def _follow(name: str, root: Path, names: Collection[str]) -> str:
    """Return where a file's name leads on the nodes, which get the links among a project's ``names``.

    The result keeps a link that nodes can't follow, because it is absolute or leads out of the project.
    """
    path = Path(name)
    for link in (*reversed(path.parents), path):
        if str(link) in names and (root / link).is_symlink():
            target = (root / link).readlink()
            end = os.path.normpath(link.parent / target / path.relative_to(link))
            is_plain = os.path.normpath(target) == str(target)  # not such as a/../b, if a is a link
            is_inside = is_plain and not end.startswith(("/", "../"))
            return _follow(end, root, names) if is_inside else name
    return name


def _is_data(name: str, path: Path, data: Sequence[JobFolder]) -> bool:
    """Whether a file is in a folder of data. Raises :class:`UsageError` if that has another at its place."""
    for each in data:
        if f"work/{name}/".startswith(f"{each.target}/"):
            other = each.root / f"work/{name}/"[len(each.target) + 1 :]
            if other.resolve() == path:
                return True
            raise UsageError(f"--files: {path} and {other} of --data-dir would both be {name}")
    return False


def find_script(command: Sequence[str], folder: Path, root: Path | None = None) -> str | None:
    """Return the first word that names a local file. Raises :class:`UsageError` if a script is missing.

    An absolute path, such as ``/usr/bin/env``, is on the nodes.
    """
    for word in command:
        # Of a word that can't be a path, such as a long program, pathlib raises.
        if not word.startswith(("/", "-")) and os.path.isfile(folder / word):  # noqa: PTH113
            _require_inside(word, folder, root or folder)
            return word
    program, *rest = command
    first = rest[0] if rest else ""
    meant = Path(program).name in _SHELLS and first.endswith((".py", ".sh"))
    missing = program if program.startswith("./") else first if meant else None
    if missing is not None and not missing.startswith("/"):
        raise UsageError(
            f"{missing}: no such file in {folder}",
            hint="the command's script must be in the working folder",
        )
    return None


def _absolute(path: Path) -> Path:
    """Return the path without ``..``; a link keeps its name, which the command uses."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - pathlib's keeps the dots


def _require_inside(script: str, folder: Path, root: Path) -> None:
    if not _absolute(folder / script).is_relative_to(_absolute(root)):
        what = "working folder" if root == folder else "project"
        raise UsageError(
            f"{script} is outside the {what} {root}",
            hint="run the command from a folder that contains the script and its files",
        )


def _expand(given: str, folder: Path, project: Path) -> Iterable[tuple[str, Path]]:
    root = _absolute(folder / os.path.expanduser(given))  # noqa: PTH111 - pathlib's fails for unknown users
    if not root.exists():
        raise UsageError(f"--files {given}: no such file or folder")
    check_file(root)
    base = _absolute(project)
    place = root.relative_to(base) if root.is_relative_to(base) else Path(root.name)
    if root.is_file():
        yield place.as_posix(), root.resolve()
        return
    for file in _files_below(root):
        yield (place / file.relative_to(root)).as_posix(), file.resolve()


def _files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield a folder's files; of a link to a folder as well, but not to one that it is in."""
    here = folder.resolve()
    if any(each.is_relative_to(here) for each in above):
        return
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"--files {folder}: can't be read: {error.strerror}") from None
    for path in found:
        if path.is_dir():
            yield from _files_below(path, (*above, here)) if path.name not in CACHES else ()
        elif path.is_file():
            yield path


def name_largest(sizes: Mapping[str, int]) -> str:
    """Return the largest top folders and files of some paths with their sizes."""
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        top = name.partition("/")[0]
        parts[top] = parts.get(top, 0) + size
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{shlex.quote(name)} {format_size(size)}" for name, size in largest)


def _too_large(files: ProgramFiles) -> UsageError:
    largest = name_largest({name: path.stat().st_size for name, path in files.files.items()})
    return UsageError(
        f"{files} for every node exceed {format_size(MAX_BYTES)}; the largest: {largest}",
        hint="name fewer with --files, or send them with --large-files",
    )


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(rf"({NAME.pattern})=.*", re.DOTALL)
RESERVED = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|(SPR|PMI|MPI|I_MPI|CCL_WORKER)_.*"
)
"""Variables that the placement and the launcher set."""


@dataclass(frozen=True)
class ProgramRequest:
    """A program to run. ``results`` receives its output, log, and ``job.json``.

    ``env`` holds ``NAME=VALUE`` words for the program. The placement reserves cores for ``backend``.
    """

    spec: JobSpec
    files: ProgramFiles
    results: Path
    folders: tuple[JobFolder, ...] = ()
    packages: PackageList | None = None
    own: OwnPackage = field(default_factory=OwnPackage)
    """The project as a package."""
    output_dir: str = ""
    """A folder in the working folder that stands for the output folder."""
    outputs: tuple[str, ...] | None = None
    """Patterns of the files in the project's folder that are results; ``None``: all new and changed ones."""
    subfolder: str = "."
    """The program's working folder in the project."""
    env: tuple[str, ...] = ()
    backend: str = "auto"
    kind: str = "run"
    is_interactive: bool = False
    """Whether the program runs on the user's terminal."""
    array: ArrayPlan | None = None
    """The elements that run instead of one program in all ranks."""


def check_variables(words: Sequence[str]) -> tuple[str, ...]:
    """Return ``NAME=VALUE`` words; a ``NAME`` alone takes its value from this machine's environment.

    Raises :class:`UsageError` for a variable that is not set here, or that the placement sets.
    """
    found = []
    for word in words:
        if NAME.fullmatch(word):
            if word not in os.environ:
                raise UsageError(
                    f"--env {word} is not set on this machine", hint=f"export {word}=…"
                )
            word = f"{word}={os.environ[word]}"
        match = _VARIABLE.fullmatch(word)
        if not match:
            name = word.partition("=")[0]  # the rest may be a secret
            raise UsageError(f"--env {name}: expected NAME=VALUE, or NAME")
        if RESERVED.fullmatch(match[1]):
            raise UsageError(
                f"--env {match[1]}: the placement sets it for each rank",
                hint="--nodes, --ppn, --placement, and --ccl-workers control it",
            )
        found.append(word)
    return tuple(found)


def read_variables(path: Path) -> tuple[str, ...]:
    """Read a file of ``NAME=VALUE`` lines; comments, ``export``, and quotes are as in a shell.

    Raises :class:`UsageError` with the line's number, but never a value.
    """
    words = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, is_set, value = text.partition("=")
        try:
            if value.startswith(("'", '"')):
                parts = shlex.split(value, comments=True)
            else:  # `#` begins a comment only after a space: a password may contain it
                parts = shlex.split(re.split(r"\s#", value)[0])
        except ValueError:
            parts = ["", ""]
        if not is_set or not NAME.fullmatch(name) or len(parts) > 1 or "\0" in value:
            raise UsageError(
                f"{path}: line {number} is not NAME=VALUE", hint="quote values with spaces"
            )
        words.append(f"{name}={''.join(parts)}")
    return tuple(words)


def plan_program(request: ProgramRequest, stack: Stack) -> JobPlan:
    """Return a plan whose ranks check their placement and then exec the program. Pure.

    Variables are sent in a file: mpirun's arguments are recorded and visible to all users.
    """
    backend = stack.choose_backend(request.backend)
    files: dict[str, Path | bytes] = {}
    if all(each.target != "work" for each in request.folders):
        # With a folder, two programs would create work/ at the same time.
        files["work/.keep"] = b""
    files |= {f"work/{name}": path for name, path in request.files.files.items()}
    argv = [f"--folder={os.path.normpath(f'work/{request.subfolder}')}", "--output=output"]
    files |= request.own.files
    if request.own.imports:
        argv.append(f"--imports={':'.join(request.own.imports)}")
    if request.output_dir:
        argv.append(f"--output-dir={request.output_dir}")
    if request.env:
        argv.append(f"--environment={SECRETS}")
    if request.is_interactive:
        argv.append("--terminal")
    command = request.spec.work.program
    if request.array:
        files[ARRAY] = request.array.render()
        command = ("--array", request.array.asked, "--", *command)
    return JobPlan(
        kind=request.kind,
        module="worker.array" if request.array else "worker.program",
        spec=request.spec,
        argv=tuple(argv) if request.array else (*argv, "--", *request.spec.work.program),
        resumes=bool(request.array),
        backend=backend,
        files=files,
        variables=request.env,
        folders=request.folders,
        packages=request.packages,
        sends=str(request.files) if request.files.files else "",
        env={"SPR_BACKEND": backend},
        results=request.results,
        command=command,
        details={
            "files": len(request.files.files),
            "bytes": request.files.size,
            "packages": request.packages.source if request.packages else None,
            "folders": {each.target: Path(each.store).name for each in request.folders},
            "outputs": request.outputs,
            "env": [word.partition("=")[0] for word in request.env],
            **({"elements": len(request.array.elements)} if request.array else {}),
        },
        gather_output=True,
        is_interactive=request.is_interactive,
    )
