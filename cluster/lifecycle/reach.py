"""Reaching nodes after launch: SSH, cloud-init, and facts, on many nodes in parallel."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from botocore.exceptions import BotoCoreError, ClientError

from cluster.context import Context
from cluster.lifecycle.cut_off import explain_cut_off, find_impaired
from cluster.nodes import HostOpener, Node
from infra.errors import HostError, JumpError
from infra.instances import describe_by_id
from infra.wait import BOOT_DEADLINE_S
from provision.facts import HostFacts, gather_facts
from provision.host import CONNECT_TIMEOUT_S, wait_until_reachable
from provision.install import persist, wait_for_cloud_init
from provision.run_on_nodes import on_all, on_each

# A machine that has been running for longer than a boot takes is no longer booting.
_REACH_AGAIN_S = 5 * 60
_STATUS_EVERY_S = 60.0
# Machines that are up according to EC2's status checks answer within this time, or not at all.
_CUT_OFF_S = 3 * 60
# Status checks are requested for a few slow nodes, not for the whole cluster.
_MOST_STATUSES = 10


class _CutOffError(HostError):
    """EC2's status checks are ok, but no node answers: the fault lies between this machine and them."""


class _Stragglers:
    """Nodes that do not answer yet, and why: one progress note for all of them.

    ``witness`` is a node that has answered before, if there is one.
    """

    def __init__(self, ctx: Context, open_host: HostOpener, witness: Node | None) -> None:
        self.ctx, self.open_host, self.witness = ctx, open_host, witness
        self.heard: list[Node] = []
        self.not_tried = set[str]()
        """Instances of which the last connection ended on the way, with --jump."""
        self.ok_since: float | None = None
        self.waiting: dict[str, tuple[Node, str]] = {}
        self.lock = threading.Lock()
        self.asked_at = ctx.clock.monotonic()
        self.gone: dict[str, str] = {}
        self.statuses = ""

    def report(self, node: Node, passed: float, reason: str) -> None:
        """Note that a node does not answer. Raises :class:`HostError` if EC2 says it never will."""
        with self.lock:
            self.waiting[node.name] = node, reason
            self._ask_ec2()
            if self.find_cut_off():
                raise _CutOffError(node.name, reason.removeprefix(f"[{node.name}] "))
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
        if self.witness and self.answers(self.witness):
            self.heard.append(self.witness)
        return not self.heard

    def require_way(self, nodes: Sequence[Node], failed: Mapping[str, str]) -> None:
        """Raise :class:`SprError` if no node answers any more, and EC2 finds no fault with one that failed.

        ``failed`` are reasons by instance ID.
        """
        known = {node.instance.id: node for node in (*self.heard, self.witness) if node}
        if not failed or not (known or self.ok_since is not None):
            return
        asked = describe_by_id(self.ctx.clients.ec2, list(failed.keys() | known.keys()))
        gone = {instance.id for instance in asked if instance.why_gone}
        bad = gone | find_impaired(self.ctx, (i for i in asked if i.id in failed))
        lost = [why for id_, why in failed.items() if id_ not in bad]
        left = [node for id_, node in known.items() if id_ not in gone]
        # Nodes that answered, and are gone, don't tell anything about the network.
        if not lost or (known and not left):
            return
        is_open = any(on_all("looking for a way", left, self.answers).values())
        not_tried = self.not_tried.intersection(failed) - bad
        if not is_open or not_tried:
            ids = not_tried if is_open else {node.instance.id for node in nodes} - bad
            kept = [node for node in nodes if node.instance.id in ids]
            raise explain_cut_off(self.ctx, kept, lost[0])

    def answers(self, node: Node) -> bool:
        """Whether a new connection to a node succeeds."""
        host = self.open_host(node)
        host.close()
        self.not_tried.discard(node.instance.id)
        try:
            return host.run("true", timeout_s=CONNECT_TIMEOUT_S).exit_code == 0
        except JumpError:
            self.not_tried.add(node.instance.id)
            return False
        except HostError:
            return False

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


def reach_nodes(
    ctx: Context, nodes: Sequence[Node], open_host: HostOpener, witness: Node | None = None
) -> tuple[dict[str, HostFacts], dict[str, str]]:
    """Return the facts of nodes that answer and why the others do not, by instance ID.

    ``witness`` has answered before. Raises :class:`HostKeyError` for a machine with another host key
    than before, and :class:`SprError` if the network is at fault.
    """
    stragglers = _Stragglers(ctx, open_host, witness)

    def reach(node: Node) -> HostFacts:
        host = open_host(node)
        age = (ctx.now() - node.instance.launch_time).total_seconds()
        try:
            wait_until_reachable(
                host,
                deadline_s=max(_REACH_AGAIN_S, BOOT_DEADLINE_S - age),
                clock=ctx.clock,
                on_wait=lambda passed, reason: stragglers.report(node, passed, reason),
            )
            stragglers.heard.append(node)
            wait_for_cloud_init(host, ctx.clock)
            return persist(host, lambda: gather_facts(host), ctx.clock)
        finally:
            stragglers.done(node)

    answers = on_each(nodes, reach)
    silent = [node for node in nodes if answers[node.name].error]
    awake = on_all("looking for a way", silent, stragglers.answers)
    is_back = any(awake.values()) or not stragglers.find_cut_off()
    # A node that was given up for the network has its whole time again if the network is back.
    again = [
        node
        for node in silent
        if awake[node.name] or (is_back and isinstance(answers[node.name].error, _CutOffError))
    ]
    answers |= on_each(again, reach)
    ids = {node.name: node.instance.id for node in nodes}
    facts = {ids[name]: answer.value for name, answer in answers.items() if answer.value}
    failed = {ids[name]: answer.reason for name, answer in answers.items() if answer.error}
    stragglers.require_way(nodes, failed)
    return facts, failed
