"""The cloud-init user data of every node: shutdown at expiry, idle, or done; settings; a warm disk.

It never holds secrets: every user of the machine can read it. A machine's time to live can be extended.
"""

from __future__ import annotations

import gzip
import json
import shlex
from importlib import resources

from infra.errors import HostError
from infra.lifetime import Lifetime
from provision.host import Host, sudo
from provision.on_node import keeper
from provision.run_on_nodes import send

# JSON is YAML, so no value can break the document.
_HEADER = "#cloud-config\n"
_STATE = str(keeper.STATE)
EXPIRY_SCRIPT = f"{_STATE}/expiry"
EXPIRY_TIMER, _IDLE_TIMER = "spr-cluster-expiry.timer", "spr-cluster-idle.timer"
# In the folder of this instance, which a copy of the machine does not share:
# https://docs.cloud-init.io/en/latest/reference/persistent-data.html
EXPIRES_FILE = "/var/lib/cloud/instance/spr-cluster-expires"
IDLE_FILE = "/var/lib/cloud/instance/spr-cluster-idle"
_SHOW = (
    f"systemctl is-active --quiet {EXPIRY_TIMER} && sh {EXPIRY_SCRIPT} show && "
    f"{{ systemctl is-active --quiet {_IDLE_TIMER} && cat {IDLE_FILE} 2>/dev/null || true; }}"
)
SHOW_EXPIRY = f"sudo -n sh -c {shlex.quote(_SHOW)}"
"""Prints the effective lifetime for :meth:`Lifetime.parse`; fails if the timer is not running."""

# bootcmd runs during the boot: a unit that waits for basic.target would wait for cloud-init.
_UNIT = "[Unit]\nDefaultDependencies=no\nConflicts=shutdown.target\nBefore=shutdown.target\n"
_TIMER = f"{_UNIT}[Timer]\nOnActiveSec=30s\nOnUnitInactiveSec=30s\nAccuracySec=1s\n"
# LogLevelMax keeps systemd's two lines per run out of the journal.
_SERVICE = f"{_UNIT}[Service]\nType=oneshot\nTimeoutStartSec=10min\nLogLevelMax=notice\n"
# Ubuntu's automatic updates would hold the package lock and take cores from training.
_QUIET = "systemctl mask --now apt-daily.timer apt-daily-upgrade.timer || true"
# Ubuntu boots bare metal with another governor, which 20.04's ondemand.service chooses again after a minute.
# A container's are those of the user's machine.
_FAST = """systemd-detect-virt --quiet --container || {
for each in /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor; do
    [ ! -e $each ] || echo performance >$each
done
systemctl mask ondemand.service
} 2>/dev/null || true"""
# A sleeping laptop must not count as a user for two hours: tcp(7).
_NOTICE_DEAD_SESSIONS = (
    "sysctl -qw net.ipv4.tcp_keepalive_time=300 net.ipv4.tcp_keepalive_intvl=30 "
    "net.ipv4.tcp_keepalive_probes=5 || true"
)

EXPRESS_MTU = 8900
"""The MTU of machines with ENA Express; it can't carry AWS's usual 9001."""
WARM_UNIT = "spr-cluster-warm.service"
"""The unit that runs while a new machine reads its disk for the first time."""
_START_WARM = (
    f"systemd-run --quiet --no-block --unit={WARM_UNIT} -p DefaultDependencies=no "
    f"-p CPUSchedulingPolicy=idle -p IOSchedulingClass=idle /bin/sh {_STATE}/warm || true"
)


# The SDKs take the region only from the environment, and give up on credentials after one second:
# https://docs.aws.amazon.com/sdkref/latest/guide/feature-imds-credentials.html
_ENVIRONMENT = r"""sed -Ei '/^AWS_((DEFAULT_)?REGION|METADATA_SERVICE_)/d;$a\' /etc/environment 2>/dev/null
cat >>/etc/environment <<'_END_'
AWS_REGION={region}
AWS_DEFAULT_REGION={region}
AWS_METADATA_SERVICE_TIMEOUT=20
AWS_METADATA_SERVICE_NUM_ATTEMPTS=3
_END_"""


