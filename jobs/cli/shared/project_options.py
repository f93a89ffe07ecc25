"""The options in ``spr-cluster.toml`` as words of a command line, checked by the commands' own parsers.

``[cluster]`` has the options of `up`; all commands on a cluster use its name, cloud, and region.
``[jobs.NAME]`` has a task or a command, with the options of `train` or `run`. The words precede the user's,
so what is typed wins.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.cli.chosen_cluster import ClusterRequest
from cluster.console.options import REST, Option, opposite, options_of
from cluster.console.parser import Parser
from infra.errors import UsageError
from infra.project_file import ProjectFile
from infra.words import nearest
from jobs.cli import build_parser
from jobs.program.pyproject import split_extras
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import is_url

_JOB_COMMANDS = ("run", "train")
_PLACE = ("name", "cloud", "region")
# What a command does, or a person confirms, is not the project's to say.
_NEVER = frozenset({"help", "advanced", "json", "yes", "dry_run", "resume", "to", "apply"})
# Paths in the folder that `run --folder` names.
_IN_PROJECT = frozenset({"output_dir"})
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_SECRET = re.compile(
    r"(^|_)(TOKEN|PAT|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET)_KEY)$"
)
_shown = partial(json.dumps, ensure_ascii=False, default=str)
_OPERATOR = re.compile(r"\d?[|&;<>]+\d?")
"""A word that a shell would not give to a program, such as ``|`` and ``2>&1``."""
# Programs have such words as arguments of their own: find -exec … \; and sort -t '|'.
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_LOCAL = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)|(\$))")


@dataclass(frozen=True)
class Origin:
    """Where an option comes from: the file with its line, the key, and the value there."""

    where: str
    key: str
    value: object
    flags: tuple[str, ...] = ()
    """All names of the option, and of its opposite."""
    adds: bool = False
    """Whether a typed value comes in addition to the file's, and not instead."""


@dataclass(frozen=True)
class CommandWords:
    """A whole command line, and the origin of each option that the file sets, by its flag."""

    words: list[str]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    typed: frozenset[str] = frozenset()
    """Words of the user, each also without its ``--flag=``."""

    def explain(self, message: str) -> str:
        """Add file, line, and key to a message about an option that the file sets."""
        for at, flag in enumerate(re.findall(r"(?<![\w-])--[a-z][\w-]*", message)):
            if origin := self.origins.get(flag):
                if at:
                    return f"{message} ({origin.where} sets {origin.key})"
                return f"{origin.where}: {origin.key}: {message}"
        for origin in self.origins.values():
            values = origin.value if isinstance(origin.value, list) else [origin.value]
            # Other errors also name the cluster.
            before = f"unknown {origin.key} " if origin.key in _PLACE else ""
            if any(f"{before}{text!r}" in message for text in {*map(str, values)} - self.typed):
                return f"{origin.where}: {origin.key}: {message}"
        return message

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Apply :meth:`explain` to the message of a :class:`UsageError`."""
        try:
            yield
        except UsageError as error:
            error.message = self.explain(error.message)
            raise


def apply_project(words: Sequence[str], project: ProjectFile) -> CommandWords:
    """Return a command line with the project's options. Raises :class:`UsageError` for invalid ones."""
    if not project.content or not words or {"-h", "--help"} & {*words[: _end(words)]}:
        return CommandWords([*words])
    command = words[0]
    parser = build_parser(command).children[command]
    if any(each.name == "subnet_ids" for each in parser.options):
        # The machine of `bake` is not one of the cluster's.
        shared = [each for each in parser.options if each.name != "instance_type"]
        options, table = _Options(shared, project, ("cluster",)), project.table("cluster")
        return _insert(words, 1, options.render(table, strict=command == "up"))
    if command in _JOB_COMMANDS:
        named = _name_first(words)
        if job := _find_job(named, project):
            words, given = _expand_job(named, job, project)
            at = 1 if words[0] == "run" else 2
            both = [*(word for each, _ in given.values() for word in each), *words]
            return _insert(words, at, {**_place(both, project), **given})
        words = words if command == "run" else named
    if any(issubclass(each.request, ClusterRequest) for each in parser.walk()):
        has_task = bool(parser.children) and len(words) > 1 and not words[1].startswith("-")
        end = len(words)
        if any(each.takes == REST for each in parser.options):
            # After a node and options, the others are a remote command's, such as its own --region.
            end = _find_name(words, _find_name(words, 1) + 1)
        found = _insert(words[:end], 1 + has_task, _place(words[:end], project))
        return replace(found, words=[*found.words, *words[end:]])
    return CommandWords([*words])


