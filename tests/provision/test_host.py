from __future__ import annotations

import pytest

from infra.errors import HostError, HostKeyError
from provision.host import wait_until_reachable
from tests.fakes import FakeClock, FakeHost


def test_a_machine_that_never_answers_fails_at_the_deadline_and_a_changed_key_at_once() -> None:
    host = FakeHost("node1", [("true", HostError("node1", "no SSH at 198.51.100.1"))])
    heard: list[str] = []

    said = r"\[node1\] SSH on node1 timed out after 40 min: no SSH at"
    with pytest.raises(HostError, match=said) as caught:
        wait_until_reachable(host, clock=FakeClock(), on_wait=lambda _, why: heard.append(why))
    assert {*heard} == {"[node1] no SSH at 198.51.100.1"}
    assert "--ssh-cidr" in str(caught.value.hint)

    host = FakeHost("node1", [("true", HostKeyError("node1", "another key"))])
    with pytest.raises(HostKeyError):
        wait_until_reachable(host, clock=FakeClock())
    assert len(host.commands) == 1
