"""Properties of the planner: it keeps good machines, and interrupted plans converge."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ec2 import tags
from infra.ec2.cluster_record import new_record, record_tags
from infra.ec2.instances import HEAD, WORKER, Instance
from infra.ec2.inventory import Inventory, Resource
from infra.ec2.key_pair import fingerprint
from infra.plan.actions import Action, ActionKind, Plan
from infra.plan.ownership import ForeignClusterError, check_owner
from infra.plan.planner import PlanInput, plan_up
from tests.infra.plan_inputs import (
    CALLER,
    KEY,
    NOW,
    PLACEMENT,
    RECIPE,
    connect,
    make_found,
    make_group,
    make_image,
    make_machine,
    make_plan_input,
    make_spec,
)

K = ActionKind
TYPES = ("r7iz.metal-16xl", "m7i.metal-24xl")
ZONES = ("us-east-1a", "us-east-1b")
OTHER_RECIPE = "ffffffffffff"
FOREIGN_KEY = "ssh-ed25519 AAAAelse"


@st.composite
def machine_of(draw: st.DrawFn, number: int) -> Instance:
    states = ["pending", "running", "running", "running", "stopping", "stopped", "shutting-down"]
    return make_machine(
        number,
        draw(st.sampled_from([HEAD, WORKER, WORKER, WORKER])),
        state=draw(st.sampled_from(states)),
        instance_type=draw(st.sampled_from([TYPES[0], *TYPES])),
        zone=draw(st.sampled_from([ZONES[0], *ZONES])),
        labels={tags.INSTALLED: draw(st.sampled_from([RECIPE, RECIPE, OTHER_RECIPE, ""]))},
    )


@st.composite
def image_of(draw: st.DrawFn, number: int) -> Any:
    return make_image(
        f"ami-{number}",
        draw(st.sampled_from(["pending", "available", "failed"])),
        **{
            tags.SEALED: draw(st.sampled_from(["yes", ""])),
            tags.INSTALLED: draw(st.sampled_from([RECIPE, RECIPE, OTHER_RECIPE])),
        },
    )


@st.composite
def plan_inputs(draw: st.DrawFn) -> PlanInput:
    """Any mixture that interrupted and changed commands could have left."""
    bake = draw(st.sampled_from(["head", "none"]))
    spec = make_spec(draw(st.integers(1, 5)), instance_types=TYPES, bake=bake)
    count, connected = draw(st.integers(0, 7)), draw(st.booleans())
    machines = tuple(draw(machine_of(number)) for number in range(count))
    if machines and connected:
        machines = connect(machines)
    rules = {"ssh_cidrs": draw(st.sampled_from([(), (CALLER,), ("0.0.0.0/0",)]))}
    group = make_group(make_spec(draw(st.integers(1, 5)), instance_types=TYPES), **rules)
    groups = draw(st.sampled_from([(), (group,)]))
    # With machines or an unexpired record, another key means another owner.
    other = () if machines or groups else ((Resource("key-2", {}, public=FOREIGN_KEY),),)
    keys = st.sampled_from([(), (KEY,), *other])
    found = Inventory(
        instances=machines,
        security_groups=groups,
        placement_groups=draw(st.sampled_from([(), (PLACEMENT,)])),
        key_pairs=draw(keys),
        images=tuple(draw(image_of(number)) for number in range(draw(st.integers(0, 2)))),
    )
    ids = [machine.id for machine in machines]
    sick = draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
    plan_input = make_plan_input(
        spec, found, unhealthy=dict.fromkeys(sick, "impaired"), wants_image=draw(st.booleans())
    )
    cached = make_image("ami-kept", **{tags.INSTALLED: plan_input.software, tags.KEPT: "yes"})
    return replace(plan_input, cached=draw(st.sampled_from([(), (), (cached,)])))


def test_a_cluster_of_another_owner_is_never_planned() -> None:
    """Whatever of it shows already: a machine, the group, or the key pair with one of them."""
    spec, foreign = make_spec(2), {tags.OWNER_KEY: fingerprint(FOREIGN_KEY)}
    own, pair = make_found(spec), Resource("key-2", {}, public=FOREIGN_KEY)
    machine, group = make_machine(9), make_group(spec)
    theirs = replace(group, tags={**group.tags, **foreign})
    living = replace(group, tags=record_tags(spec, new_record(spec, NOW, None)))
    signs: list[dict[str, Any]] = [
        {"instances": (*own.instances, replace(machine, tags={**machine.tags, **foreign}))},
        {"security_groups": (theirs,), "key_pairs": ()},
        {"security_groups": (theirs,), "key_pairs": (pair,)},
        {"instances": (), "security_groups": (living,), "key_pairs": (pair,)},
        {"key_pairs": (pair,)},
    ]
    # Machines without an owner are not taken over either.
    bare = Inventory(instances=(replace(machine, tags={}),))
    with pytest.raises(ForeignClusterError, match="this machine has none"):
        check_owner("bert", bare, "", NOW)
    for sign in signs:
        with pytest.raises(ForeignClusterError, match="belongs to another SSH key"):
            plan_up(make_plan_input(spec, replace(own, **sign)))


def is_good(plan_input: PlanInput, machine: Instance) -> bool:
    return machine.state in ("pending", "running") and machine.id not in plan_input.unhealthy


@given(plan_inputs())
def test_machines_are_kept_if_they_are_good_and_needed_and_else_terminated(
    plan_input: PlanInput,
) -> None:
    plan = plan_up(plan_input)

    kept = {machine.id for machine in plan.keep}
    taken = {id_ for action in plan.terminations for id_ in action.ids}
    assert len(kept) == len(plan.keep) <= plan_input.spec.nodes
    assert len({machine.place for machine in plan.keep}) <= 1
    assert all(is_good(plan_input, machine) for machine in plan.keep)
    assert all(machine.role == WORKER for machine in plan.keep[1:])
    assert kept | taken == {machine.id for machine in plan_input.found.alive}
    assert not kept & taken
    # A bare one would get newer software than the others have.
    mixed = plan_input.software != plan_input.recipe
    healthy = [machine for machine in plan_input.found.alive if is_good(plan_input, machine)]
    good = [each for each in healthy if each.tags.get(tags.INSTALLED) or not mixed]
    if not good:
        assert plan.keep == ()
        return

    place, places = plan.keep[0].place, Counter(machine.place for machine in healthy)
    assert places[place] == max(places.values())
    here = [machine for machine in good if machine.place == place]
    if any(machine.role == HEAD for machine in here):
        assert plan.keep[0].role == HEAD, "a good head was thrown away"
    workers_gone = [m for m in here if m.id in taken and m.role == WORKER]
    assert not workers_gone or len(plan.keep) == plan_input.spec.nodes


class World:
    """What the actions of a plan do, as far as another plan sees it; each checks what it needs."""

    def __init__(self, plan_input: PlanInput) -> None:
        self.plan_input = plan_input
        self.found = plan_input.found
        self.nodes: list[Instance] = []

    def apply(self, plan: Plan, stop_after: int = 99) -> PlanInput:
        self.nodes = list(plan.keep)
        for action in plan.actions[:stop_after]:
            getattr(self, f"_{action.kind.name.lower()}")(action)
        return replace(self.plan_input, found=self.found, unhealthy={})

    def _change(self, **parts: Any) -> None:
        self.found = replace(self.found, **parts)

    def _set(self, *machines: Instance) -> None:
        changed = {machine.id: machine for machine in machines}
        rest = [m for m in self.found.instances if m.id not in changed]
        self._change(instances=(*rest, *machines))
        self.nodes = [changed.pop(m.id, m) for m in self.nodes] + list(changed.values())

    def _buy(self, count: int, role: str, digest: str) -> None:
        place = self.nodes[0].place if self.nodes else (TYPES[0], ZONES[0])
        first = 100 + len(self.found.instances)
        here: dict[str, Any] = {"instance_type": place[0], "zone": place[1]}
        here |= {"labels": {tags.INSTALLED: digest}}
        self._set(*(make_machine(number, role, **here) for number in range(first, first + count)))

    def _terminate(self, action: Action) -> None:
        rest = tuple(m for m in self.found.instances if m.id not in action.ids)
        self._change(instances=rest)

    def _delete_images(self, action: Action) -> None:
        self._change(images=tuple(i for i in self.found.images if i.id not in action.ids))

    def _delete_snapshots(self, _: Action) -> None:
        pass

    def _delete_keys(self, _: Action) -> None:
        self._change(key_pairs=())

    def _create_group(self, _: Action) -> None:
        assert not self.found.security_groups
        bare = {"ssh_cidrs": (), "inside_in": False, "inside_out": False}
        self._change(security_groups=(make_group(self.plan_input.spec, **bare),))

    def _open_group(self, _: Action) -> None:
        opened: dict[str, Any] = {"ssh_cidrs": (CALLER,), "inside_in": True, "inside_out": True}
        self._change(security_groups=(replace(self.found.security_groups[0], **opened),))

    def _record(self, _: Action) -> None:
        group = self.found.security_groups[0]
        labels = record_tags(self.plan_input.spec, self.plan_input.record)
        self._change(security_groups=(replace(group, tags={**group.tags, **labels}),))

    def _import_key(self, _: Action) -> None:
        assert not self.found.key_pairs
        self._change(key_pairs=(KEY,))

    def _create_placement(self, _: Action) -> None:
        assert not self.found.placement_groups
        self._change(placement_groups=(PLACEMENT,))

    def _run_head(self, _: Action) -> None:
        assert not self.nodes
        assert self.found.security_groups
        assert self.found.key_pairs == (KEY,)
        self._buy(1, HEAD, "")

    def _software_of(self, action: Action) -> str:
        """What a machine has that is bought so."""
        if "Canonical's Ubuntu image" in action.detail:
            assert self.plan_input.bake == "none"
            return ""
        known = (*self.found.images, *self.plan_input.cached)
        named = [image for image in known if image.id in action.detail.split()]
        (image,) = named or self.found.images
        assert image.state == "available"
        assert image.tags[tags.SEALED] == "yes"
        return image.tags[tags.INSTALLED]

    def _run_nodes(self, action: Action) -> None:
        assert not self.nodes
        self._buy(self.plan_input.spec.nodes, WORKER, self._software_of(action))
        self._promote(action)

    def _run_workers(self, action: Action) -> None:
        assert self.nodes[0].role == HEAD
        missing = self.plan_input.spec.nodes - len(self.nodes)
        self._buy(missing, WORKER, self._software_of(action))

    def _promote(self, _: Action) -> None:
        first = self.nodes[0]
        self._set(replace(first, role=HEAD, tags={**first.tags, tags.ROLE: HEAD}))

    def _reach(self, _: Action) -> None:
        self._set(*(replace(machine, state="running") for machine in self.nodes))

    def _install(self, _: Action) -> None:
        assert self.nodes[0].role == HEAD
        bare = [node for node in self.nodes if not node.tags.get(tags.INSTALLED)]
        assert bare
        label = {tags.INSTALLED: self.plan_input.recipe}
        self._set(*(replace(node, tags={**node.tags, **label}) for node in bare))

    def _begin_image(self, _: Action) -> None:
        assert self.found.images == ()
        installed = {tags.INSTALLED: self.nodes[0].tags[tags.INSTALLED]}
        self._change(images=(make_image(state="pending", **installed),))

    def _create_image(self, _: Action) -> None:
        head = self.nodes[0]
        assert head.state == "running"
        assert self.found.images == ()
        self._change(images=(make_image(**{tags.INSTALLED: head.tags[tags.INSTALLED]}),))

    def _wait_image(self, _: Action) -> None:
        (image,) = self.found.images
        self._change(images=(replace(image, state="available"),))

    def _connect(self, _: Action) -> None:
        assert len(self.nodes) == self.plan_input.spec.nodes
        assert self.nodes[0].role == HEAD
        self._set(*connect(self.nodes))

    def _verify(self, _: Action) -> None:
        assert len(self.nodes) == self.plan_input.spec.nodes


@given(plan_inputs(), st.integers(0, 12), st.integers(0, 12))
def test_an_applied_plan_leaves_nothing_to_do_also_if_two_before_it_were_interrupted(
    plan_input: PlanInput, first: int, second: int
) -> None:
    for cut in (first, second, 99):
        plan_input = World(plan_input).apply(plan_up(plan_input), cut)

    again = plan_up(plan_input)
    assert not again.changes, [action.title for action in again.actions]
    assert not again.buys
    assert len(again.keep) == plan_input.spec.nodes
