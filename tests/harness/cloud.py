"""Embedded cloud with simulated machines in a separate process: EC2 for the harness."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from moto.iam.models import iam_backends
from moto.scheduler.models import scheduler_backends

from infra.aws.clients import Clients, connect
from infra.aws.cloud import Cloud
from infra.ec2.cluster_record import GENERATION
from infra.ec2.tags import OWNER_KEY
from infra.local.machines.podman import ContainerSpec
from tests.cloud.faults import Faults
from tests.harness import botocore_files
from tests.harness.contract import KNOWN_DEVIATIONS, Contract, watching
from tests.harness.shared_time import SharedTime
from tests.harness.simulated_machines import SimulatedMachines, host_key_of
from tests.infra.hasty_time import AtOnce
from tests.infra.local.fakes import CREDENTIALS, Endpoint, FakeCloud, FakePodman, state_folder

_START_S = 60
CALLER = "203.0.113.7/32"


class SimulatedEngine(FakePodman):
    """podman as a dictionary; its containers are simulated machines."""

    def __init__(self, machines: SimulatedMachines) -> None:
        super().__init__()
        self.machines = machines
        self.cloud: FakeCloud | None = None
        self.ends_on_time = False
        """Whether machines shut themselves down at their deadline."""
        self.is_held = False
        """Whether they are held until their latest end."""
        self.lives: dict[str, list[float]] = {}
        """When each machine was launched and, if it has ended, when that was."""

    def is_alive(self, pid: int) -> bool:
        if self.ends_on_time:
            self._end_on_time()
        return super().is_alive(pid)

    def _end_on_time(self) -> None:
        assert self.cloud is not None
        now = self.cloud.application.runtime.clock.time()
        for name in [c.name for c in self.state.values() if c.running]:
            machine = self.machines.read(_instance_of(name))
            end = machine.get("expires", machine["launch_expires"])
            end = int(machine["rest"].split()[0]) if self.is_held else end
            if end <= now:
                self.end(name, 130)

    def start(self, name: str) -> None:
        super().start(name)
        spec: ContainerSpec = self.specs[name]
        instance_id = _instance_of(name)
        fate = self.cloud.fate_of(instance_id) if self.cloud else ""
        image = spec.image.name if isinstance(spec.image, Path) else ""
        content = (spec.mounts[0].source / "user-data").read_bytes()
        is_ours = content.startswith(b"\x1f\x8b")
        user_data = (gzip.decompress(content) if is_ours else content).decode()
        faults = self.cloud.application.faults.now if self.cloud else Faults()
        rate = faults.disk.first_read_mib_s if image else None
        if self.cloud:
            self.lives[instance_id] = [self.cloud.application.runtime.clock.time()]
        self.machines.begin(instance_id, spec.address, fate, image, user_data, rate)

    def end(self, name: str, exit_code: int) -> None:
        super().end(name, exit_code)
        self._end_life(name)

    def remove(self, names: Any) -> None:
        listed = list(names)
        super().remove(listed)
        for name in listed:
            self._end_life(name)

    def _end_life(self, name: str) -> None:
        instance_id = _instance_of(name)
        self.machines.end(instance_id)
        life = self.lives.get(instance_id)
        if self.cloud and life and len(life) == 1:
            life.append(self.cloud.application.runtime.clock.time())

    def copy_disk(self, container: str, target: Path) -> None:
        self.machines.copy_disk(_instance_of(container), target.stem)
        super().copy_disk(container, target)

    def host_keys(self, pid: int, made: str, proc: Path = Path("/proc")) -> tuple[str, ...]:
        names = [c.name for c in self.state.values() if c.pid == pid]
        return tuple(f"{host_key_of(_instance_of(name))} root@fake" for name in names)


def _instance_of(container: str) -> str:
    return "i-" + container.partition("-i-")[2]


def make_cloud(url: str) -> Cloud:
    """Return the cloud at a harness's address. Its machines have AMX."""
    return Cloud(
        name="local",
        region="us-east-1",
        caller_cidr=lambda: CALLER,
        billed=False,
        has_amx=True,
        endpoint_url=url,
        credentials=CREDENTIALS,
    )


@dataclass
class CloudProcess:
    """A server in another process, controlled over a pipe."""

    url: str
    root: Path
    time: SharedTime
    process: subprocess.Popen[str]
    clients: Clients
    """For forks of this process, in which each finds them unused."""

    @property
    def machines(self) -> Path:
        return self.root / "machines"

    def ask(self, question: str, text: str = "") -> Any:
        """Have the server do something; returns its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([question, text]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the harness's cloud has ended"
        return json.loads(answer)

    def new(self, faults: str = "") -> None:
        """Begin with an empty cloud, and these faults."""
        self.ask("new", faults)

    def faults(self, text: str) -> None:
        self.ask("faults", text)

    def left(self) -> list[str]:
        """The ids of all that exists, found without tags or filters."""
        found: list[str] = self.ask("left")
        return found

    def launched(self) -> int:
        """How many machines were launched since the faults were last set."""
        count: int = self.ask("launched")
        return count

    def calls(self) -> Counter[str]:
        """EC2's calls by action since the last :meth:`new`."""
        return Counter(self.ask("calls"))

    def connect(self) -> Clients:
        return connect(make_cloud(self.url))


