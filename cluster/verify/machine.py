"""Does each machine match its instance type, and is it set up for full speed? Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from cluster.verify.reachability import FIX_CLOCK
from cluster.verify.results import CheckResult, Expected, Verdict, asks
from infra.errors import HostError
from infra.instance_types import InstanceType
from infra.words import counted
from provision.facts import AMX_FLAGS, HostFacts, NodeHealth

_KIB_PER_GIB = 1024 * 1024
# The kernel reserves a few percent of the memory.
_MEMORY_SHARE, _SMALL_MEMORY_SHARE, _SMALL_GIB = 0.95, 0.9, 32
_AVAILABLE_SHARE = 0.25
_NOT_EXPOSED = "not exposed by this machine"
_CPU = "/sys/devices/system/cpu"
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_CLOCKSOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"

# Of cgroups version 2, those of systemd; of version 1, each in its own file system.
_CONTROLLERS = (
    "cd /sys/fs/cgroup && if [ -e cgroup.controllers ]; then cat cgroup.controllers; else "
    "for each in memory pids; do findmnt -nro OPTIONS $PWD/$each | grep -q '^rw' && echo $each; done; fi"
)

T = TypeVar("T")


def shared(
    check: Callable[[str, T, Expected], CheckResult],
) -> Callable[[str, T, Expected], CheckResult]:
    """Skip a check in a container, which shares kernel, memory, and clock with its host."""

    def judge(node: str, seen: T, expected: Expected) -> CheckResult:
        result = check(node, seen, expected)
        if expected.machine or result.verdict is Verdict.SKIPPED:
            return result
        found = f"not checked in a container: {result.found}"
        return CheckResult(node, result.check, Verdict.SKIPPED, found)

    return judge


def check_amx(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check the AMX flags and the kernel's permission to use the tile registers: ok needs both."""
    flags = ", ".join(sorted(AMX_FLAGS))
    if not health.missing_amx:
        return CheckResult(node, "amx", Verdict.OK, f"{flags}; tile data granted")
    found = f"no AMX: {health.model} lacks {', '.join(health.missing_amx)}"
    verdict = Verdict.FAIL if expected.amx_required else Verdict.WARN
    if not expected.amx_required:
        remedy = "Training works without AMX, but slower. Do not take times of this node for AMX's"
    elif health.amx >= AMX_FLAGS:
        # Linux grants the registers since 5.16: https://docs.kernel.org/arch/x86/xstate.html
        remedy = f"Use an Ubuntu whose kernel supports AMX: 5.16 or newer, found {health.kernel}"
    else:
        remedy = (
            f"Replace single nodes without AMX:\n{expected.command('up')}\n"
            "If all lack it, choose an instance type with AMX, such as r7iz.metal-16xl"
        )
    return CheckResult(node, "amx", verdict, found, f"{flags}, tile data granted", remedy)


