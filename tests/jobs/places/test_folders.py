"""Folders on their way to the head: here, ``ssh`` runs rsync in another folder of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infra.errors import HostError, UsageError
from jobs.places.folders import _send, send_folders
from jobs.places.plan import JobPaths
from jobs.program.folder import read_project

_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
shift; cd HEAD && exec sh -c "$*"
"""


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    head, ssh = tmp_path / "head", tmp_path / "bin/ssh"
    for folder in (head, ssh.parent):
        folder.mkdir()
    ssh.write_text(_SSH.replace("HEAD", str(head)))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=":")
    return head


@pytest.mark.parametrize(
    "change",
    [None, lambda path: path.write_text("new"), Path.unlink, lambda path: path.chmod(0o755)],
)
def test_a_store_has_the_content_that_its_name_stands_for(
    change: Callable[[Path], object] | None, head: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    names = ["#a", ";b", "c d"]
    for name in names:
        (project / name).write_text("old")
    folder = read_project(project, max_bytes=None)
    if change:
        change(project / "#a")
        with pytest.raises(UsageError, match="changed after it was read"):
            _send(folder, "spr-folders/.x", "", "node0", Path("config"))
    else:
        assert "3 changed files" in _send(folder, "spr-folders/.x", "", "node0", Path("config"))
        interrupted = head / f"spr-folders/.{Path(folder.store).name}.job"
        interrupted.mkdir()
        (interrupted / "#a").write_text("old")
        assert "2 changed files" in _send(folder, "spr-folders/.y", "", "node0", Path("config"))
        assert sorted(path.name for path in (head / "spr-folders/.x").iterdir()) == names
        (head / "spr-folders/.z/#a/full").mkdir(parents=True)
        with pytest.raises(HostError, match=r"failed: (?!.*link-dest).*#a"):
            _send(folder, "spr-folders/.z", "none", "node0", Path("config"))


def test_packages_are_installed_once_the_files_are_there(head: Path, tmp_path: Path) -> None:
    """Which may take minutes, in which the user edits files."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "a").touch()
    folder = read_project(project, max_bytes=None)

    def install() -> str:
        assert [*head.glob("spr-folders/.project-*.run-1/a")]
        raise UsageError("no such package")

    node: Any = Mock()
    node.name = "node0"
    with pytest.raises(UsageError, match="no such package"):
        send_folders(node, [folder], install, JobPaths("run-1"), Path("config"), print)
