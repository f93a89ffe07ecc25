"""A stack's packages as requirements for pip, with the options and the check that belong to them."""

from __future__ import annotations

from provision.stacks.stack import Stack


def render_requirements(stack: Stack) -> str:
    """Return the stack's packages and where to find them, for pip; its lock, if there is one."""
    sources = [f"--extra-index-url {index}" for index in stack.indexes]
    sources += [f"--find-links {page}" for page in stack.find_links]
    return "\n".join([*sources, *(stack.lock or stack.python_packages), ""])


def pip_options(stack: Stack) -> str:
    """Return pip's options beside the requirements: a lock is complete, with a hash for every file."""
    return "--require-hashes --no-deps" if stack.lock else ""


def render_import_check(stack: Stack) -> str:
    """Return Python code that imports the stack's modules, and fails for a torch that is not for CPUs."""
    modules = ", ".join(stack.versions)
    return f"import {modules}; assert torch.version.cuda is None, torch.__version__"
