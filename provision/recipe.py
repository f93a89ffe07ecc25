"""The recipe of an image: the name of everything that decides what is in it."""

from __future__ import annotations

import hashlib
import json
from importlib import resources

from provision.install import stack_digest
from provision.stacks import Stack


def recipe_digest(stack: Stack, base: str = "") -> str:
    """Names what an image of a stack holds; the same on every machine and in every cluster.

    It covers the stack with all its versions and indexes, the Ubuntu release, our installation and
    sealing scripts, and ``base``: what a cloud starts machines from besides that release. Canonical's
    rebuilds of a release are not in it: they would make every image useless some times a month.
    """
    parts = {
        "base": base,
        "ubuntu": stack.ubuntu,
        "install": stack_digest(stack),
        "seal": resources.files("provision").joinpath("seal.sh").read_text(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
