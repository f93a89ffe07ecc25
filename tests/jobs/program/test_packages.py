"""The packages that a project names: in a header, a lock, a project file, or requirements."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.places.plan import PackageList
from jobs.program.packages import find_packages
from jobs.program.pyproject import read_own_package

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
        ("requirements.txt", "--no-index\n", "requirements.txt: --no-index: only"),
        ("requirements.txt", "-r missing.txt\n", "missing.txt"),
        ("requirements.txt", "-r .\n", "can't be read: Is a directory"),
        ("pyproject.toml", "[project\n", "pyproject.toml: not TOML"),
        (
            "pyproject.toml",
            '[project]\nname = "a"\ndependencies = ["a", 3]\n',
            "pyproject.toml: project: dependencies: 1: Input should",
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


def test_extras_and_groups_may_name_each_other(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        PROJECT
        + '[project.optional-dependencies]\ntrain_Set = ["datasets"]\nall = ["Mine[train-set]", "rich"]\n'
        '[dependency-groups]\ntest_1 = ["pytest"]\ndev = [{ include-group = "Test.1" }, "ruff"]\n'
    )
    found = find(tmp_path, given="pyproject.toml[all,dev]")
    assert found is not None
    assert found.lines[2:] == ("rich", "datasets", "ruff", "pytest")
    with pytest.raises(UsageError, match="no extra or group 'gpu'"):
        find(tmp_path, given="pyproject.toml[gpu]")


def test_options_of_requirements_files(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "base.txt").write_text("rich==1.0 \\\n    --hash=sha256:ab\n")
    (tmp_path / "pins.txt").write_text("numpy<3\n-r 'more pins.txt'\n")
    (tmp_path / "more pins.txt").write_text("scipy<2\n")
    (tmp_path / "requirements.txt").write_text(
        '--extra-index-url "https://one"\n-f https://two\n-c pins.txt\n-r base.txt\n-e .\n'
    )
    lines = ("rich==1.0 --hash=sha256:ab", "einops", "tomli; python_full_version < '3.11'")
    found = PackageList(
        *("requirements.txt", lines),
        constraints=("numpy<3", "scipy<2"),
        indexes=("https://one",),
        links=("https://two",),
        imports=(".",),
    )
    assert find(tmp_path, given="requirements.txt") == found
    (tmp_path / "dev").mkdir()
    for name in ("requirements.txt", "base.txt", "pins.txt", "more pins.txt"):
        (tmp_path / name).rename(tmp_path / "dev" / name)
    assert find(tmp_path, given="dev/requirements.txt") == found, "-e . is the working folder"


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


SOURCE = '[project]\nname = "a"\nversion = "1"\ndependencies = ["fork"]\n'


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        *(
            ("pyproject.toml", SOURCE + more, said)
            for more, said in (
                ('[tool.uv.sources]\nFork = { path = "libs/fork" }\n', "packages (fork), which only"),
                ('[[tool.uv.index]]\nurl = "https://mine"\n', "packages (index), which only"),
                ('[tool.poetry.dependencies]\nfork = { git = "https://a" }\n', "packages (fork), which only"),
            )
        ),
        ("pyproject.toml", '[tool.poetry.dependencies]\npython = "^3"\nfork = "^4"\n', "not read"),
        ("Pipfile", '[packages]\nfork = "*"\n', "Pipfile: its dependencies are"),
        ("pixi.toml", '[dependencies]\npython = "*"\nfork = "*"\n', "pixi.toml: its dependencies"),
        ("setup.py", "setup(install_requires=['fork'])\n", "setup.py: its dependencies are not"),
        ("environment.yml", "dependencies:\n- fork\n", "environment.yml: its dependencies are"),
        ("train.py", HEADER.replace("# ]", "# ]\n# [tool.uv.sources]\n# einops.path = 1"), "(einops)"),
        ("requirements.txt", "./wheels/fork.whl\n", "./wheels/fork.whl: only folders of the"),
        ("requirements.txt", "fork @ file:///fork.whl\n", "file:///fork.whl: only folders"),
        ("requirements.txt", "-e ../lib\n", "../lib: only folders of the"),
        ("requirements.txt", "-e fork\n", "./fork: only folders of the"),
        ("requirements.txt", "-f ./wheels\nfork\n", "-f ./wheels: a folder of this machine"),
        ("requirements.txt", "-i https://${UNSET_NAME}@mine\nfork\n", "UNSET_NAME is not set here"),
        ("requirements.txt", "fork".encode("utf-16"), "not UTF-8 (byte 0), but UTF-16"),
    ],
)  # fmt: skip
def test_another_package_than_the_one_asked_for_is_refused(
    name: str, text: str | bytes, said: str, tmp_path: Path
) -> None:
    for folder in ("lib", "project/libs/fork"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").write_text('[project]\nname = "fork"\n')
    root = tmp_path / "project"
    (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as raised:
        find(root, name if name == "train.py" else "")
    assert said in raised.value.message
    assert find(root, given="none") is None


def test_sources_of_what_is_not_asked_for_or_the_stacks_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        SOURCE.replace("fork", "torch") + '[tool.uv.sources]\ntorch = { index = "cpu" }\n'
        'fork = { path = "fork" }\n[[tool.uv.index]]\nname = "cpu"\nurl = "https://a"\nexplicit = true\n'
    )
    assert find(tmp_path) == PackageList("pyproject.toml", ("torch",))


LOCAL = """
[[package]]
name = "a"
version = "1"
source = { virtual = "." }
dependencies = [{ name = "fork" }, { name = "private" }, { name = "torch" }]

