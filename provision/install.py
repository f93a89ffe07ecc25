"""Install a stack on a machine with one rendered script over SSH; settings and errors of Intel MPI."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import TypeVar

from infra.errors import ConnectionLostError, HostError, NoAnswerError
from infra.wait import Clock, Progress
from provision.host import Host, Result, wait_until_reachable
from provision.stacks.stack import Stack

T = TypeVar("T")

# One fixed path on every node: mpirun starts the same absolute path everywhere.
_ROOT = "/opt/spr-cluster"
VENV = f"{_ROOT}/venv"
STACK_FILE = f"{_ROOT}/stack"
"""On the node: the digest of its stack, written when the installation is complete."""
EXAMPLES = f"{_ROOT}/examples"
"""On the node, if the stack has examples: run_qa.py and its neighbors."""
LOG = "/var/log/spr-cluster-install.log"
HOSTFILE = "/home/ubuntu/hosts"
"""The nodes' names in rank order, head first; the same file on every node."""
MPIRUN_ENV = {
    "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
    "I_MPI_ROOT": VENV,
    "LD_LIBRARY_PATH": f"{VENV}/lib",
    "FI_PROVIDER_PATH": f"{VENV}/lib",
}
"""Where mpirun finds its programs, its libraries, and libfabric's providers."""
_DIRECT = (
    "localhost",
    "127.0.0.1",
    "169.254.169.254",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
)
"""What needs no proxy: instance metadata, and private ranges, for the programs that know ranges."""
_QUEUE = ("slurm-wlm", "munge", "curl", "rsync")
"""System packages of every node in addition to its stack's; Slurm's health check needs curl."""
_STEP = "@step "
_INSTALL_DEADLINE_S = 45 * 60
_CLOUD_INIT_DEADLINE_S = 20 * 60
_ATTEMPTS = 3
_RECONNECT_DEADLINE_S = 5 * 60


