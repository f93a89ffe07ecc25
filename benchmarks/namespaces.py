"""Ranks on nodes that are network namespaces, connected by a bridge. Root only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.common import ROOT
from infra.local.machines.links import LinkLimits, tc_commands

CABLE = "cable"
"""Each node's network interface."""
_BRIDGE, _NETWORK = "spr-nodes", "10.213.77"


@contextmanager
def connected_nodes(count: int, limits: LinkLimits) -> Iterator[list[str]]:
    """Make nodes for the duration of a ``with`` block, and return their names."""
    nodes = [f"{_BRIDGE}{number}" for number in range(count)]
    try:
        _run("ip", "link", "add", _BRIDGE, "up", "type", "bridge")
        for number, node in enumerate(nodes):
            _run("ip", "netns", "add", node)
            _run("ip", "link", "add", node, "type", "veth", "peer", "name", CABLE, "netns", node)
            _run("ip", "link", "set", node, "master", _BRIDGE, "up")
            _run("ip", "-n", node, "address", "add", f"{_NETWORK}.{number + 1}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                _run("ip", "-n", node, "link", "set", device, "up")
            for command in tc_commands(limits, CABLE):
                _run("ip", "netns", "exec", node, *command)
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", _BRIDGE], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def run_ranks(
    nodes: Sequence[str], argv: Sequence[str], environ: Mapping[str, str], *, ppn: int = 1
) -> list[Any]:
    """Run ``python -m argv --rank=N`` as ``ppn`` ranks on each node; return their last lines' JSON."""
    ranks = range(len(nodes) * ppn)
    running = [_start(nodes, argv, environ, rank, ppn) for rank in ranks]
    try:
        answers = [process.communicate(timeout=3600)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit("a rank failed: see above")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def _start(
    nodes: Sequence[str], argv: Sequence[str], environ: Mapping[str, str], rank: int, ppn: int
) -> subprocess.Popen[str]:
    own = {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(len(nodes) * ppn),
        "MPI_LOCALRANKID": str(rank % ppn),
        "MPI_LOCALNRANKS": str(ppn),
        "MASTER_ADDR": f"{_NETWORK}.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": CABLE,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # It warns that no name belongs to a namespace's address.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", nodes[rank // ppn], sys.executable, "-m", *argv, f"--rank={rank}"],
        cwd=ROOT,
        env={**os.environ, **own, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )
