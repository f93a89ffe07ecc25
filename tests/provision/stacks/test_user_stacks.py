"""The user's own stacks, in a file of the working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from infra.project_file import PROJECT_FILE
from provision.stacks.load import load_stack, shipped_names, stack_names


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / PROJECT_FILE


def test_a_change_takes_the_place_of_what_the_base_has(own: Path) -> None:
    own.write_text(
        """
        [stacks.mine]
        base = "intel"
        python_packages = ["Datasets==4.1.0", "wandb>=0.20", "oneccl_bind_pt==2.7.0"]
        remove_packages = ["numpy"]
        environment = { CCL_LOG_LEVEL = "info" }
        """
    )
    base, mine = load_stack("intel"), load_stack("mine")

    assert stack_names() == (*shipped_names(), "mine")
    assert mine.python_packages == (
        "torch==2.7.0",
        "intel-extension-for-pytorch==2.7.0",
        "oneccl_bind_pt==2.7.0",
        "transformers==4.56.2",
        "accelerate==1.10.1",
        "Datasets==4.1.0",
        "scikit-learn==1.7.2",
        "peft==0.17.1",
        "evaluate==0.4.6",
        "boto3>=1.41,<2",
        "impi-rt==2021.18.1",
        "wandb>=0.20",
    )
    assert mine.environment == {"CCL_LOG_LEVEL": "info"}
    assert mine.summary == "intel, changed in spr-cluster.toml"
    assert mine.versions == base.versions
    unchanged = {"ubuntu", "python", "backend", "use_ipex", "indexes", "system_packages"}
    assert mine.model_dump(include=unchanged) == base.model_dump(include=unchanged)


def test_another_ubuntu_brings_its_python_and_lists_are_replaced(own: Path) -> None:
    own.write_text(
        """
        [stacks.mine]
        base = "intel"
        ubuntu = "24.04"
        indexes = ["https://mirror.test/simple"]
        [stacks.old]
        base = "reference"
        environment = { KMP_HW_SUBSET = "" }
        """
    )
    mine = load_stack("mine")

    assert (mine.ubuntu, mine.python) == ("24.04", "3.12")
    assert mine.indexes == ("https://mirror.test/simple",)
    assert "KMP_HW_SUBSET" not in load_stack("old").environment
    assert load_stack("old").environment["OMP_NUM_THREADS"] == "24"


def test_versions_that_do_not_match_are_refused(own: Path) -> None:
    own.write_text('[stacks.mine]\nbase = "intel"\npython_packages = ["torch==2.6.0"]\n')

    with pytest.raises(UsageError, match=r"stack mine: intel-extension\S+ 2.7.0 does not match"):
        load_stack("mine")
    load_stack("intel")  # a mistake in one's own file does not touch what ships


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[stacks.mine]\nbase = intel", "spr-cluster.toml: not TOML: Invalid value"),
        ("[stack.mine]\n", "unknown table [stack]; did you mean stacks?"),
        ("stacks = 3", "stacks is not a table"),
        ("[stacks]\nmine = 3", "[stacks.mine]: expected a table"),
        ("[stacks.mine]\n", "[stacks.mine]: base is missing: expected the name of a shipped stack"),
        ("[stacks.Mine]\nbase = 'intel'", "[stacks.Mine]: a name has at most 32 lower-case"),
        ("[stacks.intel]\nbase = 'upstream'", "[stacks.intel]: a shipped stack has this name"),
        (
            "[stacks.mine]\nbase = 'intell'",
            f"base = 'intell': expected one of {', '.join(shipped_names())}; did you mean intel?",
        ),
        (
            "[stacks.mine]\nbase = 'intel'\npython_package = []",
            "[stacks.mine]: unknown key python_package; did you mean python_packages?",
        ),
        (
            "[stacks.mine]\nbase = 'intel'\nbackend = 'nccl'",
            "[stacks.mine]: backend = 'nccl': expected ccl or gloo; did you mean ccl?",
        ),
        ("[stacks.mine]\nbase = 'intel'\nuse_ipex = 'no'", "use_ipex = 'no': expected true or"),
        ("[stacks.mine]\nbase = 'intel'\nubuntu = 22.04", "ubuntu = 22.04: expected one of 20.04"),
        ("[stacks.mine]\nbase = 'intel'\npython = '3'", "python = '3': expected one of 3.8, 3.10"),
        (
            "[stacks.mine]\nbase = 'intel'\nindexes = ['pypi.org']",
            "indexes[0] = 'pypi.org': expected a list of URLs that begin with https://",
        ),
        (
            "[stacks.mine]\nbase = 'intel'\npython_packages = ['torch=2.7']",
            "python_packages: 'torch=2.7': expected a list of requirements",
        ),
        (
            "[stacks.mine]\nbase = 'intel'\nsystem_packages = ['-y']",
            "system_packages[0] = '-y': expected a list of Ubuntu",
        ),
        (
            "[stacks.mine]\nbase = 'intel'\nenvironment = { A = 1 }",
            "environment.A = 1: expected variables, with their values in quotes",
        ),
        (
            "[stacks.mine]\nbase = 'intel'\nremove_packages = ['nump']",
            "remove_packages: 'nump' is not in its base; did you mean numpy?",
        ),
    ],
)
def test_a_mistake_is_named(own: Path, text: str, message: str) -> None:
    own.write_text(text)

    with pytest.raises(UsageError) as caught:
        load_stack("mine")

    assert message in caught.value.message


def test_an_unknown_stack_names_the_closest_and_the_file(own: Path) -> None:
    own.write_text('[stacks.mine]\nbase = "intel"\n')

    with pytest.raises(UsageError) as caught:
        load_stack("mime")

    assert str(caught.value) == (
        f"unknown stack 'mime': one of {', '.join(shipped_names())}, mine; did you mean mine?\n"
        "  → your own stacks are read from spr-cluster.toml in the working folder or above"
    )
