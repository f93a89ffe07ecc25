"""The recipe of an image: the same everywhere, and another for every change that counts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from provision.bake import recipe_digest
from provision.install import stack_digest
from provision.stacks.load import load_stack, shipped_names
from provision.stacks.stack import Stack

ASK = """
import json
from provision.bake import recipe_digest
from provision.install import stack_digest
from provision.stacks.load import load_stack, shipped_names
stacks = [load_stack(name) for name in shipped_names()]
print(json.dumps({stack.name: [stack_digest(stack), recipe_digest(stack)] for stack in stacks}))
"""


def changed(**values: object) -> Stack:
    return Stack.model_validate({**load_stack("upstream").model_dump(), **values})


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
        recipe_digest(changed(lock=["torch==2.13.0 --hash=sha256:" + "1" * 64])),
        recipe_digest(load_stack("intel")),
    ]

    assert len(set(recipes)) == len(recipes)


def ask(folder: Path) -> dict[str, list[str]]:
    """Each stack's installation and recipe by the code in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=folder, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_another_checkout_has_the_same_recipes_until_one_line_changes(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "local")
    for name in ("infra", "provision"):
        shutil.copytree(Path(__file__).parents[2] / name, tmp_path / name, ignore=ignored)
    stacks = [load_stack(name) for name in shipped_names()]
    own = {stack.name: [stack_digest(stack), recipe_digest(stack)] for stack in stacks}
    assert ask(tmp_path) == own

    upstream = tmp_path / "provision/stacks/upstream.toml"
    upstream.write_text(upstream.read_text().replace("datasets==5.2.0", "datasets==5.2.1"))
    with (tmp_path / "provision/on_node/seal.sh").open("a") as script:
        script.write("true\n")
    sealed = ask(tmp_path)
    for name, (installation, recipe) in own.items():
        assert (sealed[name][0] != installation) is (name == "upstream")
        assert sealed[name][1] != recipe

    with (tmp_path / "provision/on_node/install.sh").open("a") as script:
        script.write("true\n")
    for name, digests in ask(tmp_path).items():
        assert not {*digests} & {*sealed[name]}
