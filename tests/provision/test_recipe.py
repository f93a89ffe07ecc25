"""The recipe of an image: the same everywhere, and another for every change that counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from provision import on_node
from provision.bake import recipe_digest
from provision.install import stack_digest
from provision.stacks.load import load_stack, shipped_names
from provision.stacks.stack import Stack


def test_every_change_of_content_changes_the_recipe() -> None:
    stack = load_stack("upstream")
    first, *others = stack.python_packages

    def changed(**values: object) -> str:
        return recipe_digest(Stack.model_validate({**stack.model_dump(), **values}))

    recipes = [
        recipe_digest(stack),
        recipe_digest(stack, "another base"),
        recipe_digest(load_stack("intel")),
        changed(ubuntu="24.10"),
        changed(python_packages=[f"{first}.1", *others]),
        changed(system_packages=[*stack.system_packages, "jq"]),
        changed(indexes=[*stack.indexes, "https://example.org/simple"]),
        changed(lock=["torch==2.13.0 --hash=sha256:" + "1" * 64]),
    ]
    assert len(set(recipes)) == len(recipes)


def digests() -> dict[str, list[str]]:
    """Each stack's installation and recipe."""
    stacks = [load_stack(name) for name in shipped_names()]
    return {stack.name: [stack_digest(stack), recipe_digest(stack)] for stack in stacks}


def test_another_process_has_the_same_recipes() -> None:
    ask = (
        "import json; from tests.provision.test_recipe import digests; print(json.dumps(digests()))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, check=True)

    assert json.loads(done.stdout) == digests()


def test_a_changed_script_changes_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digests(), "read before the scripts are replaced"
    scripts = shutil.copytree(Path(on_node.__file__).parent, tmp_path / "on_node")
    monkeypatch.setattr(resources, "files", lambda _: scripts)
    for script, is_changed in (("seal.sh", [False, True]), ("install.sh", [True, True])):
        before = digests()
        with (scripts / script).open("a") as file:
            file.write("true\n")
        for name, now in digests().items():
            assert [a != b for a, b in zip(now, before[name], strict=True)] == is_changed
