"""What each command prints with ``--json`` matches its schema, whichever test runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from cluster.console.options import Request
from jobs.cli import SHORT_FORMS

SCHEMAS = Path(__file__).parents[2] / "jobs/cli/setup/schemas.json"
Emit = Callable[[Request, "str | Callable[[], str]", object], None]


@cache
def _schemas_of(command: str) -> Draft202012Validator | None:
    """Return what checks a command's documents: those of its name, also with an option after it."""
    known = json.loads(SCHEMAS.read_text())["$defs"]
    found = [schema for name, schema in known.items() if f"{name} ".startswith(f"{command} ")]
    return Draft202012Validator({"anyOf": found}) if found else None


def _command_of(words: Sequence[str]) -> str:
    """Return a command line's command; `local` has subcommands."""
    (name, *_), rest = SHORT_FORMS.get(words[0], words[:1]), words[1:]
    return f"local {rest[0]}" if name == "local" else name


def require_schema(words: Sequence[str], data: object) -> None:
    """Check the JSON document of a command line, such as ``["jobs", "--json"]``."""
    command = _command_of(words)
    schemas = _schemas_of(command)
    assert schemas, f"{SCHEMAS.name} has nothing for `spr-cluster {command} --json`"
    error = best_match(schemas.iter_errors(data))
    if error is not None:
        raise AssertionError(f"{command} --json: {error.json_path}: {error.message}\n{data}")


def checked(emit: Emit) -> Emit:
    """Return `emit` with this check, also of what a command would print without ``--json``."""

    @wraps(emit)
    def check(request: Request, text: str | Callable[[], str], data: object) -> None:
        if request.words and (request.json or _schemas_of(_command_of(request.words))):
            require_schema(request.words, json.loads(json.dumps(data)))
        emit(request, text, data)

    return check
