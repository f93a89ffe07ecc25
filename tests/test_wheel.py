"""The built wheel with `[local]`, as the README says, and without, on supported Pythons of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infra.version
from tests.harness.user_environment import (
    build_wheel,
    find_pythons,
    make_environment,
    without_checkout,
)

_FIRST, *_MIDDLE, _LAST = find_pythons()
# The end-to-end tests run on this Python; `make test-full` tries the others between first and last.
_INSTALLATIONS = [
    (_FIRST, "[local]"),
    *(pytest.param(each, "[local]", marks=pytest.mark.full) for each in _MIDDLE),
    (_LAST, ""),
]
# Runs all commands and all functions of the Python API without a cluster.
_TRY = """
import contextlib, importlib.util, io, json, socket, sys
import spr_cluster as api
early = {"jobs", "infra"} & sys.modules.keys()
from jobs.__main__ import main
from jobs.cli import COMMANDS

def no_network(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, "no network in tests")

socket.getaddrinfo = no_network
CALLS = {
    "Cluster.plan": lambda c, j: c.plan(nodes=2),
    "Cluster.up": lambda c, j: c.up(nodes=2),
    "Cluster.find": lambda c, j: c.find(),
    "Cluster.status": lambda c, j: c.status(),
    "Cluster.extend": lambda c, j: c.extend("1h"),
    "Cluster.down": lambda c, j: c.down(),
    "Cluster.submit": lambda c, j: c.submit(api.Training("squad", demo=True)),
    "Cluster.job": lambda c, j: c.job("squad-1").status(),
    "Cluster.jobs": lambda c, j: c.jobs(),
    "Job.state": lambda c, j: j.state,
    "Job.status": lambda c, j: j.status(),
    "Job.wait": lambda c, j: j.wait(1),
    "Job.fetch": lambda c, j: j.fetch(),
    "Job.results": lambda c, j: j.results,
    "Job.log": lambda c, j: j.log(),
    "Job.cancel": lambda c, j: j.cancel(),
}
KINDS = (property, classmethod, staticmethod)
public = {
    f"{kind.__name__}.{name}"
    for kind in (api.Cluster, api.Job)
    for name, value in vars(kind).items()
    if not name.startswith("_") and (callable(value) or isinstance(value, KINDS))
}
found = {"untried": sorted(public ^ set(CALLS)), "early": [*early], "commands": {}, "api": {}}
found["version"] = api.__version__
try:
    from spr_cluster import speed_up
except ImportError as error:
    found["speed_up"] = str(error)
extras = ("kubernetes", "moto", "torch", "transformers", "pytest")
found["extras"] = [name for name in extras if importlib.util.find_spec(name)]
words = [[name, "--help"] for name in COMMANDS] + [[name] for name in COMMANDS]
for each in [*words, *json.loads(sys.argv[1])]:
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = main(each)
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            code = repr(error)
    found["commands"][" ".join(each)] = [code, errors.getvalue()]
cluster = api.Cluster("none", "aws", "us-east-1")
for name, call in CALLS.items():
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            call(cluster, cluster.job("squad-1"))
        found["api"][name] = "nothing was raised"
    except BaseException as error:
        found["api"][name] = "" if isinstance(error, api.SprError) else repr(error)
print(json.dumps(found))
"""
# They need more of the package's files than `--help` does.
_MORE = ("docs --agent", "train squad --to kubernetes-yaml --nodes 2")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, or one that `make release` has built."""
    built = os.environ.get("SPR_TEST_WHEEL")
    return Path(built) if built else build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize(("python", "extra"), _INSTALLATIONS)
def test_every_command_and_function_works_without_other_extras(
    wheel: Path, python: str, extra: str, tmp_path: Path
) -> None:
    programs = make_environment(wheel, tmp_path / "venv", python, extra)
    done = subprocess.run(
        [str(programs / "python"), "-c", _TRY, json.dumps([each.split() for each in _MORE])],
        cwd=tmp_path,
        env=without_checkout(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    assert found["extras"] == (["moto"] if extra else [])
    assert found["untried"] == found["early"] == []
    assert found["speed_up"] == "speed_up needs numpy: pip install 'spr-cluster[job]'"
    shown = subprocess.check_output([programs / "spr-cluster", "--version"], text=True)
    assert shown == f"spr-cluster {found['version']}\n"
    assert f"-{found['version']}-" in wheel.name
    helps = {name: each for name, each in found["commands"].items() if name.endswith("--help")}
    assert len(helps) > 30
    assert {name: each for name, each in helps.items() if each != [0, ""]} == {}
    assert [found["commands"][each] for each in _MORE] == [[0, ""], [0, ""]]
    wrong = {
        name: each
        for name, each in found["commands"].items()
        if each[0] not in (0, 1, 2) or "Traceback" in each[1]
    }
    assert wrong == {}
    assert {name: each for name, each in found["api"].items() if each} == {}


def test_a_version_says_which_commit_it_came_from(tmp_path: Path) -> None:
    tree = tmp_path / "repository/tree"
    (tree / "infra").mkdir(parents=True)
    copy = shutil.copy(infra.version.__file__, tree / "infra")
    release = re.findall(r'_RELEASE = "(.*)"', Path(copy).read_text())[0]
    (tree / "pyproject.toml").touch()
    (tree / "infra/__init__.py").touch()

    def git(folder: Path, *words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.check_output(["git", "-C", str(folder), *who, *words], text=True).strip()

    def version() -> str:
        script = "from infra.version import read_version; print(read_version())"
        environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.check_output(
            [sys.executable, "-c", script], env=environ, cwd=tmp_path, text=True
        ).strip()

    git(tree.parent, "init", "--quiet")
    git(tree.parent, "commit", "--quiet", "--allow-empty", "--message", "another project's")
    assert version() == release
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "one")
    commit = git(tree, "rev-parse", "HEAD")[:7]
    assert version() == f"{release}+g{commit}"
    git(tree, "tag", f"v{release}")
    assert version() == release
    (tree / "pyproject.toml").write_text("# changed\n")
    assert version() == f"{release}+g{commit}.dirty"
    git(tree, "commit", "--quiet", "--all", "--message", "two")
    assert version() == f"{release}+g{git(tree, 'rev-parse', 'HEAD')[:7]}"
