"""Every command where only the README's packages are: `[local]`, or the requirements alone."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.metadata import distribution, packages_distributions
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jobs.cli import COMMANDS

# Blocks packages, then runs commands in one process: {command: [exit code, stderr]}.
_RUN = """
import contextlib, io, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED, commands = map(json.loads, sys.argv[1:])
sys.meta_path.insert(0, Blocker())
from jobs.__main__ import main

found = {}
for command in commands:
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = main(command.split(" "))
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            code = repr(error)
    found[command] = [code, errors.getvalue()]
print(json.dumps(found))
"""
_LOCAL = ["up --cloud local --yes", "status --cloud local", "jobs --cloud local --name none"]
_HELP = [f"{name} --help" for name in COMMANDS]


def required(distribution_name: str, extra: str = "") -> set[str]:
    """Return a package and all that it requires, as pip would install them."""
    found, left = set[tuple[str, str]](), [(canonicalize_name(distribution_name), extra)]
    while left:
        name, with_extra = left.pop()
        if (name, with_extra) in found:
            continue
        found.add((name, with_extra))
        for text in distribution(name).requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": with_extra}):
                left += [(canonicalize_name(need.name), each) for each in ("", *need.extras)]
    return {name for name, _ in found}


@cache
def run_without(extra: str, *commands: str) -> dict[str, Any]:
    """Run commands as if nothing but this extra's packages were installed."""
    allowed = required("spr-cluster", extra)
    blocked = [
        module
        for module, names in packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & allowed
    ]
    assert {"torch", "pytest"} <= set(blocked)
    argv = [sys.executable, "-c", _RUN, json.dumps(blocked), json.dumps(commands)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("extra", ["local", ""])
@pytest.mark.parametrize(
    "command", [*_HELP, "docs --agent", "train squad --to kubernetes-yaml --nodes 2"]
)
def test_a_command_needs_no_optional_package(command: str, extra: str) -> None:
    found = run_without(extra, *_HELP, "docs --agent", "train squad --to kubernetes-yaml --nodes 2")
    assert found[command] == [0, ""], found[command]
