"""Is each machine what its type promises, and as fast as it can be? Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cluster.verify.checks.result import CheckResult, Expected, Verdict, count, typical
from infra.instance_types import InstanceType
from provision.facts import AMX_FLAGS
from provision.health import NodeHealth

_KIB_PER_GIB = 1024 * 1024
# The kernel keeps some percent of the memory for itself before it counts.
_MEMORY_SHARE, _SMALL_MEMORY_SHARE, _SMALL_GIB = 0.95, 0.9, 32
_AVAILABLE_SHARE = 0.25
# Linux hands out AMX's registers from 5.16 on: https://docs.kernel.org/arch/x86/xstate.html
_KERNEL = (5, 16)

Health = Mapping[str, NodeHealth]


def check_machines(health: Health, expected: Expected) -> Iterator[CheckResult]:
    """AMX and cores of all nodes; the rest of the machine where it is one of its own."""
    for node, told in health.items():
        yield check_amx(node, told, expected)
    yield from check_cores(health, expected)
    for result in _check_rest(health, expected):
        yield result if expected.machine else _not_judged(result)


def _check_rest(health: Health, expected: Expected) -> Iterator[CheckResult]:
    yield from check_kernel(health, expected)
    for node, told in health.items():
        yield check_memory(node, told, expected)
        yield check_governor(node, told, expected)
        yield check_turbo(node, told, expected)
        yield check_huge_pages(node, told, expected)
        yield check_clocksource(node, told, expected)
        yield check_clock_service(node, told, expected)


def _not_judged(result: CheckResult) -> CheckResult:
    """A container has its host's kernel, memory and clock: nobody's verdict is due on them."""
    if result.verdict is Verdict.UNKNOWN:
        return result
    return CheckResult(
        result.node, result.check, Verdict.UNKNOWN, f"not judged, the host's: {result.found}"
    )


def check_amx(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """All AMX flags, and the kernel's permission to use the tile registers. Never ok without both."""
    if not told.missing_amx:
        found = f"{', '.join(sorted(AMX_FLAGS))}; tile data granted"
        return CheckResult(node, "amx", Verdict.OK, found)
    found = f"no AMX: {told.model} lacks {', '.join(told.missing_amx)}"
    verdict = Verdict.FAIL if expected.amx_required else Verdict.WARN
    if expected.amx_required:
        remedy = (
            f"{expected.command('up')} replaces a single node without it; where all lack it, a type "
            "with AMX: --instance-type r7iz.metal-16xl"
        )
        if told.amx >= AMX_FLAGS:
            remedy = f"an Ubuntu whose kernel knows AMX (5.16 or newer; here {told.kernel})"
    else:
        remedy = "training goes on without it, slower; times of such nodes say nothing about AMX"
    wanted = f"{', '.join(sorted(AMX_FLAGS))}, tile data granted"
    return CheckResult(node, "amx", verdict, found, wanted, remedy)


def check_cores(health: Health, expected: Expected) -> Iterator[CheckResult]:
    """Cores, sockets, NUMA nodes and hyper-threads: as the catalogue says, else all alike."""
    if not health:
        return
    shapes = {node: _describe_shape(told) for node, told in health.items()}
    usual = typical(shapes.values())
    for node, told in health.items():
        verdict, wanted, remedy = Verdict.OK, "", ""
        if expected.machine:
            verdict, wanted, remedy = _judge_shape(node, told, expected.machine, expected)
        if verdict is Verdict.OK and shapes[node] != usual:
            verdict, wanted = Verdict.FAIL, f"as the other nodes: {usual}"
            remedy = f"does something limit its CPUs? {_show_limits(node, expected)}"
        yield CheckResult(node, "cores", verdict, shapes[node], wanted, remedy)


def _describe_shape(told: NodeHealth) -> str:
    parts = [count(told.cores, "core"), count(told.sockets, "socket")]
    return ", ".join([*parts, count(told.numa_nodes, "NUMA node"), count(len(told.cpus), "CPU")])


def _judge_shape(
    node: str, told: NodeHealth, machine: InstanceType, expected: Expected
) -> tuple[Verdict, str, str]:
    wanted = ", ".join(
        [
            f"{machine.name}: {count(machine.cores, 'core')}",
            count(machine.sockets, "socket"),
            count(machine.vcpus, "CPU"),
        ]
    )
    if len(told.cpus) < told.logical_cpus:
        found = f"{wanted}; its processes may use {len(told.cpus)} of {told.logical_cpus} CPUs"
        return Verdict.FAIL, found, _show_limits(node, expected)
    if (told.cores, told.sockets) != (machine.cores, machine.sockets):
        remedy = f"it is not the machine that was bought; {expected.replacement(node)}"
        return Verdict.FAIL, wanted, remedy
    if len(told.cpus) != machine.vcpus:
        remedy = "hyper-threads are off, which training can do without: on bare metal "
        return (
            Verdict.WARN,
            wanted,
            remedy + "`echo on | sudo tee /sys/devices/system/cpu/smt/control`",
        )
    if told.numa_nodes < machine.sockets:
        remedy = "NUMA is off in the firmware: memory of the other socket counts as near; "
        return (
            Verdict.WARN,
            f"{wanted}, a NUMA node per socket",
            remedy + expected.replacement(node),
        )
    return Verdict.OK, "", ""


