"""Messages on an existing cluster: requests that can't be met, and things that are wrong.

Each row is a command, what is amiss, and the message, word for word; nothing may have changed. All
rows share one cluster, which is put right again after each.
"""

from __future__ import annotations

import re
import shlex
import urllib.request
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from urllib.error import URLError

import pytest

import infra.aws.cloud
from cluster.local_files import ClusterFiles
from infra.errors import HostError
from infra.files import write_private
from provision.host import Result
from tests.harness import failures as f
from tests.harness.command_line import CommandLine, files_at_home, open_command_line
from tests.infra.local.fakes import Endpoint

_OWNER = "arn:aws:iam::123456789012:user/spr-cluster"
_UP = "up --nodes 2 --yes"
_NEW = "up --name other --nodes 2 --yes"
_NO_KEY = (
    "\n  → use the machine that made the cluster, or let `ssh --authorize` there add your key; "
    "`spr-cluster down --name spr` works from any machine"
)
_OVER = (
    "the time to live of cluster 'spr' is over; its nodes are shutting down\n  → in two minutes, "
    "`spr-cluster up --name spr` creates a new one; to remove the rest: spr-cluster down "
    f"{f.FLAGS}"
)
_GRACE = (
    "the time to live of cluster 'spr' is over; its nodes wait for `fetch` until TIME if anything is only "
    "on them, and start nothing new\n  → to go on with them: spr-cluster extend 2h --name spr; results: "
    "spr-cluster fetch JOB --name spr"
)
_LONG_AGO = f.record("expires latest", "2020-01-01T00:00:00Z")
_BROKEN_RECORD = (
    "invalid cluster record in the tags of the security group: spr-cluster:{}\n"
    "  → restore the tags, or remove the cluster with `spr-cluster down --name spr`"
)
_STOPPED = (
    "the head node i-0 is stopped; it was not changed\n  → start it: aws ec2 start-instances "
    "--region us-east-1 --instance-ids i-0; or remove the cluster: spr-cluster down --name spr"
)
_BEGIN_ANEW = "or start over: spr-cluster down --name spr"
_TIMED_OUT = HostError("node1", "no SSH at 172.31.0.5: timed out")
_THROTTLED = f"DescribeInstances failed: RequestLimitExceeded: Request limit exceeded.{f.BUSY}"
_ALL_THROTTLED = "[[throttle]]\naction = 'DescribeInstances'\nrate = 1\n"
_UNREACHABLE = (
    'cannot reach AWS: Could not connect to the endpoint URL: "http://127.0.0.1:9/"\n'
    "  → check the network and --region"
)