def proxy_environment(proxy: str, region: str, nodes: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that send programs through a proxy, except to these nodes; {} without one.

    S3 also stays direct: a gateway endpoint serves it, and bucket policies may require that.
    """
    if not proxy:
        return {}
    dns = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    direct = (*_DIRECT, ".internal", f"s3.{region}.{dns}", "s3.amazonaws.com", *nodes)
    values = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": ",".join(direct)}
    # apt and curl know only lowercase names, some libraries only the others.
    return {**values, **{name.lower(): value for name, value in values.items()}}


def with_environment(environment: Mapping[str, str], command: str) -> str:
    """Return a simple shell command with these variables."""
    words = [f"{name}={value}" for name, value in environment.items()]
    return f"env {shlex.join(words)} {command}" if words else command


def persist(
    host: Host,
    work: Callable[[], T],
    clock: Clock | None,
    on_break: Callable[[str], object] = str,
) -> T:
    """Repeat work whose connection broke, although it may have continued on the machine."""
    for attempt in range(2, _ATTEMPTS + 1):
        try:
            return work()
        except (ConnectionLostError, NoAnswerError) as error:
            on_break(f"{error.message}; trying again ({attempt} of {_ATTEMPTS})")
        if gone := host.why_gone():
            raise HostError(host.name, gone)
        wait_until_reachable(host, deadline_s=_RECONNECT_DEADLINE_S, clock=clock)
    return work()


def wait_for_cloud_init(host: Host, clock: Clock | None = None) -> None:
    """Wait until cloud-init has finished the first boot. Raises :class:`HostError` if it failed."""

    def wait() -> Result:
        return host.run(
            "cloud-init status --wait --long", timeout_s=_CLOUD_INIT_DEADLINE_S, check=False
        )

    done = persist(host, wait, clock)
    # 2 means finished, with warnings: https://docs.cloud-init.io/en/latest/explanation/return_codes.html
    if done.exit_code not in (0, 2):
        # While it waits, it prints dots.
        lines = [line.strip() for line in done.stdout.lstrip(".").splitlines()]
        raise HostError(
            host.name,
            f"cloud-init failed: {' | '.join(filter(None, lines)) or 'no output'}",
            hint="on the node, read /var/log/cloud-init-output.log",
        )


def render_install_script(stack: Stack) -> str:
    """Render the bash script that installs a stack. It can be rerun after any interruption."""
    values = {"root": _ROOT, "venv": VENV, "python": stack.python}
    values |= {"pip": stack.pip, "examples": stack.examples}
    arrays = {
        "system_packages": (*stack.system_packages, *_QUEUE),
        "python_packages": stack.python_packages,
        "indexes": stack.indexes,
        "find_links": stack.find_links,
        "lock": stack.lock,
        "versions": [f"{module}={wanted}" for module, wanted in stack.versions.items()],
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines += [f"{name}=({shlex.join(array)})" for name, array in arrays.items()]
    script = resources.files("provision.on_node").joinpath("install.sh").read_text()
    # Bash reads a group whole, so a second upload can't change a running script.
    return "\n".join(["{", *lines, script, "exit", "}", ""])


def stack_digest(stack: Stack) -> str:
    """Return a digest that changes with the stack or the install script."""
    return hashlib.sha256(render_install_script(stack).encode()).hexdigest()[:12]


def install_stack(
    host: Host,
    stack: Stack,
    progress: Progress,
    clock: Clock | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Install a stack unless the machine already has it. The log stays on the machine.

    ``environment`` is for this installation only, so an image does not carry it. Survives a broken
    connection. Raises :class:`HostError` with the last lines of output.
    """
    persist(host, lambda: _install(host, stack, progress, environment or {}), clock, progress.note)


def _install(host: Host, stack: Stack, progress: Progress, environment: Mapping[str, str]) -> None:
    script = "/tmp/spr-cluster-install.sh"
    host.put(render_install_script(stack).encode(), script)
    tail: list[str] = []

    def follow(text: str) -> None:
        for line in text.split("\n"):
            if line.startswith(_STEP):
                progress.note(line.removeprefix(_STEP))
            elif line.strip():
                tail.append(line.strip())
                del tail[:-5]

    # tee -p: the installation continues after its connection breaks.
    pipe = f"set -o pipefail; bash {script} {stack_digest(stack)} 2>&1 | sudo tee -pa {LOG}"
    command = with_environment(environment, f"bash -c {shlex.quote(pipe)}")
    done = host.run(command, timeout_s=_INSTALL_DEADLINE_S, check=False, on_text=follow)
    if done.exit_code != 0:
        raise HostError(
            host.name,
            f"installing stack {stack.name} failed: {' | '.join(tail) or 'no output'}",
            hint=f"the whole log is {LOG} on the node",
        )


def explain_mpi_failure(lines: Sequence[str]) -> str | None:
    """Return the cause of a failure in mpirun's output as one line; ``None`` if there is none.

    Intel MPI's Hydra reports a node on which it can't start a process as
    ``Unable to run bstrap_proxy on HOST``.
    """
    rank = "a rank"
    for line in lines:
        if match := re.match(r"= +RANK (\d+) PID \d+ RUNNING AT (\S+)", line):
            rank = f"rank {match[1]} on {match[2]}"
        if match := re.search(r"[Uu]nable to run bstrap_proxy on (\S+)", line):
            return (
                f"mpirun can't start on {match[1].rstrip('.,')}: does the head reach it over SSH?"
            )
        if match := re.search(r"@(\S+?)\] HYD_spawn .* unable to bind process", line):
            return f"mpirun can't pin a rank on {match[1]}: have its usable CPUs changed?"
        if "cannot open shared object file" in line or "mpirun: not found" in line:
            return line.strip()
        if match := re.search(r"KILLED BY SIGNAL: (\d+) \(([^)]*)\)", line):
            return f"{rank} was killed by signal {match[1]} ({match[2]})"
    return None
