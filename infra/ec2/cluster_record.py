"""A cluster's recorded options, stored as tags of its security group.

The group is created first and deleted last, so a command on any machine can look up the cluster's
size, types, stack, and deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from math import ceil
from typing import Any

from infra.ec2 import tags
from infra.errors import SprError, UsageError
from infra.lifetime import AFTER, Lifetime
from infra.spec import (
    LONGEST_TTL,
    OPTIONS,
    ClusterOption,
    ClusterOptions,
    ClusterSpec,
    build_spec,
    require_role,
    require_spot,
    validate_options,
)
from infra.words import render_duration, spoken_duration, spoken_time

_PREFIX = "spr-cluster:"
_CREATED = f"{_PREFIX}created"
_BOUND = f"{_PREFIX}bound"
_PEAK = f"{_PREFIX}peak"
GENERATION = f"{_PREFIX}generation"
_JUST_NOW = timedelta(minutes=10)
SHUTDOWN = timedelta(minutes=5)
"""The time that a node takes to shut down, on bare metal, and is billed."""
_HOUR = timedelta(hours=1)
_PRICED = ("nodes", "market", "max_price")
_RECORDED = {key: option for key, option in OPTIONS.items() if option.tag is not None}


@dataclass(frozen=True)
class ClusterRecord:
    """``options`` holds the fields of :class:`ClusterOptions` that have a tag.

    From ``expires`` on, nodes shut down unless something on them is nowhere else; at ``latest``, they do
    in any case. ``bound`` is how far jobs may move ``latest``, by --max-time and --budget.
    ``generation`` counts changes to the cluster, so that ``up`` can reject an outdated plan. ``peak`` holds
    the most nodes since creation, and the market and maximum price at which they can have cost most.
    """

    options: Mapping[str, Any]
    created: datetime
    expires: datetime
    latest: datetime
    generation: int = 0
    bound: datetime | None = None
    peak: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dearest(self) -> Mapping[str, Any]:
        """The options at which it cost most per hour since its creation."""
        return {**self.options, **self.peak}

    @property
    def nodes(self) -> int:
        return int(self.options["nodes"])

    def is_over(self, now: datetime) -> bool:
        """Return whether the time to live has passed; remaining nodes shut down or wait for `fetch`."""
        return now >= self.expires

    def is_ended(self, now: datetime) -> bool:
        """Return whether no node may be left."""
        return now >= self.latest

    def is_late(self, now: datetime) -> bool:
        """Return whether a node that still runs did not shut down, and no second guard ended it."""
        guard = AFTER if self.options["second_guard"] else timedelta()
        return now >= self.latest + guard + SHUTDOWN

    @property
    def grace_ends(self) -> datetime:
        """Until when nodes wait for `fetch`; ``latest`` is later if a job with a limit may run longer."""
        grace: timedelta = self.options["grace"]
        return min(self.expires + grace, self.latest)

    @property
    def ends_at_most(self) -> datetime:
        """When the nodes shut down if jobs keep them as long as they may."""
        return max(self.latest, self.bound or self.latest)

    @property
    def job_ends(self) -> datetime:
        """When the nodes shut down at the latest while a job with a limit runs."""
        grace: timedelta = self.options["grace"]
        return max(self.expires, self.latest - grace)

    def spoken_grace(self, now: datetime) -> str:
        """Return until when nodes wait for `fetch`, as text such as ``until 10:26 UTC (in 1 min)``."""
        latest = f"until {spoken_time(self.latest, now)}"
        if not now < self.grace_ends < self.latest:
            return latest
        usual = spoken_time(self.grace_ends, now)
        return f"until {usual}, or {latest} with a job that has --max-time or --budget"

    def begun(self, now: datetime) -> ClusterRecord:
        """Return it for a cluster that is created now, with all its times moved."""
        late = now.replace(microsecond=0) - self.created  # tags store whole seconds
        times = {key: getattr(self, key) for key in ("created", "expires", "latest", "bound")}
        return replace(self, **{key: time + late for key, time in times.items() if time})

    def joined(self, seen: ClusterRecord | None) -> ClusterRecord:
        """Return it with the ends that another command has moved further, according to ``seen``."""
        if seen is None or seen.created != self.created:
            return self
        expires, latest = max(self.expires, seen.expires), max(self.latest, seen.latest)
        return replace(self, expires=expires, latest=latest)

    @property
    def lifetime(self) -> Lifetime:
        """What each node has to know."""
        idle = self.options["idle_timeout"] or timedelta()
        return Lifetime(self.expires, self.latest, self.options["grace"], idle)


def spoken_end(expires: datetime, job_ends: datetime | None, now: datetime) -> str:
    """Return when nodes shut down, also while a job with a limit runs, as text."""
    text = spoken_time(expires, now)
    if job_ends is None or job_ends <= expires:
        return text
    return f"{text}, or up to {spoken_time(job_ends, now)} while a job with --max-time or --budget runs"


def lifetime_tags(record: ClusterRecord) -> dict[str, str]:
    """Return the tags of the group and of each machine that say when they end."""
    return {
        tags.EXPIRES: tags.render_time(record.expires),
        tags.LATEST: tags.render_time(record.latest),
    }


def deadline_tags(record: ClusterRecord) -> dict[str, str]:
    """Return the group's tags to update for a new deadline."""
    bound = {_BOUND: tags.render_time(record.bound)} if record.bound else {}
    return {GENERATION: str(record.generation), **lifetime_tags(record), **bound}