[[package]]
name = "fork"
version = "99"
source = { directory = "libs/fork" }

[[package]]
name = "private"
version = "1"
source = { registry = "https://mine/simple" }
wheels = [{ url = "https://mine/private-1-py3-none-any.whl", hash = "sha256:HASH" }]

[[package]]
name = "torch"
version = "2.0"
source = { registry = "https://cpu/simple" }
""".replace("HASH", "ab" * 32)


def test_a_lock_names_its_sources(tmp_path: Path) -> None:
    (tmp_path / "libs/fork/src").mkdir(parents=True)
    (tmp_path / "libs/fork/pyproject.toml").write_text('[project]\nname = "fork"\n')
    text = SOURCE + '[tool.uv.sources]\nfork = { path = "libs/fork" }\n'
    (tmp_path / "pyproject.toml").write_text(text)
    lock = 'version = 1\nrequires-python = ">=3.10"\n' + LOCAL
    (tmp_path / "uv.lock").write_text(lock)
    assert find(tmp_path) == PackageList(
        *("uv.lock", (f"private==1 --hash=sha256:{'ab' * 32}", "torch==2.0"), True),
        wants=("fork",),
        indexes=("https://mine/simple",),
        imports=("libs/fork/src",),
    )
    for source, said in (("../fork", r"\.\./fork: only"), ("fork.whl", r"fork\.whl: only")):
        changed_lock = lock.replace('directory = "libs/fork', f'path = "{source}')
        (tmp_path / "uv.lock").write_text(changed_lock)
        with pytest.raises(UsageError, match=said):
            find(tmp_path)


def test_requirements_are_what_pip_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDEX_USER", "me")
    (tmp_path / "libs/fork").mkdir(parents=True)
    (tmp_path / "libs/fork/pyproject.toml").write_text(SOURCE.replace("fork", "einops"))
    (tmp_path / "requirements.txt").write_text(
        "--index-url https://${INDEX_USER}@mine/simple\nlibs/fork\n"
        "-e git+https://host/b.git@main#egg=b\nrich==1 --hash=sha256:ab\n"
    )
    assert find(tmp_path) == PackageList(
        "requirements.txt",
        ("einops", "git+https://host/b.git@main#egg=b", "rich==1 --hash=sha256:ab"),
        index="https://me@mine/simple",
        imports=("libs/fork",),
    )


def test_the_projects_python_counts_without_packages(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\nrequires-python = ">=3.14"\n')
    assert find(tmp_path) == PackageList("pyproject.toml", (), python=">=3.14")
    (tmp_path / "requirements.txt").write_text("einops\n")
    assert find(tmp_path) == PackageList("requirements.txt", ("einops",), python=">=3.14")


@pytest.mark.timeout(20)
def test_comments_between_blank_lines_take_no_time(tmp_path: Path) -> None:
    text = '[tool.poetry.dependencies]\npython = "^3"\n' + "\n# no package\n" * 40
    (tmp_path / "pyproject.toml").write_text(text)
    assert find(tmp_path) is None