@contextmanager
def cloud_process(root: Path) -> Iterator[CloudProcess]:
    """Start the server in a folder, and end it.

    Meanwhile a call of this process, or of its forks, that is not in AWS's service model fails.
    """
    root.mkdir(parents=True, exist_ok=True)
    time = SharedTime(root / "time", 1_800_000_000.0)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.harness.cloud", str(root)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MOTO_AMIS_PATH": str(Path(__file__).parents[1] / "ubuntu_amis.json")},
    ) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())
        try:
            with watching(Contract(KNOWN_DEVIATIONS, strict=True)):
                botocore_files.read_once()
                clients = connect(make_cloud(url))
                # To make them takes half of a fork's time.
                assert all((clients.ec2, clients.buyer, clients.ssm, clients.quotas))
                yield CloudProcess(url, root, time, process, clients)
        finally:
            process.kill()


def _serve(root: Path, commands: TextIO) -> None:
    """Answer one command a line until the pipe closes."""
    time, endpoint, number = SharedTime(root / "time"), Endpoint(), 0
    print(json.dumps(endpoint.url), flush=True)
    line = commands.readline()
    while line:
        number += 1
        machines = SimulatedMachines(root / "machines")
        for machine in machines.root.glob("i-*"):
            machines.end(machine.name)
        engine = SimulatedEngine(machines)
        folder = state_folder(root / f"cloud-{number}")
        with endpoint.serve(folder, engine, clock=time, saving=False) as cloud:
            engine.cloud = cloud
            cloud.application.runtime.containers._background = AtOnce()  # type: ignore[assignment]
            line = _answer(cloud, engine, line, commands)


def _answer(cloud: FakeCloud, engine: SimulatedEngine, line: str, commands: TextIO) -> str:
    """Answer until a new cloud is requested; return that request."""
    first, machines = True, engine.machines
    while line:
        question, text = json.loads(line)
        if question == "new" and not first:
            return line
        first = False
        if question in ("new", "faults"):
            cloud.faults(text)
            cut = machines.cut
            cut.parent.mkdir(parents=True, exist_ok=True)
            cut.unlink(missing_ok=True)
            if cloud.application.faults.now.network.cuts_ssh:
                cut.touch()
            answer: Any = "done"
        elif question == "left":
            answer = list_left(cloud)
        elif question == "standing":
            answer = list_standing(cloud)
        elif question == "lives":
            engine.ends_on_time = engine.is_held = True
            answer = engine.lives
        elif question == "bill":
            meter = cloud.backend.lifecycle.meter
            answer = meter.bill(cloud.application.runtime.now())
        elif question == "launched":
            answer = cloud.application.faults.launched
        else:
            answer = dict(cloud.application.calls)
        print(json.dumps(answer), flush=True)
        line = commands.readline()
    return ""


def list_left(cloud: FakeCloud) -> list[str]:
    """Return the IDs of everything that exists, tagged or not, listed by EC2 or not."""
    backend = cloud.backend
    iam, scheduler = iam_backends[backend.account_id], scheduler_backends[backend.account_id]
    schedule_groups = [g for region in scheduler.values() for g in region.schedule_groups.values()]
    with cloud.application.lock:
        groups = [g for groups in backend.groups.values() for g in groups.values()]
        return [
            *(i.id for i in backend.all_instances() if i.state != "terminated"),
            *backend.volumes,
            *backend.snapshots,
            *(i for i in backend.enis),
            *(image.id for image in backend.amis.values() if image.owner_id == backend.account_id),
            *(group.id for group in groups if group.name != "default"),
            *(pair.id for pair in backend.key_pairs.values()),
            *backend.placement_groups.by_name,
            *(r.id for r in backend.spot_instance_requests.values() if r.state == "active"),
            *(role.name for region in iam.values() for role in region.roles.values()),
            *(group.name for group in schedule_groups if group.name != "default"),
            *(name for group in schedule_groups for name in group.schedules),
        ]


def list_standing(cloud: FakeCloud) -> dict[str, str]:
    """Return what can be removed, by ID, with the claim of its owner: a group's ID and count of changes.

    Placement groups are known by name alone. EC2 does not delete one in use, and `up` replaces another.
    """
    ec2 = cloud.backend
    with cloud.application.lock:
        groups = [g for groups in ec2.groups.values() for g in groups.values()]
        made = [
            *(group for group in groups if group.name != "default"),
            *(i for i in ec2.all_instances() if i.state not in ("shutting-down", "terminated")),
            *ec2.key_pairs.values(),
            *(image for image in ec2.amis.values() if image.owner_id == ec2.account_id),
            *ec2.snapshots.values(),
        ]
        tags = {item.id: {tag["key"]: tag["value"] for tag in item.get_tags()} for item in made}
    claims = {t[OWNER_KEY]: f"{id_} {t[GENERATION]}" for id_, t in tags.items() if GENERATION in t}
    return {id_: claims.get(labels.get(OWNER_KEY, ""), "") for id_, labels in tags.items()}


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    botocore_files.read_once()
    _serve(Path(sys.argv[1]), sys.stdin)
