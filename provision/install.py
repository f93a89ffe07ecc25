"""Putting a stack on a machine: one script, rendered from data, run over one connection."""

from __future__ import annotations

import shlex
from importlib import resources

from infra.errors import HostError
from infra.progress import Progress
from provision.host import Host
from provision.stacks import Stack

# One fixed path on every node: mpirun starts the same absolute path everywhere.
VENV = "/opt/spr-cluster/venv"
LOG = "/var/log/spr-cluster-install.log"
_STEP = "@step "
_INSTALL_DEADLINE_S = 45 * 60
_CLOUD_INIT_DEADLINE_S = 20 * 60


def wait_for_cloud_init(host: Host) -> None:
    """Wait for the first boot's own work; raises :class:`HostError` where it failed."""
    done = host.run("cloud-init status --wait", timeout_s=_CLOUD_INIT_DEADLINE_S, check=False)
    # 2 means finished, with warnings: https://docs.cloud-init.io/en/latest/explanation/return_codes.html
    if done.exit_code not in (0, 2):
        raise HostError(
            host.name,
            f"cloud-init failed: {done.stdout.strip()}",
            hint="`spr-cluster ssh`, then read /var/log/cloud-init-output.log",
        )


def render_install_script(stack: Stack) -> str:
    """The bash script that installs a stack. It can run again after any interruption."""
    arrays = {
        "system_packages": stack.system_packages,
        "python_packages": stack.python_packages,
        "indexes": stack.indexes,
        "versions": [f"{module}={wanted}" for module, wanted in stack.versions.items()],
    }
    values = [f"venv={VENV}"] + [f"{name}=({shlex.join(v)})" for name, v in arrays.items()]
    script = resources.files("provision").joinpath("install.sh").read_text()
    return "\n".join(values) + "\n" + script


def install_stack(host: Host, stack: Stack, progress: Progress) -> None:
    """Install a stack; its log stays on the machine. Raises :class:`HostError` with the last lines."""
    script = "/tmp/spr-cluster-install.sh"
    host.put(render_install_script(stack).encode(), script)
    tail: list[str] = []

    def follow(line: str) -> None:
        if line.startswith(_STEP):
            progress.note(line.removeprefix(_STEP))
        elif line.strip():
            tail.append(line.strip())
            del tail[:-5]

    command = f"set -o pipefail; bash {script} 2>&1 | sudo tee -a {LOG}"
    done = host.run(
        f"bash -c {shlex.quote(command)}",
        timeout_s=_INSTALL_DEADLINE_S,
        check=False,
        on_line=follow,
    )
    if done.exit_code != 0:
        raise HostError(
            host.name,
            f"installing stack {stack.name} failed: {' | '.join(tail) or 'no output'}",
            hint=f"the whole log is {LOG} on the node",
        )
