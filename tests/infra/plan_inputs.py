"""Existing clusters as inputs of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from infra.ec2 import tags
from infra.ec2.cluster_record import new_record, record_tags
from infra.ec2.images import Image
from infra.ec2.instances import HEAD, WORKER, Instance
from infra.ec2.inventory import Inventory, Resource
from infra.ec2.key_pair import fingerprint, generate_key_pair
from infra.ec2.network import SecurityGroup
from infra.plan.planner import PlanInput, mesh_digest
from infra.spec import ClusterSpec, build_spec

NOW = datetime(2026, 7, 31, 12, 0, tzinfo=timezone.utc)
CALLER = "203.0.113.7/32"
RECIPE = "0123456789ab"
KEY_PAIR = generate_key_pair("mine")
PUBLIC_KEY = " ".join(KEY_PAIR.public.split()[:2])
PLACE = ("r7iz.metal-16xl", "us-east-1a")


def make_spec(nodes: int = 3, **options: Any) -> ClusterSpec:
    return build_spec(
        **{"name": "bert", "nodes": nodes, "stack": "intel", "ssh_cidrs": (CALLER,), **options}
    )


def make_machine(number: int, role: str = WORKER, **changes: Any) -> Instance:
    """Machine i-N, launched N seconds after the first, with its software."""
    extra = changes.pop("labels", {})
    labels = {tags.CLUSTER: "bert", tags.ROLE: role, tags.INSTALLED: RECIPE, **extra}
    machine = Instance(
        id=f"i-{number}",
        state="running",
        role=role,
        private_ip=f"172.31.0.{10 + number}",
        public_ip=f"198.51.100.{10 + number}",
        launch_index=0,
        launch_time=NOW + timedelta(seconds=number),
        instance_type=PLACE[0],
        zone=PLACE[1],
        tags={key: value for key, value in labels.items() if value},
    )
    return replace(machine, **changes)


def make_machines(count: int) -> tuple[Instance, ...]:
    """A connected head, i-0, and its workers."""
    return connect((make_machine(0, HEAD), *(make_machine(n) for n in range(1, count))))


def connect(machines: Sequence[Instance]) -> tuple[Instance, ...]:
    """The same with the head's tag that says so; ranks are as they stand."""
    head = machines[0]
    labels = {**head.tags, tags.MESH: mesh_digest(machines)}
    return (replace(head, tags=labels), *machines[1:])


def make_group(spec: ClusterSpec, **changes: Any) -> SecurityGroup:
    """The cluster's group with its record and all its rules."""
    record = record_tags(spec, new_record(spec, NOW, None), fingerprint(PUBLIC_KEY))
    labels = {tags.CLUSTER: "bert", **record}
    group = SecurityGroup("sg-1", "vpc-1", labels, (CALLER,), inside_in=True, inside_out=True)
    return replace(group, **changes)


def make_image(name: str = "ami-1", state: str = "available", **labels: str) -> Image:
    """A clean image of the recipe; ``labels`` change its tags, and empty ones take them away."""
    wanted = {tags.SEALED: "yes", tags.INSTALLED: RECIPE, **labels}
    known = {key: value for key, value in wanted.items() if value}
    return Image(name, f"spr-{name}", state, "/dev/sda1", (f"snap-of-{name}",), known)


KEY = Resource("key-1", {}, public=PUBLIC_KEY)
PLACEMENT = Resource("spr-cluster-bert", {})


def make_plan_input(spec: ClusterSpec, found: Inventory | None = None, **changes: Any) -> PlanInput:
    """A desired cluster and what exists, with the key on this machine."""
    wanted: dict[str, Any] = {
        "spec": spec,
        "record": new_record(spec, NOW, None),
        "found": found or Inventory(),
        "recipe": RECIPE,
        "public_key": PUBLIC_KEY,
        "now": NOW,
    }
    return PlanInput(**{**wanted, **changes})


def make_found(spec: ClusterSpec, **changes: Any) -> Inventory:
    """A complete cluster that matches the spec."""
    whole: dict[str, Any] = {
        "instances": make_machines(spec.nodes),
        "security_groups": (make_group(spec),),
        "placement_groups": (PLACEMENT,),
        "key_pairs": (KEY,),
        "images": (make_image(),),
    }
    return Inventory(**{**whole, **changes})
