"""The support state of a stack's parts, as of November 2026. Pure."""

from __future__ import annotations

from infra.ec2.images import RELEASES
from infra.errors import UsageError
from provision.stacks.flags import training_flags
from provision.stacks.stack import BINDING, IPEX, Stack
from provision.stacks.versions import release

# https://github.com/intel/intel-extension-for-pytorch and https://github.com/intel/torch-ccl
IPEX_STATE = (
    "intel-extension-for-pytorch ended with 2.8.0: archived by Intel in March 2026, with known "
    "security issues that remain unfixed; Intel recommends upstream PyTorch"
)
BINDING_STATE = (
    "oneccl-bind-pt ended with 2.8.0: deprecated by Intel in November 2025; it was never on PyPI, "
    "only on Intel's own indexes, which have had outages"
)
_XPU_ONLY = "oneccl-bind-pt 2.8.0 is only on Intel's index for GPUs (.../stable/xpu/us/)"


_ENDED = {IPEX: "archived IPEX", BINDING: "deprecated the oneCCL bindings"}


def summarize_state(stack: Stack) -> tuple[str, ...]:
    """Return a line for a stack with parts that Intel has given up; none for others."""
    ended = [text for package, text in _ENDED.items() if stack.requirement(package)]
    if not ended:
        return ()
    what = " and ".join(ended)
    return (f"Stack {stack.name}: Intel has {what}; details: spr-cluster stacks",)


def explain_state(stack: Stack) -> tuple[str, ...]:
    """Sentences about parts of a stack that are no longer supported, or can't be used together."""
    sentences = []
    if stack.requirement(IPEX):
        sentences.append(IPEX_STATE)
    binding = stack.pin(BINDING)
    if binding:
        sentences.append(BINDING_STATE)
        if release(binding) == release("2.8.0"):
            sentences.append(_XPU_ONLY)
    if ended := RELEASES[stack.ubuntu].free_updates_ended:
        sentences.append(f"Ubuntu {stack.ubuntu}: free security updates ended in {ended}")
    try:
        training_flags(stack)
    except UsageError as error:
        sentences.append(f"scripts with transformers' Trainer can't use it: {error.message}")
    return tuple(sentences)
