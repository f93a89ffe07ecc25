"""Matching versions, their flags, and their support; rejects stacks whose versions don't match. Pure.

Sources: the tables of https://github.com/intel/torch-ccl (torch and its bindings), of
https://github.com/intel/intel-extension-for-pytorch (torch and IPEX), of
https://huggingface.co/docs/transformers/v4.28.1/en/perf_train_cpu_many (Python), and PyPI's own
list of torch's wheels in November 2026. Flags: ``training_args.py`` in the wheels of transformers' releases
on both sides of every boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.ec2.images import RELEASES
from infra.errors import UsageError
from provision.stacks.stack import (
    BINDING,
    IPEX,
    MPI,
    TORCH,
    TRANSFORMERS,
    Stack,
    fits,
    is_final,
    parse_requirement,
    python_minor,
    release,
)

UBUNTU_PYTHON = {name: ubuntu.python for name, ubuntu in RELEASES.items()}


@dataclass(frozen=True)
class Match:
    """Versions that were built for one another; ``pythons`` are the first and last with wheels."""

    torch: str
    ipex: tuple[str, ...]
    binding: str
    pythons: tuple[str, str]


MATRIX = (
    Match("1.12.0", ("1.12.0",), "1.12.0", ("3.7", "3.10")),
    Match("1.12.1", ("1.12.100", "1.12.300"), "1.12.100", ("3.7", "3.10")),
    Match("1.13.0", ("1.13.0",), "1.13.0", ("3.7", "3.10")),
    Match("2.0.*", ("2.0.*",), "2.0.*", ("3.8", "3.11")),
    Match("2.1.0", ("2.1.*",), "2.1.*", ("3.8", "3.11")),
    Match("2.3.*", ("2.3.*",), "2.3.*", ("3.8", "3.11")),
    Match("2.5.*", ("2.5.*",), "2.5.*", ("3.9", "3.12")),
    Match("2.6.*", ("2.6.*",), "2.6.*", ("3.9", "3.13")),
    Match("2.7.0", ("2.7.0",), "2.7.0", ("3.9", "3.13")),
    Match("2.8.0", ("2.8.0",), "2.8.0", ("3.9", "3.13")),
)
"""One row per set. The bindings had another name before 1.12; since torch 2.9 there is neither package."""

# torch alone, without Intel's packages: the first version of each span, and its Pythons.
_TORCH_PYTHONS = (
    ("2.15", "3.11", None),
    ("2.9", "3.10", None),
    ("2.5", "3.9", "3.13"),
    ("2.2", "3.8", "3.12"),
    ("2.0", "3.8", "3.11"),
    ("1.13", "3.7", "3.11"),
    ("1.11", "3.7", "3.10"),
    ("0", "3.6", "3.9"),
)
# It requires a libfabric that PyPI does not have.
_BROKEN_MPI, _GOOD_MPI = "2021.19.0", "2021.18.1"


def check_stack(stack: Stack) -> None:
    """Raises :class:`UsageError`, naming versions that match, if a stack's parts don't."""
    for text in stack.python_packages:
        if not parse_requirement(text):
            raise _refusal(
                stack, f"{text!r}: expected a requirement such as torch==2.7.0 or numpy<2.4"
            )
    _check_pins(stack)
    match = _find_match(stack)
    _check_python(stack, match)
    _check_parts(stack)


def _refusal(stack: Stack, message: str, hint: str | None = None) -> UsageError:
    return UsageError(f"stack {stack.name}: {message}", hint=hint)


def _check_pins(stack: Stack) -> None:
    for package in (TORCH, TRANSFORMERS, IPEX, BINDING):
        requirement = stack.requirement(package)
        if requirement is None:
            if package in (TORCH, TRANSFORMERS):
                raise _refusal(stack, f"{package} is missing", f"add {package}==VERSION")
        elif not requirement.pinned or not is_final(requirement.pinned):
            raise _refusal(
                stack,
                f"{requirement.text} is not an exact release",
                f"other packages depend on its version, so pin it: {package}==VERSION",
            )


def _find_match(stack: Stack) -> Match | None:
    """The row of the stack's torch and Intel's packages; ``None`` if it has none of these."""
    pins = {package: stack.pin(package) for package in (IPEX, BINDING)}
    intel = {package: version for package, version in pins.items() if version}
    torch = stack.pin(TORCH) or ""
    rows = [match for match in MATRIX if fits(torch, match.torch)]
    for package, version in intel.items():
        if any(_has(match, package, version) for match in rows):
            continue
        ways = [f"{package} {' or '.join(patterns(match, package))}" for match in rows]
        ways += [f"torch {match.torch}" for match in MATRIX if _has(match, package, version)]
        if release(torch) > release("2.8"):
            ways.append("stack upstream: both of Intel's projects ended with 2.8.0")
        ways = ways or [f"torch {', '.join(match.torch for match in MATRIX)}"]
        raise _refusal(
            stack, f"{package} {version} does not match torch {torch}", f"use {'; or '.join(ways)}"
        )
    return rows[0] if intel else None


def _has(match: Match, package: str, version: str) -> bool:
    return any(fits(version, pattern) for pattern in patterns(match, package))


def patterns(match: Match, package: str) -> tuple[str, ...]:
    """The versions of IPEX or of the bindings in one row."""
    return match.ipex if package == IPEX else (match.binding,)


def _check_python(stack: Stack, match: Match | None) -> None:
    torch, python = stack.pin(TORCH) or "", stack.python
    low, high = match.pythons if match else torch_pythons(torch)
    fitting = [
        f"ubuntu {ubuntu} (Python {version})"
        for ubuntu, version in UBUNTU_PYTHON.items()
        if _between(version, low, high)
    ]
    if not _between(python, low, high):
        what = f"torch {torch} with Intel's packages" if match else f"torch {torch}"
        span = f"from {low} on" if high is None else f"{low} to {high}"
        raise _refusal(
            stack,
            f"{what} has no wheels for Python {python}, only for Python {span}",
            f"use {' or '.join(fitting)}" if fitting else None,
        )
    if (own := UBUNTU_PYTHON[stack.ubuntu]) != python:
        raise _refusal(
            stack,
            f"Ubuntu {stack.ubuntu} comes with Python {own}, not {python}",
            f"use {' or '.join(fitting)}",
        )


def torch_pythons(torch: str) -> tuple[str, str | None]:
    """The first and the last Python (``None``: unknown) with wheels of torch alone."""
    return next(
        (low, high) for first, low, high in _TORCH_PYTHONS if release(torch) >= release(first)
    )


def _between(python: str, low: str, high: str | None) -> bool:
    minor = python_minor(python)
    return python_minor(low) <= minor and (high is None or minor <= python_minor(high))


def _check_parts(stack: Stack) -> None:
    needs = {MPI: f"launcher {stack.launcher} needs"}
    if stack.backend == "ccl":
        needs[BINDING] = "backend ccl needs"
    if stack.use_ipex:
        needs[IPEX] = "use_ipex needs"
    for package, why in needs.items():
        if not stack.requirement(package):
            raise _refusal(stack, f"{why} {package}", f"add {package} to python_packages")
    if stack.pin(MPI) == _BROKEN_MPI:
        raise _refusal(
            stack,
            f"{MPI} {_BROKEN_MPI} can't be installed: PyPI lacks the libfabric that it requires",
            f"use {MPI} {_GOOD_MPI}",
        )


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
# Since 5.1.0, --ddp_backend accepts other names.
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
    """Return the flags that make a script such as run_qa.py use this stack.

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
    # Without either flag, the trainer requires a GPU.
    argv += ["--use_cpu" if "--use_cpu" in known else "--no_cuda", "--bf16"]
    return TrainingFlags(known, tuple(argv))