_ON_A_CLUSTER = (
    f.Row(
        "key lost",
        _UP,
        f"cluster 'spr' belongs to another SSH key (SHA256:0) of {_OWNER}; this machine has none"
        "\n  → choose another --name, or use the machine that made the cluster; if the cluster is "
        "yours, `spr-cluster down --name spr` removes it from any machine",
        act=f.lose_key,
        code=2,
    ),
    f.Row(
        "key damaged",
        "repair --yes",
        "the cluster's key on this machine is damaged or not the right one "
        f"(HOME/spr/id_ed25519){_NO_KEY}",
        act=f.damage_key,
        code=2,
    ),
    *(
        f.Row(
            f"key open to others, {command.split()[0]}",
            command,
            "the cluster's key is readable by other users (HOME/spr/id_ed25519, mode 644); it was not used"
            "\n  → chmod 600 HOME/spr/id_ed25519",
            act=f.open_key,
            code=2,
        )
        for command in (_UP, "ssh", "train squad --demo")
    ),
    f.Row(
        "key lost, ssh",
        "ssh",
        f"the cluster's key is not on this machine (HOME/spr/id_ed25519){_NO_KEY}",
        act=f.lose_key,
        code=2,
    ),
    f.Row(
        "key damaged, extend",
        "extend 2h",
        "the cluster's key on this machine is damaged or not the right one "
        f"(HOME/spr/id_ed25519){_NO_KEY}",
        act=f.damage_key,
        code=2,
    ),
    f.Row(
        "key lost, verify",
        "verify",
        f"the cluster's key is not on this machine (HOME/spr/id_ed25519){_NO_KEY}",
        act=f.lose_key,
        code=2,
    ),
    f.Row(
        "no such node", "ssh node7", "no 'node7' in cluster 'spr': it has node0 to node1", code=2
    ),
    f.Row(
        "stack changed",
        "up --stack intel --yes",
        "--stack intel: cluster 'spr' was created with upstream, which can't be changed\n  → omit "
        f"--stack, {_BEGIN_ANEW}",
        code=2,
    ),
    f.Row(
        "disk changed",
        "up --volume-gib 200 --yes",
        "--volume-gib 200: cluster 'spr' was created with 100, which can't be changed\n  → omit "
        f"--volume-gib, {_BEGIN_ANEW}",
        code=2,
    ),
    f.Row(
        "subnet changed",
        "up --subnet-id subnet-1 --yes",
        "--subnet-id subnet-1: cluster 'spr' was created without it, which can't be changed\n  → "
        f"omit --subnet-id, {_BEGIN_ANEW}",
        code=2,
    ),
    f.Row(
        "type changed",
        "up --instance-type c7i.metal-24xl --yes",
        "--instance-type c7i.metal-24xl: the machines of cluster 'spr' are r7iz.metal-16xl\n  "
        "→ leave --instance-type out, or start over: spr-cluster down " + f.FLAGS,
        code=2,
    ),
    f.Row(
        "name of another cloud",
        "up --cloud local",
        "this machine has the key of another cluster 'spr', in aws us-east-1\n  → choose another "
        f"--name, or remove that cluster: spr-cluster down {f.NEW_FLAGS}",
        code=2,
    ),
    f.Row(
        "not on a terminal",
        "down",
        "this needs confirmation, but there is no terminal\n  → --yes confirms",
        code=2,
    ),
    f.Row(
        "too long a life",
        "extend 30d",
        "cluster 'spr' would live until TIME; the maximum is 30 days from now\n  → its nodes shut "
        "down at TIME now",
        code=2,
    ),
    f.Row("time over", _UP, _OVER, act=_LONG_AGO),
    f.Row("grace", _UP, _GRACE, act=f.record("expires", "2020-01-01T00:00:00Z")),
    f.Row("time over, extend", "extend 2h", _OVER, act=_LONG_AGO),
    f.Row(
        "record changed",
        _UP,
        _BROKEN_RECORD.format("nodes is 'many'"),
        act=f.record("nodes", "many"),
    ),
    f.Row(
        "record changed, ssh",
        "ssh",
        _BROKEN_RECORD.replace("spr-cluster:", "", 1).format(
            "--market '': expected 'on-demand', 'spot' or 'spot-or-on-demand'"
        ),
        act=f.record("market", ""),
    ),
    f.Row(
        "record changed, train",
        "train squad --demo",
        _BROKEN_RECORD.format("expires is 'never'"),
        act=f.record("expires", "never"),
    ),
    f.Row("head stopped", "repair --yes", _STOPPED, act=f.stop_head),
    f.Row(
        "a job runs",
        "up --nodes 1 --yes",
        "job squad-1 is still running on this cluster\n  → wait for it to end, or save a "
        f"checkpoint and end it: spr-cluster cancel squad-1 {f.FLAGS}",
        act=f.all_of(
            f.stage("node0", "^squeue ", Result(0, "7|RUNNING|node[0-1]|None|squad-1\n", "")),
            f.stage(
                "node0", "^# listing the nodes", Result(0, "Host node1 HostName 172.31.0.5", "")
            ),
        ),
        code=2,
    ),
    f.Row(
        "a silent worker, train",
        "train squad --demo",
        "inspecting the nodes failed on 1 of 2 nodes:\n  [node1] no SSH at "
        "172.31.0.5: timed out\n  → `spr-cluster repair --name spr` replaces nodes that don't "
        "answer",
        act=f.stage("node1", ".", _TIMED_OUT),
    ),
)
_OF_THE_CLOUD = (
    f.Row("throttled for ever", _UP, _THROTTLED, faults=_ALL_THROTTLED),
    f.Row("throttled for ever, list", "list", _THROTTLED, faults=_ALL_THROTTLED),
    f.Row(
        "region not enabled",
        "status",
        "DescribeInstances failed: OptInRequired: told by EC2\n  → enable the region in the "
        "console (Account, AWS Regions), or complete the account's registration",
        faults=f.error("DescribeInstances", "OptInRequired"),
    ),
    f.Row("AWS not reachable", "status", _UNREACHABLE, act=f.be_unreachable),
    f.Row("AWS not reachable, down", "down --yes", _UNREACHABLE, act=f.be_unreachable),
    f.Row(
        "a network's login page",
        _UP,
        "the response is not from AWS\n  → check for a proxy or a network login page between this "
        "machine and AWS",
        act=f.show_login_page,
        breaks_contract="* answer : the body is no XML",
    ),
    f.Row(
        "no default VPC",
        _NEW,
        "no default subnet in us-east-1: the account has no default VPC there\n  → create one: "
        "`aws ec2 create-default-vpc --region us-east-1`; or choose a subnet with --subnet-id",
        act=f.remove_default_vpc,
        code=2,
    ),
    f.Row(
        "quota too small",
        _NEW,
        "quota L-1216C47A is 32 vCPUs: 2 nodes of r7iz.metal-16xl need 128\n  → request more in "
        "the console's Service Quotas, or use fewer --nodes or a smaller --instance-type",
        faults="[quota]\non_demand_vcpus = 32\n",
        code=2,
    ),
    f.Row(
        "quota for spot too small",
        f"{_NEW} --market spot",
        "quota L-34B43A08 is 64 vCPUs: 2 nodes of r7iz.metal-16xl need 128\n  → request more in "
        "the console's Service Quotas, or use fewer --nodes or a smaller --instance-type",
        faults="[quota]\nspot_vcpus = 64\n",
        code=2,
    ),
    f.Row(
        "no image of Ubuntu",
        _NEW,
        "Canonical publishes no image of Ubuntu 24.04 in us-east-1\n  → use another --region",
        faults=f.error("GetParameter", "ParameterNotFound"),
    ),
    f.Row(
        "type not in the region",
        f"{_NEW} --region sa-east-1",
        "r7iz.metal-16xl: not offered in sa-east-1\n  → use another --region (us-east-1 offers all "
        "of them) or another --instance-type",
        code=2,
    ),
)


