"""Machines of a cluster while a plan is applied: bought, reached, checked, and replaced."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property

from cluster.context import Context
from cluster.lifecycle.host_identity import check_head_identity, check_neighbors
from cluster.lifecycle.reach import explain_cut_off, find_impaired, reach_nodes
from cluster.nodes import Cluster, Node, rank_nodes
from cluster.verify.machine import require_amx
from cluster.verify.results import name_some
from infra.ec2 import instances, tags
from infra.ec2.cluster_record import lifetime_tags
from infra.ec2.images import Image
from infra.ec2.instances import HEAD, WORKER, Instance
from infra.ec2.inventory import describe_inventory
from infra.ec2.network import SecurityGroup
from infra.ec2.purchase import SPOT, NoCapacityError, Offer, Purchase, Refusal, buy
from infra.ec2.termination_schedule import ClusterGuard
from infra.errors import DeadlineError, HostError, NoAnswerError, SprError
from infra.instance_types import METAL_BOOT_MIN, VIRTUAL_BOOT_MIN, is_metal
from infra.plan.planner import PlanInput
from infra.wait import BOOT_DEADLINE_S, NamedProgress
from infra.words import tag_value
from provision.facts import HostFacts
from provision.host import CONNECT_TIMEOUT_S, Host
from provision.install import install_stack, proxy_environment
from provision.run_on_nodes import on_all
from provision.stacks.stack import Stack
from provision.user_data import render_user_data

# A node that ends sooner after its start is not worth its price.
_USEFUL = timedelta(minutes=5)


class PlanAgainError(Exception):
    """Raised when the plan no longer fits what exists.

    ``unhealthy`` are reasons by instance ID. With ``is_move``, a machine is only in the wrong zone.
    ``refused`` is the offer that had no capacity for them after all.
    """

    def __init__(
        self,
        reason: str,
        unhealthy: Mapping[str, str] | None = None,
        *,
        is_move: bool = False,
        refused: Refusal | None = None,
    ) -> None:
        super().__init__(reason)
        self.unhealthy = dict(unhealthy or {})
        self.is_move = is_move or refused is not None
        self.refused = (refused,) if refused else ()


class Machines:
    """The cluster's machines while a plan is applied; ``offers`` are the ways to buy more."""

    def __init__(
        self,
        ctx: Context,
        plan_input: PlanInput,
        keep: Sequence[Instance],
        offers: Callable[[], Sequence[Offer]],
    ) -> None:
        self.ctx, self.plan_input, self.offers = ctx, plan_input, offers
        self.spec, self.record = plan_input.spec, plan_input.record
        self.all = tuple(keep)
        self.facts: dict[str, HostFacts] = {}
        self._bought: dict[str, Offer] = {}
        self.open_host = ctx.host_opener()

    @property
    def cluster(self) -> Cluster:
        nodes = rank_nodes(self.all, self.spec.nodes, self.spec.jump)
        # Without a head, the first worker becomes the head.
        nodes = (*(replace(node, rank=0) for node in nodes[:1]), *nodes[1:])
        return Cluster(self.spec.name, nodes, self.spec.nodes)

    @property
    def head_host(self) -> Host:
        return self.open_host(self.cluster.head)

    @cached_property
    def guard(self) -> ClusterGuard:
        """The second guard, which terminates machines from outside."""
        boundary = self.spec.permissions_boundary
        return ClusterGuard(self.ctx.clients, self.spec.name, self.ctx.clock, boundary)

    # Buying

    def add(
        self,
        role: str,
        count: int,
        image: Image,
        group: SecurityGroup,
        offers: Sequence[Offer] | None = None,
    ) -> None:
        """Buy machines and wait until they run, answer over SSH, and finish cloud-init."""
        wanted = self.offers() if offers is None else offers
        self.all = (*self.all, *self._buy(role, count, image, group, wanted))
        self.reach()

    def add_workers(self, image: Image, group: SecurityGroup) -> None:
        """Buy the missing workers in the head's zone; a new head without workers may move instead."""
        head = self.cluster.head.instance
        here = [offer for offer in self.offers() if offer.place == head.place]
        try:
            self.add(WORKER, self.spec.nodes - len(self.all), image, group, here)
        except NoCapacityError as error:
            elsewhere = [offer for offer in self.offers() if offer.place != head.place]
            # A head that has been connected may hold results.
            if len(self.all) > 1 or head.tags.get(tags.MESH) or not elsewhere:
                raise
            # The next plan buys all nodes together, from the image, in any zone with capacity. The head
            # must go first: its placement group belongs to its zone.
            why = f"no capacity for the workers in {head.zone}: {error.code}"
            self.ctx.events.record(
                "moved", f"away from {head.zone}", reason=error.message, resources=[head.id]
            )
            raise PlanAgainError(why, {head.id: why}, is_move=True) from None

    def _buy(
        self,
        role: str,
        count: int,
        image: Image,
        group: SecurityGroup,
        offers: Sequence[Offer],
    ) -> tuple[Instance, ...]:
        # Another command may have moved the end.
        found = describe_inventory(self.ctx.clients.ec2, self.spec.name, ("security_groups",))
        self.record = self.record.joined(found.record)
        self.check_time()
        offer, bought = buy(
            self.ctx.clients.buyer,
            self.purchase(role, count, image, group),
            offers,
            clock=self.ctx.clock,
            on_refusal=self._report_refusal,
            wait_for_end=self._wait_for_end,
        )
        self.ctx.progress.note(f"bought: {offer}")
        self._bought.update((instance.id, offer) for instance in bought)
        self._record_purchase(offer, bought)
        if self.spec.second_guard:
            # Immediately: a machine that never boots has no other guard.
            self.guard.protect([instance.id for instance in bought], self.record.latest)
        return bought

    def check_time(self, minutes: int = 0) -> None:
        """Raise :class:`SprError` if too little time is left to start nodes, which takes some minutes."""
        slow = any(map(is_metal, self.spec.instance_types))
        boot = (METAL_BOOT_MIN if slow else VIRTUAL_BOOT_MIN)[1]
        least = timedelta(minutes=max(boot, minutes)) + _USEFUL
        if not self.record.is_over(
            self.ctx.now() + (least if self.ctx.cloud.billed else timedelta())
        ):
            return
        longer = "use a longer --ttl: bare metal takes up to 20 min to start, and an image may take an hour"
        exists = self.all or self.plan_input.found.alive
        raise SprError(
            "too little of the time to live is left to buy and start nodes",
            hint=f"to extend it: spr-cluster extend 2h {self.ctx.flags}" if exists else longer,
        )

    def _wait_for_end(self) -> bool:
        """Wait for the machines that are shutting down; return whether there were any and they ended."""
        ec2, by_tag = self.ctx.clients.ec2, tags.cluster_filter(self.spec.name)
        ids = [i.id for i in instances.describe_instances(ec2, by_tag, ("shutting-down",))]
        limit, note = self.plan_input.end_wait_s, self.ctx.progress.note

        def on_wait(passed: float) -> None:
            minutes = f"{passed / 60:.0f} min of at most {limit / 60:.0f}"
            note(f"waiting for {name_some(ids)}, which shut down, {minutes}")

        try:
            instances.wait_until_ended(ec2, ids, self.ctx.clock, on_wait, deadline_s=limit)
        except DeadlineError as error:
            note(f"{error.message}; continuing")
            return False
        self.check_time()
        return bool(ids)

    def purchase(
        self, role: str, count: int, image: Image, group: SecurityGroup | None
    ) -> Purchase:
        """Return what to buy; before the first purchase there may be no group."""
        taken = {node.rank for node in self.cluster.nodes}
        free = [rank for rank in range(self.spec.nodes) if rank not in taken]
        labels = {
            tags.RANKS: tags.render_ranks(free[:count]),
            tags.STACK: self.spec.stack,
            **lifetime_tags(self.record),
            tags.INSTALLED: image.tags.get(tags.INSTALLED, ""),
            tags.REPLACES: tag_value(self._why_bought),
            **self.ctx.owner_labels(group),
        }
        return Purchase(
            spec=self.spec,
            role=role,
            count=count,
            image=image,
            group_id=group.id if group else "",
            user_data=lambda offer: render_user_data(
                self.record.lifetime,
                self.ctx.cloud.region,
                ena_express=offer.ena_express,
            ),
            labels={key: value for key, value in labels.items() if value},
            known=frozenset(instance.id for instance in self.all),
            profile=tags.profile_name(self.spec.name, self.ctx.cloud.region)
            if self.spec.makes_role
            else "",
            refused=self.plan_input.refused,
        )

    def _record_purchase(self, offer: Offer, bought: Sequence[Instance]) -> None:
        self.ctx.events.record(
            "bought",
            f"{len(bought)} x {offer}",
            reason=self._why_bought,
            resources=[instance.id for instance in bought],
            replaces=self._replaced,
            type=offer.type.name,
            zone=offer.network.zone,
            market=offer.market,
            usd_per_hour=self._price(offer),
        )

    def _price(self, offer: Offer) -> float | None:
        """Return the machine's price per hour in its market, if it is known."""
        prices, is_spot = self.plan_input.prices, offer.market == SPOT
        known = prices.market(offer.type.name, offer.network.zone, spot=is_spot)
        return known if self.ctx.cloud.billed else 0.0

    @property
    def _replaced(self) -> dict[str, str]:
        """Why the plan terminates machines, by instance ID."""
        found, unhealthy = self.plan_input.found, self.plan_input.unhealthy
        return {i.id: unhealthy[i.id] for i in found.alive if i.id in unhealthy}

    @property
    def _why_bought(self) -> str:
        return "; ".join(f"replaces {id_}: {why}" for id_, why in self._replaced.items())

    def _report_refusal(self, refusal: Refusal) -> None:
        self.ctx.progress.note(f"{refusal.offer}: {refusal.code}")
        reason = f"{refusal.code}: {refusal.message}"
        self.ctx.events.record("refused", str(refusal.offer), reason=reason)

    # Reaching and checking

    def reach(self) -> None:
        """Wait for every machine that was not reached yet, and replace those that fail."""
        ids = [instance.id for instance in self.all if instance.id not in self.facts]
        boot = instances.wait_until_running(
            self.ctx.clients.ec2, ids, on_wait=self._note_states, clock=self.ctx.clock
        )
        boot.check_disks()
        running = {instance.id: instance for instance in boot.running}
        self.all = tuple(running.get(instance.id, instance) for instance in self.all)
        nodes = [node for node in self.cluster.nodes if node.instance.id in running]
        self.ctx.write_ssh_config(self.cluster)
        witness = next((n for n in self.cluster.nodes if n.instance.id in self.facts), None)
        facts, failed = reach_nodes(self.ctx, nodes, self.open_host, witness)
        self.facts.update(facts)
        self._check_capacity(boot.failed)
        self.give_up({**boot.failed, **failed}, never_ran=boot.failed)
        self._check(nodes)

    def _check_capacity(self, failed: Mapping[str, str]) -> None:
        """Plan again without the offer if EC2 ended new machines for lack of capacity."""
        late = {
            id_: refusal
            for id_, why in failed.items()
            if id_ in self._bought
            and (refusal := Refusal.after_launch(self._bought[id_], why.partition(": ")[2]))
        }
        if late:
            refusal = next(iter(late.values()))
            self._report_refusal(refusal)
            faults = {id_: failed[id_] for id_ in late}
            self._record_faults(faults, never_ran=faults)
            why = f"{name_some(list(late))} ended at launch: {refusal.code}"
            raise PlanAgainError(why, faults, refused=refusal)

    def _note_states(self, passed: float, states: str) -> None:
        limit = BOOT_DEADLINE_S // 60
        self.ctx.progress.note(f"{states}, {passed / 60:.0f} min of at most {limit}")

    def _check(self, nodes: Sequence[Node]) -> None:
        """Check the machines' host keys and AMX."""
        head, others = self.cluster.head, [node for node in nodes if node.rank > 0]
        if head in nodes:
            self.ctx.progress.note(check_head_identity(self.ctx, head))
            facts, required = self.facts[head.instance.id], self.spec.amx_required
            self.ctx.progress.note(require_amx(head.name, facts, required=required))
        if others:
            check_neighbors(self.ctx, self.head_host, others)
        if self.spec.amx_required:
            # If the head has AMX, a worker without it is a faulty machine, not a wrong type.
            missing = {
                node.instance.id: self.facts[node.instance.id].missing_amx for node in others
            }
            self.give_up({id_: f"no AMX: lacks {', '.join(m)}" for id_, m in missing.items() if m})

    def give_up(self, faults: Mapping[str, str], never_ran: Container[str] = ()) -> None:
        """Have faulty machines replaced, except a head that may hold results.

        Raises :class:`PlanAgainError`, or :class:`HostError` for such a head, or :class:`SprError` if
        all machines were terminated, as `down` does.
        """
        if not faults:
            return
        self.check_not_removed()
        nodes = self.cluster.nodes
        head = nodes[0].instance
        names = self._record_faults(faults, never_ran)
        if head.id in faults and head.role == HEAD and head.tags.get(tags.MESH):
            raise HostError(
                nodes[0].name,
                f"the head {head.id} does not answer: {faults[head.id]}",
                hint=f"is this machine's address in --ssh-cidr? {self._way_without_head}",
            )
        what = "; ".join(f"{names[id_]} ({id_}): {why}" for id_, why in faults.items())
        raise PlanAgainError(what, faults)

    def _record_faults(
        self, faults: Mapping[str, str], never_ran: Container[str]
    ) -> dict[str, str]:
        """Record why machines are faulty; return all nodes' names by instance ID."""
        names = {node.instance.id: node.name for node in self.cluster.nodes}
        for id_, why in faults.items():
            ran = id_ not in never_ran
            self.ctx.events.record("faulty", names[id_], reason=why, resources=[id_], ran=ran)
        return names

    @property
    def _way_without_head(self) -> str:
        return (
            f"If the head is lost, run `aws ec2 terminate-instances --region {self.ctx.cloud.region} "
            f"--instance-ids {self.cluster.head.instance.id}`, then `spr-cluster repair "
            f"{self.ctx.flags}`, which makes a worker the head"
        )

    def require_way_to_head(self) -> bool:
        """Return whether the head answers.

        Raises :class:`SprError` if it does not, although it runs and EC2 finds no fault with it.
        """
        head, host = self.cluster.head, self.head_host
        if instances.has_ended(self.ctx.clients.ec2, head.instance.id):
            return False
        host.close()
        try:
            host.run("true", timeout_s=CONNECT_TIMEOUT_S)
        except NoAnswerError as error:
            if find_impaired(self.ctx, [head.instance]):
                return False
            cut_off = explain_cut_off(self.ctx, [head], error.message)
            if head.instance.tags.get(tags.MESH):
                cut_off.hint = f"{cut_off.hint}. {self._way_without_head}"
            raise cut_off from None
        except HostError:
            return False
        return True

    def check_not_removed(self) -> None:
        """Raise :class:`SprError` if another command has terminated all machines."""
        ids = [instance.id for instance in self.all]
        seen = instances.describe_by_id(self.ctx.clients.ec2, ids)
        # `down` terminates the machines first, and removes the security group minutes later.
        if sum(instance.was_terminated for instance in seen) == len(ids):
            raise SprError(
                "the cluster was removed in the meantime: another command terminated "
                f"{name_some(ids)}",
                hint=f"to create it again: spr-cluster up {self.ctx.flags}",
            )

    def install(self, stack: Stack, recipe: str) -> None:
        """Install the software on all nodes that lack it, in parallel.

        Nodes that succeed are labeled with the recipe, even if others fail.
        """
        bare = [n for n in self.cluster.nodes if not n.instance.tags.get(tags.INSTALLED)]
        progress, clock, done = self.ctx.progress, self.ctx.clock, list[str]()
        environment = proxy_environment(self.spec.proxy or "", self.ctx.cloud.region)

        def install_one(node: Node) -> None:
            shown = progress if len(bare) == 1 else NamedProgress(progress, node.name)
            install_stack(self.open_host(node), stack, shown, clock, environment)
            done.append(node.instance.id)

        try:
            if len(bare) == 1:
                install_one(bare[0])
            else:
                on_all(f"installing stack {stack.name}", bare, install_one)
        finally:
            if done:
                label = {tags.INSTALLED: recipe}
                instances.label_instances(self.ctx.clients.ec2, sorted(done), label)

    # Labels

    def promote(self) -> None:
        """Make the first node the head; all nodes have the same software."""
        head = self.cluster.head.instance
        self.label_head(tags.resource_tags(self.spec.name, HEAD, **{tags.ROLE: HEAD}))
        self.all = tuple(replace(i, role=HEAD) if i.id == head.id else i for i in self.all)

    def label_head(self, labels: dict[str, str]) -> None:
        """Set tags on the head."""
        head = self.cluster.head.instance
        instances.label_instances(self.ctx.clients.ec2, [head.id], labels)
        labeled = replace(head, tags={**head.tags, **labels})
        self.all = tuple(labeled if i.id == head.id else i for i in self.all)
