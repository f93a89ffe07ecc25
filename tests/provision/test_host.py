from __future__ import annotations

import pytest

from infra.errors import HostError, HostKeyError
from provision.host import wait_until_reachable
from tests.fakes import FakeClock, FakeHost


def test_a_machine_that_never_answers_fails_at_the_deadline() -> None:
    host = FakeHost("node1", [("true", HostError("node1", "no SSH at 198.51.100.1"))])
    heard: list[str] = []

    with pytest.raises(
        HostError, match=r"\[node1\] SSH on node1 timed out after 40 min: .*no SSH at"
    ) as caught:
        wait_until_reachable(
            host, clock=FakeClock(), on_wait=lambda _, reason: heard.append(reason)
        )

    assert "[node1] no SSH at 198.51.100.1" in heard
    assert "--ssh-cidr" in str(caught.value.hint)


def test_a_changed_host_key_fails_at_once() -> None:
    host = FakeHost("node1", [("true", HostKeyError("node1", "another key"))])

    with pytest.raises(HostKeyError):
        wait_until_reachable(host, clock=FakeClock())
    assert len(host.commands) == 1