def render_user_data(lifetime: Lifetime, region: str, *, ena_express: bool = False) -> bytes:
    """Render user data that powers the machine off at its end; EC2 then terminates it.

    The head may hold it for a while, or power all nodes off when a job is done: ``keeper.py``. With an
    idle timeout, the head powers the whole cluster off after that time without an SSH session or a
    job. With ``ena_express``, the network gets the settings it needs. All files are written at every boot
    from the machine's own user data (cloud-init's bootcmd), in memory except for the environment of all
    sessions and jobs, so that an image never carries one machine's expiry to another. It is compressed:
    EC2 takes 16 KiB.
    ``EXPIRES_FILE`` and ``IDLE_FILE`` on the machine override ``lifetime``: see :func:`extend_life`.
    """
    guards = {
        "expiry": render_expiry_script(lifetime),
        "keeper": send(keeper).render("keeping results") + "\n",
        "idle": render_idle_script(),
    }
    if ena_express:
        values = _render_values(state=_STATE, mtu=EXPRESS_MTU)
        guards["ena-express"] = values + _read("ena_express.sh")
    idle = f"[ -s {IDLE_FILE} ] || echo {lifetime.seconds[3]} >{IDLE_FILE}"
    boot = [
        _render_start(guards),
        idle,
        _ENVIRONMENT.format(region=region),
        _read("fresh.sh"),
        _QUIET,
        _FAST,
    ]
    boot += [_render_file(f"{_STATE}/warm", _read("warm.sh")), _START_WARM, _NOTICE_DEAD_SESSIONS]
    if ena_express:
        boot.append(f"timeout 30 sh {_STATE}/ena-express || true")
    config = {"package_update": False, "bootcmd": boot}
    return gzip.compress((_HEADER + json.dumps(config) + "\n").encode(), 9, mtime=0)


def render_expiry_script(lifetime: Lifetime) -> str:
    """Render the script that powers an expired machine off; with ``show``, it prints the lifetime."""
    expires, latest, grace, _ = lifetime.seconds
    values = _render_values(
        launch_expires=expires,
        launch_latest=latest,
        launch_grace=grace,
        expires_file=EXPIRES_FILE,
        hold=f"{_STATE}/hold",
        checks=f"{_STATE}/checks",
        first_boot=str(keeper.FIRST_BOOT),
    )
    return values + _read("expiry.sh")


def render_idle_script() -> str:
    """Render the script that powers an idle cluster off after the time in ``IDLE_FILE``."""
    values = _render_values(idle_file=IDLE_FILE, state=_STATE, homes="/home")
    return values + _read("idle.sh")


def _render_start(guards: dict[str, str]) -> str:
    """Render a shell script that writes the guards and their systemd units, and starts them."""
    units = "/run/systemd/system"
    files = {}
    for name, script in guards.items():
        path = f"{_STATE}/{name}"
        files[path] = script
        files[f"{units}/spr-cluster-{name}.service"] = f"{_SERVICE}ExecStart=/bin/sh {path}\n"
        files[f"{units}/spr-cluster-{name}.timer"] = _TIMER
    timers = " ".join(f"spr-cluster-{name}.timer" for name in guards)
    return "\n".join(
        [
            "set -e",
            f"mkdir -p {_STATE} {units}",
            *(_render_file(path, text) for path, text in files.items()),
            "systemctl daemon-reload",
            f"systemctl restart --no-block {timers}",
            # A machine without its guard is a failed boot; the rest may fail.
            "set +e",
        ]
    )


def _render_file(path: str, text: str) -> str:
    return f"cat >{path} <<'_END_'\n{text}_END_"


def _render_values(**values: str | int) -> str:
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def _read(script: str) -> str:
    return resources.files("provision.on_node").joinpath(script).read_text()


def extend_life(host: Host, lifetime: Lifetime) -> None:
    """Set the times at which a machine shuts itself down, also across reboots.

    Starts the timers if they are not running. Raises :class:`HostError` if it can't be started or keeps a
    different time.
    """
    expires, latest, grace, idle = lifetime.seconds
    steps = [
        _render_change(EXPIRES_FILE, f"{expires} '{latest} {grace}'"),
        f"systemctl start {EXPIRY_TIMER}",
        _render_change(IDLE_FILE, f"{idle}"),
        *([f"systemctl start {_IDLE_TIMER}"] if idle else []),
        _SHOW,
    ]
    done = host.run(sudo(" && ".join(steps)), check=False)
    in_force = Lifetime.parse(done.stdout)
    if done.exit_code != 0 or in_force is None:
        output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.exit_code}"
        raise HostError(
            host.name,
            f"the timer that shuts it down does not answer: {output}",
            hint=f"on the node, see `systemctl status {EXPIRY_TIMER}` and "
            "/var/log/cloud-init-output.log; `down` removes it with the cluster",
        )
    if in_force.seconds != lifetime.seconds:
        raise HostError(
            host.name,
            f"it still shuts down at {in_force}, not at {lifetime}",
            hint=f"on the node, check {EXPIRES_FILE} and {IDLE_FILE}",
        )


def _render_change(path: str, lines: str) -> str:
    """Render the replacement of a file by a rename, so that its reader never sees half a number."""
    return (
        f"new=$(mktemp {path}.XXXXXX) && chmod 644 $new && printf '%s\\n' {lines} >$new && "
        f"sync $new && mv -f $new {path}"
    )
