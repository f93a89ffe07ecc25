"""What a cluster was asked to be, kept as tags of its security group: the one record, in EC2 itself.

The group is the first thing that is made and the last that goes, so every command on any machine
finds in it what the others need: size, types, stack, the end of its life.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from infra import tags
from infra.errors import SprError, UsageError
from infra.spec import ClusterSpec, build_spec, parse_duration, render_duration

_PREFIX = "spr-cluster:"
_CREATED = f"{_PREFIX}created"
_JUST_NOW = timedelta(minutes=10)
# The parts of a spec that a cluster keeps for life: every node is made by them.
_FIXED = {"stack": "--stack", "volume_gib": "--volume-gib", "subnet_id": "--subnet-id"}


@dataclass(frozen=True)
class Record:
    """``options`` are what :func:`build_spec` takes, less the cluster's name and its SSH addresses."""

    options: Mapping[str, Any]
    created: datetime
    expires: datetime

    @property
    def nodes(self) -> int:
        return int(self.options["nodes"])

    def is_over(self, now: datetime) -> bool:
        """The time to live has passed: nodes that still run are ending themselves."""
        return now >= self.expires


def record_tags(spec: ClusterSpec, record: Record) -> dict[str, str]:
    """The group's tags. Values keep to the characters that every AWS service allows in tags."""
    market = ["spot"] if spec.spot else ["on-demand"]
    if spec.spot and spec.on_demand_allowed:
        market.append("on-demand")
    values = {
        "nodes": str(spec.nodes),
        "stack": spec.stack,
        "instance-types": " ".join(spec.instance_types),
        "volume-gib": str(spec.volume_gib),
        "amx": "required" if spec.amx_required else "optional",
        "market": " ".join(market),
        "max-price": "" if spec.max_price is None else f"{spec.max_price:g}",
        "idle-timeout": render_duration(spec.idle_timeout) if spec.idle_timeout else "",
        "placement-group": "yes" if spec.placement_group else "no",
        "subnet": spec.subnet_id or "",
        "bake": spec.bake,
    }
    return {
        **{_PREFIX + key: value for key, value in values.items()},
        _CREATED: tags.render_time(record.created),
        tags.EXPIRES: tags.render_time(record.expires),
    }


def parse_record(labels: Mapping[str, str]) -> Record | None:
    """The record in a group's tags; ``None`` where there is none.

    Raises :class:`SprError` where somebody has changed it beyond recognition.
    """
    if f"{_PREFIX}nodes" not in labels:
        return None

    def read(key: str, parse: Callable[[str], Any] = str) -> Any:
        label = _PREFIX + key
        try:
            return parse(labels[label])
        except KeyError:
            raise ValueError(f"{label} is missing") from None
        except (ValueError, IndexError, UsageError):
            raise ValueError(f"{label} is {labels[label]!r}") from None

    try:
        options = {
            "nodes": read("nodes", int),
            "stack": read("stack"),
            "instance_types": read("instance-types", lambda text: tuple(text.split())),
            "volume_gib": read("volume-gib", int),
            "amx_required": read("amx") == "required",
            "spot": read("market", lambda text: text.split()[0]) == "spot",
            "on_demand_allowed": read("market").split() == ["spot", "on-demand"],
            "max_price": read("max-price", lambda text: float(text) if text else None),
            "idle_timeout": read("idle-timeout", _parse_idle),
            "placement_group": read("placement-group") == "yes",
            "subnet_id": read("subnet") or None,
            "bake": read("bake"),
        }
        created, expires = (read(key, tags.parse_time) for key in ("created", "expires"))
        build_spec(name="a", ssh_cidr="0.0.0.0/32", **options)
    except (ValueError, UsageError) as error:
        raise SprError(
            f"the cluster's record, in the tags of its security group, can't be read: {error}",
            hint="somebody changed these tags; `spr-cluster down` still removes the cluster",
        ) from None
    return Record(options, created, expires)


def _parse_idle(text: str) -> timedelta | None:
    return parse_duration(text, "idle-timeout") if text else None


def merge_options(
    name: str,
    ssh_cidr: str,
    given: Mapping[str, Any],
    record: Record | None,
    defaults: Mapping[str, Any] | None = None,
) -> ClusterSpec:
    """What the user gives now, over what the cluster was made with, over the cloud's defaults.

    Raises :class:`UsageError` for a change that an existing cluster can't follow.
    """
    known = dict(record.options) if record else {}
    for key, option in _FIXED.items():
        if key in given and key in known and given[key] != known[key]:
            raise UsageError(
                f"{option} {given[key]}: cluster {name!r} was made with {known[key] or 'none'}",
                hint=f"leave {option} out, or begin anew: spr-cluster down --name {name}",
            )
    return build_spec(name=name, ssh_cidr=ssh_cidr, **{**(defaults or {}), **known, **given})


def new_record(
    spec: ClusterSpec, now: datetime, old: Record | None, *, has_machines: bool = True
) -> Record:
    """The record of a cluster from now on.

    What exists keeps its end. What is over begins anew, and so does what has no machines and was
    begun a while ago; what was begun just now may have machines that EC2 does not show yet.
    """
    options = spec.model_dump(exclude={"name", "ssh_cidr", "ttl"})
    if old and not old.is_over(now) and (has_machines or now - old.created < _JUST_NOW):
        return Record(options, old.created, old.expires)
    # EC2 keeps whole seconds in a tag.
    start = now.replace(microsecond=0)
    return Record(options, start, start + spec.ttl)