def _name_first(words: Sequence[str]) -> Sequence[str]:
    """Return the words with that of a task, job, or program before the command's options."""
    at = _find_name(words, 1)
    return [words[0], words[at], *words[1:at], *words[at + 1 :]] if at < _end(words) else words


def _find_name(words: Sequence[str], at: int) -> int:
    """Return where the first word from ``at`` is that is neither an option nor the value of one."""
    if at < _end(words) and words[at].startswith("-"):
        commands = ("run", "train") if words[0] == "run" else (words[0],)
        options = [each for name in commands for each in all_options(build_parser(name))]
        valued = {flag for each in options if not each.is_switch for flag in each.flags}
        while at < _end(words) and words[at].startswith("-"):
            at += 2 if words[at] in valued else 1
    return at


def all_options(parser: Parser) -> Iterator[Option]:
    """Yield the options of a command and its subcommands."""
    for each in parser.walk():
        yield from each.options


def _end(words: Sequence[str]) -> int:
    return words.index("--") if "--" in words else len(words)


Rendered = dict[str, tuple[list[str], Origin]]


def _insert(words: Sequence[str], at: int, found: Rendered) -> CommandWords:
    parts = [word.partition("=") for word in words[: _end(words)]]
    flags, typed = {part[0] for part in parts}, {part[2] or part[0] for part in parts}
    # A value that a typed one replaces is not read: a mistake in it would be blamed on what is typed.
    kept = [given for given, each in found.values() if each.adds or flags.isdisjoint(each.flags)]
    new = [word for given in kept for word in given]
    origins = {
        name: each
        for flag, (given, each) in found.items()
        if flags.isdisjoint(each.flags)
        for name in {flag, *(word.partition("=")[0] for word in given)}
    }
    return CommandWords([*words[:at], *new, *words[at:]], origins, frozenset(typed))


def _place(words: Sequence[str], project: ProjectFile) -> Rendered:
    """Return the options that say which cluster it is, unless the user named another one."""
    table = {key: value for key, value in project.table("cluster").items() if key in _PLACE}
    found = _Options(options_of(ClusterRequest), project, ("cluster",)).render(table)
    # Only a cluster has a name, a cloud, and a region.
    if _typed("--to", words) not in (None, "cluster"):
        return {}
    if _typed("--name", words) not in (None, table.get("name")):
        return {}
    if words[0] in ("fetch", "jobs") and any(word.startswith("s3://") for word in words):
        found.pop("--name", None)  # a stored job needs no cluster
    if _typed("--cloud", words) not in (None, table.get("cloud", "aws")):
        found.pop("--region", None)
    return found


def _typed(flag: str, words: Sequence[str]) -> str | None:
    """Return the value that the user gave an option."""
    values: list[str | None] = [None]
    for word, after in pairwise([*words[: _end(words)], ""]):
        name, has_value, value = word.partition("=")
        values += [value if has_value else after] if name == flag else []
    return values[-1]


