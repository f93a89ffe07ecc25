"""Is a machine the one that it should be? A wrong host key ends everything, and nothing is trusted."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from cluster.lifecycle.host_identity import check_head_identity, verified_by
from infra.ec2.key_pair import generate_key_pair
from infra.errors import HostKeyError, SprError
from infra.files import write_private
from provision.host_keys import pin_host_keys, pinned_host_keys
from tests.harness.simulated_cloud import SimulatedCloud
from tests.harness.simulated_machines import host_key_of

STRANGER = host_key_of("i-stranger")
_NOT_OURS = "another SSH key|not the right one"


def pin_stranger(cloud: SimulatedCloud, *instance_ids: str) -> Callable[[], None]:
    """Make this machine know nodes by a stranger's key, as after a first contact with somebody else."""

    def pin() -> None:
        for instance_id in instance_ids:
            pin_host_keys(cloud.ctx.files.known_hosts, instance_id, [STRANGER])

    return pin


def secrets_given(cloud: SimulatedCloud) -> int:
    """How often anything was installed, copied or connected."""
    steps = ("install.sh", "sealing", "tar -C")
    return sum(cloud.steps.count(step) for step in steps)


def test_a_host_key_that_has_changed_ends_it_at_once(cloud: SimulatedCloud) -> None:
    worker = cloud.prepared(nodes=2).workers[0].instance.id
    pin_stranger(cloud, worker)()
    before, began = secrets_given(cloud), cloud.clock.now

    with pytest.raises(HostKeyError, match=rf"\[node1\] {worker} shows another SSH host key"):
        cloud.up(nodes=3)
    assert secrets_given(cloud) == before
    assert cloud.clock.now - began < 60
    assert worker in cloud.found("instances").ids()["instances"], "it was replaced without a word"
    assert pinned_host_keys(cloud.ctx.files.known_hosts, worker) == (STRANGER,)


def test_a_head_whose_console_shows_another_key_is_not_trusted(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (f"{STRANGER} root@somewhere",)
    monkeypatch.setattr(cloud.engine, "host_keys", lambda *_: keys)

    for _ in range(2):
        with pytest.raises(
            HostKeyError, match=r"\[node0\] the SSH host key pinned here for i-\w+ is not"
        ):
            cloud.up(nodes=2)
    assert secrets_given(cloud) == 0
    assert len(cloud.purchases()) == 1


def test_each_key_is_verified_before_any_node_is_connected_and_remembered(
    cloud: SimulatedCloud,
) -> None:
    cluster = cloud.prepared(nodes=2)

    assert "its host key matches its console" in cloud.progress.notes
    assert verified_by(cloud.ctx.events) == {
        cluster.head.instance.id: "console",
        cluster.workers[0].instance.id: "head",
    }
    done = cloud.steps.done
    scan = next(i for i, step in enumerate(done) if "ssh-keyscan" in step)
    first = next(i for i, step in enumerate(done) if "tar -C" in step)
    assert scan < first
    assert cloud.steps.count("ssh-keyscan") == 1


@pytest.mark.parametrize(("delay_s", "how"), [(60, "console"), (3600, "first contact")])
def test_a_type_without_the_latest_console_is_asked_again_and_waited_for_a_while(
    cloud: SimulatedCloud, delay_s: int, how: str
) -> None:
    cloud.faults(f"[console]\nlatest = false\ndelay_s = {delay_s}\n")

    head = cloud.up(nodes=1).head

    events = cloud.ctx.events
    assert verified_by(events) == {head.instance.id: how}
    assert cloud.clock.now - cloud.began < 240
    # Later it is looked at again, without another wait.
    before = cloud.clock.now
    check_head_identity(cloud.ctx, head)
    assert cloud.clock.now - before < 10, "a throttled call aside, nothing takes time"
    cloud.clock.now += 3600
    assert check_head_identity(cloud.ctx, head) == "its host key matches its console"
    assert verified_by(events) == {head.instance.id: "console"}


def test_a_worker_whom_the_head_sees_with_another_key_is_not_trusted(cloud: SimulatedCloud) -> None:
    def pin_all_workers() -> None:
        workers = [i.id for i in cloud.found("instances").instances if i.role != "head"]
        pin_stranger(cloud, *workers)()

    cloud.steps.before["ssh-keyscan"] = pin_all_workers

    with pytest.raises(
        HostKeyError, match=r"\[node1\] the SSH host key pinned here for i-\w+ is not"
    ):
        cloud.up(nodes=3)
    assert cloud.steps.count("tar -C") == 0


def test_a_changed_key_found_by_the_verification_is_an_error_too(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2)

    def refuse() -> None:
        raise HostKeyError("node0", "another key")

    cloud.steps.before["health of all nodes"] = refuse
    with pytest.raises(HostKeyError, match="another key"):
        cloud.up(nodes=2)
    assert len(cloud.found("instances").instances) == 2


def test_a_key_that_is_not_here_can_not_enter(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1)
    key = cloud.ctx.files.key.read_text()
    other = generate_key_pair("other").private
    for content in (None, "", "no key", key.replace("A", "B"), other):
        cloud.ctx.files.key.unlink(missing_ok=True)
        if content is not None:
            write_private(cloud.ctx.files.key, content)

        with pytest.raises(SprError, match=_NOT_OURS) as caught:
            cloud.up(nodes=2)
        assert re.search("`spr-cluster down.*` (works|removes it) from any", str(caught.value))
