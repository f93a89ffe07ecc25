"""The recipe of an image: a digest of everything that determines its content."""

from __future__ import annotations

import hashlib
import json
from importlib import resources

from provision.install import stack_digest
from provision.stacks.stack import Stack


def recipe_digest(stack: Stack, base: str = "") -> str:
    """Identify the content of an image; the same on every machine and in every cluster.

    It covers the stack with all its versions and indexes, the Ubuntu release, our installation and
    sealing scripts, and ``base``: what else a cloud starts machines from. It leaves out Canonical's
    rebuilds of a release, which would invalidate every image several times a month.
    """
    parts = {
        "base": base,
        "ubuntu": stack.ubuntu,
        "install": stack_digest(stack),
        "seal": resources.files("provision").joinpath("seal.sh").read_text(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