def _unknown(stack: Stack, version: str, flag: str, last: str) -> UsageError:
    return UsageError(
        f"stack {stack.name}: transformers {version} does not know {flag}",
        hint=f"use transformers {last}, the last release that does",
    )


_TITLES = {
    TORCH: "PyTorch",
    IPEX: "IPEX",
    BINDING: "oneCCL bindings",
    TRANSFORMERS: "transformers",
    MPI: "Intel MPI",
}


def describe_software(stack: Stack) -> str:
    """Return the main parts, such as ``stack upstream (PyTorch 2.13, transformers 5.23, tcmalloc)``."""
    pins = {title: stack.pin(package) for package, title in _TITLES.items()}
    parts = [f"{title} {'.'.join(pin.split('.')[:2])}" for title, pin in pins.items() if pin]
    parts += ["tcmalloc"] if any("perftools" in each for each in stack.system_packages) else []
    more = "" if stack.requirement(IPEX) else " IPEX and oneCCL: --stack intel."
    return f"stack {stack.name} ({', '.join(parts)}).{more}"


OLDEST_PYTHON, OLDEST_TORCH = "3.10", "2.4"


def runs_tasks(stack: Stack) -> bool:
    """Return whether a stack is new enough for the code of this tool's own tasks."""
    python_is_old = python_minor(stack.python) < python_minor(OLDEST_PYTHON)
    return not python_is_old and release(stack.pin(TORCH) or "") >= release(OLDEST_TORCH)


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
    """Return a line for a stack with parts that Intel has discontinued; none for others."""
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
