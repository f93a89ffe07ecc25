"""Has each node the software of its stack, whole, and room to work? Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from cluster.verify.checks.result import CheckResult, Expected, Verdict, typical
from provision.health import NodeHealth
from provision.install import LOG, VENV
from provision.stacks.stack import BINDING, IPEX, TORCH, TRANSFORMERS, Stack, module_name
from provision.stacks.versions import parse_requirement, python_minor, release

_GIB = 1024**3
# A job's log, model and checkpoints; below the lesser a job ends amid its work.
_FREE_FAIL, _FREE_WARN = 2 * _GIB, 10 * _GIB
# Of a disk, a file system and Ubuntu's boot partitions take some.
_DISK_SHARE = 0.9

Health = Mapping[str, NodeHealth]


def check_software(health: Health, expected: Expected) -> Iterator[CheckResult]:
    """tcmalloc, the stack's versions, Python and the disk of all nodes."""
    if not health:
        return
    library = _usual(told.tcmalloc for told in health.values())
    mark = _usual(told.mark for told in health.values())
    for node, told in health.items():
        yield check_tcmalloc(node, told, library, expected)
        yield check_stack(node, told, mark, expected)
        yield check_disk(node, told, expected)
    yield from check_python(health, expected)


def _usual(values: Iterable[str | None]) -> str | None:
    """The most frequent value; nodes without one are not what the others should be like."""
    there = [value for value in values if value is not None]
    return typical(there) if there else None


def check_tcmalloc(
    node: str, told: NodeHealth, usual: str | None, expected: Expected
) -> CheckResult:
    """The library that every rank preloads: there, loadable, and at the same path everywhere."""
    # Debian and Ubuntu have it in packages of these names, with t64 at the end from 24.04 on.
    packages = '"^lib(google-perftools|tcmalloc-minimal)4(t64)?$"'
    script = f"sudo apt-get -q update; sudo apt-get -q install --reinstall -y {packages}"
    remedy = expected.on_node(node, script)
    if told.tcmalloc is None:
        found, wanted = "missing", usual or "/usr/lib/*/libtcmalloc.so.4"
        return CheckResult(node, "tcmalloc", Verdict.FAIL, found, wanted, remedy)
    if told.tcmalloc_error:
        found = f"{told.tcmalloc} can't be preloaded: {told.tcmalloc_error}"
        return CheckResult(node, "tcmalloc", Verdict.FAIL, found, "a library that loads", remedy)
    if told.tcmalloc != usual:
        wanted = f"as the other nodes: {usual}"
        return CheckResult(node, "tcmalloc", Verdict.FAIL, told.tcmalloc, wanted, remedy)
    return CheckResult(node, "tcmalloc", Verdict.OK, told.tcmalloc)


def check_stack(
    node: str, told: NodeHealth, usual_mark: str | None, expected: Expected
) -> CheckResult:
    """The stack's environment, its packages in their versions, and the mark of a whole installation."""
    if not told.in_venv:
        found = f"{VENV} has no Python that runs"
        remedy = f"its environment is broken; {expected.replacement(node)}"
        return CheckResult(node, "stack", Verdict.FAIL, found, VENV, remedy)
    wrong = find_wrong_versions(told, expected.stack)
    if wrong:
        found = ", ".join(found for found, _ in wrong.values())
        wanted = ", ".join(requirement for _, requirement in wrong.values())
        remedy = expected.on_node(node, _install_command(list(wrong), expected.stack))
        return CheckResult(node, "stack", Verdict.FAIL, found, wanted, remedy)
    wanted = f"{expected.stack.name} ({expected.digest})"
    if told.mark is None:
        remedy = f"it did not end, see {LOG} on the node; {expected.replacement(node)}"
        return CheckResult(node, "stack", Verdict.FAIL, "no whole installation", wanted, remedy)
    if told.mark != usual_mark:
        remedy = f"it has another node's software; {expected.replacement(node)}"
        found = f"installation {told.mark}, other nodes {usual_mark}"
        return CheckResult(node, "stack", Verdict.FAIL, found, wanted, remedy)
    if told.mark != expected.digest:
        remedy = "another version of this tool, or of the stack, made it; `up` of a new cluster is like it"
        return CheckResult(node, "stack", Verdict.WARN, f"installation {told.mark}", wanted, remedy)
    torch = told.versions.get("torch")
    return CheckResult(node, "stack", Verdict.OK, f"{expected.stack.name}, torch {torch}")