def _find_job(words: Sequence[str], project: ProjectFile) -> str:
    """Return the name of the project's job in ``run NAME`` or ``train NAME``."""
    jobs = project.table("jobs")
    name = words[1] if len(words) > 1 else ""
    if name in jobs or name.startswith("-") or name in TASKS:
        return name if name in jobs else ""
    near = nearest(name, [*jobs, *(TASKS if words[0] == "train" else ())])
    # A single word that is no program here, either.
    is_job = len(words) == 2 and not (Path(name).exists() or shutil.which(name))
    if name and jobs and (near or is_job or words[0] == "train"):
        near = near or f"; it has {', '.join(jobs)}"
        hint = f"to run a program of that name: spr-cluster run -- {shlex.join(words[1:])}"
        if words[0] == "train":
            hint = f"the tasks are {', '.join(TASKS)}"
        raise UsageError(f"{project.path} has no job {name!r}{near}", hint=hint)
    return ""


def _expand_job(
    words: Sequence[str], name: str, project: ProjectFile
) -> tuple[list[str], Rendered]:
    """Return the words of a job without its options, and the options. Its paths are the file's."""
    command, _, *typed = words
    end, more = _end(words), _find_name(words, 2)
    table, where = project.table("jobs", name), project.where("jobs", name)
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{where}: [jobs.{name}]: a name has at most 32 lower-case letters, digits, and hyphens"
        )
    kinds = [key for key in ("task", "command") if key in table]
    if len(kinds) != 1:
        raise UsageError(
            f"{where}: [jobs.{name}] needs either a task or a command",
            hint=f'such as task = "{next(iter(TASKS))}" or command = "python train.py"',
        )
    value, at = table.pop(kinds[0]), project.where("jobs", name, kinds[0])
    if kinds == ["task"]:
        if value not in [*TASKS]:  # it may be a list or a table
            meant = nearest(value, TASKS) if isinstance(value, str) else ""
            raise UsageError(f"{at}: task = {value!r}: one of {', '.join(TASKS)}{meant}")
        options = parser_of(build_parser("train"), "train", value).options
        found = _Options(options, project, ("jobs", name)).render(table)
        return ["train", value, *typed], found
    if command != "run":
        raise UsageError(f"{at}: [jobs.{name}] is a command", hint=f"spr-cluster run {name}")
    if more < end:
        # It may be the value of an unknown option.
        build_parser("run").parse(["run", *words[2:end]])
        raise UsageError(
            f"unknown argument {words[more]!r} of [jobs.{name}]",
            hint=f"more arguments of its program follow --: spr-cluster run {name} -- {words[more]}",
        )
    program = _split_command(value, at)
    options = parser_of(build_parser("run"), "run").options
    found = _Options(options, project, ("jobs", name)).render(table)
    # Such a job starts in the file's folder, wherever it is typed.
    root = str(project.root)
    found = {"--folder": ([f"--folder={root}"], Origin(where, "folder", root)), **found}
    return ["run", *words[2:end], "--", *program, *words[end + 1 :]], found


def _split_command(value: object, where: str) -> list[str]:
    if isinstance(value, str) and value.strip():
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise UsageError(f"{where}: command = {value!r}: {error}") from None
        unquoted = _QUOTED.sub("_", value).split()
        if operator := next(filter(_OPERATOR.fullmatch, unquoted), None):
            raise UsageError(
                f"{where}: command = {value!r}: no shell runs it, so {operator!r} has no effect",
                hint=f"command = {_shown(['sh', '-c', value])}",
            )
        return words
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return list(value)
    raise UsageError(f'{where}: command = {value!r}: expected text such as "python train.py"')


def parser_of(parser: Parser, *names: str) -> Parser:
    """Return the parser of a command or of its subcommand."""
    for name in names:
        parser = parser.children[name]
    return parser


def file_options(options: Iterable[Option]) -> dict[str, Option]:
    """Return the options that a file may set, by flag."""
    shown = [each for each in options if each.name not in _NEVER]
    return {flag: each for each in shown for flag in each.flags if flag.startswith("--")}


