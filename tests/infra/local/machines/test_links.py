"""Shaped network interfaces: the kernel's own account of them, in a network of the test's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.errors import CloudError, UsageError
from infra.local.machines.links import LinkLimits, require_shaping, shape, tc_commands
from jobs.__main__ import main
from tests.infra.local.fakes import FakeCloud, FakePodman


@pytest.fixture
def node() -> Iterator[int]:
    """The process of a network that has an interface as a node has."""
    script = "ip link add eth0 type veth peer name eth1 && echo ready && exec cat"
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def shaping_of(pid: int) -> list[dict[str, Any]]:
    argv = ["nsenter", "--net", "--target", str(pid), "tc", "-json", "qdisc", "show", "dev", "eth0"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=10)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return [each for each in found if each["kind"] != "noqueue"]


def test_a_limit_is_set_replaced_and_lifted(node: int) -> None:
    for gbit_s in (10, 0.5):
        shape(node, LinkLimits(gbit_s))
        (found,) = shaping_of(node)
        assert (found["kind"], found["options"]["rate"]) == ("tbf", gbit_s * 1e9 / 8)
    shape(node, LinkLimits())
    assert shaping_of(node) == []


def test_a_network_that_is_gone_is_an_error_only_if_it_is_to_be_limited() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    shape(ended.pid, LinkLimits())
    with pytest.raises(CloudError, match="can't limit a node's network: nsenter"):
        shape(ended.pid, LinkLimits(1))


def test_a_delay_comes_before_the_limit() -> None:
    delay, limit = tc_commands(LinkLimits(25, 0.05), "eth0")
    assert " ".join(delay).endswith("root handle 1: netem delay 0.05ms limit 100000")
    assert " ".join(limit).endswith("parent 1:1 tbf rate 25000000000bit burst 6250000 latency 50ms")
    assert tc_commands(LinkLimits(), "eth0") == []


def test_a_file_is_refused_if_the_kernel_can_not_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path))
    trial = ["unshare", "--net", *tc_commands(LinkLimits(delay_ms=0.1), "lo")[0]]
    able = subprocess.run(trial, capture_output=True, check=False, timeout=10).returncode == 0
    file = tmp_path / "slow.toml"
    file.write_text("[network]\ngbit_s = 10\ndelay_ms = 0.1\n")
    assert main(["local", "faults", str(file)]) == (0 if able else 2)
    assert ("network.delay_ms: this machine's kernel" in capsys.readouterr().err) != able


def test_without_the_program_that_shapes_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"network.gbit_s: .*unshare"):
        require_shaping(LinkLimits(1))


def test_running_nodes_and_new_ones_follow_the_faults_file(
    fake_cloud: FakeCloud, podman: FakePodman
) -> None:
    fake_cloud.run()
    assert fake_cloud.podman.links == {}
    fake_cloud.faults("[network]\ngbit_s = 2.5\n")
    fake_cloud.run()
    fake_cloud.ec2.describe_instances()
    running = [each.pid for each in podman.state.values()]
    assert podman.links == dict.fromkeys(running, LinkLimits(2.5))
    fake_cloud.faults("")
    fake_cloud.ec2.describe_instances()
    assert podman.links == dict.fromkeys(running, LinkLimits())
