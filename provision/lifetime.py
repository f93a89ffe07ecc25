"""When a machine ends itself: asked of it, and changed on it, through the guard that decides it."""

from __future__ import annotations

from datetime import datetime, timezone

from infra.errors import HostError
from provision.host import Host, sudo
from provision.user_data import EXPIRES_FILE, EXPIRY_SCRIPT, EXPIRY_TIMER

_SHOW = f"systemctl is-active --quiet {EXPIRY_TIMER} && sh {EXPIRY_SCRIPT} show"


def extend_life(host: Host, expires: datetime) -> None:
    """Have a machine end itself at ``expires``, sooner or later than now set, across reboots.

    Raises :class:`HostError` where its guard does not run, or does not follow.
    """
    epoch = int(expires.timestamp())
    # A rename, so that the guard never reads half a number.
    write = (
        f"new=$(mktemp {EXPIRES_FILE}.XXXXXX) && chmod 644 $new && echo {epoch} >$new && "
        f"sync $new && mv -f $new {EXPIRES_FILE}"
    )
    in_force = _ask(host, f"{write} && {_SHOW}")
    if int(in_force.timestamp()) != epoch:
        raise HostError(
            host.name,
            f"it still ends itself at {in_force:%Y-%m-%d %H:%M:%S} UTC, not at the time it was told",
            hint=f"is {EXPIRES_FILE} on it as it was written?",
        )


def gather_expiry(host: Host) -> datetime:
    """When a machine ends itself, as it says itself; raises :class:`HostError` without a guard."""
    return _ask(host, _SHOW)


def _ask(host: Host, script: str) -> datetime:
    done = host.run(sudo(script), check=False)
    if done.exit_code != 0 or not done.stdout.strip().isdecimal():
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.exit_code}"
        raise HostError(
            host.name,
            f"the guard that ends it in time does not answer: {said}",
            hint=f"`systemctl status {EXPIRY_TIMER}` and /var/log/cloud-init-output.log on it say why; "
            "`spr-cluster down` ends it now",
        )
    return datetime.fromtimestamp(int(done.stdout), timezone.utc)
