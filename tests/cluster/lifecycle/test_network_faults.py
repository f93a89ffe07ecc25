"""A fault of the network is one fault, however many machines it hides: nothing is bought again."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from infra.errors import ConnectionLostError, HostError, NoAnswerError, SprError, UsageError
from tests.harness.cloud import CALLER
from tests.harness.simulated_cloud import SimulatedCloud

OTHER = "198.51.100.9/32"
MOVED = f'[network]\ncaller = "{OTHER}"\n'
CUT = '[network]\nssh = "blocked"\n'

HEALTH = "# querying the health of all nodes"
_RANGE = "203.0.113.0/24"


def when(cloud: SimulatedCloud, action: str, faults: str) -> None:
    """Activate faults as soon as EC2 has answered an action."""

    def activate(seen: str, moment: str) -> None:
        if (seen, moment) == (action, "after"):
            cloud.fake.application.on_call = None
            cloud.faults(faults)

    cloud.fake.application.on_call = activate


def breaks(cloud: SimulatedCloud, step: str, times: int = 1) -> None:
    """Have the connection break in the next calls of a step."""
    left = iter(range(times))

    def lose() -> None:
        if next(left, None) is not None:
            raise ConnectionLostError("node0", "the connection broke")

    cloud.steps.before[step] = lose


def cut_in(cloud: SimulatedCloud, step: str) -> None:
    """Have the network end in a step, with the connection that the step uses."""

    def cut() -> None:
        cloud.faults(CUT)
        raise ConnectionLostError("node0", "the connection broke")

    cloud.steps.before[step] = cut


def moves_and_plans_again(cloud: SimulatedCloud, machine: int = 1) -> SimulatedCloud:
    """Have this machine's address change at the purchase; a machine that dies makes a new plan.

    Return the cloud for a user who allows the new address. ``machine`` counts the purchased from 0.
    """
    rule = f'[[machine]]\nn = {machine}\nfate = "dies"\n'
    cloud.faults(rule)
    when(cloud, "RunInstances", rule + MOVED)
    return replace(cloud, ctx=replace(cloud.ctx, allow=lambda _: True))


def assert_nothing_was_replaced(cloud: SimulatedCloud) -> None:
    assert len(cloud.purchases()) == 1
    assert not cloud.recorder.of("TerminateInstances")


# Before the purchase


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "internet_gateway = false",
            r"subnet-\w+ and \d more: route table rtb-\w+ has no route for 0.0.0.0/0; its machines",
        ),
        (
            'acl = "no-ssh"',
            r"subnet-\w+ and \d more: network ACL acl-\w+ denies SSH \(TCP in from 203.0.113.7/32, port "
            r"22\): rule 1",
        ),
    ],
)
def test_machines_that_could_not_be_reached_are_not_bought(
    cloud: SimulatedCloud, fault: str, message: str
) -> None:
    cloud.faults(f"[network]\n{fault}\n")

    with pytest.raises(UsageError, match=message) as caught:
        cloud.up(nodes=2)
    assert ("--subnet-id" if "acl" in fault else "--private") in str(caught.value.hint)
    assert cloud.left() == []
    assert not cloud.writes()


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("firewall = true\n", "firewall = true\nssh = 'blocked'\n", "which may or may not allow SSH"),
        ("", "acl = 'no-answers'\n", "DENIES SSH responses"),
    ],
)  # fmt: skip
def test_a_way_that_is_or_may_be_closed_is_named(
    cloud: SimulatedCloud, before: str, after: str, says: str
) -> None:
    cloud.faults(f"[network]\n{before}")
    when(cloud, "RunInstances", f"[network]\n{after}")
    cloud.clock.pace = 5

    with pytest.raises(SprError, match="none of 1 node answers") as caught:
        cloud.up(nodes=1)
    assert says in str(caught.value)
    assert "NO ROUTE" not in str(caught.value)
    assert ("the firewall may block SSH" in " ".join(cloud.progress.notes)) is bool(before)
    assert_nothing_was_replaced(cloud)
    cloud.faults(f"[network]\n{before}")
    cloud.up()
    assert cloud.cluster().is_whole


# While the machines are waited for


def test_if_no_machine_answers_all_are_kept_and_used_when_the_network_is_repaired(
    cloud: SimulatedCloud,
) -> None:
    when(cloud, "RunInstances", CUT)
    cloud.clock.pace = 5

    with pytest.raises(SprError, match=r"none of 3 nodes answers: ") as caught:
        cloud.up(nodes=3, bake="none")

    assert_nothing_was_replaced(cloud)
    assert cloud.clock.now - cloud.began < 10 * 60
    machines = cloud.found("instances").ids()["instances"]
    assert len(machines) == 3
    text = str(caught.value)
    assert "no SSH: timed out" in text
    assert all(id_ in text for id_ in machines)
    assert "leads to igw-" in text
    assert "VPC Block Public Access: off" in text
    assert "lets SSH through" in text
    assert f"allows SSH from {CALLER}; this machine is {CALLER}: allowed" in text
    assert "spr-cluster up --name bert" in text
    assert "spr-cluster down --name bert" in text
    cloud.faults("")
    cloud.up()
    assert cloud.cluster().is_whole
    assert cloud.found("instances").ids()["instances"] == machines


def test_a_head_that_is_older_than_a_boot_has_minutes_to_answer(cloud: SimulatedCloud) -> None:
    head = cloud.prepared(nodes=1).head.instance.id
    cloud.break_ssh(head)
    cloud.clock.now += 3600
    looks = itertools.count()

    def repair(action: str, moment: str) -> None:
        if (action, moment) == ("DescribeInstanceStatus", "after") and next(looks) == 2:
            cloud.mend_ssh(head)

    cloud.fake.application.on_call = repair

    assert cloud.up(nodes=2).head.instance.id == head


@pytest.mark.parametrize("head_answers", [True, False])
def test_new_workers_that_do_not_answer_are_replaced_only_if_the_head_still_does(
    cloud: SimulatedCloud, head_answers: bool
) -> None:
    cloud.prepared(nodes=1)
    before = len(cloud.purchases())
    if head_answers:
        cloud.faults('[[machine]]\nn = 0\nfate = "no-ssh"\n')
        cloud.clock.pace = 60
        cloud.up(nodes=2)
        assert cloud.cluster().is_whole
        return
    when(cloud, "RunInstances", CUT)
    with pytest.raises(SprError, match="none of 1 node answers"):
        cloud.up(nodes=2)
    assert len(cloud.purchases()) == before + 1
    assert len(cloud.found("instances").instances) == 2


# After a machine has answered


@pytest.mark.parametrize(("nodes", "step"), [(1, "cloud-init"), (3, "querying the facts")])
def test_a_network_that_ends_after_the_first_answer_replaces_nothing(
    cloud: SimulatedCloud, nodes: int, step: str
) -> None:
    cut_in(cloud, step)
    cloud.clock.pace = 20

    with pytest.raises(SprError, match=r"none of \d nodes? answers: ") as caught:
        cloud.up(nodes=nodes, bake="none")

    assert_nothing_was_replaced(cloud)
    assert all(id_ in str(caught.value) for id_ in cloud.found("instances").ids()["instances"])
    cloud.steps.before.clear()
    cloud.faults("")
    cloud.up()
    assert cloud.cluster().is_whole
    assert_nothing_was_replaced(cloud)


@pytest.mark.parametrize("age", [0, 2400])
def test_a_machine_that_answered_and_is_impaired_is_replaced_unless_it_is_young(
    cloud: SimulatedCloud, age: int
) -> None:
    cloud.faults('[[machine]]\nn = 0\nfate = "impaired"\n')

    def lose() -> None:
        cloud.steps.before.clear()
        (id_,) = cloud.found("instances").ids()["instances"]
        cloud.break_ssh(id_)
        # A young machine may only seem impaired.
        cloud.clock.now += age
        raise ConnectionLostError("node0", "the connection broke")

    cloud.steps.before["cloud-init"] = lose
    cloud.clock.pace = 20

    if age:
        cloud.up(nodes=1, bake="none")
        assert cloud.cluster().is_whole
        assert len(cloud.purchases()) == 2
    else:
        with pytest.raises(SprError, match="none of 1 node answers"):
            cloud.up(nodes=1, bake="none")
        assert_nothing_was_replaced(cloud)


def test_a_machine_that_answers_again_while_another_boots_is_kept(cloud: SimulatedCloud) -> None:
    """The network is broken for longer than one machine is waited for."""
    cloud.faults('[[machine]]\nn = 1\nfate = "no-ssh"\n')
    machines, looks = list[str](), list[str]()

    def lose() -> None:
        cloud.steps.before.clear()
        # Not before: the thread of the machine that boots may be far ahead of this one.
        cloud.clock.pace = 5
        machines.extend(cloud.found("instances").ids()["instances"])
        for id_ in machines:
            cloud.break_ssh(id_)
        raise ConnectionLostError("node0", "the connection broke")

    def repair(action: str, moment: str) -> None:
        if machines and (action, moment) == ("DescribeInstanceStatus", "after"):
            looks.append(action)
            if len(looks) == 10:
                for id_ in machines:
                    cloud.mend_ssh(id_)

    cloud.steps.before["cloud-init"] = lose
    cloud.fake.application.on_call = repair

    cloud.up(nodes=2, bake="none")

    assert cloud.cluster().is_whole
    assert_nothing_was_replaced(cloud)


@pytest.mark.parametrize(("step", "times"), [("querying the facts", 1), (HEALTH, 1), (HEALTH, 9)])
def test_one_connection_that_breaks_is_opened_again(
    cloud: SimulatedCloud, step: str, times: int
) -> None:
    breaks(cloud, step, times)

    if times == 1:
        cloud.up(nodes=2, bake="none")
        assert cloud.cluster().is_whole
    else:  # a head that was just connected is not replaced
        with pytest.raises(HostError, match="the head i-") as caught:
            cloud.up(nodes=2, bake="none")
        assert "spr-cluster repair --name bert" in str(caught.value.hint)
    assert_nothing_was_replaced(cloud)


@pytest.mark.parametrize("is_impaired", [True, False])
def test_a_connected_head_that_is_lost_leaves_a_way_to_go_on(
    cloud: SimulatedCloud, is_impaired: bool
) -> None:
    head = cloud.prepared(nodes=2).head.instance.id

    def lose() -> None:
        cloud.break_ssh(head)
        if is_impaired:
            cloud.fake.backend.lifecycle.impaired.add(head)
            cloud.clock.now += 2400
        raise NoAnswerError("node0", "the connection broke")

    cloud.steps.before[HEALTH] = lose

    with pytest.raises(SprError) as caught:
        cloud.up()
    assert ("none of 1 node answers" in caught.value.message) is not is_impaired
    assert f"--instance-ids {head}`, then" in str(caught.value.hint)
    assert "spr-cluster repair --name bert" in str(caught.value.hint)
    assert not cloud.recorder.of("TerminateInstances")


# The address of this machine


@pytest.mark.parametrize(
    ("chosen", "exists", "admitted"),
    [
        (None, False, (OTHER,)),
        (CALLER, False, (OTHER, CALLER)),
        (_RANGE, True, (OTHER, _RANGE)),
    ],
)
def test_an_address_that_changes_during_up_is_followed_also_in_a_later_plan(
    cloud: SimulatedCloud, chosen: str | None, exists: bool, admitted: tuple[str, ...]
) -> None:
    """A machine that is replaced makes a new plan, which must not open the old address again."""
    if exists:
        cloud.up(chosen, nodes=1)
    mover = moves_and_plans_again(cloud, machine=0 if exists else 1)

    mover.up(None if exists else chosen, nodes=2)

    assert set(cloud.group.ssh_cidrs) == {*admitted}
    assert bool(cloud.recorder.of("RevokeSecurityGroupIngress")) is (chosen is None)
    if chosen is None:
        notes = " ".join(cloud.progress.notes)
        assert f"this machine's address changed from {CALLER} to {OTHER}" in notes
    assert any(event["event"] == "address" for event in cloud.ctx.events.read())


@pytest.mark.parametrize(
    ("chosen", "later", "admitted"),
    [
        # Ranges that the user chose stay.
        ("192.0.2.0/24,auto,2001:db8::/64", (), ("192.0.2.0/24", OTHER, "2001:db8::/64")),
        # An address that the user names stays, until it is no longer named.
        (None, (f"{CALLER},192.0.2.0/24", None), (CALLER, "192.0.2.0/24", OTHER)),
        (CALLER, ("auto",), (OTHER,)),
        (f"{CALLER},auto", (), (CALLER, OTHER)),
    ],
)
def test_only_an_address_that_the_user_did_not_choose_is_replaced(
    cloud: SimulatedCloud, chosen: str | None, later: tuple[str | None, ...], admitted: tuple[str]
) -> None:
    cloud.up(chosen, nodes=1)
    for ranges in later:
        cloud.up(ranges)
    cloud.faults(MOVED)

    cloud.up()

    assert {*cloud.group.ssh_cidrs} == {*admitted}


def test_many_connections_that_fail_at_once_look_the_address_up_once(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1)
    cloud.faults(CUT)
    looked: list[str] = []

    def look() -> str:
        looked.append(CALLER)
        return CALLER

    head = cloud.seen_as(caller_cidr=look).ctx.host_opener()(cloud.cluster().head)
    before = time.monotonic()
    for _ in range(5):
        with pytest.raises(NoAnswerError):
            head.run("true")

    assert looked == [CALLER]
    assert time.monotonic() - before < 5


def test_a_rule_that_cannot_be_repaired_is_no_crash(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1)
    cloud.faults(
        MOVED
        + '[[error]]\naction = "AuthorizeSecurityGroupIngress"\ncode = "UnauthorizedOperation"\n'
    )
    ctx = replace(cloud.ctx, allow=lambda _: True)

    with pytest.raises(NoAnswerError, match="this machine's address changed"):
        ctx.host_opener()(cloud.cluster().head).run("true")
    assert "SSH can't be opened to it" in cloud.progress.notes[-1]