class _Options:
    """Renders a table of the file as words for a parser."""

    def __init__(
        self, options: Iterable[Option], project: ProjectFile, table: tuple[str, ...]
    ) -> None:
        self._known, self._project, self._table = file_options(options), project, table

    def render(self, table: Mapping[str, Any], *, strict: bool = True) -> Rendered:
        """Return words and origin by flag. Unknown keys are errors if ``strict``, and else left out."""
        found: Rendered = {}
        for key, value in table.items():
            flag = "--tag" if key == "tags" and isinstance(value, dict) else f"--{key}"
            where = self._project.where(*self._table, key)
            if flag not in self._known:
                if not strict:
                    continue
                meant = nearest(key, [name[2:] for name in self._known])
                raise UsageError(
                    f"{where}: unknown key {key!r} in [{'.'.join(self._table)}]{meant}"
                )
            words = self._words(flag, key, value, where)
            option = self._known[flag]
            flags = (*option.flags, *map(opposite, option.flags))
            found[flag] = (words, Origin(where, key, value, flags, option.repeats))
        return found

    def _words(self, flag: str, key: str, value: Any, where: str) -> list[str]:
        option, shown = self._known[flag], f"{where}: {key} = {_shown(value)}"
        if flag == "--env" and isinstance(value, dict):
            return [f"--env={self._variable(*each)}" for each in value.items()]
        if flag == "--tag" and isinstance(value, dict):
            value = [f"{name}={text}" for name, text in value.items()]
        if option.is_switch:
            if not isinstance(value, bool):
                raise UsageError(f"{shown}: expected true or false")
            off = [opposite(flag)] if option.can_clear else []
            return [flag] if value else off
        if value == [] and option.repeats:
            return [f"{flag}={each}" for each in option.if_empty]
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not option.repeats:
            if not option.is_list:
                raise UsageError(f"{shown}: expected one value")
            values = [",".join(map(str, value))]
        for each in values:
            if isinstance(each, bool) or not isinstance(each, str | int | float):
                raise UsageError(f"{shown}: expected {'a number' if option.is_number else 'text'}")
            if each == "":
                raise UsageError(f"{shown}: the value is empty")
        return [f"{flag}={self._path(option, str(each))}" for each in values]

    def _path(self, option: Option, value: str) -> str:
        """Return a path of the project as seen from the working folder; other words stay unchanged."""
        if option.name == "env" and "=" in value and value[0] != "@":
            return self._variable(*value.split("=", 1))
        root, kinds = self._project.root, {*str(option.metavar).split("|")}
        mark = "@" if option.name == "env" and value.startswith("@") else ""
        is_path = bool(mark) or (option.name == "array" and ".csv" in value)
        is_path |= bool({"PATH", "DIR", "FILE"} & kinds) and option.name not in _IN_PROJECT
        if not is_path or is_url(value) or value == "none" or root == Path.cwd():
            return value
        path = root / os.path.expanduser(value.removeprefix(mark))  # noqa: PTH111 - see expand_home
        # A word that is no file of the project may be a model on the hub.
        is_name = len(kinds) > 1 and not value.startswith(".") and not path.exists()
        if option.name == "packages":  # such as FILE[train]; also in the folder that `folder` names
            is_name = not (root / split_extras(value)[0]).exists()
        return value if is_name else f"{mark}{path}"

    def _variable(self, name: str, value: Any) -> str:
        """Return a ``NAME=VALUE`` word; ``$NAME`` in the value is this machine's variable."""
        where = self._project.where(*self._table, "env", name)
        if not isinstance(value, str):
            raise UsageError(f"{where}: {name} = {_shown(value)}: expected text, in quotes")
        if _SECRET.search(name) and value and not _LOCAL.search(value):
            raise UsageError(
                f"{where}: {name} is a secret in a file",
                hint=f'set it in your shell, and write {name} = "${name}" here',
            )
        return f"{name}={_expand_variables(name, value, where)}"


def _expand_variables(name: str, value: str, where: str) -> str:
    def look_up(match: re.Match[str]) -> str:
        if match[3]:
            return "$"
        wanted = match[1] or match[2]
        if wanted not in os.environ:
            raise UsageError(
                f"{where}: {name} refers to {wanted}, which is not set on this machine",
                hint=f"export {wanted}=…",
            )
        return os.environ[wanted]

    return _LOCAL.sub(look_up, value)