def find_wrong_versions(told: NodeHealth, stack: Stack) -> dict[str, tuple[str, str]]:
    """By the stack's requirement: what there is, and what should be."""
    wrong = {}
    for text in stack.python_packages:
        requirement = parse_requirement(text)
        if requirement is None:
            continue
        found = told.versions.get(requirement.name)
        if found is None:
            wrong[text] = (f"no {requirement.name}", text)
        elif not requirement.accepts(found):
            wrong[text] = (f"{requirement.name} {found}", text)
    return wrong or _find_wrong_modules(told, stack)


def _find_wrong_modules(told: NodeHealth, stack: Stack) -> dict[str, tuple[str, str]]:
    """Where pip's records are right, and the files are another version's."""
    wrong = {}
    for package in (TORCH, IPEX, BINDING, TRANSFORMERS):
        version = stack.pin(package)
        if version is None:
            continue
        module = module_name(package, version)
        found = told.modules.get(module)
        if found is None or release(found) != release(version):
            there = f"module {module} {found}" if found else f"no module {module}"
            wrong[f"{package}=={version}"] = (there, f"{package}=={version}")
    return wrong


def _install_command(requirements: list[str], stack: Stack) -> str:
    """pip's own line to put packages right; what they need is there already."""
    indexes = " ".join(f"--extra-index-url {url}" for url in stack.indexes)
    links = " ".join(f"--find-links {url}" for url in stack.find_links)
    options = " ".join(filter(None, (indexes, links)))
    packages = " ".join(shlex.quote(text) for text in requirements)
    return f"{VENV}/bin/pip install --force-reinstall --no-deps {options} {packages}"


def check_python(health: Health, expected: Expected) -> Iterator[CheckResult]:
    """One Python on all nodes: that of the stack's Ubuntu, where it is Ubuntu."""
    usual = typical(told.python for told in health.values())
    for node, told in health.items():
        verdict, wanted, remedy = Verdict.OK, "", ""
        if told.python != usual:
            verdict, wanted = Verdict.WARN, f"as the other nodes: {usual}"
            remedy = f"it was updated alone; {expected.replacement(node)}"
        elif expected.machine and python_minor(told.python) != python_minor(expected.stack.python):
            verdict, wanted = Verdict.WARN, expected.stack.python
            remedy = f"the stack's packages are for that one; {expected.replacement(node)}"
        yield CheckResult(node, "python", verdict, told.python, wanted, remedy)


def check_disk(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """It can be written to, has room, and is as large as it was bought."""
    size, free = told.disk_size / _GIB, told.disk_free / _GIB
    found = f"{free:.0f} of {size:.0f} GiB free"
    look = expected.on_node(node, "df -h /; sudo du -xh / 2>/dev/null | sort -h | tail")
    if told.disk_error:
        remedy = expected.on_node(node, "findmnt /; df -h /; sudo dmesg | tail")
        return CheckResult(node, "disk", Verdict.FAIL, told.disk_error, "can be written to", remedy)
    if told.disk_free < _FREE_FAIL:
        wanted = f"{_FREE_FAIL // _GIB} GiB free or more"
        return CheckResult(node, "disk", Verdict.FAIL, found, wanted, look)
    if told.disk_free < _FREE_WARN:
        wanted = f"{_FREE_WARN // _GIB} GiB free or more"
        return CheckResult(node, "disk", Verdict.WARN, found, wanted, look)
    if expected.machine and size < expected.volume_gib * _DISK_SHARE:
        remedy = f"its file system did not grow; {expected.on_node(node, 'lsblk; df -h /')}"
        wanted = f"{expected.volume_gib} GiB"
        return CheckResult(node, "disk", Verdict.WARN, found, wanted, remedy)
    return CheckResult(node, "disk", Verdict.OK, found)
