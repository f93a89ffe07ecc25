"""What a project's packages become beside a stack's, resolved by uv from an index of files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from infra.errors import UsageError
from jobs.places.packages import (
    PROTECTED,
    check_packages,
    install_packages,
    name_packages,
    resolve,
)
from jobs.places.plan import PackageList
from provision.stacks.load import load_stack
from provision.stacks.sources import NodePython, PipConfiguration, Resolver, Sources
from tests.fakes import FakeHost
from tests.provision.package_index import make_wheel

INSTALLED = {"torch": "2.13.0+cpu", "impi-rt": "2021.18.1", "lib": "1.0", "other": "1.0"}
PYTHON = NodePython(f"3.{sys.version_info.minor}", "2.36")


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    (folder / f"{name}-{version}-py3-none-any.whl").write_bytes(make_wheel(name, version, needs))


@pytest.fixture
def resolver(tmp_path: Path) -> Resolver:
    index = tmp_path / "index"
    index.mkdir()
    for version in ("1.0", "2.0"):
        wheel(index, "lib", version)
        wheel(index, "other", version)
    wheel(index, "tool", "3.0", "torch>=2", "lib")
    wheel(index, "newer", "1.0", "other>=2")
    sources = Sources((), (str(index),))
    return Resolver(find_uv_bin(), PipConfiguration(sources=sources, options=("--no-index",)))


def pins(resolver: Resolver, *lines: str, is_lock: bool = False, **more: Any) -> list[str]:
    packages = PackageList("requirements.txt", lines, is_lock, **more)
    return resolve(packages, load_stack("upstream"), INSTALLED, PYTHON, resolver)


def test_the_stacks_packages_are_kept_where_they_fit(resolver: Resolver) -> None:
    assert pins(resolver, "tool") == ["tool==3.0"], "lib 1.0 of the stack is enough, and its torch"
    assert pins(resolver, "tool", "newer") == ["newer==1.0", "other==2.0", "tool==3.0"]
    assert pins(resolver, "lib", "torch") == []
    assert pins(resolver, "lib==2.0; sys_platform == 'win32'", "other==2.0") == ["other==2.0"]
    torches = ("torch<2.8; python_version < '3.9'", "torch; python_full_version >= '3.9'")
    old, stack = replace(PYTHON, version="3.8.10"), load_stack("upstream")
    assert pins(resolver, *torches) == []
    with pytest.raises(UsageError, match=r"needs torch<2\.8"):
        resolve(PackageList("a.txt", torches), stack, INSTALLED, old, resolver)


def test_a_lock_is_installed_as_it_is(resolver: Resolver) -> None:
    cublas = "nvidia-cublas==12.1 ; sys_platform == 'linux'"
    lock = ("lib==2.0", "other==1.0", "torch==2.13.0", cublas)
    assert pins(resolver, *lock, is_lock=True) == ["lib==2.0"]
    older = ("lib==2.0", "torch==2.7.0")
    assert pins(resolver, *older, is_lock=True, wants=("torch>=2",)) == ["lib==2.0"]
    with pytest.raises(UsageError, match=r"needs torch<2\.8, and stack upstream has 2\.13"):
        pins(resolver, *older, is_lock=True, wants=("torch<2.8",))


def test_constraints_limit_what_is_chosen(resolver: Resolver) -> None:
    assert pins(resolver, "newer", constraints=("newer<2",)) == ["newer==1.0", "other==2.0"]
    with pytest.raises(UsageError, match="newer"):
        pins(resolver, "newer", constraints=("newer>1",))


def test_only_torchs_companions_come_from_the_stacks_indexes(
    resolver: Resolver, tmp_path: Path
) -> None:
    wheel(tmp_path / "index", "torchvision", "1.0", "torch>=2")
    wheel(tmp_path / "index", "timm", "1.0", "torchvision")
    cpu = tmp_path / "cpu"
    cpu.mkdir()
    wheel(cpu, "torchvision", "1.0+cpu", "torch>=2")
    wheel(cpu, "lib", "3.0")
    cpu_only = {"indexes": (), "find_links": (str(cpu),)}
    stack = load_stack("upstream").model_copy(update=cpu_only)
    for lines, wanted in (
        (("lib>1",), ["lib==2.0"]),
        (("timm",), ["timm==1.0", "torchvision==1.0+cpu"]),
    ):
        packages = PackageList("requirements.txt", lines)
        assert resolve(packages, stack, INSTALLED, PYTHON, resolver) == wanted


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch==2.12.0", r"txt needs torch==2\.12\.0, and stack upstream has 2\.13\.0\+cpu"),
        ("lib==9", r"requirements\.txt: .*there is no version of lib==9"),
        ("no such", r"requirements\.txt: "),
    ],
)
def test_what_can_not_be_had_is_refused_with_uvs_reason(
    line: str, said: str, resolver: Resolver
) -> None:
    with pytest.raises(UsageError, match=said):
        pins(resolver, line)


def test_a_list_is_checked_without_a_node(resolver: Resolver) -> None:
    stack = load_stack("upstream")
    check_packages(PackageList("requirements.txt", ("tool", "newer")), stack, resolver)
    for line, said in (("lib==9", "no version of lib"), ("torch<2.8", "stack upstream has 2.13.0")):
        with pytest.raises(UsageError, match=said):
            check_packages(PackageList("requirements.txt", (line,)), stack, resolver)


def make_head(known: str = "") -> FakeHost:
    """A head with Python 3.11 that has ``known`` installed."""
    said = json.dumps(["3.11.2", "2.36", INSTALLED, ""])
    first = f"Python 3.11.2\n{known}"
    return FakeHost("node0", [("python -V", first), ("importlib", said), ("installing", "")])


def install(head: FakeHost, packages: PackageList) -> str:
    return install_packages(head, packages, load_stack("upstream"), lambda _: None, {})


def test_the_projects_python_is_checked_for_what_is_installed_already() -> None:
    listed = PackageList("pyproject.toml", ("lib",), python=">=3.10")
    assert install(make_head("lib==1.0\n"), listed)
    for lines in (("lib",), ()):
        with pytest.raises(UsageError, match=r"needs Python >=3\.14, and the nodes have 3\.11\.2"):
            install(make_head("lib==1.0\n"), replace(listed, lines=lines, python=">=3.14"))
    assert install(make_head(), replace(listed, lines=())) == ""


def test_what_is_installed_is_what_was_asked_for(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.places.packages.find_resolver", lambda: resolver)
    plain = PackageList("uv.lock", ("lib==2.0", "tool==3.0"), is_lock=True)
    hashed = f"lib==2.0 --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}"
    listed = replace(plain, lines=(hashed, "tool==3.0"), index="https://mine")
    head = make_head()
    others = (plain, replace(listed, index=""))
    keys = {install(head, listed), *(install(make_head(), each) for each in others)}
    assert len(keys) == 3
    at, base = "https://mine", replace(plain, is_lock=False)
    apart = [replace(base, index=at), replace(base, lines=(*plain.lines, at))]
    apart += [replace(base, constraints=(at,)), replace(base, indexes=(at,))]
    apart += [replace(base, links=(at,))]
    names = {name_packages(each, load_stack("upstream")) for each in (base, plain, *apart)}
    assert len(names) == 7, "each part has its own place in the name"
    (path,) = head.files
    assert head.files[path].decode() == f"{hashed}\ntool==3.0\n"
    assert path in head.commands[-1]
    assert head.commands[-1].count("--index-url=https://mine") == 2, "for uv and for pip"
    assert "pypi" not in head.commands[-1]


def test_what_the_stack_matches_is_protected() -> None:
    matched = ["torch", "impi-rt", "oneccl-bind-pt", "intel-openmp", "mkl"]
    others = ["torchvision", "transformers", "numpy", "torchmetrics"]
    assert [name for name in (*matched, *others) if PROTECTED.fullmatch(name)] == matched
