"""The training flags of each release of transformers, and those that a stack needs. Pure.

Source: ``training_args.py`` in the wheels of the releases on both sides of every boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.errors import UsageError
from provision.stacks.stack import TRANSFORMERS, Stack
from provision.stacks.versions import release

OLDEST = "4.24.0"
"""The oldest release whose flags are known."""

# (flag, the first release that has it, the first that no longer does)
_SPANS: tuple[tuple[str, str, str | None], ...] = (
    ("--bf16", OLDEST, None),
    ("--xpu_backend", OLDEST, "4.32.0"),
    ("--ddp_backend", "4.29.0", None),
    ("--no_cuda", OLDEST, "5.0.0"),
    ("--use_cpu", "4.32.0", None),
    ("--use_ipex", OLDEST, "4.57.0"),
    ("--overwrite_output_dir", OLDEST, "5.0.0"),
    ("--group_by_length", OLDEST, "5.2.0"),
    ("--train_sampling_strategy", "5.2.0", None),
)
_LAST_WITH_IPEX = "4.56.2"
# From 5.1.0 on, --ddp_backend accepts other names.
_FIRST_WITHOUT_CCL, _LAST_WITH_CCL = "5.1.0", "5.0.0"


@dataclass(frozen=True)
class TrainingFlags:
    """``known``: the flags of the release. ``argv``: those that select the stack's backend and precision."""

    known: frozenset[str]
    argv: tuple[str, ...]


def known_flags(transformers: str) -> frozenset[str]:
    """Return the flags that a release has. Raises :class:`UsageError` before 4.24.0."""
    found = release(transformers)
    if found < release(OLDEST):
        raise UsageError(
            f"transformers {transformers}: its training flags are unknown",
            hint=f"use transformers {OLDEST} or newer",
        )
    return frozenset(
        flag
        for flag, first, gone in _SPANS
        if release(first) <= found and (gone is None or found < release(gone))
    )


def training_flags(stack: Stack) -> TrainingFlags:
    """Return the flags with which a script such as run_qa.py uses this stack.

    Raises :class:`UsageError`, naming the last release that fits, if there are none.
    """
    version = stack.pin(TRANSFORMERS) or ""
    known = known_flags(version)
    if stack.use_ipex and "--use_ipex" not in known:
        raise _unknown(stack, version, "--use_ipex", _LAST_WITH_IPEX)
    if stack.backend == "ccl" and release(version) >= release(_FIRST_WITHOUT_CCL):
        raise _unknown(stack, version, "--ddp_backend ccl", _LAST_WITH_CCL)
    backend = "--ddp_backend" if "--ddp_backend" in known else "--xpu_backend"
    argv = [backend, stack.backend]
    argv += ["--use_ipex"] if stack.use_ipex else []
    # Without either flag, the trainer asks for a GPU.
    argv += ["--use_cpu" if "--use_cpu" in known else "--no_cuda", "--bf16"]
    return TrainingFlags(known, tuple(argv))


def _unknown(stack: Stack, version: str, flag: str, last: str) -> UsageError:
    return UsageError(
        f"stack {stack.name}: transformers {version} does not know {flag}",
        hint=f"use transformers {last}, the last release that does",
    )
