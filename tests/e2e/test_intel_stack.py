"""The published software, IPEX and oneCCL, as a product: `--stack intel` on the embedded cloud.

SPR_TEST_ONECCL_WHEEL is the path of a wheel of oneCCL's bindings for PyTorch 2.7.0 and this machine's Python:
no public index has one. pip takes it from there on the nodes, and the rest from this machine's sources.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import CommandLine, LiveCluster, podman

_WHEEL = os.environ.get("SPR_TEST_ONECCL_WHEEL", "")
_HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()
_CPUS = sorted(os.sched_getaffinity(0))
pytestmark = [
    *(pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(3600)),
    pytest.mark.skipif(not _WHEEL, reason="SPR_TEST_ONECCL_WHEEL names no wheel of the bindings"),
]


@pytest.fixture(scope="module")
def intel(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    cli = CommandLine(tmp_path_factory.mktemp("intel"), programs)
    folder = Path(_WHEEL).resolve().parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", f"{os.environ.get('PIP_FIND_LINKS', '')} {folder}")
        yield LiveCluster(cli, cli.json("up", "--stack=intel", "--nodes=3", "--cloud=local"))
        cli.run("down", "--yes", check=None)
        cli.run("local", "reset", "--keep-base", check=None)


def give_cpus(cluster: LiveCluster, cpus: list[int]) -> None:
    for node in cluster.names:
        podman("update", f"--cpuset-cpus={','.join(map(str, cpus))}", cluster.container(node))
        # Its affinity, which jobs inherit, is that of its start.
        cluster.cli.ssh(node, "sudo systemctl restart slurmd")
    cluster.wait_until_idle()


def test_the_published_software_as_a_whole(intel: LiveCluster) -> None:
    cli = intel.cli

    def submit(*options: str) -> str:
        fixed = ("--demo", "--dtype", "fp32", "--epochs", "12", "--checkpoint-every", "5")
        return str(cli.json("train", "squad", *fixed, *options, "--detach")["job"])

    def finish(job: str) -> tuple[list[Any], str]:
        cli.run("wait", job)
        read = f"cd spr-jobs/{job}/output; sha256sum model/model.safetensors; cat results.json"
        digest, _, results = cli.ssh("node0", read).partition("\n")
        return json.loads(results)["loss_curve"], digest

    def signal_after(job: str, step: int, name: str) -> None:
        found = f"ls spr-jobs/{job}/output/checkpoints 2>/dev/null | awk -F- '$2 >= {step}'"
        cli.ssh("node0", f'until [ -n "$({found})" ]; do sleep 0.2; done')
        cli.ssh("node1", f"pkill -{name} -f worker.tasks")

    verdicts = {c["verdict"] for c in cli.json("verify")["checks"] if c["check"] == "amx"}
    assert verdicts == {"ok" if _HAS_AMX else "warn"}
    # As many computing threads as beside a worker of oneCCL.
    give_cpus(intel, _CPUS[:1])
    gloo = {nodes: finish(submit("--nodes", nodes, "--backend", "gloo")) for nodes in "23"}
    give_cpus(intel, _CPUS[:2])
    ccl = {nodes: finish(submit("--nodes", nodes)) for nodes in "23"}
    assert ccl["2"] == gloo["2"]
    # The sum of three numbers depends on their order.
    assert ccl["3"][0][-1][1] == pytest.approx(gloo["3"][0][-1][1], abs=0.01)

    job = submit("--retries", "2")
    signal_after(job, 10, "KILL")
    signal_after(job, 40, "STOP")
    assert finish(job)[1] == ccl["3"][1]
    assert '"attempt": 3' in cli.ssh("node0", f"cat spr-jobs/{job}/end.json")

    job = submit()
    signal_after(job, 10, "CONT")
    cli.run("cancel", job)
    cli.run("train", "squad", "--resume", job, "--detach")
    assert finish(job)[1] == ccl["3"][1]
    cli.run("bench", "--seconds", "1")