def record_tags(
    spec: ClusterSpec, record: ClusterRecord, owner_key: str = "", had: Container[str] = ()
) -> dict[str, str]:
    """Return the group's tags. ``owner_key`` is the fingerprint of the cluster's SSH key, if known.

    An option without a tag has an empty one if the group ``had`` one.
    """
    values = {**spec.model_dump(), **_pick_lifetime(record.options, spec)}
    written = {
        f"{_PREFIX}{option.tag}": "" if values[key] is None else option.write(values[key])
        for key, option in _RECORDED.items()
    }
    return {
        **{
            label: text or "" for label, text in written.items() if text is not None or label in had
        },
        _CREATED: tags.render_time(record.created),
        _PEAK: " ".join(str(record.dearest[key] or "") for key in _PRICED).strip(),
        **deadline_tags(record),
        **dict(spec.labels),
        **({tags.OWNER_KEY: owner_key} if owner_key else {}),
    }


def parse_record(labels: Mapping[str, str]) -> ClusterRecord | None:
    """Parse the record in a group's tags; return ``None`` if there is none.

    Raises :class:`SprError` if the tags are invalid.
    """
    if f"{_PREFIX}nodes" not in labels:
        return None

    def read(key: str, parse: Callable[[str], Any]) -> Any:
        label = _PREFIX + key
        try:
            return parse(labels[label])
        except KeyError:
            raise ValueError(f"{label} is missing") from None
        except (ValueError, UsageError):
            raise ValueError(f"{label} is {labels[label]!r}") from None

    try:
        options = ClusterOptions().model_dump(include={*_RECORDED, "labels"})
        for key, option in _RECORDED.items():
            # Some values have no tag.
            has_none = options[key] is not None and option.write(options[key]) is None
            if f"{_PREFIX}{option.tag}" in labels or not has_none:
                options[key] = read(str(option.tag), partial(_parse, key, option))
        options["labels"] = tags.user_labels(labels)
        times = (read(key, tags.parse_time) for key in ("created", "expires", "latest"))
        created, expires, latest = times
        bound = read("bound", tags.parse_time) if _BOUND in labels else None
        generation = read("generation", int)
        peak = read("peak", _parse_peak) if _PEAK in labels else {}
        validate_options(**options)
    except (ValueError, UsageError) as error:
        raise SprError(
            f"invalid cluster record in the tags of the security group: {error}",
            hint="if a newer version made it, install that; else restore the tags, or remove it: "
            f"`spr-cluster down --name {labels.get(tags.CLUSTER, 'NAME')}`",
        ) from None
    return ClusterRecord(options, created, expires, latest, generation, bound, peak)


def _parse_peak(text: str) -> dict[str, Any]:
    nodes, market, *price = text.split()
    return {"nodes": int(nodes), "market": market, "max_price": float(price[0]) if price else None}


