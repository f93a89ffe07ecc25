"""The tool's whole lifecycle in this process: EC2 from the embedded cloud, machines simulated in a folder.

Nothing sleeps: EC2 and the tool share one simulated time, which passes only in waits.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.context import Context
from cluster.lifecycle.down import Removed, down
from cluster.lifecycle.prepare import find_offers, prepare
from cluster.lifecycle.reconcile import bring_up
from cluster.local_files import ClusterFiles
from cluster.nodes import Cluster
from infra.aws.cloud import Cloud
from infra.ec2.inventory import Inventory, describe_inventory
from infra.ec2.network import SecurityGroup
from infra.ec2.tags import render_time
from infra.local.state import StateFolder
from infra.plan.actions import Plan
from infra.plan.planner import PlanInput, plan_up
from infra.spec import validate_options
from tests.aws import Recorder, answered_directly
from tests.harness.cloud import CALLER, SimulatedEngine, list_left, make_cloud
from tests.harness.prepared_cluster import begin_with
from tests.harness.simulated_machines import SimulatedMachines, write_state
from tests.infra.hasty_time import AtOnce, HastyTime
from tests.infra.local.fakes import Endpoint, FakeCloud, FakeTime

NAME = "bert"


@dataclass
class RecordedProgress:
    """A :class:`infra.wait.Progress` that records phases and notes."""

    phases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        self.phases.append(title)
        yield

    def note(self, text: str) -> None:
        self.notes.append(text)


class Steps:
    """The commands over SSH, by the patterns of :class:`tests.harness.simulated_machines.SimulatedHost`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.before: dict[str, Callable[[], None]] = {}
        """By a part of the step's name: called just before it, and may raise."""
        self.after: dict[str, Callable[[], None]] = {}
        """The same, called just after it."""

    def __call__(self, name: str, moment: str) -> None:
        if name.startswith("put "):
            return
        if moment == "after":
            self.done.append(name)
        for part, act in list((self.after if moment == "after" else self.before).items()):
            if part in name:
                act()

    def count(self, part: str) -> int:
        return sum(part in name for name in self.done)


@dataclass
class SimulatedNetwork:
    """What lies between the tool and the machines: the faults, and the machines' security groups."""

    fake: FakeCloud
    caller: str = CALLER
    """From where EC2 sees the tool, unless the faults say otherwise."""

    def caller_cidr(self) -> str:
        """The address from which EC2 sees the tool."""
        return self.fake.application.faults.now.network.caller or self.caller

    def probe_ssh(self) -> str:
        """Why no connection to port 22 leaves the tool's network."""
        is_blocked = self.fake.application.faults.now.network.ssh == "blocked"
        return "an SSH server of AWS: timed out" if is_blocked else ""

    def why_closed(self, instance_id: str, inside: bool) -> str:
        """Return why no connection reaches a machine."""
        faults = self.fake.application.faults.now.network
        machine = next((i for i in self.fake.backend.all_instances() if i.id == instance_id), None)
        if machine is None or machine.state != "running":
            return "it does not run"
        inside = inside or not machine.nics[0].public_ip
        if faults.cuts_ssh and not inside:
            return "the network is cut"
        caller = machine.private_ip if inside else self.caller_cidr()
        return "" if _admits(machine.nics[0].group_set, caller) else "no rule allows it"


def _admits(groups: Any, caller: str) -> bool:
    address = ipaddress.ip_network(caller)
    ranges = [
        ipaddress.ip_network(rule.ip_range.get("CidrIp") or rule.ip_range["CidrIpv6"])
        for group in groups
        for rule in group.ingress_rules
        if rule.ip_range and str(rule.from_port) == "22"
    ]
    return any(address.network_address in r for r in ranges)


