"""Messages on an existing cluster: requests that can't be met, and things that are wrong.

Each row is a command and what is amiss; ``golden/cluster.txt`` has the messages. Nothing may have
changed. All rows share one cluster, which is put right again after each.
"""

from __future__ import annotations

import re
import shlex
import urllib.request
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import pytest

import infra.aws.cloud
from cluster.local_files import ClusterFiles
from infra.errors import HostError
from infra.files import write_private
from provision.host import Result
from tests.golden import check_section
from tests.harness import failures as f
from tests.harness.command_line import CommandLine, files_at_home, open_command_line
from tests.infra.local.fakes import Endpoint

_GOLDEN = Path(__file__).parent / "golden" / "cluster.txt"
_UP = "up --nodes 2 --yes"
_SMALLER = "up --nodes 1 --yes"
_NEW = "up --name other --nodes 2 --yes"
_LONG_AGO = f.record("expires latest", "2020-01-01T00:00:00Z")
_TIMED_OUT = HostError("node1", "no SSH at 172.31.0.5: timed out")
_ALL_THROTTLED = "[[throttle]]\naction = 'DescribeInstances'\nrate = 1\n"
_A_JOB_RUNS = f.stage(
    "node0", "^echo; timeout 20 squeue ", Result(0, "7|RUNNING|node[0-1]|None|squad-1\n", "")
)


def _slurm_lists(text: str) -> f.Act:
    return f.all_of(_A_JOB_RUNS, f.stage("node0", "^# listing", Result(0, text, "")))


_ON_A_CLUSTER = (
    f.Row("key lost", _UP, act=f.lose_key, code=2),
    f.Row("key damaged", "repair --yes", act=f.damage_key, code=2),
    *(
        f.Row(f"key open to others, {command.split()[0]}", command, act=f.open_key, code=2)
        for command in (_UP, "ssh")
    ),
    f.Row("key lost, ssh", "ssh", act=f.lose_key, code=2),
    f.Row("no such node", "ssh node7", code=2),
    f.Row("stack changed", "up --stack intel --yes", code=2),
    f.Row("subnet changed", "up --subnet-id subnet-1 --yes", code=2),
    f.Row("private cleared", "up --no-private --yes", act=f.record("private", "yes"), code=2),
    f.Row("type changed", "up --instance-type c7i.metal-24xl --yes", code=2),
    f.Row("name of another cloud", "up --cloud local", code=2),
    f.Row("not on a terminal", "down", code=2),
    f.Row("too long a life", "extend 30d", code=2),
    f.Row("another account", "down --yes", 'account = "210987654321"\n', code=2),
    f.Row("no record", "repair --yes", act=f.lose_record, code=2),
    f.Row("time over", _UP, act=_LONG_AGO),
    f.Row("grace", _UP, act=f.record("expires", "2020-01-01T00:00:00Z")),
    f.Row("record changed", _UP, act=f.record("nodes", "many")),
    f.Row("record changed, ssh", "ssh", act=f.record("market", "")),
    f.Row("head stopped", "repair --yes", act=f.stop_head),
    f.Row("a job runs", _SMALLER, act=_slurm_lists(" Hello\nnode0 172.31.0.4\nnode1 172.31.0.5\n"), code=2),
    f.Row("a job runs on a node that Slurm does not list", _SMALLER, act=_slurm_lists("node1 172.31.0.5\n")),
    f.Row("a silent worker, train", "train squad --demo", act=f.stage("node1", ".", _TIMED_OUT)),
)  # fmt: skip
_NO_XML = "* answer : the body is no XML"
_OF_THE_CLOUD = (
    f.Row("throttled for ever", _UP, _ALL_THROTTLED),
    f.Row("region not enabled", "status", f.error("DescribeInstances", "OptInRequired")),
    f.Row("AWS not reachable", "status", act=f.be_unreachable),
    f.Row("a network's login page", _UP, act=f.show_login_page, breaks_contract=_NO_XML),
    f.Row("no default VPC", _NEW, act=f.remove_default_vpc, code=2),
    f.Row("quota too small", _NEW, "[quota]\non_demand_vcpus = 32\n", code=2),
    f.Row("no image of Ubuntu", _NEW, f.error("GetParameter", "ParameterNotFound")),
    f.Row("type not in the region", f"{_NEW} --region sa-east-1", code=2),
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

    check_section(_GOLDEN, row.name, f.plain(result.message))
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


def test_an_unusable_home_is_named(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPR_CLUSTER_HOME", "/dev/null/x")
    before = line.changes

    result = line.run(*shlex.split(_NEW))

    assert (result.code, line.changes) == (1, before)
    check_section(_GOLDEN, "unusable home", result.message)


def test_an_unknown_public_address_is_requested_from_the_user(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", fail)
    opened = line.open_cloud("aws", None, None)
    blind = replace(opened, caller_cidr=infra.aws.cloud.find_caller_cidr)
    monkeypatch.setattr(line, "open_cloud", lambda *_: blind)
    before = line.changes

    result = line.run(*shlex.split(_NEW))

    assert (result.code, line.changes) == (1, before)
    check_section(_GOLDEN, "unknown address", result.message)
