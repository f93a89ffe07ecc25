"""The packages that a project names: in a header, a lock, a project file, or requirements."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.launchers.plan import PackageList
from jobs.program import packages
from jobs.program.packages import find_packages, read_own_package, runs_python

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
    assert find(tmp_path) == PackageList("pyproject.toml", lines, python=">=3.10")
    (tmp_path / "uv.lock").write_text(LOCK)
    pins = ("einops==0.8.1", "tomli==2.0.1 ; python_full_version < '3.11'")
    locked = PackageList("uv.lock", pins, is_lock=True, wants=lines, python=">=3.10")
    assert find(tmp_path) == locked
    (tmp_path / "train.py").write_text(HEADER)
    assert find(tmp_path, "train.py") == PackageList("train.py", ("einops",), python=">=3.10")
    assert find(tmp_path, "train.py", "requirements.txt") == listed
    assert find(tmp_path, "train.py", "none") is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "requirements.txt",
            "--no-index\n",
            "requirements.txt: --no-index: only",
        ),
        ("requirements.txt", "-r missing.txt\n", "missing.txt"),
        ("pyproject.toml", "[project\n", "pyproject.toml: not TOML"),
        (
            "pyproject.toml",
            "[project]\ndependencies = 3\n",
            "project: dependencies: Input should be a valid array",
        ),
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


def test_extras_and_groups_may_name_each_other(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        PROJECT
        + '[project.optional-dependencies]\ntrain = ["datasets"]\nall = ["mine[train]", "rich"]\n'
        '[dependency-groups]\ntest = ["pytest"]\ndev = [{ include-group = "test" }, "ruff"]\n'
    )
    found = find(tmp_path, given="pyproject.toml[all,dev]")
    assert found is not None
    assert found.lines[2:] == ("rich", "datasets", "ruff", "pytest")
    with pytest.raises(UsageError, match="no extra or group 'gpu'"):
        find(tmp_path, given="pyproject.toml[gpu]")


def test_options_of_requirements_files(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "base.txt").write_text("rich==1.0 \\\n    --hash=sha256:ab\n")
    (tmp_path / "pins.txt").write_text("numpy<3\n")
    (tmp_path / "requirements.txt").write_text(
        "--extra-index-url https://one\n-f https://two\n-c pins.txt\n-r base.txt\n-e .\n"
    )
    lines = ("rich==1.0", "einops", "tomli; python_full_version < '3.11'")
    assert find(tmp_path, given="requirements.txt") == PackageList(
        *("requirements.txt", lines),
        constraints=("numpy<3",),
        indexes=("https://one",),
        links=("https://two",),
    )


def test_dependencies_that_setuptools_reads_from_a_file(tmp_path: Path) -> None:
    dynamic = '[project]\nname = "mine"\nversion = "1"\ndynamic = ["dependencies"]\n'
    (tmp_path / "pyproject.toml").write_text(dynamic)
    with pytest.raises(UsageError, match="its dependencies are dynamic"):
        find(tmp_path)
    (tmp_path / "uv.lock").write_text(LOCK)
    locked = find(tmp_path)
    assert locked is not None
    assert locked.lines[0] == "einops==0.8.1"
    (tmp_path / "uv.lock").unlink()
    (tmp_path / "requirements.in").write_text("einops\n")
    where = '[tool.setuptools.dynamic]\ndependencies = { file = ["requirements.in"] }\n'
    (tmp_path / "pyproject.toml").write_text(dynamic + where)
    assert find(tmp_path) == PackageList("pyproject.toml", ("einops",))


def test_a_project_is_as_if_installed(tmp_path: Path) -> None:
    assert read_own_package(tmp_path).imports == (), "its modules could hide Python's own"
    (tmp_path / "setup.py").touch()
    assert read_own_package(tmp_path).imports == ("work",)
    (tmp_path / "src").mkdir()
    (tmp_path / "libs/one/src").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "my-lib"\ndynamic = ["version"]\n[project.scripts]\n'
        'go = "mine.cli:App.main"\n[tool.uv.workspace]\nmembers = ["libs/*"]\n'
    )
    own = read_own_package(tmp_path)
    assert own.imports == ("work/src", "work/libs/one/src", "site")
    assert own.scripts == ("go",)
    assert own.files["site/bin/go"].decode().splitlines()[1:] == [
        *("import sys", "from mine.cli import App", "sys.exit(App.main())")
    ]
    for name, content in own.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (found,) = distributions(name="my-lib", path=[str(tmp_path / "site")])
    assert (found.version, found.entry_points["go"].value) == ("0", "mine.cli:App.main")


@pytest.mark.parametrize(
    ("command", "can"),
    [("python a.py", True), ("./a.py", True), ("torchrun a.py", True), ("hostname", False)],
)
def test_only_python_needs_packages(command: str, can: bool) -> None:
    assert runs_python(command.split()) is can
    assert runs_python(["mine", "train"], ["mine"])


EVERY_KEY: dict[str, Any] = {
    "project": {
        "name": "mine",
        "version": "1",
        "requires-python": ">=3.10",
        "dependencies": ["einops"],
        "optional-dependencies": {"train": ["mine[more]"], "more": ["tqdm"]},
        "dynamic": [],
        "scripts": {"mine": "mine:main"},
        "entry-points": {"mine.plugins": {"a": "mine:a"}},
    },
    "dependency-groups": {"dev": ["pytest", {"include-group": "lint"}], "lint": ["ruff"]},
    "tool": {
        "uv": {"workspace": {"members": ["parts/*"]}},
        "setuptools": {"dynamic": {"dependencies": {"file": ["requirements.txt"]}}},
    },
}
HOSTILE: tuple[Any, ...] = (
    *(0, -1.5, float("nan"), True, datetime(2026, 1, 1, tzinfo=timezone.utc)),
    *("", "..", "../..", "/", "**x", "\0", "x" * 5000, "dependencies", "mine[dev]"),
    *([], [0], [[]], [{}], [""], ["../*"], ["/etc/*"], ["x" * 5000], ["dependencies"]),
    *({}, {"": ""}, {"../../x": "a:b"}, {"include-group": 0}, {"a": {"b": 0}}, {"file": [0]}),
)


def changed(content: Any, value: Any) -> Iterator[Any]:
    """Return the document once for each of its values, which ``value`` replaces."""
    yield value
    places = content.items() if isinstance(content, dict) else enumerate(content)
    for place, below in places if isinstance(content, dict | list) else ():
        for each in changed(below, value):
            copied = content.copy()
            copied[place] = each
            yield copied


@pytest.mark.parametrize("dynamic", [[], ["dependencies"]])
def test_any_project_file_is_read_or_refused_in_one_line(
    dynamic: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyproject.toml", "uv.lock", "requirements.txt", "parts/one/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(packages, "_export", lambda *_: ())
    base = {**EVERY_KEY, "project": {**EVERY_KEY["project"], "dynamic": dynamic}}
    read, refused = 0, list[str]()
    for value in HOSTILE:
        for content in changed(base, value):
            monkeypatch.setattr(packages, "parse_toml", lambda *_, content=content: content)
            if not isinstance(content, dict):
                continue
            for given in ("pyproject.toml[train,dev]", "uv.lock[train]", None):
                try:
                    if given:
                        find(tmp_path, given=given)
                    else:
                        files = read_own_package(tmp_path).files
                        assert all(".." not in Path(each).parts for each in files)
                    read += 1
                except UsageError as error:
                    refused.append(error.message)
    assert read > 100 < len(refused)
    assert not [message for message in refused if "\n" in message]


@pytest.mark.parametrize("line", ["-e LONG", "-r LONG", "-e \0", "-r \0", "-r ."])
def test_requirements_that_name_no_file_are_refused(line: str, tmp_path: Path) -> None:
    line = line.replace("LONG", "x" * 5000)
    (tmp_path / "requirements.txt").write_text(f"einops\n{line}\n")
    with pytest.raises(UsageError):
        find(tmp_path)
    with pytest.raises(UsageError):
        find(tmp_path, given=line)


def test_a_wrong_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\ndependencies = ["a", 3]\n')
    with pytest.raises(
        UsageError, match=r"pyproject\.toml: project: dependencies: 1: Input should"
    ):
        find(tmp_path)
