"""Reaching nodes after launch: SSH, cloud-init, and facts, on many nodes in parallel."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from botocore.exceptions import BotoCoreError, ClientError

from cluster.context import Context
from cluster.events import describe_failure
from cluster.lifecycle.cut_off import explain_cut_off
from cluster.nodes import HostOpener, Node
from infra.errors import HostError, HostKeyError
from infra.instances import describe_by_id
from infra.wait import BOOT_DEADLINE_S
from provision.facts import HostFacts, gather_facts
from provision.host import CONNECT_TIMEOUT_S, Host, on_all, wait_until_reachable
from provision.install import wait_for_cloud_init

# A machine that has been running for longer than a boot takes is no longer booting.
_REACH_AGAIN_S = 5 * 60
_STATUS_EVERY_S = 60.0
# Machines that are up according to EC2's status checks answer within this time, or not at all.
_CUT_OFF_S = 3 * 60
# Status checks are requested for a few slow nodes, not for the whole cluster.
_MOST_STATUSES = 10


class _CutOffError(Exception):
    """EC2's status checks are ok, but no node answers: the fault lies between this machine and them."""


class _Stragglers:
    """Nodes that do not answer yet, and why: one progress note for all of them.

    ``witness`` is a node that has answered before, if there is one.
    """

    def __init__(self, ctx: Context, witness: Host | None) -> None:
        self.ctx, self.witness = ctx, witness
        self.heard, self.reason = False, ""
        self.ok_since: float | None = None
        self.waiting: dict[str, tuple[Node, str]] = {}
        self.lock = threading.Lock()
        self.asked_at = ctx.clock.monotonic()
        self.gone: dict[str, str] = {}
        self.statuses = ""

    def report(self, node: Node, passed: float, reason: str) -> None:
        """Note that a node does not answer. Raises :class:`HostError` if EC2 says it never will."""
        with self.lock:
            self.waiting[node.name], self.reason = (node, reason), reason
            self._ask_ec2()
            if self.find_cut_off():
                raise _CutOffError
            if gone := self.gone.get(node.instance.id):
                raise HostError(node.name, gone)
            names = ", ".join(sorted(self.waiting)[:4])
            more = f" and {len(self.waiting) - 4} more" if len(self.waiting) > 4 else ""
            text = (
                f"waiting for SSH on {names}{more}: "
                f"{passed / 60:.0f} min of at most {BOOT_DEADLINE_S // 60}"
            )
            # Refused connections are normal during the first minute of a boot.
            if passed > _STATUS_EVERY_S:
                text += f"; {self.statuses}{reason}"
            self.ctx.progress.note(text)

    def done(self, node: Node) -> None:
        with self.lock:
            self.waiting.pop(node.name, None)

    def find_cut_off(self) -> bool:
        """Return whether no node has answered for too long, although EC2 says that they are up."""
        if self.heard or self.ok_since is None:
            return False
        if self.ctx.clock.monotonic() - self.ok_since < _CUT_OFF_S:
            return False
        self.heard = self.witness is not None and _answers(self.witness)
        return not self.heard

    def _ask_ec2(self) -> None:
        """Get EC2's view of the nodes that are waited for, once a minute: gone, or their checks."""
        now = self.ctx.clock.monotonic()
        if now - self.asked_at < _STATUS_EVERY_S:
            return
        self.asked_at = now
        ec2 = self.ctx.clients.ec2
        ids = [node.instance.id for node, _ in self.waiting.values()]
        try:
            self.gone |= {i.id: i.why_gone for i in describe_by_id(ec2, ids) if i.why_gone}
            some = [id_ for id_ in ids if id_ not in self.gone][:_MOST_STATUSES]
            if not some:
                self.ok_since = None
                return
            found = ec2.describe_instance_status(InstanceIds=some)
        except (ClientError, BotoCoreError):
            return
        words = sorted(
            {s.get("InstanceStatus", {}).get("Status", "?") for s in found["InstanceStatuses"]}
        )
        # Machines that are still booting have a right to be waited for.
        booting = {"?", "initializing", "insufficient-data"} & set(words)
        if booting or "ok" not in words:
            self.ok_since = None
        elif self.ok_since is None:
            self.ok_since = now
        self.statuses = f"EC2's status checks: {', '.join(words)}; " if words else ""


def _answers(host: Host) -> bool:
    """Whether a new connection to a host succeeds."""
    host.close()
    try:
        return host.run("true", timeout_s=CONNECT_TIMEOUT_S).exit_code == 0
    except HostError:
        return False


def reach_nodes(
    ctx: Context, nodes: Sequence[Node], open_host: HostOpener, witness: Host | None = None
) -> tuple[dict[str, HostFacts], dict[str, str]]:
    """Return the facts of nodes that answer and why the others do not, by instance ID.

    ``witness`` has answered before. Raises :class:`HostKeyError` for a machine with another host key
    than before, and :class:`SprError` if the network is at fault.
    """
    stragglers = _Stragglers(ctx, witness)

    def reach(node: Node) -> HostFacts | HostError | _CutOffError:
        host = open_host(node)
        age = (ctx.now() - node.instance.launch_time).total_seconds()
        try:
            wait_until_reachable(
                host,
                deadline_s=max(_REACH_AGAIN_S, BOOT_DEADLINE_S - age),
                clock=ctx.clock,
                on_wait=lambda passed, reason: stragglers.report(node, passed, reason),
            )
            stragglers.heard = True
            wait_for_cloud_init(host)
            return gather_facts(host)
        except (HostError, _CutOffError) as error:
            return error
        finally:
            stragglers.done(node)

    answers = on_all("reaching the nodes", nodes, reach)
    if nodes and stragglers.find_cut_off():
        raise explain_cut_off(ctx, nodes, stragglers.reason)
    # A node that was given up for the network has its whole time if another one has answered since.
    early = [node for node in nodes if isinstance(answers[node.name], _CutOffError)]
    if early:
        answers |= on_all("reaching the nodes", early, reach)
    facts, failed = {}, {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, HostKeyError):
            raise answer
        if isinstance(answer, HostError | _CutOffError):
            failed[node.instance.id] = describe_failure(answer).removeprefix(f"[{node.name}] ")
        else:
            facts[node.instance.id] = answer
    return facts, failed
