"""A stack's packages for pip: those of its lock, if it has one."""

from __future__ import annotations

from provision.stacks.load import load_stack
from provision.stacks.stack import pip_options, render_requirements


def test_without_a_lock_pip_chooses_what_the_packages_need() -> None:
    stack = load_stack("upstream")
    lines = render_requirements(stack).splitlines()

    assert lines == [
        *(f"--extra-index-url {each}" for each in stack.indexes),
        *stack.python_packages,
    ]
    assert pip_options(stack) == ""


def test_a_lock_takes_the_place_of_the_packages() -> None:
    line = f"torch==2.13.0 --hash=sha256:{'0' * 64}"
    stack = load_stack("upstream").model_copy(update={"lock": (line,)})

    assert render_requirements(stack).splitlines()[len(stack.indexes) :] == [line]
    assert pip_options(stack) == "--require-hashes --no-deps"