@pytest.fixture(scope="module")
def standing(endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A cluster of two nodes that is whole, and its keys on this machine."""
    folder = tmp_path_factory.mktemp("standing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPR_CLUSTER_HOME", str(folder / "home"))
        with open_command_line(endpoint, folder, patch) as line:
            line.must(*shlex.split(_UP))
            yield line


@pytest.fixture
def line(standing: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    """That cluster, put right again after the test."""
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(standing.cloud.machines.root.parent / "home"))
    key = ClusterFiles.of("spr").key
    backend, private = standing.cloud.fake.backend, key.read_text()
    subnets = {zone: dict(found) for zone, found in backend.subnets.items()}
    tags, head = deepcopy(backend.tags), standing.ids()[0]
    yield standing
    standing.machines.staged.clear()
    standing.call_log.instead, standing.url = None, ""
    standing.cloud.faults("")
    backend.tags, backend.subnets = tags, type(backend.subnets)(dict, subnets)
    backend.start_instances([head])
    write_private(key, private)


@f.rows(_ON_A_CLUSTER, _OF_THE_CLOUD)
def test_a_refusal_changes_nothing_and_gives_the_reason(line: CommandLine, row: f.Row) -> None:
    row.act(line)
    line.cloud.faults(row.faults)
    before, files = line.changes, files_at_home()

    result = line.run(*shlex.split(row.argv))

    assert f.plain(result.message) == row.message
    assert result.code == row.code
    assert result.err.count("spr-cluster: ") == 1
    assert "Traceback" not in result.err
    assert line.changes == before
    assert files_at_home() == files


@pytest.mark.parametrize("argv", [_UP, "down --yes", "repair --yes", "extend 2h"])
def test_a_locked_cluster_is_reported(line: CommandLine, argv: str) -> None:
    before = line.changes
    with ClusterFiles.of("spr").lock():
        result = line.run(*shlex.split(argv))

    assert (result.code, line.changes) == (2, before)
    text = r"another spr-cluster command \(PID \d+\) is using cluster 'spr'"
    assert re.fullmatch(
        f"{text}\n  → wait for it to finish, or stop it with Ctrl-C", result.message
    )


@pytest.mark.parametrize("argv", [_NEW, "down --yes"])
def test_an_unusable_home_is_named(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch, argv: str
) -> None:
    monkeypatch.setenv("SPR_CLUSTER_HOME", "/dev/null/x")
    before = line.changes

    result = line.run(*shlex.split(argv))

    assert (result.code, line.changes) == (1, before)
    assert result.message == (
        "/dev/null/x: Not a directory\n  → does it exist, is there space, and may this user access "
        "it? SPR_CLUSTER_HOME sets where this tool keeps its files"
    )


def test_an_unknown_public_address_is_requested_from_the_user(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    opened = line.open_cloud("aws", None, None)
    blind = replace(opened, caller_cidr=infra.aws.cloud.find_caller_cidr)
    monkeypatch.setattr(line, "open_cloud", lambda *_: blind)
    before = line.changes

    result = line.run(*shlex.split(_NEW))

    assert (result.code, line.changes) == (1, before)
    assert result.message == (
        "cannot determine this machine's public address from https://checkip.amazonaws.com: "
        "<urlopen error no route to host>\n  → specify the addresses that may use SSH: --ssh-cidr "
        "203.0.113.7/32"
    )
