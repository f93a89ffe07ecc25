"""``up`` and ``down`` in a process that can be killed at any AWS call or SSH step."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cluster.context import Context
from cluster.lifecycle.down import down
from cluster.lifecycle.prepare import find_offers, prepare
from cluster.lifecycle.reconcile import bring_up
from cluster.local_files import ClusterFiles
from infra.aws.clients import Clients, translate_boto_error
from infra.ec2.cluster_record import ClusterRecord, parse_record
from infra.ec2.inventory import Inventory, describe_inventory
from infra.errors import SprError
from infra.plan.planner import plan_up
from infra.spec import validate_options
from tests.harness.cloud import CALLER, CloudProcess, make_cloud
from tests.harness.simulated_machines import SimulatedMachines

NAME = "bert"
# How a run ends; a process that was killed ends by its signal.
DONE, FAILED, BROKEN = 0, 1, 70
Work = Callable[[Context, Mapping[str, Any]], None]
_READS = ("Describe", "Get", "other")
_LONGEST_STEP_S = 120.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL at the n-th event (0-based), ``before`` or ``after`` it takes effect."""

    kind: str
    """``call`` (to AWS) or ``step`` (over SSH)."""
    number: int
    moment: str


class Events:
    """Counts a process's calls and steps, and kills it at one of them.

    With a ``gate``, each call that changes something waits until the harness lets it through.
    """

    def __init__(self, kill: Kill | None, log: Path, gate: socket.socket | None = None) -> None:
        self._kill, self._log, self._gate = kill, log, gate
        self._counts = {"call": 0, "step": 0}
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def tell(self, kind: str, name: str, moment: str) -> None:
        with self._lock:
            if moment == "before":
                setattr(self._of_thread, kind, self._counts[kind])
                self._counts[kind] += 1
                with self._log.open("a") as log:
                    log.write(f"{kind} {name}\n")
                if self._gate and kind == "call" and not name.startswith(_READS):
                    self._gate.sendall(f"{name}\n".encode())
                    assert self._gate.recv(1), "the harness has ended"
            number = getattr(self._of_thread, kind, -1)
            if self._kill == Kill(kind, number, moment):
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, clients: Clients) -> None:
        """Count what a set of clients sends; each attempt of a retried call counts."""
        for client in (clients.ec2, clients.buyer, clients.ssm, clients.quotas):
            events: Any = client.meta.events
            events.register("before-send", self._before)
            events.register("response-received", self._after)

    def _before(self, request: Any, **_: Any) -> None:
        body = request.body
        text = body.decode() if isinstance(body, bytes) else str(body or "")
        action = text.partition("Action=")[2].partition("&")[0] or "other"
        self.tell("call", action, "before")

    def _after(self, **_: Any) -> None:
        self.tell("call", "", "after")


def make_context(cloud: CloudProcess, home: Path, events: Events | None = None) -> Context:
    """The tool's context on a harness's cloud, its time, and its machines."""
    os.environ["SPR_CLUSTER_HOME"] = str(home)
    clients = cloud.clients
    hook: Callable[[str, str], None] = lambda _name, _moment: None  # noqa: E731
    if events:
        events.watch(clients)
        hook = lambda name, moment: events.tell("step", name, moment)  # noqa: E731
    return Context(
        cloud=make_cloud(cloud.url),
        clients=clients,
        files=ClusterFiles.of(NAME),
        clock=cloud.time,
        now=cloud.time.now,
        make_host=SimulatedMachines(cloud.machines, hook).make_host,
    )


def run_up(ctx: Context, given: Mapping[str, Any]) -> None:
    """What `spr-cluster up` does, without output."""
    run_limited_up(ctx, given, lambda record, _: record)


def run_limited_up(
    ctx: Context,
    given: Mapping[str, Any],
    limit: Callable[[ClusterRecord, ClusterRecord | None], ClusterRecord],
) -> None:
    """The same with a limit for jobs: ``limit`` gets the new record and the old one."""
    with ctx.files.lock():
        plan_input = prepare(ctx, validate_options(**given), CALLER)
        old = parse_record(plan_input.group.tags) if plan_input.group else None
        plan_input = replace(plan_input, record=limit(plan_input.record, old))
        plan = plan_up(plan_input)
        offers = cache(lambda: find_offers(ctx, plan_input))
        if plan.buys:
            offers()
        bring_up(ctx, plan_input, plan, offers)


def run_down(ctx: Context, _: Mapping[str, Any]) -> None:
    """What `spr-cluster down` does, without output."""
    with ctx.files.lock():
        down(ctx)


def run_keep_image(ctx: Context, _: Mapping[str, Any]) -> None:
    """What `spr-cluster down --keep-image` does, without output."""
    with ctx.files.lock():
        down(ctx, keep_image=True)


@dataclass(frozen=True)
class Run:
    """How a process ended: ``code`` is an exit code, or a signal's number below 0."""

    code: int
    error: str
    events: tuple[str, ...]

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Actor:
    """A command in a process of its own; the caller must have no threads.

    With ``steps``, it halts before each call that changes something, until :meth:`step`.
    """

    def __init__(
        self,
        cloud: CloudProcess,
        home: Path,
        work: Work,
        given: Mapping[str, Any] | None = None,
        *,
        kill: Kill | None = None,
        steps: bool = False,
    ) -> None:
        self._log, self._error = (
            cloud.root / f"{home.name}-events",
            cloud.root / f"{home.name}-error",
        )
        self._log.write_text("")
        self._error.write_text("")
        self._gate, gate = socket.socketpair()
        self._gate.settimeout(_LONGEST_STEP_S)
        self.waits_for = ""
        """The call that it halts at; "" if it does not halt."""
        self._child = os.fork()
        if self._child == 0:
            events = Events(kill, self._log, gate if steps else None)
            code = _work(cloud, home, work, given or {}, events, self._error)
            gate.sendall(b"\n")
            os._exit(code)
        gate.close()
        if steps:
            self._read()

    def _read(self) -> None:
        self.waits_for = self._gate.recv(100).decode().strip()

    def step(self) -> None:
        """Let one call through, and wait until the next halts or the process ends."""
        self._gate.sendall(b".")
        self._read()

    def finish(self) -> Run:
        """Let everything through, and return how it ended."""
        while self.waits_for:
            self.step()
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._gate.close()
        return Run(code, self._error.read_text(), tuple(self._log.read_text().splitlines()))


def run_in_process(
    cloud: CloudProcess,
    home: Path,
    work: Work,
    given: Mapping[str, Any] | None = None,
    kill: Kill | None = None,
) -> Run:
    """Run in a process of its own, killed where it is said; the caller must have no threads."""
    return Actor(cloud, home, work, given, kill=kill).finish()


def _work(
    cloud: CloudProcess,
    home: Path,
    work: Work,
    given: Mapping[str, Any],
    events: Events,
    error: Path,
) -> int:
    import time

    from botocore.retries.bucket import TokenBucket

    # The SDK's pauses pass in the harness's time, too. Its limit on the rate of calls would wait for
    # real minutes where calls are throttled by lot, however slowly they come.
    setattr(time, "sleep", cloud.time.sleep)  # noqa: B010
    setattr(TokenBucket, "acquire", lambda *_: True)  # noqa: B010
    try:
        work(make_context(cloud, home, events), given)
    except SprError as failure:
        error.write_text(str(failure))
        return FAILED
    except BaseException as failure:
        if isinstance(failure, Exception) and (result := translate_boto_error(failure)):
            error.write_text(str(result))
            return FAILED
        error.write_text(traceback.format_exc())
        sys.stdout.flush()
        return BROKEN
    return DONE


def describe(cloud: CloudProcess) -> Inventory:
    """Everything that exists of the cluster, or of anything that we tag, without faults."""
    return describe_inventory(cloud.connect().ec2, NAME)


def fingerprint(found: Inventory) -> dict[str, Any]:
    """What must be the same however often a cluster's making was interrupted."""
    group = found.group
    return {
        "counts": {kind: len(ids) for kind, ids in found.ids().items()},
        "states": sorted(instance.state for instance in found.instances),
        "roles": sorted(instance.role for instance in found.instances),
        "open": group.is_open_as([CALLER], "") if group else None,
        "images": sorted(image.state for image in found.images),
    }


def defects(cloud: CloudProcess) -> str:
    """What the simulated machines have found wrong, such as a machine with another one's private keys."""
    path = cloud.machines / "defect"
    return path.read_text() if path.exists() else ""
