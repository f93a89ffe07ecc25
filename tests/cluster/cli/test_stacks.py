from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.__main__ import main
from provision.stacks.load import shipped_names
from tests.provision.package_index import PackageIndex, serve_index

OWN = """
[stacks.mine]
base = "upstream"
indexes = []
python_packages = ["torch==2.13.0", "transformers==5.0.0", "impi-rt==2021.18.1"]
remove_packages = ["datasets", "tzdata", "scikit-learn", "peft", "accelerate", "evaluate", "boto3"]
examples = "file:///dev/null"
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """One index with all that stack `mine` needs, and pip without any other configuration."""
    monkeypatch.chdir(tmp_path)
    Path("spr-cluster.toml").write_text(OWN)
    for name in [name for name in os.environ if name.startswith("PIP_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with serve_index() as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        index.add("torch", "2.13.0+cpu", "cp312-cp312-manylinux_2_28_x86_64")
        index.add("transformers", "5.0.0")
        index.add("impi-rt", "2021.18.1", "py2.py3-none-manylinux1_x86_64")
        yield index


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_stacks_are_explained(capsys: pytest.CaptureFixture[str], index: PackageIndex) -> None:
    code, out, _ = run(capsys, "stacks")
    stacks = {stack["name"]: stack for stack in json.loads(run(capsys, "stacks", "--json")[1])}

    assert code == 0
    for text in (
        "reference: the recipe of 2022",
        "Ubuntu 20.04, Python 3.8",
        "--xpu_backend ccl --use_ipex --no_cuda --bf16",
        "archived by Intel in March 2026, with known security issues",
        "deprecated by Intel in November 2025; it was never on PyPI",
        "mine: upstream, changed in spr-cluster.toml",
    ):
        assert text in out
    assert "archived" not in out[out.index("mine: ") :]
    assert index.asked == []
    assert tuple(stacks) == (*shipped_names(), "mine")
    assert stacks["intel"]["training_flags"][:2] == ["--ddp_backend", "ccl"]
    assert len({stack["digest"] for stack in stacks.values()}) == len(stacks)


def test_a_check_without_problems(capsys: pytest.CaptureFixture[str], index: PackageIndex) -> None:
    code, out, err = run(capsys, "stacks", "--check", "mine")

    assert (code, out) == (
        0,
        "mine: 3 packages available and compatible, for Python 3.12 on Ubuntu 24.04\n",
    )
    assert "Check stack mine" in err


def test_a_problem_is_a_sentence(capsys: pytest.CaptureFixture[str], index: PackageIndex) -> None:
    index.pages["/torch/"] = {}
    (report,) = json.loads(run(capsys, "stacks", "--json", "--check", "mine")[1])
    sentence = "torch==2.13.0 is not available for Python 3.12 on Ubuntu 24.04: on "
    sentence += f"{index.url} there is no version of it"
    problem = {"sentence": sentence, "package": "torch", "index": ""}
    assert (report["ok"], report["problems"]) == (False, [problem])
    index.statuses["/torch/"] = 503

    code, out, err = run(capsys, "stacks", "--check", "mine")

    assert code == 1
    assert err.splitlines()[-1] == "spr-cluster: 1 of 1 stack can't be installed: mine"
    title, *text, end = out.splitlines()
    assert title == "mine:"
    assert f"Failed to fetch: {index.url}/torch/: " in " ".join(map(str.strip, text))
    assert end == "  The packages were not resolved. Fix the other problems first."
