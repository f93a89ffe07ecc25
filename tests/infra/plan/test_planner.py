"""The planner: one case per combination of desired and existing cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from infra.ec2 import tags
from infra.ec2.images import Image
from infra.ec2.instances import HEAD, Instance
from infra.ec2.inventory import RegisteredKey
from infra.plan.actions import ActionKind, Plan
from infra.plan.planner import PlanInput, plan_up
from tests.infra.plan_inputs import (
    CALLER,
    KEY,
    NOW,
    connect,
    make_found,
    make_group,
    make_image,
    make_machine,
    make_machines,
    make_plan_input,
    make_spec,
)

K = ActionKind
FRESH = (K.CREATE_GROUP, K.OPEN_GROUP, K.IMPORT_KEY)
FROM_HEAD = (K.RUN_HEAD, K.INSTALL, K.CREATE_IMAGE, K.RUN_WORKERS, K.CONNECT, K.VERIFY)
GROWTH = (K.REACH, K.RUN_WORKERS, K.CONNECT, K.VERIFY)
SPEC = make_spec(3)
FOREIGN_KEY = RegisteredKey("key-2", {}, "ssh-ed25519 AAAAelse")
EXPIRED = NOW + timedelta(days=2)


def kinds(plan: Plan) -> tuple[ActionKind, ...]:
    return tuple(action.kind for action in plan.actions)


def ids_of(plan: Plan, kind: ActionKind) -> tuple[str, ...]:
    return next(action.ids for action in plan.actions if action.kind is kind)


@dataclass(frozen=True)
class Case:
    """A plan input and the expected plan; ``ids`` are those that an action is about."""

    plan_input: PlanInput
    actions: tuple[ActionKind, ...]
    keep: tuple[str, ...] = ("i-0", "i-1", "i-2")
    ids: dict[ActionKind, tuple[str, ...]] = field(default_factory=dict)

    @property
    def all_actions(self) -> tuple[ActionKind, ...]:
        """The actions. Whatever changes an existing cluster records that first."""
        first = self.actions[0]
        changes = first is not K.RECORD and set(self.actions) - {K.REACH, K.VERIFY}
        return (K.RECORD, *self.actions) if changes and self.plan_input.group else self.actions


def there(**changes: Any) -> PlanInput:
    """A whole cluster of three, less what is changed."""
    return make_plan_input(SPEC, make_found(SPEC, **changes))


def unhealthy(*ids: str, **changes: Any) -> PlanInput:
    return replace(there(**changes), unhealthy=dict.fromkeys(ids, "impaired"))


def grow_to(nodes: int, **changes: Any) -> PlanInput:
    wider = make_spec(nodes)
    found = make_found(SPEC, **{"security_groups": (make_group(wider),), **changes})
    return make_plan_input(wider, found)


def head_alone(image: Image | None, **head: Any) -> PlanInput:
    """An interrupted `up`: the head is there, and perhaps an image."""
    machines = (make_machine(0, HEAD, **head),)
    return there(instances=machines, images=(image,) if image else ())


def changed(number: int, **changes: Any) -> tuple[Instance, ...]:
    """The machines of a whole cluster, one of them changed."""
    return tuple(
        replace(machine, **changes) if index == number else machine
        for index, machine in enumerate(make_machines(3))
    )


HEADLESS = make_machines(3)[1:]
ELSEWHERE = {"zone": "us-east-1b"}
CASES = {
    "nothing is there": Case(
        make_plan_input(SPEC), (*FRESH, K.CREATE_PLACEMENT, *FROM_HEAD), keep=()
    ),
    "nothing is there, one node": Case(
        make_plan_input(make_spec(1)),
        (*FRESH, K.CREATE_PLACEMENT, K.RUN_HEAD, K.INSTALL, K.CONNECT, K.VERIFY),
        keep=(),
    ),
    "nothing exists, no placement group requested": Case(
        make_plan_input(make_spec(3, placement_group=False)), (*FRESH, *FROM_HEAD), keep=()
    ),
    "everything is there": Case(there(), (K.VERIFY,)),
    "everything is there, less the image": Case(there(images=()), (K.VERIFY,)),
    "everything is there, less the placement group": Case(there(placement_groups=()), (K.VERIFY,)),
    "the group is alone": Case(
        there(instances=(), images=(), key_pairs=(), placement_groups=()),
        (K.IMPORT_KEY, K.CREATE_PLACEMENT, *FROM_HEAD),
        keep=(),
    ),
    "the group has no rules": Case(
        there(security_groups=(make_group(SPEC, ssh_cidrs=(), inside_in=False, inside_out=False),)),
        (K.OPEN_GROUP, K.VERIFY),
    ),
    "the group lets nothing out inside": Case(
        there(security_groups=(make_group(SPEC, inside_out=False),)), (K.OPEN_GROUP, K.VERIFY)
    ),
    "the caller has another address": Case(
        there(security_groups=(make_group(SPEC, ssh_cidrs=("198.51.100.1/32",)),)),
        (K.OPEN_GROUP, K.VERIFY),
    ),
    "another address has access, too": Case(
        there(security_groups=(make_group(SPEC, ssh_cidrs=("0.0.0.0/0", CALLER)),)),
        (K.OPEN_GROUP, K.VERIFY),
    ),
    "the record says another size": Case(
        there(security_groups=(make_group(make_spec(7)),)), (K.RECORD, K.VERIFY)
    ),
    "EC2 has no key": Case(there(key_pairs=()), (K.IMPORT_KEY, K.VERIFY)),
    "expired, and EC2 has another key": Case(
        replace(there(instances=(), images=(), key_pairs=(FOREIGN_KEY,)), now=EXPIRED),
        (K.DELETE_KEYS, K.IMPORT_KEY, *FROM_HEAD),
        keep=(),
        ids={K.DELETE_KEYS: (FOREIGN_KEY.id,)},
    ),
    "expired, and of a key that this machine lacks": Case(
        replace(there(instances=(), images=()), public_key="", now=EXPIRED),
        (K.DELETE_GROUPS, K.CREATE_GROUP, *FRESH[1:2], K.DELETE_KEYS, *FRESH[2:], *FROM_HEAD),
        keep=(),
        ids={K.DELETE_GROUPS: ("sg-1",), K.DELETE_KEYS: (KEY.id,)},
    ),
    "a bare head": Case(
        head_alone(None, labels={tags.INSTALLED: ""}),
        (K.REACH, K.INSTALL, K.CREATE_IMAGE, K.RUN_WORKERS, K.CONNECT, K.VERIFY),
        keep=("i-0",),
    ),
    "a head with its software": Case(
        head_alone(None),
        (K.REACH, K.CREATE_IMAGE, K.RUN_WORKERS, K.CONNECT, K.VERIFY),
        keep=("i-0",),
    ),
    "a head that is still starting": Case(
        head_alone(None, state="pending", labels={tags.INSTALLED: ""}),
        (K.REACH, K.INSTALL, K.CREATE_IMAGE, K.RUN_WORKERS, K.CONNECT, K.VERIFY),
        keep=("i-0",),
    ),
    "a head and its image": Case(head_alone(make_image()), GROWTH, keep=("i-0",)),
    "a head and an image on its way": Case(
        head_alone(make_image(state="pending")),
        (K.REACH, K.WAIT_IMAGE, *GROWTH[1:]),
        keep=("i-0",),
        ids={K.WAIT_IMAGE: ("ami-1",)},
    ),
    "a head and an image that may hold private keys": Case(
        head_alone(make_image(state="pending", **{tags.SEALED: ""})),
        (K.DELETE_IMAGES, K.DELETE_SNAPSHOTS, K.REACH, K.CREATE_IMAGE, *GROWTH[1:]),
        keep=("i-0",),
        ids={K.DELETE_IMAGES: ("ami-1",), K.DELETE_SNAPSHOTS: ("snap-of-ami-1",)},
    ),
    "a head and an image of other software": Case(
        head_alone(make_image(**{tags.INSTALLED: "ffffffffffff"})),
        (K.DELETE_IMAGES, K.DELETE_SNAPSHOTS, K.REACH, K.CREATE_IMAGE, *GROWTH[1:]),
        keep=("i-0",),
    ),
    "a head and an image that failed": Case(
        head_alone(make_image(state="failed")),
        (K.DELETE_IMAGES, K.DELETE_SNAPSHOTS, K.REACH, K.CREATE_IMAGE, *GROWTH[1:]),
        keep=("i-0",),
    ),
    "an image that was kept on purpose, and failed": Case(
        there(images=(make_image(state="failed", **{tags.KEPT: "yes"}),)),
        (K.DELETE_IMAGES, K.DELETE_SNAPSHOTS, K.VERIFY),
    ),
    "an image of other software that was kept on purpose": Case(
        there(images=(make_image(**{tags.INSTALLED: "ffffffffffff", tags.KEPT: "yes"}),)),
        (K.VERIFY,),
    ),
    "an image kept from an earlier cluster": Case(
        there(instances=()), (K.RUN_NODES, K.CONNECT, K.VERIFY), keep=()
    ),
    "an image on its way, and no machine": Case(
        there(instances=(), images=(make_image(state="pending"),)),
        (K.WAIT_IMAGE, K.RUN_NODES, K.CONNECT, K.VERIFY),
        keep=(),
    ),
    "two images: one will do": Case(
        there(images=(make_image("ami-1", "pending"), make_image("ami-2"))),
        (K.DELETE_IMAGES, K.DELETE_SNAPSHOTS, K.VERIFY),
        ids={K.DELETE_IMAGES: ("ami-1",)},
    ),
    "the cluster grows": Case(grow_to(5), GROWTH),
    "the cluster grows, its image is gone": Case(
        grow_to(5, images=()), (K.REACH, K.CREATE_IMAGE, *GROWTH[1:])
    ),
    "the cluster shrinks": Case(
        make_plan_input(
            make_spec(2), make_found(SPEC, security_groups=(make_group(make_spec(2)),))
        ),
        (K.TERMINATE, K.REACH, K.CONNECT, K.VERIFY),
        keep=("i-0", "i-1"),
        ids={K.TERMINATE: ("i-2",)},
    ),
    "the cluster shrinks to its head": Case(
        make_plan_input(
            make_spec(1), make_found(SPEC, security_groups=(make_group(make_spec(1)),))
        ),
        (K.TERMINATE, K.REACH, K.CONNECT, K.VERIFY),
        keep=("i-0",),
        ids={K.TERMINATE: ("i-1", "i-2")},
    ),
    "a worker has gone": Case(
        there(instances=(make_machines(3)[0], make_machines(3)[2])), GROWTH, keep=("i-0", "i-2")
    ),
    "a worker is ending": Case(
        there(instances=changed(1, state="shutting-down")), GROWTH, keep=("i-0", "i-2")
    ),
    "a worker has stopped": Case(
        there(instances=changed(1, state="stopped")),
        (K.TERMINATE, *GROWTH),
        keep=("i-0", "i-2"),
        ids={K.TERMINATE: ("i-1",)},
    ),
    "a worker is impaired": Case(
        unhealthy("i-2"), (K.TERMINATE, *GROWTH), keep=("i-0", "i-1"), ids={K.TERMINATE: ("i-2",)}
    ),
    "the head has gone": Case(
        there(instances=HEADLESS),
        (K.REACH, K.PROMOTE, *GROWTH[1:]),
        keep=("i-1", "i-2"),
        ids={K.PROMOTE: ("i-1",)},
    ),
    "the head has gone, two nodes are enough": Case(
        make_plan_input(
            make_spec(2),
            make_found(SPEC, instances=HEADLESS, security_groups=(make_group(make_spec(2)),)),
        ),
        (K.REACH, K.PROMOTE, K.CONNECT, K.VERIFY),
        keep=("i-1", "i-2"),
    ),
    "a machine in another zone": Case(
        there(instances=(*make_machines(3), make_machine(3, **ELSEWHERE))),
        (K.TERMINATE, K.VERIFY),
        ids={K.TERMINATE: ("i-3",)},
    ),
    "a machine of another type": Case(
        there(instances=(*make_machines(3), make_machine(3, instance_type="m7i.metal-24xl"))),
        (K.TERMINATE, K.VERIFY),
        ids={K.TERMINATE: ("i-3",)},
    ),
    "an interrupted move to another zone": Case(
        there(
            instances=(make_machine(0, HEAD), *(make_machine(n, **ELSEWHERE) for n in (1, 2, 3)))
        ),
        (K.TERMINATE, K.REACH, K.PROMOTE, K.CONNECT, K.VERIFY),
        keep=("i-1", "i-2", "i-3"),
        ids={K.TERMINATE: ("i-0",), K.PROMOTE: ("i-1",)},
    ),
    "a move that was interrupted as the new head got its role": Case(
        there(
            instances=(
                make_machine(0, HEAD),
                make_machine(1, HEAD, **ELSEWHERE),
                *(make_machine(n, **ELSEWHERE) for n in (2, 3)),
            )
        ),
        (K.TERMINATE, K.REACH, K.CONNECT, K.VERIFY),
        keep=("i-1", "i-2", "i-3"),
        ids={K.TERMINATE: ("i-0",)},
    ),
    "one worker strayed: the head's place counts": Case(
        there(instances=(make_machine(0, HEAD), make_machine(1, **ELSEWHERE))),
        (K.TERMINATE, *GROWTH),
        keep=("i-0",),
        ids={K.TERMINATE: ("i-1",)},
    ),
    "two heads in one place": Case(
        there(instances=(*make_machines(3), make_machine(3, HEAD))),
        (K.TERMINATE, K.VERIFY),
        ids={K.TERMINATE: ("i-3",)},
    ),
    "the nodes were never connected": Case(
        there(instances=tuple(make_machine(n, HEAD if n == 0 else "worker") for n in range(3))),
        (K.REACH, K.CONNECT, K.VERIFY),
    ),
    "other nodes than now were connected": Case(
        there(instances=(connect(make_machines(2))[0], *make_machines(3)[1:])),
        (K.REACH, K.CONNECT, K.VERIFY),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_up_does_where(name: str) -> None:
    case = CASES[name]

    plan = plan_up(case.plan_input)

    assert kinds(plan) == case.all_actions
    assert tuple(machine.id for machine in plan.keep) == case.keep
    for kind, ids in case.ids.items():
        assert ids_of(plan, kind) == ids
    assert plan.changes is (set(case.actions) - {K.REACH, K.VERIFY} != set())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.keep])
def test_ec2s_order_of_its_answer_decides_nothing(name: str) -> None:
    plan_input = CASES[name].plan_input
    backwards = replace(plan_input.found, instances=plan_input.found.instances[::-1])

    again = plan_up(replace(plan_input, found=backwards))

    assert kinds(again) == CASES[name].all_actions
    assert tuple(machine.id for machine in again.keep) == CASES[name].keep
