"""The time at which a machine shuts itself down, read and changed through its own timer."""

from __future__ import annotations

import shlex
from datetime import datetime, timezone

from infra.errors import HostError
from provision.host import Host, sudo
from provision.user_data import EXPIRES_FILE, EXPIRY_SCRIPT, EXPIRY_TIMER

_SHOW = f"systemctl is-active --quiet {EXPIRY_TIMER} && sh {EXPIRY_SCRIPT} show"
SHOW_EXPIRY = f"sudo -n sh -c {shlex.quote(_SHOW)}"
"""Prints the time in force, in seconds since 1970; fails if the timer does not run."""


def extend_life(host: Host, expires: datetime) -> None:
    """Set the time at which a machine shuts itself down; it survives reboots.

    Starts the timer if it does not run. Raises :class:`HostError` if it can't be started, or keeps
    another time.
    """
    epoch = int(expires.timestamp())
    # A rename, so that the timer's script never reads half a number.
    write = (
        f"new=$(mktemp {EXPIRES_FILE}.XXXXXX) && chmod 644 $new && echo {epoch} >$new && "
        f"sync $new && mv -f $new {EXPIRES_FILE}"
    )
    done = host.run(sudo(f"{write} && systemctl start {EXPIRY_TIMER} && {_SHOW}"), check=False)
    if done.exit_code != 0 or not done.stdout.strip().isdecimal():
        output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.exit_code}"
        raise HostError(
            host.name,
            f"the timer that shuts it down does not answer: {output}",
            hint=f"on the node, see `systemctl status {EXPIRY_TIMER}` and "
            "/var/log/cloud-init-output.log; `down` removes it with the cluster",
        )
    if int(done.stdout) != epoch:
        in_force = datetime.fromtimestamp(int(done.stdout), timezone.utc)
        raise HostError(
            host.name,
            f"it still shuts down at {in_force:%Y-%m-%d %H:%M:%S} UTC, not at the new time",
            hint=f"on the node, check {EXPIRES_FILE}",
        )
