"""``spr-cluster config``: show, write, and describe ``spr-cluster.toml``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

from cluster.cli.chosen_cluster import CLOUD_NAMES
from cluster.cli.spec_options import read_change
from cluster.cli.up import UpRequest
from cluster.console.options import REST, JsonRequest, Option, Request, argument, opposite, switch
from cluster.console.output import ask_for, emit, has_terminal, say
from cluster.console.parser import Parser, add_request
from infra.errors import UsageError
from infra.project_file import PROJECT_FILE, ProjectFile, read_project_file
from infra.spec import OPTIONS, ClusterOptions, validate_options
from infra.words import render_duration
from jobs.cli import COMMANDS, build_parser, expand
from jobs.cli.shared.job_options import TaskRequest, VariableRequest
from jobs.cli.shared.project_options import apply_project, file_options, parser_of
from jobs.cli.train import TrainCommand
from jobs.worker.tasks import TASKS
from provision.stacks.load import Changes


@dataclass(frozen=True, kw_only=True)
class ConfigRequest(JsonRequest):
    """Show every option of a command with its value and origin: the command line, a line of
    spr-cluster.toml in this folder or above, or the default.

    examples:
      spr-cluster config                   options of the cluster and the jobs
      spr-cluster config up --nodes 8      the same for a command line
      spr-cluster config run finetune      one job of spr-cluster.toml
      spr-cluster config --init            ask five questions, and write a file
      spr-cluster config --schema > spr-cluster.schema.json
    """

    init: bool = switch("ask five questions, and write a new file", excludes="way")
    schema: bool = switch("print the file's JSON schema, for editors", excludes="way")
    command: tuple[str, ...] = argument(
        "up, run NAME, train TASK, or another, with options", (), takes=REST
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "config", run, ConfigRequest)


def run(request: ConfigRequest) -> int:
    if request.schema:
        print(json.dumps(build_schema(), indent=2))
    elif request.init:
        _write_new()
    else:
        project = read_project_file()
        words = expand(request.command or ["up"])
        # The parser takes a --json after the command for the command's, which may have none.
        own = [*takewhile("--".__ne__, words)]
        request = replace(request, json=request.json or "--json" in own)
        words = [*filter("--json".__ne__, own), *words[len(own) :]]
        settings = list(describe_settings(words, project))
        wrong: list[UsageError] = []
        for name in () if request.command else project.table("jobs"):
            try:
                settings += _describe_job(name, project)
            except UsageError as error:  # such as a variable that is not set in this shell
                wrong.append(error)
        none = f"`{words[0]}` has no options that {PROJECT_FILE} could set."
        text = _render(settings) if settings else none
        emit(request, text, [asdict(each) for each in settings])
        if wrong:
            raise UsageError("\n".join(dict.fromkeys(map(str, wrong))))
    return 0


@dataclass(frozen=True)
class Setting:
    """An option's value and origin: ``flag``, ``default``, or a file with its line."""

    key: str
    value: Any
    origin: str


def describe_settings(words: Sequence[str], project: ProjectFile) -> Iterator[Setting]:
    """Yield the options of a command line. Raises :class:`UsageError` for an invalid one."""
    if words[0] not in COMMANDS:
        raise UsageError(f"unknown command {words[0]!r}", hint="such as: spr-cluster config up")
    found = apply_project(words, project)
    with found.explaining():
        command, request = build_parser(found.words[0]).parse(found.words)
        _check(request)
    typed = {word.partition("=")[0] for word in words}
    given = {**vars(request), **getattr(request, "given", {})}
    for flag, option in file_options(command.options).items():
        value, origin = given.get(option.name), "default"
        if option.can_clear and value is not None:
            value = value is option.const
        if {flag, opposite(flag)} & typed:
            origin = "flag"
        elif flag in found.origins:
            value, origin = found.origins[flag].value, found.origins[flag].where
        elif value in (None, ()):
            value = _default_of(option.name, request)
        if flag == "--env" and isinstance(value, tuple):  # never a value
            value = [word.partition("=")[0] for word in value]
        yield Setting(flag[2:], _plain(value), origin)


def _describe_job(name: str, project: ProjectFile) -> Iterator[Setting]:
    """Yield what the file sets for a job. Raises :class:`UsageError` for an invalid option."""
    settings = {each.key: each for each in describe_settings(["run", name], project)}
    for key, value in project.table("jobs", name).items():
        # The task and the command are no options.
        given = Setting(key, value, project.where("jobs", name, key))
        yield replace(settings.get(key, given), key=f"jobs.{name}.{key}")


def _check(request: Request) -> None:
    """Raise :class:`UsageError` for a value that a command would refuse."""
    if isinstance(request, UpRequest):
        read_change(request)
    elif isinstance(request, TrainCommand):
        request.read_options(request.preset)
    elif isinstance(request, TaskRequest):
        request.read_options()
    elif isinstance(request, VariableRequest):
        request.read_variables()