def check_cores(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check cores, sockets, NUMA nodes, and hyper-threads against the catalog and each other."""
    shape, usual = _describe_shape(health), expected.usual(_describe_shape)
    verdict, wanted, remedy = Verdict.OK, "", ""
    if expected.machine:
        verdict, wanted, remedy = _judge_shape(node, health, expected.machine, expected)
    if verdict is Verdict.OK and shape != usual:
        verdict, wanted = Verdict.FAIL, f"same as the other nodes: {usual}"
        remedy = _show_limits(node, expected)
    return CheckResult(node, "cores", verdict, shape, wanted, remedy)


def _describe_shape(health: NodeHealth) -> str:
    parts = [counted(len(health.physical_cores), "core"), counted(health.sockets, "socket")]
    parts += [counted(len(health.numa_nodes), "NUMA node"), counted(len(health.cpus), "CPU")]
    return ", ".join(parts)


def _judge_shape(
    node: str, health: NodeHealth, machine: InstanceType, expected: Expected
) -> tuple[Verdict, str, str]:
    # EC2 does not report sockets, so they are unknown for types outside our table.
    sockets = machine.sockets or health.sockets
    parts = [counted(machine.cores, "core"), counted(sockets, "socket")]
    wanted = f"{machine.name}: {', '.join(parts)}, {counted(machine.vcpus, 'CPU')}"
    if len(health.cpus) < health.logical_cpus:
        limit = f"processes may use {len(health.cpus)} of {health.logical_cpus} CPUs"
        return Verdict.FAIL, f"{wanted}; {limit}", _show_limits(node, expected)
    if (len(health.physical_cores), health.sockets) != (machine.cores, sockets):
        reason = "The machine does not match its instance type"
        return Verdict.FAIL, wanted, expected.replacement(node, reason)
    if len(health.cpus) != machine.vcpus:
        script = "echo on | sudo tee /sys/devices/system/cpu/smt/control"
        remedy = "Hyper-threads are off; training does not need them. To enable them on bare metal:"
        return Verdict.WARN, wanted, f"{remedy}\n{expected.on_node(node, script)}"
    if len(health.numa_nodes) < sockets:
        reason = "NUMA is off in the firmware, so remote memory counts as local"
        wanted = f"{wanted}, one NUMA node per socket"
        return Verdict.WARN, wanted, expected.replacement(node, reason)
    return Verdict.OK, "", ""


def _show_limits(node: str, expected: Expected) -> str:
    script = "taskset -pc $$; systemctl show user.slice -p AllowedCPUs"
    return f"Find out what limits its CPUs:\n{expected.on_node(node, script)}"


@shared
def check_kernel(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check that all nodes run the same kernel."""
    usual = expected.usual(lambda peer: peer.kernel)
    if health.kernel == usual:
        return CheckResult(node, "kernel", Verdict.OK, health.kernel)
    wanted = f"same as the other nodes: {usual}"
    remedy = expected.replacement(node, "Only this node was updated")
    return CheckResult(node, "kernel", Verdict.WARN, health.kernel, wanted, remedy)


@shared
def check_memory(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check that the node has the memory of its type, and enough of it available."""
    total = health.memory_total / _KIB_PER_GIB
    available = health.memory_available / _KIB_PER_GIB
    found = f"{total:.0f} GiB, {available:.0f} available"
    machine = expected.machine
    is_small = machine is not None and machine.memory_gib < _SMALL_GIB
    share = _SMALL_MEMORY_SHARE if is_small else _MEMORY_SHARE
    if machine and total < machine.memory_gib * share:
        remedy = expected.replacement(node, "Memory is missing")
        wanted = f"{machine.name}: {machine.memory_gib:g} GiB"
        return CheckResult(node, "memory", Verdict.FAIL, found, wanted, remedy)
    if available < total * _AVAILABLE_SHARE:
        remedy = f"Find out what uses it:\n{expected.on_node(node, 'ps aux --sort=-rss | head')}"
        wanted = f"{_AVAILABLE_SHARE:.0%} available"
        return CheckResult(node, "memory", Verdict.WARN, found, wanted, remedy)
    return CheckResult(node, "memory", Verdict.OK, found)


@asks(f"cat {_CPU}/cpu[0-9]*/cpufreq/scaling_governor | sort -u")
@shared
def check_governor(node: str, printed: str, expected: Expected) -> CheckResult:
    """Check for the ``performance`` frequency governor, as in Intel's MLPerf submissions."""
    if not printed:
        return CheckResult(node, "governor", Verdict.SKIPPED, _NOT_EXPOSED)
    found = ", ".join(printed.split())
    if found == "performance":
        return CheckResult(node, "governor", Verdict.OK, found)
    script = f"echo performance | sudo tee {_CPU}/cpu*/cpufreq/scaling_governor"
    remedy = expected.on_node(node, script)
    return CheckResult(node, "governor", Verdict.WARN, found, "performance", remedy)


@asks(f"cd {_CPU} && tail intel_pstate/no_turbo || tail cpufreq/boost | tr 01 10")
@shared
def check_turbo(node: str, printed: str, expected: Expected) -> CheckResult:
    """Check that cores may exceed their base clock. Intel's driver says 1 for no turbo."""
    if not printed:
        return CheckResult(node, "turbo", Verdict.SKIPPED, _NOT_EXPOSED)
    if printed == "0":
        return CheckResult(node, "turbo", Verdict.OK, "on")
    script = (
        f"cd {_CPU}; echo 0 | sudo tee intel_pstate/no_turbo || echo 1 | sudo tee cpufreq/boost"
    )
    return CheckResult(node, "turbo", Verdict.WARN, "off", "on", expected.on_node(node, script))


@asks(f"cat {_HUGE_PAGES}")
@shared
def check_huge_pages(node: str, printed: str, expected: Expected) -> CheckResult:
    """Check that programs get transparent huge pages, always or on request."""
    # All settings, with the active one in brackets.
    found = re.search(r"\[(\w+)\]", printed)
    if not found:
        return CheckResult(node, "huge pages", Verdict.SKIPPED, _NOT_EXPOSED)
    if found[1] != "never":
        return CheckResult(node, "huge pages", Verdict.OK, found[1])
    remedy = expected.on_node(node, f"echo always | sudo tee {_HUGE_PAGES}")
    return CheckResult(node, "huge pages", Verdict.WARN, "never", "always or madvise", remedy)


@asks(_CONTROLLERS)
def check_limits(node: str, printed: str, _: Expected) -> CheckResult:
    """Say what the kernel can't limit for a job that shares the node."""
    usable = printed.split()
    if not (missing := [each for each in ("memory", "pids", "cpuset") if each not in usable]):
        return CheckResult(node, "limits", Verdict.OK, "the kernel limits jobs that share the node")
    found = (
        f"the kernel can't limit {', '.join(missing)} for jobs that share the node: a guard measures them "
        "5 times a second, and their processes are only pinned"
    )
    return CheckResult(node, "limits", Verdict.SKIPPED, found)


@asks(f"cat {_CLOCKSOURCE}")
@shared
def check_clocksource(node: str, printed: str, expected: Expected) -> CheckResult:
    """Check that the kernel reads the time from the processor; other sources take microseconds."""
    if not printed:
        return CheckResult(node, "clocksource", Verdict.SKIPPED, _NOT_EXPOSED)
    if printed in ("tsc", "kvm-clock"):
        return CheckResult(node, "clocksource", Verdict.OK, printed)
    remedy = expected.on_node(node, f"echo tsc | sudo tee {_CLOCKSOURCE}")
    return CheckResult(node, "clocksource", Verdict.WARN, printed, "tsc or kvm-clock", remedy)


@shared
def check_clock_service(node: str, health: NodeHealth, expected: Expected) -> CheckResult:
    """Check that a service, chrony on AWS's Ubuntu, synchronizes the clock."""
    if health.clock_kept is None:
        return CheckResult(node, "time service", Verdict.SKIPPED, _NOT_EXPOSED)
    if health.clock_kept:
        return CheckResult(node, "time service", Verdict.OK, "the clock is synchronized")
    remedy = expected.on_node(node, FIX_CLOCK)
    found = "the clock is not synchronized"
    return CheckResult(node, "time service", Verdict.WARN, found, "chrony synchronizes it", remedy)


def require_amx(node: str, facts: HostFacts, *, required: bool) -> str:
    """Check a node for AMX and return a note for the user.

    Raises :class:`HostError` if AMX is required and missing.
    """
    if not facts.missing_amx:
        return "AMX available: " + ", ".join(sorted(AMX_FLAGS))
    text = f"no AMX: {facts.model} lacks {', '.join(facts.missing_amx)}"
    if required:
        raise HostError(
            node,
            text,
            hint="choose a type with AMX (--instance-type r7iz.metal-16xl), "
            "or continue without it: --allow-no-amx",
        )
    return f"{text}; continuing without AMX; training will be slower"
