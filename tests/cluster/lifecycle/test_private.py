"""Machines without public addresses: bought, reached, and remembered as such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.context import Context
from cluster.lifecycle.prepare import find_offers
from cluster.local_files import ClusterFiles
from cluster.nodes import Node
from cluster.slurm.job_queue import find_losses
from infra.errors import JumpError, SprError, UsageError
from provision.host import Host, Result
from provision.ssh import SshHost
from tests.harness.simulated_cloud import SimulatedCloud

NAT = "[network]\nnat = true\n"


@pytest.fixture
def nat(cloud: SimulatedCloud) -> SimulatedCloud:
    """A cloud whose subnets have a NAT gateway instead of an internet gateway."""
    cloud.faults(NAT)
    return cloud


def before_each_command(cloud: SimulatedCloud, act: Callable[[Node], object]) -> SimulatedCloud:
    """The same cloud, where each command on a node begins with ``act``, which may raise."""

    def make_host(node: Node, files: ClusterFiles) -> Host:
        host = cloud.machines.make_host(node, files)
        run = host.run

        def run_after(*words: Any, **more: Any) -> Result:
            act(node)
            return run(*words, **more)

        vars(host)["run"] = run_after
        return host

    return replace(cloud, ctx=replace(cloud.ctx, make_host=make_host))


def test_a_private_cluster_is_reached_at_private_addresses(nat: SimulatedCloud) -> None:
    cluster = nat.prepared(nodes=2, private=True)

    requests = nat.recorder.of("RunInstances")
    interfaces = [interface for r in requests for interface in r["NetworkInterfaces"]]
    assert interfaces
    assert not any(interface["AssociatePublicIpAddress"] for interface in interfaces)
    assert [node.public_ip for node in cluster.nodes] == ["", ""]
    assert [node.address for node in cluster.nodes] == [n.private_ip for n in cluster.nodes]
    config = nat.ctx.files.ssh_config.read_text()
    assert f"HostName {cluster.head.private_ip}" in config
    assert "ProxyCommand" not in config
    assert nat.group.ssh_cidrs == (str(nat.fake.backend.vpc_range),), "the VPC's own range"
    # It stays private, and its rule does not follow this machine.
    nat.faults(NAT + 'caller = "198.51.100.9/32"\n')
    assert not nat.plan().changes
    assert nat.plan_input(nodes=3).spec.private
    assert not nat.ctx.access.find_move()


@pytest.mark.parametrize(
    ("jump", "command"),
    [
        ("me@jump.example.com:2222", "-p 2222 -W {ip}:22 -- me@jump.example.com"),
        (
            "eice",
            "aws ec2-instance-connect open-tunnel --instance-id {id} --remote-port 22 --region",
        ),
        ("ssm", "aws ssm start-session --target {id} --document-name AWS-StartSSHSession"),
    ],
)
def test_the_jump_is_remembered_and_used_by_every_way_of_ssh(
    nat: SimulatedCloud, jump: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nat.prepared(nodes=1, private=True, jump=jump)

    head = nat.cluster().head
    wanted = command.format(ip=head.private_ip, id=head.instance.id)
    config = nat.ctx.files.ssh_config.read_text()
    (line,) = [text for text in config.splitlines() if "ProxyCommand" in text]
    assert wanted in line
    host = Context._ssh_host(nat.ctx, head, nat.ctx.files)
    assert isinstance(host, SshHost)
    assert wanted in " ".join(host._proxy_argv)


def test_down_asks_the_head_over_the_jump_what_would_be_lost(nat: SimulatedCloud) -> None:
    nat.prepared(nodes=1, private=True, jump="ssm")
    asked: list[Node] = []

    find_losses(before_each_command(nat, asked.append).ctx, nat.found())

    assert {node.jump for node in asked} == {"ssm"}
    damaged = [{"Key": "spr-cluster:nodes", "Value": "many"}]
    nat.ec2.create_tags(Resources=[nat.group.id], Tags=damaged)
    assert "invalid cluster record" in find_losses(nat.ctx, nat.found()).unknown


@pytest.mark.parametrize(
    ("jump", "program", "what"),
    [
        ("me@jump.example.com", "ssh", "the OpenSSH client"),
        ("eice", "aws", "the AWS CLI version 2"),
        ("ssm", "aws", "the AWS CLI version 2"),
        ("ssm", "session-manager-plugin", "the Session Manager plugin"),
    ],
)
def test_without_the_program_of_the_jump_nothing_is_bought(
    nat: SimulatedCloud, monkeypatch: pytest.MonkeyPatch, jump: str, program: str, what: str
) -> None:
    monkeypatch.setattr("provision.jump.which", lambda name: name != program or None)

    with pytest.raises(UsageError, match=f"--jump {jump}: {program} is not installed") as caught:
        nat.up(nodes=1, private=True, jump=jump)

    assert what in str(caught.value.hint)
    assert nat.left() == []


@pytest.mark.parametrize("proxy", [None, "http://10.0.0.9:3128"])
def test_with_an_image_or_a_proxy_only_the_agent_of_ssm_needs_a_way_out(
    nat: SimulatedCloud, proxy: str | None
) -> None:
    if not proxy:
        nat.prepared(nodes=2, private=True)
        nat.down(keep_image=True)
    closed = "[network]\ninternet_gateway = false\n"
    options: Any = {"nodes": 2, "private": True, **({"proxy": proxy} if proxy else {})}
    nat.faults(closed)
    for other in ({}, {"jump": "eice"}):
        assert find_offers(nat.ctx, nat.plan_input(**options, **other))
    nat.faults(f"{closed}endpoints = ['ssm']\n")
    left, bought = nat.left(), len(nat.purchases())
    with pytest.raises(UsageError, match="its machines can't reach Session Manager") as caught:
        nat.up(**options, jump="ssm")
    assert "create interface endpoints for ssm and ssmmessages" in str(caught.value.hint)
    assert (nat.left(), len(nat.purchases())) == (left, bought)
    nat.faults(f"{closed}endpoints = ['ssm', 'ssmmessages']\n")

    nat.up(**options, jump="ssm")

    assert nat.cluster().is_whole


@pytest.mark.parametrize(
    ("jump", "fault", "lacks"),
    [
        ("eice", "connect_endpoint", r"vpc-\w+ has no EC2 Instance Connect Endpoint"),
        ("ssm", "host_management", "Default Host Management Configuration is off in us-east-1"),
    ],
)
def test_without_the_jumps_own_resource_nothing_is_bought(
    nat: SimulatedCloud, jump: str, fault: str, lacks: str
) -> None:
    nat.faults(f"{NAT}{fault} = false\n")

    with pytest.raises(UsageError, match=f"--jump {jump}: {lacks}") as caught:
        nat.up(nodes=1, private=True, jump=jump)
    assert "or choose another --jump" in str(caught.value.hint)
    assert nat.left() == []


def test_an_instance_profile_may_replace_host_management(nat: SimulatedCloud) -> None:
    nat.faults(f"{NAT}host_management = false\n")

    find_offers(nat.ctx, nat.plan_input(private=True, jump="ssm", instance_profile="nodes"))

    assert "so the role in instance profile nodes needs the policy Amazon" in nat.progress.notes[-1]


@pytest.mark.parametrize("later", [False, True])
def test_public_machines_are_reached_over_a_jump_where_port_22_is_blocked(
    cloud: SimulatedCloud, later: bool
) -> None:
    if later:
        cloud.prepared(nodes=1)
    cloud.faults('[network]\nssh = "blocked"\n')
    seen = cloud.seen_as(caller_cidr=pytest.fail, probe_ssh=pytest.fail)

    cluster = (cloud if later else seen).up(nodes=3, jump="eice")

    assert cloud.cluster().is_whole
    assert cloud.cluster().head.jump == "eice"
    head = cluster.head
    assert head.public_ip
    assert head.address == head.private_ip
    assert later or cloud.group.ssh_cidrs == (str(cloud.fake.backend.vpc_range),)
    config = cloud.ctx.files.ssh_config.read_text()
    proxies = [line for line in config.splitlines() if "Proxy" in line]
    assert proxies[1:] == ["    ProxyJump node0"] * 2
    assert config.count("ProxyCommand aws") == 1
    assert not seen.ctx.access.find_move()


def test_a_node_to_which_the_jump_does_not_lead_is_neither_terminated_nor_bought_again(
    nat: SimulatedCloud,
) -> None:
    closed = list[str]()

    def fail(node: Node) -> None:
        if node.name == "node1":
            closed.append(node.instance.id)
            raise JumpError(node.name, "no SSH at 10.0.0.5 over `aws`: too many connections")

    cloud = before_each_command(nat, fail)
    nat.clock.pace = 60

    with pytest.raises(SprError, match=r"none of 1 node answers: .*too many connections"):
        cloud.up(nodes=3, private=True, jump="eice", bake="none")
    assert set(closed) <= set(nat.found("instances").ids()["instances"])
    assert not nat.recorder.of("TerminateInstances")
    assert len(nat.purchases()) == 1


def test_an_agent_may_register_with_session_manager_half_an_hour_after_the_boot(
    nat: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, boot_s = list[float](), 15 * 60

    def fail_for_long(node: Node) -> None:
        asked.append(nat.clock.now)
        if asked[-1] - asked[0] < 1800 + boot_s:
            raise JumpError(node.name, "no SSH: An error occurred (TargetNotConnected)")

    def status(*_: object) -> str:
        return "initializing" if nat.clock.now - asked[0] < boot_s else "ok"

    monkeypatch.setattr("infra.local.api.lifecycle.InstanceLifecycle.status_of", status)
    nat.clock.pace = 60

    cloud = before_each_command(nat, fail_for_long)
    assert cloud.up(nodes=1, private=True, jump="ssm").is_whole
    notes = [note for note in nat.progress.notes if "register only after 5 to 30 min" in note]
    assert notes
    assert all("min of at most 75" in note for note in notes)


def test_private_machines_that_are_silent_are_kept_and_the_way_to_them_is_named(
    nat: SimulatedCloud,
) -> None:
    blocked = 'block_public_access = "block-ingress"\n'
    nat.faults(NAT + blocked + '[[machine]]\nfate = "no-ssh"\n')

    with pytest.raises(SprError, match="none of 1 node answers") as caught:
        nat.up(nodes=1, private=True, jump="ssm")
    text = str(caught.value)
    assert "leads to nat-" in text
    assert "the machines have no public addresses" in text
    assert "VPC Block Public Access: block-ingress" in text
    assert "CLOSES THESE SUBNETS" not in text
    assert "; this machine comes over ssm" in text
    assert len(nat.purchases()) == 1


def test_a_proxy_replaces_the_route_and_is_remembered(cloud: SimulatedCloud) -> None:
    proxy = "http://10.0.0.9:3128"
    cloud.faults("[network]\ninternet_gateway = false\nacl = 'no-downloads'\n")
    with pytest.raises(UsageError, match="can't install software"):
        cloud.up(nodes=2, private=True)

    cluster = cloud.up(nodes=2, private=True, proxy=proxy)

    def known() -> dict[str, str]:
        return dict(cloud.cluster().environment)

    assert known()["https_proxy"] == known()["HTTPS_PROXY"] == proxy
    direct = known()["NO_PROXY"].split(",")
    assert {"169.254.169.254", "node1", *(node.private_ip for node in cluster.nodes)} <= {*direct}
    installed = cloud.machines.read(cluster.head.instance.id)
    assert installed["proxy"] == proxy
    cloud.up(nodes=2)
    assert known()["http_proxy"] == proxy
    cloud.up(nodes=2, proxy="none")
    assert known() == {}
