"""Apply a plan action by action, through EC2 and SSH."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from botocore.exceptions import BotoCoreError, ClientError

from cluster import ssh_mesh
from cluster.context import Context
from cluster.lifecycle.deadline import reset_guards
from cluster.lifecycle.machines import Machines, PlanAgainError
from cluster.nodes import Cluster
from cluster.slurm import job_queue
from cluster.verify.queue import find_stopped
from cluster.verify.reachability import find_unusable
from cluster.verify.results import NodeAnswer, expect, name_some
from cluster.verify.verify import check_nodes, probe_nodes, summarize_problems
from infra.aws.clients import error_code, translate_boto_error
from infra.ec2 import images, key_pair, network, tags
from infra.ec2.cluster_record import record_tags
from infra.ec2.instances import HEAD, UNBILLED, WORKER, describe_instances, label_instances
from infra.ec2.inventory import describe_inventory
from infra.ec2.purchase import Offer
from infra.errors import (
    ConnectionLostError,
    DeadlineError,
    HostError,
    HostKeyError,
    HostsError,
    NoAnswerError,
    SprError,
)
from infra.files import write_private
from infra.iam.instance_profile import ClusterProfile
from infra.instance_types import find_machine
from infra.plan.actions import Action, ActionKind, Plan
from infra.plan.planner import PlanInput, mesh_digest
from infra.plan.removal import remove
from infra.wait import HELD_DEADLINE_S, TERMINATE_DEADLINE_S
from infra.words import counted
from provision.bake import begin_image
from provision.host import Host
from provision.stacks.stack import Stack

_PROBE_AGAIN_S = 10.0
_USELESS_IMAGES = {ActionKind.DELETE_IMAGES, ActionKind.DELETE_SNAPSHOTS}
_REFUSED = (SprError, ClientError, BotoCoreError)
_CUT_OFF = (ConnectionLostError, HostKeyError, NoAnswerError)

BeforeImage = Callable[[Host], object]
"""Adds what an image needs beside the stack, to its machine."""


class ImageContentError(SprError):
    """What an image needs beside the stack can't be installed; trying again would not help."""

    def __init__(self, reason: SprError) -> None:
        super().__init__(reason.message, hint=reason.hint)
        self.exit_code = reason.exit_code


