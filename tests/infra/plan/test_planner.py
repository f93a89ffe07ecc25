"""The planner: one case per combination of desired and existing cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.ec2 import tags
from infra.ec2.images import Image
from infra.ec2.instances import HEAD, Instance
from infra.ec2.inventory import Resource
from infra.plan.actions import ActionKind, Plan
from infra.plan.planner import PlanInput, plan_up
from tests.golden import check_section
from tests.infra.plan_inputs import (
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
GROWTH = (K.REACH, K.RUN_WORKERS, K.CONNECT, K.VERIFY)
SPEC = make_spec(3)
_GOLDEN = Path(__file__).parent / "golden" / "plans.txt"
FOREIGN_KEY = Resource("key-2", {}, public="ssh-ed25519 AAAAelse")
EXPIRED = NOW + timedelta(days=2)


def kinds(plan: Plan) -> tuple[ActionKind, ...]:
    return tuple(action.kind for action in plan.actions)


def ids_of(plan: Plan, kind: ActionKind) -> tuple[str, ...]:
    return next(action.ids for action in plan.actions if action.kind is kind)


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
CASES: dict[str, PlanInput] = {
    "nothing is there": make_plan_input(SPEC),
    "everything is there": there(),
    "the group has no rules": there(
        security_groups=(make_group(SPEC, ssh_cidrs=(), inside_in=False, inside_out=False),)
    ),
    "EC2 has no key": there(key_pairs=()),
    "expired, and EC2 has another key": replace(
        there(instances=(), images=(), key_pairs=(FOREIGN_KEY,)), now=EXPIRED
    ),
    "expired, and of a key that this machine lacks": replace(
        there(instances=(), images=()), public_key="", now=EXPIRED
    ),
    "a bare head": head_alone(None, labels={tags.INSTALLED: ""}),
    "a head with its software": head_alone(None),
    "a head and its image": head_alone(make_image()),
    "a head and an image on its way": head_alone(make_image(state="pending")),
    "a head and an image that may hold private keys": head_alone(
        make_image(state="pending", **{tags.SEALED: ""})
    ),
    "an image that was kept on purpose, and failed": there(
        images=(make_image(state="failed", **{tags.KEPT: "yes"}),)
    ),
    "an image of other software that was kept on purpose": there(
        images=(make_image(**{tags.INSTALLED: "ffffffffffff", tags.KEPT: "yes"}),)
    ),
    "an image kept from an earlier cluster": there(instances=()),
    "an image on its way, and no machine": there(
        instances=(), images=(make_image(state="pending"),)
    ),
    "two images: one will do": there(images=(make_image("ami-1", "pending"), make_image("ami-2"))),
    "the cluster grows": grow_to(5),
    "the cluster grows, its image is gone": grow_to(5, images=()),
    "the cluster shrinks": make_plan_input(
        make_spec(2), make_found(SPEC, security_groups=(make_group(make_spec(2)),))
    ),
    "a worker has gone": there(instances=(make_machines(3)[0], make_machines(3)[2])),
    "a worker is impaired": unhealthy("i-2"),
    "the head has gone": there(instances=HEADLESS),
    "the head has gone, two nodes are enough": make_plan_input(
        make_spec(2),
        make_found(SPEC, instances=HEADLESS, security_groups=(make_group(make_spec(2)),)),
    ),
    "a move that was interrupted as the new head got its role": there(
        instances=(
            make_machine(0, HEAD),
            make_machine(1, HEAD, **ELSEWHERE),
            *(make_machine(n, **ELSEWHERE) for n in (2, 3)),
        )
    ),
    "one worker strayed: the head's place counts": there(
        instances=(make_machine(0, HEAD), make_machine(1, **ELSEWHERE))
    ),
    "two heads in one place": there(instances=(*make_machines(3), make_machine(3, HEAD))),
    "other nodes than now were connected": there(
        instances=(connect(make_machines(2))[0], *make_machines(3)[1:])
    ),
}


def render(plan: Plan) -> str:
    """Each action with the machines or images that it is about, and the machines that stay."""
    rows = [" ".join((action.kind.name, *sorted(action.ids))) for action in plan.actions]
    kept = " ".join(machine.id for machine in plan.keep)
    rows.append(f"keep: {kept or 'nothing'}")
    return "\n".join(rows if plan.changes else [*rows, "unchanged"])


@pytest.mark.parametrize("name", CASES)
def test_what_up_does_where(name: str) -> None:
    plan_input = CASES[name]
    backwards = replace(plan_input.found, instances=plan_input.found.instances[::-1])

    plan = render(plan_up(plan_input))

    check_section(_GOLDEN, name, plan)
    # EC2's order of its answer decides nothing.
    assert render(plan_up(replace(plan_input, found=backwards))) == plan
