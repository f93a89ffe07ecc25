from __future__ import annotations

import stat
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from infra.errors import HostError
from infra.lifetime import Lifetime
from provision.user_data import (
    EXPIRES_FILE,
    EXPIRY_SCRIPT,
    IDLE_FILE,
    SHOW_EXPIRY,
    extend_life,
    render_expiry_script,
)
from tests.provision.machine import Machine, ShellHost

GRACE = timedelta(minutes=30)


def life(hours: float, more: timedelta = GRACE) -> Lifetime:
    expires = datetime(2026, 12, 24, 18, tzinfo=timezone.utc) + timedelta(hours=hours)
    return Lifetime(expires, expires + more, GRACE)


LAUNCH, LATER = life(0), replace(life(3), idle=timedelta(hours=1))
SHOWN = "{} {} {}\n{}\n".format(*LATER.seconds)


@pytest.fixture
def host(machine: Machine) -> ShellHost:
    """A machine whose timer runs."""
    machine.replace("systemctl")
    machine.path(EXPIRY_SCRIPT).parent.mkdir()
    machine.path(EXPIRY_SCRIPT).write_text(machine.move(render_expiry_script(LAUNCH)))
    return ShellHost(machine)


def expiry(host: ShellHost) -> Lifetime | None:
    """The lifetime that the machine reports."""
    return Lifetime.parse(host.run(SHOW_EXPIRY).stdout)


def test_a_lifetime_is_extended_and_shortened(host: ShellHost) -> None:
    assert expiry(host) == LAUNCH
    for lifetime in (life(-1), life(0, timedelta(hours=9)), LATER):
        elsewhere = lifetime.expires.astimezone(timezone(timedelta(hours=-5)))
        extend_life(host, replace(lifetime, expires=elsewhere))
        assert expiry(host) == lifetime
    # The files are replaced whole, and readable.
    paths = [host.machine.path(name) for name in (EXPIRES_FILE, IDLE_FILE)]
    assert "".join(path.read_text() for path in paths) == SHOWN.replace(" ", "\n", 1)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o644}
    assert {*paths[0].parent.iterdir()} == {*paths}


def test_a_timer_that_does_not_run_is_started_again(host: ShellHost) -> None:
    started = host.machine.folder / "started"
    cases = f"start) touch {started} ;; is-active) [ -e {started} ] ;; *) exit 1 ;;"
    host.machine.replace("systemctl", f'case "$1" in {cases} esac')
    assert host.run(SHOW_EXPIRY, check=False).exit_code != 0

    extend_life(host, LATER)

    assert host.run(SHOW_EXPIRY).stdout == SHOWN


def test_a_machine_without_an_idle_timer_is_extended_and_then_an_error(host: ShellHost) -> None:
    host.machine.replace("systemctl", '[ "${*: -1}" != spr-cluster-idle.timer ]')

    extend_life(host, replace(LATER, idle=timedelta()))
    with pytest.raises(HostError, match=r"\[node0\] the timer .* does not answer"):
        extend_life(host, LATER)

    assert expiry(host) == replace(LATER, idle=timedelta())


def test_a_script_that_keeps_another_time_is_an_error(host: ShellHost) -> None:
    host.machine.path(EXPIRY_SCRIPT).write_text("echo {} {} {}\n".format(*LAUNCH.seconds))

    with pytest.raises(
        HostError, match=r"\[node0\] it still shuts down at 2026-12-24 18:00:00 UTC"
    ):
        extend_life(host, LATER)


def test_a_machine_without_its_timer_is_an_error(host: ShellHost) -> None:
    def look() -> None:
        with pytest.raises(HostError, match=r"\[node0\] the timer .* does not answer") as caught:
            extend_life(host, LATER)
        assert "`down` removes it" in str(caught.value)

    host.machine.path(EXPIRY_SCRIPT).write_text("echo soon\n")
    look()
    host.machine.path(EXPIRY_SCRIPT).unlink()
    look()
    host.machine.replace("systemctl", "exit 3")
    look()
