"""Does each node have the complete software of its stack, and room to work? Pure."""

from __future__ import annotations

import shlex

from cluster.verify.results import CheckResult, Expected, Verdict
from provision.facts import NodeHealth
from provision.install import LOG, VENV
from provision.stacks.stack import (
    BINDING,
    IPEX,
    TORCH,
    TRANSFORMERS,
    Stack,
    module_name,
    parse_requirement,
    python_minor,
    release,
)

_GIB = 1024**3
# A job needs room for its log, model, and checkpoints; below the lower limit it can fail midway.
_FREE_FAIL, _FREE_WARN = 2 * _GIB, 10 * _GIB
# The file system and Ubuntu's boot partitions take part of a disk.
_DISK_SHARE = 0.9


def check_tcmalloc(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check the library that every rank preloads: present, loadable, the same path everywhere."""
    usual = expected.usual(lambda peer: peer.tcmalloc)
    # Debian and Ubuntu package names; they end in t64 since 24.04.
    packages = '"^lib(google-perftools|tcmalloc-minimal)4(t64)?$"'
    script = f"sudo apt-get -q update; sudo apt-get -q install --reinstall -y {packages}"
    remedy = expected.on_node(node, script)
    if health.tcmalloc is None:
        found, wanted = "missing", usual or "/usr/lib/*/libtcmalloc.so.4"
        return CheckResult(node, "tcmalloc", Verdict.FAIL, found, wanted, remedy)
    if health.tcmalloc_error:
        found = f"{health.tcmalloc} can't be preloaded: {health.tcmalloc_error}"
        return CheckResult(node, "tcmalloc", Verdict.FAIL, found, "a library that loads", remedy)
    if health.tcmalloc != usual:
        wanted = f"same as the other nodes: {usual}"
        return CheckResult(node, "tcmalloc", Verdict.FAIL, health.tcmalloc, wanted, remedy)
    return CheckResult(node, "tcmalloc", Verdict.OK, health.tcmalloc)


def check_stack(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check the environment, its package versions, and the mark of a complete installation."""
    usual_mark = expected.usual(lambda peer: peer.mark)
    if not health.in_venv:
        found, remedy = f"{VENV} has no working Python", "The environment is broken"
        return CheckResult(
            node, "stack", Verdict.FAIL, found, VENV, expected.replacement(node, remedy)
        )
    wrong = find_wrong_versions(health, expected.stack)
    if wrong:
        found, wanted = ", ".join(wrong.values()), ", ".join(wrong)
        remedy = expected.on_node(node, _install_command(list(wrong), expected.stack))
        return CheckResult(node, "stack", Verdict.FAIL, found, wanted, remedy)
    if health.mark == usual_mark == expected.digest:
        found = f"{expected.stack.name}, torch {health.versions.get('torch')}"
        return CheckResult(node, "stack", Verdict.OK, found)
    return _judge_mark(node, health.mark, usual_mark, expected)


def _judge_mark(
    node: str, mark: str | None, usual_mark: str | None, expected: Expected
) -> CheckResult:
    verdict, wanted = Verdict.FAIL, f"{expected.stack.name} ({expected.digest})"
    if mark is None:
        found = "incomplete installation"
        remedy = expected.replacement(node, f"The installation did not finish; see {LOG} there")
    elif mark != usual_mark:
        found = f"installation {mark}, other nodes {usual_mark}"
        remedy = expected.replacement(node, "Its software differs")
    else:
        verdict, found = Verdict.WARN, f"installation {mark}"
        remedy = (
            "Another version of this tool or of the stack installed it. A new cluster will match"
        )
    return CheckResult(node, "stack", verdict, found, wanted, remedy)


def find_wrong_versions(health: NodeHealth, stack: Stack) -> dict[str, str]:
    """Return what is installed instead, by requirement of the stack."""
    wrong = {}
    for text in stack.python_packages:
        requirement = parse_requirement(text)
        if requirement is None:
            continue
        found = health.versions.get(requirement.name)
        if found is None:
            wrong[text] = f"no {requirement.name}"
        elif not requirement.accepts(found):
            wrong[text] = f"{requirement.name} {found}"
    return wrong or _find_wrong_modules(health, stack)


def _find_wrong_modules(health: NodeHealth, stack: Stack) -> dict[str, str]:
    """Find modules whose files have a different version than pip's records."""
    wrong = {}
    for package in (TORCH, IPEX, BINDING, TRANSFORMERS):
        version, module = stack.pin(package), module_name(package)
        found = health.modules.get(module)
        if version and (found is None or release(found) != release(version)):
            wrong[f"{package}=={version}"] = (
                f"module {module} {found}" if found else f"no module {module}"
            )
    return wrong


def _install_command(requirements: list[str], stack: Stack) -> str:
    """Return the pip command that corrects packages; their dependencies are installed already."""
    indexes = " ".join(f"--extra-index-url {url}" for url in stack.indexes)
    links = " ".join(f"--find-links {url}" for url in stack.find_links)
    options = " ".join(filter(None, (indexes, links)))
    packages = " ".join(shlex.quote(text) for text in requirements)
    return f"{VENV}/bin/pip install --force-reinstall --no-deps {options} {packages}"


def check_python(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check that all nodes have the same Python, and on AWS the stack's."""
    usual, own = expected.usual(lambda peer: peer.python), expected.stack.python
    verdict, wanted, remedy = Verdict.OK, "", ""
    if health.python != usual:
        verdict, wanted = Verdict.WARN, f"same as the other nodes: {usual}"
        remedy = expected.replacement(node, "Only this node was updated")
    elif expected.machine and python_minor(health.python) != python_minor(own):
        verdict, wanted = Verdict.WARN, own
        remedy = expected.replacement(node, f"The stack's packages are for Python {own}")
    return CheckResult(node, "python", verdict, health.python, wanted, remedy)


def check_disk(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check that the disk is writable, has room, and has its full size."""
    size, free = health.disk_size / _GIB, health.disk_free / _GIB
    found = f"{free:.0f} of {size:.0f} GiB free"
    look = expected.on_node(node, "df -h /; sudo du -xh / 2>/dev/null | sort -h | tail")
    if health.disk_error:
        remedy = expected.on_node(node, "findmnt /; df -h /; sudo dmesg | tail")
        return CheckResult(node, "disk", Verdict.FAIL, health.disk_error, "writable", remedy)
    for limit, verdict in ((_FREE_FAIL, Verdict.FAIL), (_FREE_WARN, Verdict.WARN)):
        if health.disk_free < limit:
            wanted = f"at least {limit // _GIB} GiB free"
            return CheckResult(node, "disk", verdict, found, wanted, look)
    if expected.machine and size < expected.volume_gib * _DISK_SHARE:
        remedy = f"The file system did not grow:\n{expected.on_node(node, 'lsblk; df -h /')}"
        wanted = f"{expected.volume_gib} GiB"
        return CheckResult(node, "disk", Verdict.WARN, found, wanted, remedy)
    return CheckResult(node, "disk", Verdict.OK, found)
