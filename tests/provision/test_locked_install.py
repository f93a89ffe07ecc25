"""A lock from an index to a machine: uv resolves, and pip installs through the script for nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pip
import pytest

from infra.wait import Silent
from provision.install import VENV, render_install_script
from provision.stacks.load import load_stack
from provision.stacks.sources import check_sources, find_resolver
from provision.stacks.stack import Stack
from tests.provision.machine import Machine
from tests.provision.package_index import PackageIndex, serve_only_index

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


# An environment with this environment's pip: to install another takes seconds.
_PYTHON = """
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
{python} -m venv --without-pip "$3" || exit
for packages in "$3"/lib/python*/site-packages; do echo {pip} > "$packages/pip.pth"; done
printf '#!/bin/sh\\nexec %s -m pip "$@"\\n' "$3/bin/python" > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """An index in PyPI's place, which gives no hashes."""
    with serve_only_index(monkeypatch) as index:
        index.add("model", "1.0", needs=["sums>=1"])
        index.add("sums", "1.1")
        yield index


def replace_python(machine: Machine) -> None:
    """Give a machine its own Python and pip."""
    machine.replace("python3", _PYTHON.format(python=sys.executable, pip=machine.folder / "pip"))
    (machine.folder / "pip").mkdir()
    (machine.folder / "pip/pip").symlink_to(Path(pip.__file__).parent)
    machine.path("/opt").mkdir()


@pytest.fixture
def node(machine: Machine) -> Machine:
    for name in ("dpkg", "dpkg-query", "apt-get", "compgen", "systemctl"):
        machine.replace(name)
    replace_python(machine)
    return machine


def lock(index: PackageIndex) -> Stack:
    base = {**load_stack("upstream").model_dump(), "examples": ""}
    own = {"python": HERE, "indexes": [index.url], "python_packages": ["model==1.0"]}
    stack = Stack.model_validate({**base, **own})
    report = check_sources(stack, find_resolver(), Silent(), limit_s=60, hashes=True)
    assert report.problems == ()
    return stack.model_copy(update={"lock": tuple(map(str, report.packages))})


def install(node: Machine, stack: Stack, index: PackageIndex) -> subprocess.CompletedProcess[str]:
    own = f"export PIP_CONFIG_FILE={os.devnull} PIP_INDEX_URL={index.url} PIP_DEFAULT_TIMEOUT=5\n"
    return node.shell("enable -n compgen\n" + own + render_install_script(stack), "d1")


def test_a_node_has_what_the_lock_says(node: Machine, index: PackageIndex) -> None:
    locked = lock(index)
    index.add("sums", "1.2")

    done = install(node, locked, index)

    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in locked.lock] == ["model==1.0", "sums==1.1"]
    found = node.path(VENV).glob("lib/python*/site-packages/*.dist-info")
    names = {path.name.removesuffix(".dist-info") for path in found}
    assert {"model-1.0", "sums-1.1"} <= names
