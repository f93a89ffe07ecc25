"""``up`` and ``down`` against moto, with SSH faked at its one door: the exact requests to EC2."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from botocore.exceptions import ClientError

from cluster.files import ClusterFiles, remembered_cloud
from cluster.lifecycle import Context, Up, check_name_is_free, down
from cluster.nodes import Cluster, Node, find_cluster
from infra.clients import Clients, connect
from infra.cloud import Cloud
from infra.errors import HostError, SprError, UsageError
from infra.inventory import Inventory, describe_inventory
from infra.plan import plan_up
from infra.spec import ClusterSpec, build_spec
from provision.host import Host
from provision.stacks import load_stack
from tests.aws import CALLER, Recorder
from tests.fakes import AMX, FakeClock, FakeHost, facts_answer

NOW = datetime(2026, 7, 31, 12, 0, tzinfo=timezone.utc)
EXPIRES = "2026-07-31T20:00:00Z"


def make_spec(nodes: int = 3, **wishes: Any) -> ClusterSpec:
    return build_spec(name="bert", nodes=nodes, stack="intel", ssh_cidr=CALLER, **wishes)


class Machines:
    """Every node of the cluster as a fake host that answers what a good node answers."""

    def __init__(self, flags: str = AMX) -> None:
        self.flags = flags
        self.hosts: dict[str, FakeHost] = {}

    def make(self, node: Node, files: ClusterFiles) -> Host:
        answers: list[Any] = [
            ("^true$", ""),
            ("cloud-init status --wait", "status: done"),
            ("echo '--- spr-cluster: hostname'", self._facts(node)),
            ("spr-cluster-install.sh", "@step Python packages\n"),
            ("systemd-run .*spr-cluster-unseal", ""),
            ("sh /run/spr-cluster/unseal", ""),
            ('tar -C "\\$HOME"', ""),
            ("xargs -P 64", self._hear_all),
        ]
        self.hosts[node.name] = FakeHost(node.name, answers)
        return self.hosts[node.name]

    def _facts(self, node: Node) -> str:
        return facts_answer(
            hostname=f"host-of-{node.name}", address=node.private_ip, flags=self.flags
        )

    def _hear_all(self, _: str) -> str:
        return "".join(f"answer:{name}:0:{self.flags} :{name}\n" for name in self.hosts)


def make_context(aws: Cloud, clients: Clients, machines: Machines) -> Context:
    return Context(
        cloud=aws,
        clients=clients,
        files=ClusterFiles.of("bert"),
        clock=FakeClock(),
        now=lambda: NOW,
        make_host=machines.make,
    )


def bring_up(ctx: Context, spec: ClusterSpec) -> Cluster:
    return Up(ctx, spec, load_stack("intel")).apply(plan_up(spec))


def tags_of(params: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {
        spec["ResourceType"]: {tag["Key"]: tag["Value"] for tag in spec["Tags"]}
        for spec in params["TagSpecifications"]
    }


@pytest.fixture
def ctx(aws: Cloud, clients: Clients) -> Context:
    return make_context(aws, clients, Machines())


def test_up_asks_ec2_for_exactly_this(ctx: Context, recorder: Recorder) -> None:
    cluster = bring_up(ctx, make_spec(nodes=3))

    writes = [op for op in recorder.operations() if not op.startswith("Describe")]
    assert writes == [
        "CreateSecurityGroup",
        "AuthorizeSecurityGroupIngress",
        "AuthorizeSecurityGroupEgress",
        "ImportKeyPair",
        "RunInstances",
        "CreateImage",
        "RunInstances",
    ]
    head, workers = recorder.of("RunInstances")
    assert (head["MinCount"], head["MaxCount"]) == (1, 1)
    assert (workers["MinCount"], workers["MaxCount"]) == (2, 2)
    assert workers["ImageId"] != head["ImageId"]
    group = recorder.of("AuthorizeSecurityGroupIngress")[0]["GroupId"]
    for role, request in (("head", head), ("worker", workers)):
        labels = {
            "Name": f"bert-{role}",
            "spr-cluster:cluster": "bert",
            "spr-cluster:role": role,
            "spr-cluster:stack": "intel",
            "spr-cluster:nodes": "3",
            "spr-cluster:expires": EXPIRES,
        }
        assert tags_of(request) == {
            "instance": labels,
            "volume": labels,
            "network-interface": labels,
        }
        assert request["InstanceType"] == "r7iz.metal-16xl"
        assert request["KeyName"] == "spr-cluster-bert"
        assert request["MetadataOptions"] == {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        }
        (disk,) = request["BlockDeviceMappings"]
        assert disk["Ebs"] == {
            "VolumeSize": 100,
            "VolumeType": "gp3",
            "Encrypted": True,
            "DeleteOnTermination": True,
        }
        (nic,) = request["NetworkInterfaces"]
        assert nic["Groups"] == [group]
        assert nic["DeleteOnTermination"] is True
        assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2"]


def test_the_security_group_lets_in_ssh_from_the_caller_and_the_cluster_itself(
    ctx: Context, recorder: Recorder
) -> None:
    bring_up(ctx, make_spec(nodes=1))

    (created,) = recorder.of("CreateSecurityGroup")
    assert tags_of(created)["security-group"]["spr-cluster:cluster"] == "bert"
    (ingress,) = recorder.of("AuthorizeSecurityGroupIngress")
    (egress,) = recorder.of("AuthorizeSecurityGroupEgress")
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": ingress["GroupId"]}]}
    ssh, itself = ingress["IpPermissions"]
    assert (ssh["IpProtocol"], ssh["FromPort"], ssh["ToPort"]) == ("tcp", 22, 22)
    assert [r["CidrIp"] for r in ssh["IpRanges"]] == [CALLER]
    assert itself == inside
    assert egress["IpPermissions"] == [inside]


def test_one_node_needs_no_image(ctx: Context, recorder: Recorder) -> None:
    bring_up(ctx, make_spec(nodes=1))

    assert "CreateImage" not in recorder.operations()
    assert len(recorder.of("RunInstances")) == 1


def test_the_private_key_stays_here_and_the_user_data_holds_no_secret(
    ctx: Context, recorder: Recorder
) -> None:
    bring_up(ctx, make_spec(nodes=2))

    private = ctx.files.key.read_text()
    assert ctx.files.key.stat().st_mode & 0o777 == 0o600
    assert "PRIVATE KEY" in private
    assert "PRIVATE" not in str(recorder.calls)
    assert recorder.of("ImportKeyPair")[0]["PublicKeyMaterial"].startswith(b"ssh-ed25519 ")
    for request in recorder.of("RunInstances"):
        user_data = base64.b64decode(request["UserData"]).decode()
        assert str(int((NOW + timedelta(hours=8)).timestamp())) in user_data


def test_the_image_is_made_while_the_heads_identity_is_off_its_disk(
    aws: Cloud, clients: Clients, recorder: Recorder
) -> None:
    machines = Machines()
    ctx = make_context(aws, clients, machines)
    order: list[str] = []
    clients.ec2.meta.events.register(
        "provide-client-params.ec2.CreateImage", lambda **_: order.append("CreateImage")
    )
    original = machines.make

    def record(step: str) -> Callable[[str], str]:
        def answer(_: str) -> str:
            order.append(step)
            return ""

        return answer

    def make(node: Node, files: ClusterFiles) -> Host:
        host = original(node, files)
        assert isinstance(host, FakeHost)
        host.answers.insert(0, ("sh /run/spr-cluster/unseal &&", record("unseal")))
        host.answers.insert(1, ("systemd-run .*spr-cluster-unseal", record("seal")))
        return host

    ctx = replace(ctx, make_host=make)
    bring_up(ctx, make_spec(nodes=2))

    assert order == ["seal", "CreateImage", "unseal"]
    (request,) = recorder.of("CreateImage")
    assert request["NoReboot"] is True
    assert set(tags_of(request)) == {"image", "snapshot"}


def test_a_node_without_amx_stops_up_before_anything_is_installed(
    aws: Cloud, clients: Clients
) -> None:
    machines = Machines(flags="avx512f")
    ctx = make_context(aws, clients, machines)

    with pytest.raises(
        HostError, match=r"\[node0\] no AMX: Xeon lacks amx_bf16, amx_int8, amx_tile"
    ):
        bring_up(ctx, make_spec(nodes=2))
    assert not any("install" in command for command in machines.hosts["node0"].commands)


def test_a_node_without_amx_is_accepted_where_the_user_says_so(
    aws: Cloud, clients: Clients
) -> None:
    ctx = make_context(aws, clients, Machines(flags="avx512f"))

    cluster = bring_up(ctx, make_spec(nodes=2, amx_required=False))

    assert len(cluster.nodes) == 2


def test_a_cluster_is_found_again_by_its_tags_in_the_same_order(
    ctx: Context, clients: Clients
) -> None:
    made = bring_up(ctx, make_spec(nodes=4))

    found = find_cluster(clients.ec2, "bert")

    assert [n.instance.id for n in found.nodes] == [n.instance.id for n in made.nodes]
    assert found.stack == "intel"
    assert found.node("2").name == found.node("node2").name == "node2"
    with pytest.raises(UsageError, match="no 'node9' in cluster bert: node0 to node3"):
        found.node("node9")


def test_a_name_in_use_is_refused(ctx: Context) -> None:
    bring_up(ctx, make_spec(nodes=1))

    with pytest.raises(UsageError, match="cluster 'bert' already exists: 1 instances"):
        check_name_is_free(ctx, "bert")
    check_name_is_free(ctx, "other")


def test_down_leaves_nothing(ctx: Context, clients: Clients, recorder: Recorder) -> None:
    bring_up(ctx, make_spec(nodes=3))
    found = describe_inventory(clients.ec2, "bert")
    assert set(found.ids()) >= {"instances", "security_groups", "key_pairs", "images", "snapshots"}

    kept = down(ctx, "bert", found, keep_image=False)

    assert not kept
    assert not describe_inventory(clients.ec2, "bert")
    assert not ctx.files.folder.exists()
    (terminate,) = recorder.of("TerminateInstances")
    assert len(terminate["InstanceIds"]) == 3
    order = recorder.operations()
    assert order.index("TerminateInstances") < order.index("DeleteSecurityGroup")
    assert order.index("DeregisterImage") < order.index("DeleteSnapshot")


def test_down_can_keep_the_image(ctx: Context, clients: Clients) -> None:
    bring_up(ctx, make_spec(nodes=2))

    kept = down(ctx, "bert", describe_inventory(clients.ec2, "bert"), keep_image=True)

    assert set(kept.ids()) == {"images", "snapshots"}
    assert not down(ctx, "bert", kept, keep_image=False)


def test_down_says_what_it_could_not_remove(
    ctx: Context, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up(ctx, make_spec(nodes=1))
    found = describe_inventory(clients.ec2, "bert")
    monkeypatch.setattr(clients.ec2, "delete_key_pair", lambda **_: None)

    with pytest.raises(SprError, match=r"still there after `down`: 1 key pairs \(spr-cluster-bert"):
        down(ctx, "bert", found, keep_image=False)


def test_down_waits_until_ec2_lets_go(
    ctx: Context, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up(ctx, make_spec(nodes=1))
    found = describe_inventory(clients.ec2, "bert")
    real, refusals = clients.ec2.delete_security_group, iter(range(3))

    def refuse_thrice(**params: Any) -> Any:
        if next(refusals, None) is not None:
            raise ClientError({"Error": {"Code": "DependencyViolation"}}, "DeleteSecurityGroup")
        return real(**params)

    monkeypatch.setattr(clients.ec2, "delete_security_group", refuse_thrice)

    assert not down(ctx, "bert", found, keep_image=False)


def test_what_failed_half_way_is_found_by_its_tags(
    aws: Cloud, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = make_context(aws, clients, Machines())
    spec = make_spec(nodes=2)
    up = Up(ctx, spec, load_stack("intel"))
    monkeypatch.setattr(up, "_create_image", lambda: (_ for _ in ()).throw(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        up.apply(plan_up(spec))

    found = describe_inventory(clients.ec2, "bert")
    assert set(found.ids()) >= {"instances", "security_groups", "key_pairs"}
    assert not down(ctx, "bert", found, keep_image=False)


def test_the_cloud_of_a_cluster_is_remembered(ctx: Context) -> None:
    bring_up(ctx, make_spec(nodes=1))

    assert remembered_cloud("bert") == ("aws", "us-east-1")
    assert remembered_cloud("other") is None


def test_cost_and_time_left_come_from_the_tags(ctx: Context, clients: Clients) -> None:
    bring_up(ctx, make_spec(nodes=1))
    (instance,) = describe_inventory(clients.ec2, "bert").instances

    assert instance.expires == NOW + timedelta(hours=8)
    assert instance.accrued_usd(instance.launch_time + timedelta(hours=2)) == pytest.approx(13.0944)


def test_a_time_to_live_that_is_over_buys_nothing_more(
    aws: Cloud, clients: Clients, recorder: Recorder
) -> None:
    machines = Machines()
    times = iter([NOW, NOW, NOW, NOW + timedelta(hours=9)])
    ctx = replace(make_context(aws, clients, machines), now=lambda: next(times))

    with pytest.raises(SprError, match="time to live is over before the worker nodes"):
        bring_up(ctx, make_spec(nodes=2))
    assert len(recorder.of("RunInstances")) == 1


def test_the_key_of_another_clouds_cluster_is_never_overwritten(ctx: Context) -> None:
    bring_up(ctx, make_spec(nodes=1))
    key = ctx.files.key.read_text()
    there = replace(ctx.cloud, region="eu-west-1")
    elsewhere = replace(ctx, cloud=there, clients=connect(there))

    with pytest.raises(UsageError, match="holds the key of a cluster 'bert' in aws us-east-1"):
        check_name_is_free(elsewhere, "bert")
    down(elsewhere, "bert", Inventory(), keep_image=False)
    assert ctx.files.key.read_text() == key


def test_where_a_kept_image_lies_is_remembered(ctx: Context, clients: Clients) -> None:
    bring_up(ctx, make_spec(nodes=2))

    down(ctx, "bert", describe_inventory(clients.ec2, "bert"), keep_image=True)

    assert not ctx.files.key.exists()
    assert remembered_cloud("bert") == ("aws", "us-east-1")


@pytest.mark.parametrize("name", ["..", "/etc", "", "*", ".local-cloud", "a/b"])
def test_no_name_leads_out_of_the_home_folder(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        ClusterFiles.of(name)