class PlanApplier:
    """One plan being applied: each action leaves its results for the next."""

    def __init__(
        self,
        ctx: Context,
        plan_input: PlanInput,
        stack: Stack,
        plan: Plan,
        offers: Callable[[], Sequence[Offer]],
        before_image: BeforeImage,
    ) -> None:
        self._before_image = before_image
        self.ctx, self.plan_input, self.stack, self.plan = ctx, plan_input, stack, plan
        self.spec, self.record = plan_input.spec, plan_input.record
        self.machines = Machines(ctx, plan_input, plan.keep, offers)
        self._group = plan_input.group
        self._image = plan_input.image
        self._useless_stay = False

    def apply(self) -> Cluster:
        """Carry out the plan. If it fails, everything that exists is found again by its tags.

        Raises :class:`PlanAgainError` if the rest of the plan no longer fits what exists.
        """
        if minutes := self.plan.start_min:
            # The user may have taken long to answer, and the first action may delete a stopped node's disk.
            self.machines.check_time(minutes)
        # Before the first resource: `down` must know which cloud to search.
        self.ctx.remember()
        # A past empty listing says nothing about new resources.
        self.ctx.files.removal.unlink(missing_ok=True)
        machines, ec2 = self.machines, self.ctx.clients.ec2
        steps: dict[ActionKind, Callable[[], None]] = {
            ActionKind.CREATE_GROUP: self._create_group,
            ActionKind.OPEN_GROUP: lambda: network.open_security_group(
                ec2, self.group, self.spec.ssh_cidrs, self.spec.caller
            ),
            ActionKind.RECORD: lambda: label_instances(ec2, [self.group.id], self._record_tags()),
            ActionKind.IMPORT_KEY: self._import_key,
            ActionKind.CREATE_PLACEMENT: self._create_placement,
            ActionKind.GUARD: self._guard,
            ActionKind.DELETE_GUARDS: lambda: machines.guard.remove(),
            ActionKind.CREATE_PROFILE: self._create_profile,
            ActionKind.RUN_HEAD: lambda: machines.add(HEAD, 1, self._find_image(), self.group),
            ActionKind.RUN_NODES: self._run_nodes,
            ActionKind.PROMOTE: machines.promote,
            ActionKind.REACH: machines.reach,
            ActionKind.INSTALL: lambda: machines.install(self.stack, self.plan_input.recipe),
            ActionKind.CREATE_IMAGE: self._create_image,
            ActionKind.WAIT_IMAGE: self._wait_for_image,
            ActionKind.RUN_WORKERS: lambda: machines.add_workers(self._find_image(), self.group),
            ActionKind.CONNECT: self._connect,
            ActionKind.VERIFY: self._verify,
            ActionKind.BEGIN_IMAGE: self._begin_image_for_next_time,
        }
        for action in self.plan.actions:
            with self.ctx.perform(action):
                if action.kind in steps:
                    self._run_step(steps[action.kind])
                elif action.kind in _USELESS_IMAGES:
                    self._remove_useless(action)
                else:
                    self._remove(action)
        self._check_no_late_machines()
        return self.machines.cluster

    def _remove(self, action: Action) -> None:
        # A group in use belongs to a cluster that is being created.
        is_group = action.kind is ActionKind.DELETE_GROUPS
        limit = HELD_DEADLINE_S if is_group else TERMINATE_DEADLINE_S
        try:
            # Bare metal takes long to end, while the other nodes cost money; `down` verifies that it is gone.
            remove(self.ctx.clients.ec2, action, self.ctx.clock, deadline_s=limit, until=UNBILLED)
        except DeadlineError as error:
            if is_group:
                raise PlanAgainError(error.message) from None
            raise

    def _remove_useless(self, action: Action) -> None:
        # An image that stays holds its snapshots.
        if self._useless_stay:
            return
        try:
            self._remove(action)
        except _REFUSED as error:
            self._useless_stay = True
            self._go_without(f"{', '.join(action.ids)} not removed", error)

    def _go_without(self, what: str, error: Exception) -> None:
        """Note why an optional step failed."""
        known = translate_boto_error(error) or error
        message, hint = getattr(known, "message", str(known)), getattr(known, "hint", None)
        remedy = f" ({hint})" if hint else ""
        self.ctx.progress.note(f"{what}: {message}{remedy}; the next `up` tries again")

    def _check_no_late_machines(self) -> None:
        """Plan again if EC2 only now lists machines that an interrupted command bought."""
        by_tag = tags.cluster_filter(self.spec.name)
        shown = describe_instances(self.ctx.clients.ec2, by_tag, ("pending", "running"))
        if strays := {i.id for i in shown} - {i.id for i in self.machines.all}:
            raise PlanAgainError(f"EC2 shows more machines now: {', '.join(sorted(strays))}")

    def _run_step(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ClientError as error:
            # An interrupted command made it moments ago and EC2 did not list it yet; or the `down` of an
            # earlier cluster deleted this one's placement group, which has the same name.
            code = error_code(error)
            if code.endswith(".Duplicate") or code == "InvalidPlacementGroup.Unknown":
                raise PlanAgainError(error.response["Error"]["Message"]) from None
            raise
        except (HostError, HostsError):
            self.machines.check_not_removed()
            raise

    # Resources around the machines

    @property
    def group(self) -> network.SecurityGroup:
        """The cluster's security group, existing or new."""
        assert self._group is not None, "a plan creates the group before anything that needs it"
        return self._group

    def _create_group(self) -> None:
        vpc_id = self.machines.offers()[0].network.vpc_id
        labels = self._record_tags()
        ec2 = self.ctx.clients.ec2
        self._group = network.create_security_group(ec2, self.spec.name, vpc_id, labels)
        self._record_created("security group", self._group.id)

    def _record_tags(self) -> dict[str, str]:
        """Return the tags of the group, the first resource; create the key if there is none yet."""
        files, record = self.ctx.files, self.record
        if not key_pair.read_public(files.key):
            files.remove()
            pair = key_pair.generate_key_pair(tags.resource_name(self.spec.name))
            write_private(files.key, pair.private)
            self.ctx.remember()
        key = key_pair.fingerprint(key_pair.read_public(files.key))
        if self._group:
            found = describe_inventory(self.ctx.clients.ec2, self.spec.name, ("security_groups",))
            record = record.joined(found.record)
        record = replace(record, generation=record.generation + 1)
        had = self._group.tags if self._group else ()
        return record_tags(self.spec, record, key, had) | self.ctx.owner_labels(self._group)

    def _import_key(self) -> None:
        public = f"{key_pair.read_public(self.ctx.files.key)} {tags.resource_name(self.spec.name)}"
        owner = self.ctx.owner_labels(self.group)
        key_pair.import_key_pair(self.ctx.clients.ec2, self.spec.name, public, owner)
        self._record_created("key pair", tags.resource_name(self.spec.name))

    def _create_placement(self) -> None:
        owner = self.ctx.owner_labels(self.group)
        network.create_placement_group(self.ctx.clients.ec2, self.spec.name, owner)
        self._record_created("placement group", tags.resource_name(self.spec.name))

    def _guard(self) -> None:
        kind = ActionKind.GUARD
        ids = [id_ for action in self.plan.actions if action.kind is kind for id_ in action.ids]
        self.machines.guard.protect(ids, self.record.latest)

    def _create_profile(self) -> None:
        ClusterProfile(self.ctx.clients, self.spec.name, self.ctx.clock).make(self.spec)
        name = tags.profile_name(self.spec.name, self.ctx.cloud.region)
        self._record_created("role and instance profile", name)

    def _record_created(self, what: str, resource: str) -> None:
        self.ctx.events.record("created", what, resources=[resource])

    # Machines, software, image

    def _find_image(self) -> images.Image:
        """Return the image for new nodes: one with the software, or Ubuntu's own."""
        if self._image is not None:
            return self._image
        clients = self.ctx.clients
        return images.find_ubuntu_image(clients.ssm, clients.ec2, self.stack.ubuntu)

    def _run_nodes(self) -> None:
        """Buy all nodes together; the first becomes the head."""
        self.machines.add(WORKER, self.spec.nodes, self._find_image(), self.group)
        self.machines.promote()

    @property
    def _has_jobs(self) -> bool:
        """Whether the head may hold data or models; `bench` leaves only measurements."""
        command = "ls -A spr-jobs 2>/dev/null | grep -qv ^bench-"
        return self.machines.head_host.run(command, check=False).exit_code == 0

    def _begin_image(self) -> str:
        head = self.machines.cluster.head
        labels = {tags.INSTALLED: self.plan_input.software, tags.STACK: self.spec.stack}
        labels |= self.ctx.owner_labels(self._group)
        labels |= {tags.USED: "yes"} if self._has_jobs else {}
        packages = self.plan_input.packages
        labels |= {tags.PACKAGES: packages} if packages else {}
        image = begin_image(
            self.ctx.clients.ec2,
            self.machines.head_host,
            head.instance.id,
            self.spec.name,
            # EC2 accepts a name only once, so an interrupted command's image is not started again.
            name=f"spr-cluster-{self.spec.name}-{head.instance.id}",
            labels=labels,
            clock=self.ctx.clock,
        )
        self._record_created(f"image with stack {self.spec.stack}", image)
        return image

    def _begin_image_for_next_time(self) -> None:
        try:
            if self._has_jobs:
                # Any cluster may use a kept image, so it must not contain data or models.
                self.ctx.progress.note("no image: there are jobs on the head")
                return
            self.ctx.progress.note(f"{self._begin_image()}: EC2 finishes it in the background")
        except HostKeyError:
            raise
        except _REFUSED as error:
            self._go_without("no image this time", error)

    def _create_image(self) -> None:
        try:
            self._before_image(self.machines.head_host)
        except _CUT_OFF:
            raise
        except SprError as error:
            raise ImageContentError(error) from None
        self._wait_for(self._begin_image())
        # An image can take an hour, and an idle connection may be dead by then. The new connection also
        # keeps the head's idle guard from shutting it down while the workers start.
        self.machines.head_host.close()
        self.machines.head_host.run("true")

    def _wait_for_image(self) -> None:
        assert self._image is not None, "a plan waits for an image that was found"
        self._wait_for(self._image.id)

    def _wait_for(self, image_id: str) -> None:
        self._image = images.wait_until_available(
            self.ctx.clients.ec2, image_id, self.ctx.progress, self.ctx.clock
        )

    # The whole cluster

    def _connect(self) -> None:
        cluster = self.machines.cluster
        facts = {node.name: self.machines.facts[node.instance.id] for node in cluster.nodes}
        ssh_mesh.connect_nodes(cluster, facts, self.machines.open_host)
        self._submit_again()
        self.ctx.write_ssh_config(cluster)
        digest = mesh_digest([node.instance for node in cluster.nodes])
        self.machines.label_head({tags.MESH: digest})

    def _start_queue(self) -> None:
        """Connect the nodes again if one that was connected before this plan has stopped its daemon."""
        if any(action.kind is ActionKind.CONNECT for action in self.plan.actions):
            return
        names = [node.name for node in self.machines.cluster.nodes]
        if stopped := find_stopped(self.machines.head_host, names):
            self.ctx.progress.note(
                f"{name_some(stopped)} not in the queue; connecting the nodes again"
            )
            self.machines.reach()
            self._connect()

    def _submit_again(self) -> None:
        """If a worker has just become the head, restart the lost head's jobs on it."""
        head = self.machines.cluster.head.instance
        if tags.MESH in head.tags or not any(head.id == kept.id for kept in self.plan.keep):
            return
        again, left = job_queue.submit_again(self.machines.head_host)
        for job in again:
            self.ctx.progress.note(f"job {job} starts again from its last checkpoint")
        for job in left:
            self.ctx.progress.note(
                f"job {job} ended with the lost head and is not started again (--retries 0)"
            )

    def _probe_nodes(
        self, *, again: bool = True
    ) -> tuple[Mapping[str, NodeAnswer], dict[str, str]]:
        cluster = self.machines.cluster
        try:
            answers = probe_nodes(self.machines.head_host, self.stack)
        except HostKeyError:
            raise
        except HostError as error:
            if self.machines.require_way_to_head() and again:
                return self._probe_nodes(again=False)
            self.machines.give_up({cluster.head.instance.id: error.message})
            raise
        keep = self.plan.keep
        connected = any(tags.MESH in instance.tags for instance in keep)
        earlier = {instance.id for instance in keep} if connected else set[str]()
        required = self.spec.amx_required
        return answers, find_unusable(cluster, answers, earlier, amx_required=required)

    def _verify(self) -> None:
        cluster = self.machines.cluster
        answers, faults = self._probe_nodes()
        if faults or any(answer.problem for answer in answers.values()):
            # A node under load may miss the first request; it must not be replaced for that.
            self.ctx.clock.sleep(_PROBE_AGAIN_S)
            answers, faults = self._probe_nodes()
        if cluster.head.name in faults:
            raise HostError(cluster.head.name, faults[cluster.head.name])
        self.machines.give_up({cluster.node(n).instance.id: why for n, why in faults.items()})
        with_amx = sum(bool(a.value and not a.value.missing_amx) for a in answers.values())
        nodes = counted(self.spec.nodes, "node")
        text = f"{len(answers)} of {nodes} reachable from the head, {with_amx} with AMX"
        machine = find_machine(self.ctx.clients.ec2, cluster.head.instance.instance_type)
        expected = expect(self.ctx.cloud, cluster, self.spec, self.stack, machine)
        self._start_queue()
        open_host = self.machines.open_host
        answers, expected = reset_guards(
            self.ctx, cluster, answers, expected, self.record, open_host
        )
        text += summarize_problems(check_nodes(answers, expected), expected)
        self.ctx.progress.note(text)
        self.ctx.events.record("verified", text)
