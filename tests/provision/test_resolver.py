"""uv as it is found, configured, and understood."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.stacks.lock import Pinned
from provision.stacks.sources import (
    NodePython,
    PipConfiguration,
    Sources,
    explain,
    find_resolver,
    parse_pins,
    parse_pip_configuration,
)
from tests.provision.package_index import PackageIndex, serve_index

TARGET = NodePython("3.10.12", "2.35")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with serve_index() as index:
        index.add("torch", "2.7.0")
        yield index


def resolve(index: PackageIndex, *texts: str, target: NodePython = TARGET) -> dict[str, str]:
    resolver = find_resolver(isolated=True)
    found = resolver.resolve(texts, target, Sources((index.url,)), 60)
    assert found.error == ""
    return {package.name: package.version for package in found.packages}


def test_markers_are_evaluated_for_the_node(index: PackageIndex) -> None:
    markers = {
        "python_full_version >= '3.10.12'": True,
        "python_full_version < '3.10.12'": False,
        "platform_machine == 'x86_64' and sys_platform == 'linux'": True,
        "extra == 'test'": False,
    }
    needs = [f"more{number}>=1; {marker}" for number, marker in enumerate(markers)]
    index.add("fsspec", "2025.1", needs=needs, extras=["test"])
    for number in range(len(markers)):
        index.add(f"more{number}", "1.2")

    found = resolve(index, "fsspec")

    assert {m: f"more{number}" in found for number, m in enumerate(markers)} == markers


# uv does not know the last one.
@pytest.mark.parametrize(
    ("python", "glibc", "newest"),
    [("3.8.10", "2.31", "3.1"), ("3.12.3", "2.39", "3.9"), ("3.13.5", "2.41", "3.10")],
)
def test_wheels_run_on_the_c_library_of_the_node(
    index: PackageIndex, python: str, glibc: str, newest: str
) -> None:
    for minor in (31, 32, 35, 36, 39, 40):
        index.add("math", f"3.{minor % 30}", f"py3-none-manylinux_2_{minor}_x86_64")
    # As PyTorch's and Intel's own indexes name it.
    index.add("binding", "1.0", "py3-none-linux_x86_64")

    found = resolve(index, "math", "binding", target=NodePython(python, glibc))

    assert found == {"math": newest, "binding": "1.0"}


def test_the_best_version_of_all_indexes_is_chosen(index: PackageIndex) -> None:
    with serve_index() as other:
        other.add("torch", "2.7.0+cpu")
        for urls in ((index.url, other.url), (other.url, index.url)):
            found = find_resolver(isolated=True).resolve(
                ["torch==2.7.0"], TARGET, Sources(urls), 60
            )
            assert [package.version for package in found.packages] == ["2.7.0+cpu"]


def test_pips_configuration_counts_unless_isolated(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://mirror/simple\n"
        f"find-links =\n    {index.url}/links\n    {tmp_path}/gone\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://nearer/simple")
    # uv's own configuration is no concern of nodes that install with pip.
    monkeypatch.setenv("UV_INDEX_URL", "https://else/simple")

    resolver = find_resolver()
    found = resolver.configuration

    assert found.index == "https://nearer/simple"
    assert f"{index.url}/links" in found.sources.find_links
    assert f"{tmp_path}/gone" not in found.sources.find_links
    assert find_resolver(isolated=True).configuration == PipConfiguration()
    with serve_index() as main:
        torch = resolver.resolve(["torch"], TARGET, Sources((main.url,)), 60)
    assert [package.name for package in torch.packages] == ["torch"]


def test_the_environment_overrides_the_files() -> None:
    found = parse_pip_configuration(
        ":env:.index-url='https://nearer/simple'\n:env:.proxy='http://proxy:1'\n"
        "global.cert='/ca.pem'\nglobal.extra-index-url='\\nfile:///gone\\nhttps://b/'\n"
        "global.index-url='https://mirror/simple'\ninstall.trusted-host='a b'\n"
        "install.index-url='https://middle/simple'\n:env:.no-index='1'\n"
    )

    assert found == PipConfiguration(
        "https://nearer/simple",
        Sources(("https://b/",)),
        ("--allow-insecure-host=a", "--allow-insecure-host=b", "--no-index"),
        {"SSL_CERT_FILE": "/ca.pem", "ALL_PROXY": "http://proxy:1"},
    )


def test_an_answer_is_read_and_an_error_is_one_line() -> None:
    text = "a==1.0+cpu \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nb==2\n"
    assert parse_pins(text) == (Pinned("a", "1.0+cpu", ("aa", "bb")), Pinned("b", "2", ()))
    plain = "error: No solution found\n  cause: Because a\n       and b.\n\nhint: try c\n"
    framed = "  × No solution found:\n  ╰─▶ Because a\n      and b.\n"
    assert explain(plain) == "No solution found: Because a and b. hint: try c"
    assert explain(framed) == "No solution found: Because a and b."
    assert explain("") == "uv failed silently"
