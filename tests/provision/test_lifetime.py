from __future__ import annotations

import stat
from datetime import datetime, timedelta, timezone

import pytest

from infra.errors import HostError
from provision.lifetime import extend_life, gather_expiry
from provision.user_data import EXPIRES_FILE, EXPIRY_SCRIPT, render_expiry_script
from tests.provision.machine import Machine, ShellHost

LAUNCH = datetime(2026, 12, 24, 18, tzinfo=timezone.utc)
LATER = LAUNCH + timedelta(hours=3)


@pytest.fixture
def host(machine: Machine) -> ShellHost:
    """A machine whose guard runs."""
    machine.replace("systemctl")
    machine.path(EXPIRY_SCRIPT).parent.mkdir()
    machine.path(EXPIRY_SCRIPT).write_text(machine.move(render_expiry_script(LAUNCH)))
    return ShellHost(machine)


def test_a_life_is_extended_and_shortened(host: ShellHost) -> None:
    assert gather_expiry(host) == LAUNCH
    for wish in (LATER, LAUNCH - timedelta(hours=1)):
        extend_life(host, wish.astimezone(timezone(timedelta(hours=-5))))
        assert gather_expiry(host) == wish


def test_the_file_is_replaced_whole_and_readable(host: ShellHost) -> None:
    extend_life(host, LATER)

    path = host.machine.path(EXPIRES_FILE)
    assert path.read_text() == f"{int(LATER.timestamp())}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_guard_that_does_not_follow_is_an_error(host: ShellHost) -> None:
    host.machine.path(EXPIRY_SCRIPT).write_text(f"echo {int(LAUNCH.timestamp())}\n")

    with pytest.raises(
        HostError, match=r"\[node0\] it still ends itself at 2026-12-24 18:00:00 UTC"
    ):
        extend_life(host, LATER)


@pytest.mark.parametrize("fault", ["no timer", "no script", "no number"])
def test_a_machine_without_a_guard_is_an_error(host: ShellHost, fault: str) -> None:
    if fault == "no timer":
        host.machine.replace("systemctl", "exit 3")
    elif fault == "no script":
        host.machine.path(EXPIRY_SCRIPT).unlink()
    else:
        host.machine.path(EXPIRY_SCRIPT).write_text("echo soon\n")

    with pytest.raises(
        HostError, match=r"\[node0\] the guard that ends it in time does not answer"
    ):
        gather_expiry(host)
    with pytest.raises(HostError, match=r"does not answer") as caught:
        extend_life(host, LATER)
    assert "spr-cluster down" in str(caught.value)