def _raise_peak(before: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the peak of a cluster that changes to these options."""
    both = [before, options]
    limits = [each["max_price"] if each["market"] != "on-demand" else None for each in both]
    capped = all(limits) and all(each["market"] == "spot" for each in both)
    return {
        "nodes": max(each["nodes"] for each in both),
        "market": "spot" if capped else "spot-or-on-demand",
        "max_price": max(filter(None, limits), default=None),
    }


def _parse(key: str, option: ClusterOption, text: str) -> Any:
    """Parse a tag value; an empty one means ``None`` if that is the option's default."""
    if not text and ClusterOptions.model_fields[key].default is None:
        return None
    return (option.read or option.parse)(text)


def merge_options(
    name: str,
    ssh_cidrs: tuple[str, ...],
    given: Mapping[str, Any],
    record: ClusterRecord | None,
    defaults: Mapping[str, Any] | None = None,
    caller: str = "",
) -> ClusterSpec:
    """Combine options: the given ones, else the recorded ones, else the cloud's defaults.

    ``caller`` is the range in ``ssh_cidrs`` that tracks this machine's address.
    Raises :class:`UsageError` for an option that an existing cluster cannot change.
    """
    known = dict(record.options) if record else {}
    asked = given.get("labels")
    if record and isinstance(asked, tuple) and {*asked} <= {*known.get("labels", ())}:
        # An organization may have added tags.
        given = {key: value for key, value in given.items() if key != "labels"}
    for key, option in ((key, option.flag) for key, option in OPTIONS.items() if option.fixed):
        if key in given and key in known and given[key] != known[key]:
            shown, was = (_shown(each[key]) for each in (given, known))
            was = f"with {was}" if known[key] else "without it"
            if given[key] is False:
                was, option = f"with {option}", f"--no-{option[2:]}"
            raise UsageError(
                f"{option} {'' if isinstance(given[key], bool) else shown}".rstrip()
                + f": cluster {name!r} was created {was}, which can't be changed",
                hint=f"omit {option}, or start over: spr-cluster down --name {name}",
            )
    options = {**(defaults or {}), **known, **given}
    spec = build_spec(name=name, ssh_cidrs=ssh_cidrs, caller=caller, **options)
    if "max_price" in given:
        require_spot(spec)
    if "permissions_boundary" in given:
        require_role(spec)
    return spec


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(
            "=".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value
        )
    return str(value)


def new_record(
    spec: ClusterSpec,
    now: datetime,
    old: ClusterRecord | None,
    *,
    has_machines: bool = True,
    bought: int | None = None,
) -> ClusterRecord:
    """Return the updated record of a cluster, which has had at most ``bought`` machines, if that is known.

    The deadline stays unless it has passed or the cluster has no machines. A cluster created in the
    last few minutes also keeps it, because EC2 may not list its machines yet.
    """
    options = spec.model_dump(include={*_RECORDED, "labels"})
    if old and not old.is_over(now) and (has_machines or now - old.created < _JUST_NOW):
        # Tags are written before a purchase, which may fail.
        nodes = old.dearest["nodes"] if bought is None else min(old.dearest["nodes"], bought)
        peak = _raise_peak({**old.dearest, "nodes": nodes} if nodes else options, options)
        return replace(old, options={**options, **_pick_lifetime(old.options, spec)}, peak=peak)
    # Tags store whole seconds.
    start = now.replace(microsecond=0)
    expires, generation = start + spec.ttl, old.generation if old else 0
    peak = _raise_peak(options, options)
    return ClusterRecord(options, start, expires, expires + spec.grace, generation, peak=peak)


def _pick_lifetime(options: Mapping[str, Any], spec: ClusterSpec) -> dict[str, timedelta]:
    """Return the options that are only for new clusters."""
    return {key: options.get(key, getattr(spec, key)) for key in ("ttl", "grace")}


def limit_record(
    record: ClusterRecord, old: ClusterRecord | None, usd_per_hour: float
) -> ClusterRecord:
    """Return a record with its ``bound`` by --max-time and --budget, for all of the cluster's life.

    ``usd_per_hour`` is the highest since its creation. Part of a budget is kept for the shutdown, or for the
    time that a second guard waits. Raises :class:`UsageError` naming the time to live that fits, if it
    may already run longer.
    """
    reserve = AFTER if record.options["second_guard"] else SHUTDOWN
    budget, longest = record.options["budget"], record.options["max_time"] or LONGEST_TTL
    exists = old is not None and old.created == record.created
    paid = LONGEST_TTL
    if budget:
        paid = min(budget / usd_per_hour - reserve / _HOUR, LONGEST_TTL / _HOUR) * _HOUR
    time = timedelta(seconds=int(min(longest, paid).total_seconds()))
    bound, grace = record.created + time, record.options["grace"]
    if record.latest > bound:
        need = record.latest - record.created
        if paid < longest:
            need += reserve
            had = ", the cluster's highest price" if exists else ""
            paid_for = spoken_duration(budget / usd_per_hour * 3600)
            option = f"--budget {budget:.10g}"
            enough = f"--budget {ceil(usd_per_hour * (need / _HOUR))}"
            problem = (
                f"it pays for {paid_for} at ${usd_per_hour:.2f} an hour{had}; the nodes may run "
                f"{spoken_duration(need.total_seconds())} with the grace period and the shutdown"
            )
        else:
            option = f"--max-time {render_duration(longest)}"
            enough = f"--max-time {ceil(need / timedelta(minutes=1))}m"
            problem = f"the nodes may run {render_duration(need)} with the grace period"
        fits, hint = int((time - grace) / timedelta(minutes=1)), f"use {enough}"
        if fits >= 1 and not exists:
            ttl = render_duration(timedelta(minutes=fits))
            hint = f"what fits: --ttl {ttl} with --grace {render_duration(grace)}"
        raise UsageError(f"{option}: {problem}", hint=hint)
    return replace(record, bound=bound)
