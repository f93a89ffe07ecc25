"""The recipe of an image: the same everywhere, and another for every change that counts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provision.bake import recipe_digest
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack

ROOT = Path(__file__).parents[2]
ASK = (
    "from provision.bake import recipe_digest; from provision.stacks.load import load_stack; "
    "print(recipe_digest(load_stack('intel')))"
)


def changed(**values: object) -> Stack:
    return Stack.model_validate({**load_stack("upstream").model_dump(), **values})


def checkout(folder: Path) -> None:
    """Another copy of the code."""
    for name in ("infra", "provision"):
        shutil.copytree(ROOT / name, folder / name)


def recipe_in(folder: Path) -> str:
    """The recipe of stack intel by the code in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_another_checkout_has_the_same_recipe(tmp_path: Path) -> None:
    checkout(tmp_path)

    assert recipe_in(tmp_path) == recipe_digest(load_stack("intel"))


def test_every_change_of_content_changes_the_recipe() -> None:
    stack = load_stack("upstream")
    packages = [*stack.python_packages]
    packages[0] = packages[0] + ".1"
    recipes = [
        recipe_digest(stack),
        recipe_digest(stack, "another base"),
        recipe_digest(changed(ubuntu="24.10")),
        recipe_digest(changed(python_packages=packages)),
        recipe_digest(changed(system_packages=[*stack.system_packages, "jq"])),
        recipe_digest(changed(indexes=[*stack.indexes, "https://example.org/simple"])),
        recipe_digest(load_stack("intel")),
    ]

    assert len(set(recipes)) == len(recipes)


@pytest.mark.parametrize("name", ["install.sh", "seal.sh"])
def test_one_changed_line_of_a_script_changes_the_recipe(name: str, tmp_path: Path) -> None:
    checkout(tmp_path)
    with (tmp_path / "provision/on_node" / name).open("a") as script:
        script.write("true\n")

    assert recipe_in(tmp_path) != recipe_digest(load_stack("intel"))