def _show_limits(node: str, expected: Expected) -> str:
    return expected.on_node(node, "taskset -pc $$; systemctl show user.slice -p AllowedCPUs")


def check_kernel(health: Health, expected: Expected) -> Iterator[CheckResult]:
    """One kernel on all nodes, new enough for AMX."""
    if not health:
        return
    usual = typical(told.kernel for told in health.values())
    for node, told in health.items():
        verdict, wanted, remedy = Verdict.OK, "", ""
        numbers = tuple(int(part) for part in re.findall(r"\d+", told.kernel)[:2])
        if numbers < _KERNEL and told.missing_amx:
            verdict, wanted = Verdict.WARN, "5.16 or newer, for AMX"
            remedy = "a stack on a newer Ubuntu: spr-cluster stacks"
        elif told.kernel != usual:
            verdict, wanted = Verdict.WARN, f"as the other nodes: {usual}"
            remedy = f"it was updated alone; {expected.replacement(node)}"
        yield CheckResult(node, "kernel", verdict, told.kernel, wanted, remedy)


def check_memory(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """All the memory that the type has, most of it free."""
    total = told.memory_total / _KIB_PER_GIB
    available = told.memory_available / _KIB_PER_GIB
    found = f"{total:.0f} GiB, {available:.0f} available"
    machine = expected.machine
    is_small = machine is not None and machine.memory_gib < _SMALL_GIB
    share = _SMALL_MEMORY_SHARE if is_small else _MEMORY_SHARE
    if machine and total < machine.memory_gib * share:
        remedy = f"memory is missing; {expected.replacement(node)}"
        wanted = f"{machine.name}: {machine.memory_gib} GiB"
        return CheckResult(node, "memory", Verdict.FAIL, found, wanted, remedy)
    if available < total * _AVAILABLE_SHARE:
        remedy = f"what holds it? {expected.on_node(node, 'ps aux --sort=-rss | head')}"
        wanted = f"{_AVAILABLE_SHARE:.0%} of it available"
        return CheckResult(node, "memory", Verdict.WARN, found, wanted, remedy)
    return CheckResult(node, "memory", Verdict.OK, found)


def check_governor(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """The kernel asks for full speed, as Intel's MLPerf runs do."""
    if not told.governors:
        return CheckResult(node, "governor", Verdict.UNKNOWN, "not known here")
    found = ", ".join(told.governors)
    if told.governors == ("performance",):
        return CheckResult(node, "governor", Verdict.OK, found)
    script = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    remedy = expected.on_node(node, script)
    return CheckResult(node, "governor", Verdict.WARN, found, "performance", remedy)


def check_turbo(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """Cores may run faster than their base clock."""
    if told.turbo is None:
        return CheckResult(node, "turbo", Verdict.UNKNOWN, "not known here")
    if told.turbo:
        return CheckResult(node, "turbo", Verdict.OK, "on")
    script = "echo 0 | sudo tee /sys/devices/system/cpu/intel_pstate/no_turbo"
    return CheckResult(node, "turbo", Verdict.WARN, "off", "on", expected.on_node(node, script))


def check_huge_pages(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """Programs can have transparent huge pages, always or where they ask for them."""
    if told.huge_pages is None:
        return CheckResult(node, "huge pages", Verdict.UNKNOWN, "not known here")
    if told.huge_pages != "never":
        return CheckResult(node, "huge pages", Verdict.OK, told.huge_pages)
    script = "echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    remedy = expected.on_node(node, script)
    return CheckResult(node, "huge pages", Verdict.WARN, "never", "always or madvise", remedy)


def check_clocksource(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """The kernel reads its time from the processor; from elsewhere it takes microseconds each time."""
    found = told.clocksource or "not known here"
    if told.clocksource is None:
        return CheckResult(node, "clocksource", Verdict.UNKNOWN, found)
    if told.clocksource in ("tsc", "kvm-clock"):
        return CheckResult(node, "clocksource", Verdict.OK, found)
    script = "echo tsc | sudo tee /sys/devices/system/clocksource/clocksource0/current_clocksource"
    remedy = expected.on_node(node, script)
    return CheckResult(node, "clocksource", Verdict.WARN, found, "tsc or kvm-clock", remedy)


def check_clock_service(node: str, told: NodeHealth, expected: Expected) -> CheckResult:
    """Something, on AWS's Ubuntu chrony, keeps the clock in step."""
    if told.clock_kept is None:
        return CheckResult(node, "time service", Verdict.UNKNOWN, "not known here")
    if told.clock_kept:
        return CheckResult(node, "time service", Verdict.OK, "the kernel's clock is kept in step")
    remedy = expected.on_node(node, "sudo systemctl restart chrony; timedatectl")
    found = "nothing keeps the clock in step"
    return CheckResult(node, "time service", Verdict.WARN, found, "chrony in step", remedy)
