from __future__ import annotations

import pytest

from infra.errors import HostError, HostKeyError, HostsError
from provision.host import Result, on_all, sudo, wait_until_reachable
from tests.fakes import FakeClock, FakeHost


def test_failures_on_many_machines_carry_every_outcome() -> None:
    good = FakeHost("node0", [("true", "")])
    bad = [FakeHost(f"node{n}", [("true", HostError(f"node{n}", f"broken {n}"))]) for n in (1, 2)]

    with pytest.raises(HostsError) as caught:
        on_all("checking", [good, *bad], lambda host: host.run("true"))

    assert caught.value.outcomes == {"node1": "broken 1", "node2": "broken 2"}
    assert str(caught.value).startswith("checking failed on 2 of 3 nodes:\n  [node1] broken 1")


def test_a_changed_host_key_outweighs_every_other_failure() -> None:
    changed = HostKeyError("node1", "another key", hint="look into known_hosts")
    hosts = [
        FakeHost("node0", [("true", HostError("node0", "no SSH"))]),
        FakeHost("node1", [("true", changed)]),
    ]

    with pytest.raises(HostKeyError) as caught:
        on_all("asking", hosts, lambda host: host.run("true"), hint="something else")

    assert caught.value is changed


def test_results_come_by_name_in_the_order_of_the_machines() -> None:
    hosts = [FakeHost(f"node{n}", [("hostname", str(n))]) for n in range(5)]

    done = on_all("asking", hosts, lambda host: host.run("hostname").stdout)

    assert done == {f"node{n}": str(n) for n in range(5)}
    assert on_all("asking", [], lambda host: host.name) == {}


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


def test_sudo_takes_any_script() -> None:
    assert sudo("echo 'a b'") == "sudo bash -c 'echo '\"'\"'a b'\"'\"''"
    assert Result(0, "", "").exit_code == 0
