"""oneCCL's bindings: their module, and their environment script, by version. Pure."""

from __future__ import annotations

from provision.stacks.versions import release

_RENAMED = "1.12"

FROM_1_12 = "import oneccl_bindings_for_pytorch as ccl; print(ccl.cwd)"
BEFORE_1_12 = (
    "import os, torch, torch_ccl; print(os.path.dirname(os.path.abspath(torch_ccl.__file__)))"
)


def binding_module(version: str) -> str:
    """The bindings' import name: ``torch_ccl`` before 1.12."""
    return "torch_ccl" if release(version) < release(_RENAMED) else "oneccl_bindings_for_pytorch"


def environment_lookup(version: str) -> str:
    """Python code, for the node, that prints the folder with ``env/setvars.sh``.

    Both rules: https://huggingface.co/docs/transformers/v4.28.1/en/perf_train_cpu_many
    """
    return BEFORE_1_12 if release(version) < release(_RENAMED) else FROM_1_12
