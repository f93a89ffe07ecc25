"""The packages that a project names: in a header, a lock, a project file, or requirements."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.launchers.plan import PackageList
from jobs.program.packages import find_packages, import_folders, runs_python

HEADER = """\
#!/usr/bin/env python
# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "einops",
# ]
# ///
print(1)
"""
# What `uv lock` writes for a project with one dependency.
LOCK = """\
version = 1
requires-python = ">=3.10"

[[package]]
name = "mine"
version = "1"
source = { editable = "." }
dependencies = [{ name = "einops" }, { name = "tomli", marker = "python_full_version < '3.11'" }]

[package.metadata]
requires-dist = [{ name = "einops" }, { name = "tomli", marker = "python_full_version < '3.11'" }]

[[package]]
name = "einops"
version = "0.8.1"
source = { registry = "https://pypi.org/simple" }

[[package]]
name = "tomli"
version = "2.0.1"
source = { registry = "https://pypi.org/simple" }
"""
PROJECT = """\
[project]
name = "mine"
version = "1"
requires-python = ">=3.10"
dependencies = ["einops", "tomli; python_full_version < '3.11'"]
"""


def find(root: Path, script: str = "", given: str | None = None) -> PackageList | None:
    return find_packages(given, root, root / script if script else None)


def test_the_nearest_description_of_packages_wins(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    (tmp_path / "more.txt").write_text("packaging  # a comment\n")
    (tmp_path / "requirements.txt").write_text("# mine\n\neinops >= 0.7\n-r more.txt\n")
    listed = PackageList("requirements.txt", ("einops >= 0.7", "packaging"))
    assert find(tmp_path) == listed
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    lines = ("einops", "tomli; python_full_version < '3.11'")
    assert find(tmp_path) == PackageList("pyproject.toml", lines)
    (tmp_path / "uv.lock").write_text(LOCK)
    pins = ("einops==0.8.1", "tomli==2.0.1 ; python_full_version < '3.11'")
    assert find(tmp_path) == PackageList("uv.lock", pins, is_lock=True)
    (tmp_path / "train.py").write_text(HEADER)
    assert find(tmp_path, "train.py") == PackageList("train.py", ("einops",))
    assert find(tmp_path, "train.py", "requirements.txt") == listed
    assert find(tmp_path, "train.py", "none") is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "requirements.txt",
            "--index-url https://x\n",
            "requirements.txt: --index-url https://x: only",
        ),
        ("requirements.txt", "-r missing.txt\n", "missing.txt"),
        ("pyproject.toml", "[project\n", "pyproject.toml: not TOML"),
        ("pyproject.toml", "[project]\ndependencies = 3\n", "dependencies is not a list of texts"),
        ("train.py", "# /// script\n# dependencies = [\n# ///\n", "its script header: not TOML"),
    ],
)
def test_a_damaged_description_is_named(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as raised:
        find(tmp_path, name if name.endswith(".py") else "")
    assert said in raised.value.message


def test_a_lock_that_uv_can_not_read_has_uvs_reason(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "uv.lock").write_text("version = 'x'\n")
    with pytest.raises(UsageError, match=r"uv\.lock: .*[Ff]ailed to parse"):
        find(tmp_path)
    with pytest.raises(UsageError, match="--packages gone: no such file"):
        find(tmp_path, given="gone")


def test_imports_of_both_layouts(tmp_path: Path) -> None:
    assert import_folders(tmp_path) == (), "its modules could hide Python's own"
    (tmp_path / "pyproject.toml").touch()
    assert import_folders(tmp_path) == ("work",)
    (tmp_path / "src").mkdir()
    assert import_folders(tmp_path) == ("work/src",)


@pytest.mark.parametrize(
    ("command", "can"),
    [("python a.py", True), ("./a.py", True), ("torchrun a.py", True), ("hostname", False)],
)
def test_only_python_needs_packages(command: str, can: bool) -> None:
    assert runs_python(command.split()) is can
