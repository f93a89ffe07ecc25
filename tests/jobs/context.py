"""A cluster of three nodes with faked SSH, and the context in which jobs run on it."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from cluster.nodes import Cluster
from infra import tags
from infra.plan import mesh_digest
from jobs.launch.plan import JobPaths, new_job_id
from jobs.launch.session import JobContext
from provision.stacks.load import load_stack
from tests.cluster.test_ssh_mesh import NODES
from tests.fakes import FakeHost, facts_answer

NOW = datetime(2026, 7, 31, 14, 25, 1, tzinfo=timezone.utc)
PATHS = JobPaths(new_job_id("squad", NOW))
RESULT = {"event": "result", "f1": 90.0}


def event(**fields: Any) -> str:
    """A line by which a rank reports an event."""
    return "@spr " + json.dumps(fields)


def listed(job: str, checkpoint: str) -> str:
    """An unfinished training job, as the head's script lists it."""
    return f"100 - 0 - 0 unfinished {checkpoint or '-'} 4 {job}"


def whole_cluster() -> Cluster:
    """Three nodes, connected with one another."""
    head, *workers = NODES
    digest = mesh_digest([node.instance for node in NODES])
    instance = replace(head.instance, tags={tags.MESH: digest})
    return Cluster("bert", (replace(head, instance=instance), *workers), len(NODES))


def make_hosts(output: list[str], exit_code: int = 0, busy: str = "") -> dict[str, FakeHost]:
    """Nodes on which a job prints ``output`` and ends with ``exit_code``."""
    hosts = {}
    for node in NODES:
        facts = facts_answer(hostname=f"host-of-{node.name}", address=node.private_ip)
        answers: list[Any] = [
            ("^# querying the facts", facts),
            ("for pid in", busy),
            ("listing the jobs", ""),
            ("tail -n \\+2 ~/hosts", ""),
            ("setsid -f", ""),
            ("tail -n \\+1 -F", "\n".join(output)),
            ("cat .*/exit$", str(exit_code)),
            ("tar -C .*output.tar", ""),
            ("rm -f", ""),
        ]
        hosts[node.name] = FakeHost(node.name, answers)
    files = {"log": b"log", "output/results.json": json.dumps({"f1": 90.0}).encode()}
    hosts["node0"].files[f"{PATHS.root}/output.tar"] = pack_output(files)
    return hosts


def pack_output(files: Mapping[str, bytes]) -> bytes:
    """The archive in which the head sends a job's files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def job_context(
    hosts: Mapping[str, FakeHost],
    *,
    log: list[str] | None = None,
    events: list[Any] | None = None,
    stack: str = "upstream",
    **more: Any,
) -> JobContext:
    """The context of a job on three nodes, whose log lines and events are appended to lists."""
    context = JobContext(
        whole_cluster(), load_stack(stack), lambda node: hosts[node.name], NOW, **more
    )
    return replace(
        context,
        on_log=(log if log is not None else []).append,
        on_event=(events if events is not None else []).append,
    )