@dataclass
class SimulatedCloud:
    """A cloud with simulated machines, and the lifecycle's context on it."""

    fake: FakeCloud
    engine: SimulatedEngine
    steps: Steps
    ctx: Context
    recorder: Recorder
    progress: RecordedProgress
    began: float
    network: SimulatedNetwork
    profile: str = "instant"

    @property
    def ec2(self) -> Any:
        return self.ctx.clients.ec2

    @property
    def clock(self) -> HastyTime:
        assert isinstance(self.fake.clock, HastyTime)
        return self.fake.clock

    @property
    def machines(self) -> SimulatedMachines:
        return self.engine.machines

    def faults(self, text: str) -> None:
        """Activate faults, with this cloud's profile unless they name one."""
        self.fake.faults(text if "profile" in text else f'profile = "{self.profile}"\n{text}')

    def be(self, profile: str) -> None:
        """Have this profile from now on: ``unkind``, or ``instant`` to count calls or seconds."""
        self.profile = profile
        self.faults("")

    def purchases(self) -> list[dict[str, Any]]:
        """The requests of RunInstances, without those that repeat one by its token."""
        sent = self.recorder.of("RunInstances")
        return list({request["ClientToken"]: request for request in sent}.values())

    def plan_input(self, ssh_cidr: str | None = None, **given: Any) -> PlanInput:
        return prepare(self.ctx, validate_options(**given), ssh_cidr)

    def plan(self, **given: Any) -> Plan:
        return plan_up(self.plan_input(**given))

    def up(self, ssh_cidr: str | None = None, **given: Any) -> Cluster:
        """Do what `spr-cluster up` does, without output."""
        return self.apply(self.plan_input(ssh_cidr, **given))

    def apply(
        self,
        plan_input: PlanInput,
        on_new_plan: Callable[[PlanInput, Plan, str], None] = lambda _input, _plan, _reason: None,
    ) -> Cluster:
        """Plan and bring up a cluster."""
        plan = plan_up(plan_input)
        offers = functools.cache(lambda: find_offers(self.ctx, plan_input))
        if plan.buys:
            offers()
        cluster = bring_up(self.ctx, plan_input, plan, offers, on_new_plan)
        # EC2's launch times, by which nodes are ranked, have whole seconds.
        self.clock.now += 60
        return cluster

    def prepared(self, **given: Any) -> Cluster:
        """The same as :meth:`up` in an empty cloud, which is done once for all tests."""
        key = f"{self.profile} {sorted(given.items())}"
        begin_with(self, key, lambda: self.up(**given) and None)
        return self.cluster()

    def down(self, **options: Any) -> Removed:
        return down(self.ctx, **options)

    def found(self, *kinds: str) -> Inventory:
        """What exists of the cluster, of all kinds or of these alone."""
        return describe_inventory(self.ec2, NAME, *([kinds] if kinds else []))

    @property
    def group(self) -> SecurityGroup:
        group = self.found("security_groups").group
        assert group is not None
        return group

    def cluster(self) -> Cluster:
        return self.ctx.find_cluster()

    def left(self) -> list[str]:
        """All that exists, counted in the backend itself: no tag or filter hides anything."""
        return list_left(self.fake)

    def machine(self, instance_id: str) -> dict[str, Any]:
        """Return a simulated machine's state."""
        return self.machines.read(instance_id)

    def break_ssh(self, instance_id: str) -> None:
        """Make a machine unreachable over SSH."""
        self.change_machine(instance_id, fate="no-ssh")

    def mend_ssh(self, instance_id: str) -> None:
        """Make a machine reachable again."""
        self.change_machine(instance_id, fate="")

    def change_machine(self, instance_id: str, **values: Any) -> None:
        """Change a simulated machine's state."""
        path = self.machines.root / instance_id / "state.json"
        write_state(path, {**self.machine(instance_id), **values})

    def end(self, instance_id: str) -> None:
        """Terminate a machine, as if it had failed."""
        with self.fake.application.lock:
            self.fake.backend.terminate_instances([instance_id])

    def first_zone(self) -> str:
        """Where machines are bought first."""
        return find_offers(self.ctx, self.plan_input())[0].network.zone

    def expires(self, ttl: timedelta) -> str:
        """The tag of a cluster that was begun at EC2's first second here."""
        return render_time(datetime.fromtimestamp(self.began, timezone.utc) + ttl)

    def writes(self) -> list[str]:
        """The calls so far that change something."""
        looks = ("Describe", "Get")
        return [op for op in self.recorder.operations() if not op.startswith(looks)]

    def seen_as(self, **changes: Any) -> SimulatedCloud:
        """The same with another name, region or caller in the tool's eyes."""
        cloud: Cloud = replace(self.ctx.cloud, **changes)
        return replace(self, ctx=replace(self.ctx, cloud=cloud))


class Folder(StateFolder):
    """Names its containers alike in all tests, so that a copy of a cloud has the same."""

    @property
    def key(self) -> str:
        return "0badcafe"


@contextmanager
def open_simulated_cloud(endpoint: Endpoint, root: Path, start: float) -> Iterator[SimulatedCloud]:
    """An empty cloud with simulated machines; ``start`` is EC2's time, in seconds since 1970."""
    steps, clock = Steps(), HastyTime(start)
    machines = SimulatedMachines(
        root / "machines", steps, clock, lambda *asked: network.why_closed(*asked)
    )
    engine = SimulatedEngine(machines)
    clients = endpoint.clients
    recorder, progress = Recorder(), RecordedProgress()
    with endpoint.serve(Folder(root / ".local-cloud"), engine, clock=clock, saving=False) as fake:
        engine.cloud, network = fake, SimulatedNetwork(fake)
        fake.application.runtime.containers._background = AtOnce()  # type: ignore[assignment]
        ctx = Context(
            cloud=replace(make_cloud(endpoint.url), caller_cidr=network.caller_cidr),
            clients=clients,
            files=ClusterFiles.of(NAME),
            progress=progress,
            clock=clock,
            now=lambda: datetime.fromtimestamp(clock.now, timezone.utc),
            make_host=machines.make_host,
        )
        with recorder.watching(clients), answered_directly(endpoint.url, fake.application):
            yield SimulatedCloud(fake, engine, steps, ctx, recorder, progress, start, network)


def let_no_time_pass(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the SDK's own pauses, and those of waits without a clock, pass in the cloud's time."""
    for module in ("infra.wait", "infra.aws.new_resources"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=clock.sleep))
    # The SDK's limit on the rate of calls would wait for real seconds, however slowly they come.
    monkeypatch.setattr("botocore.retries.bucket.TokenBucket.acquire", lambda *_, **__: True)


def install_jump_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this machine all programs that a jump needs, and jump hosts that let it in."""
    monkeypatch.setattr("provision.jump.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("provision.jump._read_cli_version", lambda: "aws-cli/2.12.0")
    monkeypatch.setattr("provision.jump._try_login", lambda _: "")
