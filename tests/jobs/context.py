"""A cluster of three nodes with faked SSH, and the context in which jobs run on it."""

from __future__ import annotations

import io
import json
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from cluster.nodes import Cluster
from infra.ec2 import tags
from infra.plan.planner import mesh_digest
from jobs.cli import build_parser
from jobs.places.placement import Placement
from jobs.places.plan import JobPaths, new_job_id
from jobs.places.queue.session import JobContext
from jobs.places.record import JobRecord
from jobs.worker.runtime.cores import CoreShare
from jobs.worker.runtime.events import parse_event
from jobs.worker.spec import JobSpec, PlacementOptions
from jobs.worker.supervisor.attempt import choose_cause
from jobs.worker.supervisor.launch import SECRETS, build_argv, parse_launch
from provision.stacks.load import load_stack
from tests.cluster.test_ssh_mesh import NODES
from tests.fakes import FakeHost, facts_answer

NOW = datetime(2026, 7, 31, 14, 25, 1, tzinfo=timezone.utc)
PATHS = JobPaths(new_job_id("squad", NOW))
RESULT = {"event": "result", "f1": 90.0}
SUBMITTED = JobRecord(
    job="squad-1",
    kind="squad",
    cluster="bert",
    cloud="local",
    region="local",
    billed=False,
    usd_per_hour=None,
    price_source="",
    command="x",
    argv=("x",),
    mpirun="mpirun x",
    nodes=tuple({"name": f"node{number}", "instance": f"i-{number}"} for number in range(3)),
    nnodes=3,
    placement=Placement(
        nproc_per_node=1,
        omp_threads=1,
        ccl_workers=0,
        shares=tuple((CoreShare((number,), (), 0),) for number in range(3)),
        backend="gloo",
        interface="eth0",
        tcmalloc=None,
        iomp5=None,
    ),
    options=PlacementOptions(),
    env={},
    resumable=True,
    gather_output=True,
    stack="upstream",
    packages=(),
    when=NOW.isoformat(),
)


def event(**fields: Any) -> str:
    """A line by which a rank reports an event."""
    return "@spr " + json.dumps(fields)


def listed(job: str, checkpoint: str = "", **more: Any) -> str:
    """An unfinished training job that has failed, as the head lists it; ``more`` changes that."""
    row = {
        "job": job,
        "queue": [],
        "submitted": 100,
        "begin": {},
        "end": {"state": "failed"},
        "cancelled": False,
        "has_model": False,
        "unfinished": True,
        "checkpoint": checkpoint or None,
        "size_kib": 4,
    }
    return json.dumps({**row, **more}) + "\n"


def ended(output: Sequence[str] = (), exit_code: int | None = 0, **more: Any) -> str:
    """The file that a job leaves which printed ``output``."""
    errors = [found for line in output if (found := parse_event(line)) and "message" in found]
    cause = choose_cause(errors)
    end = {
        "state": "failed" if exit_code else "succeeded",
        "exit_code": cause.get("exit_code", exit_code),
        "began": 1_800_000_000.0,
        "ended": 1_800_000_007.5,
        **{name: cause.get(name) for name in ("rank", "host", "message")},
    }
    return json.dumps({**end, **more}) + "\n"


def whole_cluster() -> Cluster:
    """Three nodes, connected with one another."""
    head, *workers = NODES
    digest = mesh_digest([node.instance for node in NODES])
    instance = replace(head.instance, tags={tags.MESH: digest})
    return Cluster("bert", (replace(head, instance=instance), *workers), len(NODES))


def mpirun_line(head: FakeHost, paths: JobPaths = PATHS) -> str:
    """The mpirun command of a job that was submitted, on the first nodes of the cluster."""
    script = head.files[paths.uploaded("run.sh")].decode()
    nodes = int(script.partition("--nodes=")[2].splitlines()[0])
    launch = parse_launch(head.files[paths.uploaded("launch.json")].decode())
    return shlex.join(build_argv(launch, list(launch.pinning)[:nodes], NODES[0].private_ip))


def _planned(head: FakeHost) -> list[str]:
    """The first nodes, as many as the last job requires."""
    script = next(text for path, text in reversed(head.files.items()) if "/run.sh" in path)
    return [node.name for node in NODES[: int(script.partition(b"--nodes=")[2].split()[0])]]


def interrupt(_: str) -> str:
    """The answer of a node while Ctrl-C is pressed."""
    raise KeyboardInterrupt


def make_hosts(output: list[str], exit_code: int = 0) -> dict[str, FakeHost]:
    """Nodes on which a job prints ``output`` and ends with ``exit_code``."""
    hosts: dict[str, FakeHost] = {}
    for node in NODES:
        facts = facts_answer(hostname=f"host-of-{node.name}", address=node.private_ip)
        answers: list[Any] = [
            ("^# querying the facts", facts),
            ("# listing the jobs", ""),
            ("# distributing the job's files", ""),
            ("# submitting a job", ""),
            ("# following a job", "\n".join(output)),
            ("# collecting the results", "at 5\n"),
            ("cat .*/end.json", lambda _: ended(output, exit_code, nodes=_planned(hosts["node0"]))),
        ]
        hosts[node.name] = FakeHost(node.name, answers)
    files = {"log": b"log", "output/results.json": json.dumps({"f1": 90.0}).encode()}
    hosts["node0"].files["results.tar"] = pack_output(files)
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


def sent_variables(head: FakeHost, paths: JobPaths = PATHS) -> list[str]:
    """The variables that came with a job's submission."""
    found: list[str] = json.loads(head.files.get(f"{paths.root}/{SECRETS}.{paths.new}", b"[]"))
    return found


def job_spec(**flat: Any) -> JobSpec:
    """A job's value from the names of its parts' fields, such as ``nodes`` and ``retries``."""
    spec = JobSpec()
    for part in ("work", "resources", "storage", "recovery", "ending"):
        value = getattr(spec, part)
        own = {name: flat.pop(name) for name in [*flat] if name in vars(value)}
        spec = replace(spec, **{part: replace(value, **own)})
    assert not flat
    return spec


def parse_request(*words: str) -> Any:
    """What a command is asked to do by a command line."""
    return build_parser(words[0]).parse(words)[1]


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
