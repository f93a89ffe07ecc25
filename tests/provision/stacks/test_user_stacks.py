"""The user's own stacks, in a file of the working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from infra.project_file import PROJECT_FILE
from provision.stacks.load import load_stack, shipped_names, stack_names
from tests.golden import check_section, read_sections

_MISTAKES = Path(__file__).parent / "golden" / "mistakes.txt"


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
        system_packages = ["jq", "numactl"]
        environment = { CCL_LOG_LEVEL = "info" }
        """
    )
    base, mine = load_stack("intel"), load_stack("mine")

    assert stack_names() == (*shipped_names(), "mine")
    changed = {
        "datasets==4.0.0": "Datasets==4.1.0",
        "oneccl-bind-pt==2.7.0": "oneccl_bind_pt==2.7.0",
    }
    kept = [text for text in base.python_packages if text != "numpy<2.4"]
    wanted = (*(changed.get(text, text) for text in kept), "wandb>=0.20")
    assert mine.python_packages == wanted
    assert mine.environment == {"CCL_LOG_LEVEL": "info"}
    assert mine.summary == "intel, changed in spr-cluster.toml"
    assert mine.versions == {
        "torch": "2.7.0",
        "intel_extension_for_pytorch": "2.7.0",
        "oneccl_bindings_for_pytorch": "2.7.0",
        "transformers": "4.56.2",
    }
    assert mine.system_packages == (*base.system_packages, "jq")
    unchanged = {"ubuntu", "python", "backend", "use_ipex", "indexes"}
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


@pytest.mark.parametrize("text", read_sections(_MISTAKES))
def test_a_mistake_is_named(own: Path, text: str) -> None:
    own.write_text(text.replace("\\n", "\n"))

    with pytest.raises(UsageError) as caught:
        load_stack("mine")

    check_section(_MISTAKES, text, str(caught.value))


def test_an_unknown_stack_names_the_closest_and_the_file(own: Path) -> None:
    own.write_text('[stacks.mine]\nbase = "intel"\n')

    with pytest.raises(UsageError) as caught:
        load_stack("mime")

    assert str(caught.value) == (
        f"unknown stack 'mime': one of {', '.join(shipped_names())}, mine; did you mean mine?\n"
        "  → your own stacks are read from spr-cluster.toml in the working folder or above"
    )