def _default_of(name: str, request: Request) -> Any:
    """Return the value that an omitted option has; ``None`` if it depends on the cluster."""
    if isinstance(request, TaskRequest):
        return getattr(TASKS[request.task].Options(), name, None)
    fits = name in OPTIONS and name != "bake" and OPTIONS[name].const is None
    if fits and isinstance(request, UpRequest):
        return ClusterOptions.model_fields[name].default
    return None


def _plain(value: Any) -> Any:
    """Return a value as in the file."""
    if isinstance(value, timedelta):
        return render_duration(value)
    return list(value) if isinstance(value, tuple) else value or None if value == "" else value


def _render(settings: Sequence[Setting]) -> str:
    width = max(len(each.key) for each in settings)
    rows = [(each.key, _shown(each.value), each.origin) for each in settings]
    middle = max(len(value) for _, value, _ in rows)
    return "\n".join(f"{key:<{width}}  {value:<{middle}}  {origin}" for key, value, origin in rows)


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(value)
    return json.dumps(value, ensure_ascii=False)


# A new file.


def _write_new() -> None:
    path = Path(PROJECT_FILE)
    if path.exists():
        raise UsageError(f"{path} already exists", hint="`spr-cluster config` shows what it sets")
    if not has_terminal():
        raise UsageError("--init asks questions, but there is no terminal")
    folder = re.sub(r"[^a-z0-9]+", "-", Path.cwd().name.lower()).lstrip("0123456789-")[:32]
    name = _ask("name", "Name of the cluster?", folder or "spr")
    cloud = _ask("cloud", "Which cloud, aws or local (free, in containers)?", "aws")
    nodes = _ask("nodes", "How many nodes?", "2")
    idle = _ask("idle_timeout", "Shut down after how long without a job?", "1h")
    command = ask_for("Which command trains? [python train.py]") or "python train.py"
    path.write_text(render_new(name, cloud, nodes, idle, command), encoding="utf-8")
    say(f"{path} is written. Next: spr-cluster up, then: spr-cluster run train")


def _ask(key: str, question: str, default: str) -> str:
    """Ask for an option of `up`. Raises :class:`UsageError` for an invalid answer."""
    text = ask_for(f"{question} [{default}]") or default
    if key in OPTIONS:
        value: Any = text
        with suppress(ValueError):  # What is no number is refused as the text that it is.
            value = OPTIONS[key].parse(text)
        validate_options(**{key: value})
    elif text not in CLOUD_NAMES:
        raise UsageError(f"--cloud {text}: expected {' or '.join(CLOUD_NAMES)}")
    return text


def render_new(name: str, cloud: str, nodes: str, idle: str, command: str) -> str:
    """Return a new file with valid values."""
    return (
        f'[cluster]  # the options of `spr-cluster up`\nname = "{name}"\ncloud = "{cloud}"\n'
        f'nodes = {int(nodes)}\nidle-timeout = "{idle}"\n\n'
        "[jobs.train]  # start it with: spr-cluster run train\n"
        f"command = {json.dumps(command, ensure_ascii=False)}\n"
    )


# The schema for editors.


def build_schema() -> dict[str, Any]:
    """Return the file's JSON schema, from the parsers of the commands."""
    cluster = _properties(parser_of(build_parser("up"), "up").options)
    cluster["tags"] = {"type": "object", "additionalProperties": {"type": "string"}}
    program = {
        "command": {"type": ["string", "array"], "description": "the program and its arguments"}
    }
    program |= _properties(parser_of(build_parser("run"), "run").options)
    jobs = [_object(program, required=["command"])]
    for task, each in TASKS.items():
        first = {"task": {"const": task, "description": each.help}}
        properties = _properties(parser_of(build_parser("train"), "train", task).options)
        jobs.append(_object(first | properties, required=["task"]))
    stack = Changes.model_json_schema()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": PROJECT_FILE,
        **_object(
            {
                "cluster": _object(cluster),
                "jobs": {"type": "object", "additionalProperties": {"anyOf": jobs}},
                "stacks": {"type": "object", "additionalProperties": stack},
            }
        ),
    }


def _object(properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**properties}, "additionalProperties": False, **more}


def _properties(options: Iterable[Option]) -> dict[str, Any]:
    return {flag[2:]: _property(flag, each) for flag, each in file_options(options).items()}


def _property(flag: str, option: Option) -> dict[str, Any]:
    about = {"description": option.help} if option.help else {}
    if option.is_switch:
        return {"type": "boolean", **about}
    kind = "string"
    if option.is_number:
        kind = "number" if option.parse is float else "integer"
    if flag == "--env":
        texts = {"type": "object", "additionalProperties": {"type": "string"}}
        return {"anyOf": [texts, {"type": "array", "items": {"type": "string"}}], **about}
    if option.is_list or option.repeats:
        return {"anyOf": [{"type": kind}, {"type": "array", "items": {"type": kind}}], **about}
    choices = {"enum": list(option.choices)} if option.choices else {}
    return {"type": kind, **choices, **about}
