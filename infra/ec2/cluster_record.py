"""A cluster's recorded options, stored as tags of its security group.

The group is created first and deleted last, so every command on any machine finds the cluster's size,
types, stack, and deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from infra.ec2 import tags
from infra.errors import SprError, UsageError
from infra.spec import ClusterSpec, build_spec, parse_duration, render_duration

_PREFIX = "spr-cluster:"
_CREATED = f"{_PREFIX}created"
GENERATION = f"{_PREFIX}generation"
_DISK_SPEED = {
    key: key.replace("_", "-") for key in ("volume_throughput", "volume_iops", "volume_init_rate")
}
_JUST_NOW = timedelta(minutes=10)
_NOT_RECORDED = {"name", "ssh_cidrs", "caller"}
# Options that cannot change while the cluster exists.
_FIXED = {
    "stack": "--stack",
    "volume_gib": "--volume-gib",
    "volume_throughput": "--volume-throughput",
    "volume_iops": "--volume-iops",
    "subnet_id": "--subnet-id",
    "private": "--private",
}


@dataclass(frozen=True)
class ClusterRecord:
    """``options`` are the arguments of :func:`build_spec` except those in ``_NOT_RECORDED``.

    ``generation`` counts the changes of the cluster, so a plan made before another change is refused.
    """

    options: Mapping[str, Any]
    created: datetime
    expires: datetime
    generation: int = 0

    @property
    def nodes(self) -> int:
        return int(self.options["nodes"])

    def is_over(self, now: datetime) -> bool:
        """Return whether the time to live has passed; remaining nodes are shutting down."""
        return now >= self.expires


def deadline_tags(record: ClusterRecord) -> dict[str, str]:
    """Return the group's tags that a new deadline changes."""
    return {
        GENERATION: str(record.generation),
        tags.EXPIRES: tags.render_time(record.expires),
    }


def record_tags(spec: ClusterSpec, record: ClusterRecord, owner_key: str = "") -> dict[str, str]:
    """Return the group's tags, in the characters that every AWS service allows.

    ``owner_key`` is the fingerprint of the cluster's SSH key, if it is known.
    """
    market = ["spot"] if spec.spot else ["on-demand"]
    if spec.spot and spec.on_demand_allowed:
        market.append("on-demand")
    values = {
        "nodes": str(spec.nodes),
        "stack": spec.stack,
        "instance-types": " ".join(spec.instance_types),
        "volume-gib": str(spec.volume_gib),
        **{label: str(getattr(spec, key) or "") for key, label in _DISK_SPEED.items()},
        "amx": "required" if spec.amx_required else "optional",
        "market": " ".join(market),
        "max-price": "" if spec.max_price is None else f"{spec.max_price:g}",
        "ttl": render_duration(record.options.get("ttl", spec.ttl)),
        "idle-timeout": render_duration(spec.idle_timeout) if spec.idle_timeout else "",
        "placement-group": "yes" if spec.placement_group else "no",
        "subnet": spec.subnet_id or "",
        "private": "yes" if spec.private else "no",
        "jump": spec.jump or "",
        "bake": spec.bake,
    }
    return {
        **{_PREFIX + key: value for key, value in values.items()},
        _CREATED: tags.render_time(record.created),
        **deadline_tags(record),
        **({tags.OWNER_KEY: owner_key} if owner_key else {}),
        **({tags.GUARD: "yes"} if spec.second_guard else {}),
    }


def parse_record(labels: Mapping[str, str]) -> ClusterRecord | None:
    """Return the record in a group's tags, or ``None`` if there is none.

    Raises :class:`SprError` if the tags are invalid.
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
            # Older records have none of them.
            **{
                key: read(label, int) if labels.get(_PREFIX + label) else None
                for key, label in _DISK_SPEED.items()
            },
            "amx_required": read("amx") == "required",
            "spot": read("market", lambda text: text.split()[0]) == "spot",
            "on_demand_allowed": read("market").split() == ["spot", "on-demand"],
            "max_price": read("max-price", lambda text: float(text) if text else None),
            "idle_timeout": read("idle-timeout", _parse_idle),
            # Older records have the default.
            **({"ttl": read("ttl", _parse_ttl)} if f"{_PREFIX}ttl" in labels else {}),
            "placement_group": read("placement-group") == "yes",
            "subnet_id": read("subnet") or None,
            # Clusters of earlier versions have public addresses.
            "private": labels.get(f"{_PREFIX}private") == "yes",
            "jump": labels.get(f"{_PREFIX}jump") or None,
            "bake": read("bake"),
            "second_guard": tags.GUARD in labels,
        }
        created, expires = (read(key, tags.parse_time) for key in ("created", "expires"))
        generation = read("generation", int) if GENERATION in labels else 0
        build_spec(name="a", ssh_cidrs=("0.0.0.0/32",), **options)
    except (ValueError, UsageError) as error:
        raise SprError(
            f"invalid cluster record in the tags of the security group: {error}",
            hint="restore the tags, or remove the cluster with "
            f"`spr-cluster down --name {labels.get(tags.CLUSTER, 'NAME')}`",
        ) from None
    return ClusterRecord(options, created, expires, generation)


def _parse_ttl(text: str) -> timedelta:
    return parse_duration(text, "ttl")


def _parse_idle(text: str) -> timedelta | None:
    return parse_duration(text, "idle-timeout") if text else None


def merge_options(
    name: str,
    ssh_cidrs: tuple[str, ...],
    given: Mapping[str, Any],
    record: ClusterRecord | None,
    defaults: Mapping[str, Any] | None = None,
) -> ClusterSpec:
    """Combine options: given now, else recorded, else the cloud's defaults.

    Raises :class:`UsageError` for an option that an existing cluster cannot change.
    """
    known = dict(record.options) if record else {}
    for key, option in _FIXED.items():
        if key in given and key in known and given[key] != known[key]:
            was = f"with {known[key]}" if known[key] else "without it"
            raise UsageError(
                f"{option} {'' if given[key] is True else given[key]}".rstrip()
                + f": cluster {name!r} was created {was}, and this can't be changed",
                hint=f"omit {option}, or start over: spr-cluster down --name {name}",
            )
    return build_spec(name=name, ssh_cidrs=ssh_cidrs, **{**(defaults or {}), **known, **given})


def new_record(
    spec: ClusterSpec, now: datetime, old: ClusterRecord | None, *, has_machines: bool = True
) -> ClusterRecord:
    """Return the record of a cluster from now on.

    An existing cluster keeps its deadline. A new lifetime starts if the deadline has passed, or if there
    are no machines; a cluster created minutes ago may have machines that EC2 does not show yet.
    """
    options = spec.model_dump(exclude=_NOT_RECORDED)
    if old and not old.is_over(now) and (has_machines or now - old.created < _JUST_NOW):
        options["ttl"] = old.options.get("ttl", spec.ttl)
        return ClusterRecord(options, old.created, old.expires, old.generation)
    # The tag stores whole seconds.
    start = now.replace(microsecond=0)
    return ClusterRecord(options, start, start + spec.ttl, old.generation if old else 0)
