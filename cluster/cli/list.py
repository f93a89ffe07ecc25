"""``spr-cluster list`` and ``gc``: clusters of this machine and of an account, and forgotten ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from cluster.cli.chosen_cluster import (
    CLOUD_NAMES,
    CloudRequest,
    command_with_profile,
    open_cloud,
    other_owner,
)
from cluster.console.display import format_seconds, format_table, make_progress
from cluster.console.options import YES, option, switch
from cluster.console.output import confirm, emit, say
from cluster.console.parser import Parser, add_request
from cluster.context import Context
from cluster.lifecycle.down import down
from cluster.local_files import ClusterFiles, known_clusters, remembered_account, utc_now
from cluster.overview import Overview, describe_regions, list_clusters
from infra.aws.caller import Caller, short_owner
from infra.aws.clients import connect, translate_boto_error
from infra.aws.cloud import DEFAULT_REGION, Cloud, MissingCredentialsError, NoRegionError
from infra.ec2.inventory import describe_inventory
from infra.errors import SprError
from infra.wait import Progress
from infra.words import counted


@dataclass(frozen=True, kw_only=True)
class ListRequest(CloudRequest):
    """Show every cluster that this machine made, on AWS and on the embedded cloud, and every cluster
    that any user of this tool made in the AWS account, from its tags.

    examples:
      spr-cluster list
      spr-cluster list --all-regions --json
    """

    all_regions: bool = switch("every region that the account can use")
    cloud: str | None = option(
        "AWS, or containers on this machine (default: aws, and those of known clusters)",
        choices=CLOUD_NAMES,
    )
    region: str | None = option(
        "AWS region (default: the configured one, and those of known clusters)"
    )


@dataclass(frozen=True, kw_only=True)
class CollectRequest(ListRequest):
    """Find expired clusters and leftovers of ended ones, and offer to remove them. A cluster that has
    machines and has not expired is never touched.

    examples:
      spr-cluster gc             show forgotten clusters, and ask
      spr-cluster gc --all-regions --yes
      spr-cluster gc --all       also kept images, and new clusters without nodes
    """

    all: bool = switch(
        "also kept images, and new clusters without machines, even if `up` on another machine has just "
        "begun to create them"
    )
    yes: bool = switch("remove without asking", flags=YES)


def add_parser(parent: Parser) -> None:
    add_request(parent, "list", run_list, ListRequest)
    add_request(parent, "gc", run_gc, CollectRequest)


_NOT_SET_UP = (MissingCredentialsError, NoRegionError)


@dataclass(frozen=True)
class _Search:
    """The clouds searched, the clusters found, and why a cloud was not searched."""

    places: Mapping[str, Sequence[str]]
    """The regions that were searched, by cloud."""
    callers: Mapping[str, Caller]
    """The credentials' owner, by cloud."""
    found: Sequence[tuple[Cloud, Overview]]
    not_searched: Mapping[str, SprError]

    def result(self) -> dict[str, Any]:
        """The part of a ``--json`` result that says where it comes from."""
        reasons = {name: reason.message for name, reason in self.not_searched.items()}
        only = next(iter(self.places)) if len(self.places) == 1 else None
        return {"cloud": only, "not_searched": reasons}

    def raise_failure(self) -> None:
        """Raise the first error, unless it is of a cloud that is not set up here and has no known cluster."""
        for name, reason in self.not_searched.items():
            if known_clusters(name) or not isinstance(reason, _NOT_SET_UP):
                raise reason


def _search(request: ListRequest, *, must_search: bool = True) -> _Search:
    """Search the chosen cloud; by default AWS and every cloud in which this machine made a cluster.

    A failing cloud is only noted if there is another. Raises the only cloud's error, unless it has no
    credentials, nothing names it, and the search is optional (not ``must_search``).
    """
    clouds = {cloud for cloud, _ in known_clusters().values()} | {"aws"}
    names = [request.cloud] if request.cloud else sorted(clouds)
    places: dict[str, Sequence[str]] = {}
    callers: dict[str, Caller] = {}
    found: list[tuple[Cloud, Overview]] = []
    failures: dict[str, SprError] = {}
    for name in names:
        try:
            cloud, callers[name], places[name], clusters = _search_cloud(name, request)
        except Exception as error:
            if (reason := translate_boto_error(error)) is None:
                raise
            there, missing = known_clusters(name), isinstance(reason, MissingCredentialsError)
            if missing:
                ways = [command_with_profile(each, request.words) for each in there]
                reason.hint = next(filter(None, ways), reason.hint)
            optional = missing and not (must_search or request.cloud or there)
            if len(names) == 1 and not optional:
                raise reason from None
            failures[name] = reason
            known = f"; {', '.join(there)} {'is' if len(there) == 1 else 'are'} there"
            say(f"{name} was not searched: {reason.message}{known if there else ''}")
            continue
        found += [(cloud, cluster) for cluster in clusters]
    if not places and (must_search or len(names) > 1):
        raise next(iter(failures.values()))
    return _Search(places, callers, found, failures)


def _search_cloud(
    name: str, request: ListRequest
) -> tuple[Cloud, Caller, Sequence[str], Sequence[Overview]]:
    progress = make_progress()
    cloud, regions = _choose_regions(name, request, progress)
    clients = connect(cloud)
    # A role with MFA asks for its code here, before the progress display.
    caller = clients.caller
    if request.all_regions:
        regions = describe_regions(clients)
    with progress.phase(f"Search {name} {', '.join(regions)}"):
        clusters, closed = list_clusters(cloud, regions)
    for region, reason in closed.items():
        say(f"{region} could not be searched completely: {reason}")
    _note_other_accounts(name, regions, caller)
    return cloud, caller, regions, clusters


def _choose_regions(
    name: str, request: ListRequest, progress: Progress
) -> tuple[Cloud, Sequence[str]]:
    """Return a cloud and the regions to search: the configured one and those of known clusters."""
    if request.region:
        return open_cloud(name, request.region, progress), (request.region,)
    there = tuple(dict.fromkeys(region for _, region in known_clusters(name).values()))
    try:
        cloud = open_cloud(name, None, progress)
    except NoRegionError as error:
        # Any region can list all of them.
        first = DEFAULT_REGION if request.all_regions else next(iter(there), None)
        if first is None:
            error.hint = f"--all-regions searches all of them, {error.hint}"
            raise
        return open_cloud(name, first, progress), there
    return cloud, tuple(dict.fromkeys([cloud.region, *there]))


def _note_other_accounts(cloud: str, regions: Sequence[str], caller: Caller) -> None:
    for name, (_, region) in known_clusters(cloud).items():
        account, profile = remembered_account(name)
        if region in regions and account not in ("", caller.account):
            was = f" (profile {profile})" if profile else ""
            say(f"{name} is in account {account}{was}, not in {caller.account}")


def run_list(request: ListRequest) -> int:
    search = _search(request, must_search=False)
    now = utc_now()
    rows = [{**each.as_dict(now), "cloud": cloud.name} for cloud, each in search.found]
    accounts = {cloud: caller.account for cloud, caller in search.callers.items()}
    text = _render(search, now, all_regions=request.all_regions)
    emit(request, text, {**search.result(), "accounts": accounts, "clusters": rows})
    search.raise_failure()
    return 0


def _render(search: _Search, now: datetime, *, all_regions: bool) -> str:
    if not search.places:
        return "No clusters were made on this machine."
    if not search.found:
        where = [
            f"{c}, {'any region' if all_regions else ', '.join(r)}, account {search.callers[c].account}"
            for c, r in search.places.items()
        ]
        return f"No clusters in {'; '.join(where)}."
    lines = [_table(search.found, now)]
    lines += ["; ".join(f"{c}: account {each.account}" for c, each in search.callers.items())]
    if any(cloud.billed for cloud, _ in search.found):
        lines += [_total([cluster for _, cluster in search.found], now)]
    if any(cluster.is_orphan(now) for _, cluster in search.found):
        lines += ["To remove leftovers of ended clusters: spr-cluster gc"]
    return "\n".join(lines)


def _table(clusters: Sequence[tuple[Cloud, Overview]], now: datetime) -> str:
    rows = [("NAME", "CLOUD", "REGION", "STATE", "NODES", "AGE", "ENDS IN", "COST", "OWNER")]
    for cloud, cluster in clusters:
        row = cluster.as_dict(now)
        wanted = "?" if row["wanted_nodes"] is None else row["wanted_nodes"]
        rest = cluster.found.billed_rest if cloud.billed else ""
        state = row["state"]
        if state == "no machines":
            state += f", {rest} billed" if rest else ", free"
        rows.append(
            (
                cluster.name,
                cloud.name,
                cluster.region,
                state,
                f"{row['nodes']}/{wanted}",
                "-" if row["age_s"] is None else format_seconds(row["age_s"]),
                _ends_in(cluster, now),
                str(cluster.cost(now) or "?"),
                short_owner(cluster.found.owner) or "-",
            )
        )
    return format_table(rows)


def _ends_in(cluster: Overview, now: datetime) -> str:
    """Return the time left, and in the grace period ``grace``."""
    expires, latest = cluster.expires, cluster.latest
    if expires is None or latest is None or latest <= now:
        return "-"
    if expires <= now and not cluster.found.alive:
        return "-"
    if expires <= now:
        return f"grace {format_seconds((latest - now).total_seconds())}"
    return format_seconds((expires - now).total_seconds())


def _total(clusters: Sequence[Overview], now: datetime) -> str:
    """Return the cost of the clusters' machines, with the sources of the prices."""
    costs = [cost for cluster in clusters if (cost := cluster.cost(now))]
    sources = dict.fromkeys(cost.source for cost in costs if cost.source)
    most = "At most " * any(cost.is_most for cost in costs)
    text = f"{most}${sum(cost.usd for cost in costs):.2f} so far at "
    text += f"on-demand prices ({'; '.join(sources)})." if sources else "on-demand prices."
    return text if len(costs) == len(clusters) else f"{text} Some prices are unknown."


def run_gc(request: CollectRequest) -> int:
    search = _search(request)
    now = utc_now()
    wanted = [
        (cloud, each)
        for cloud, each in search.found
        if each.is_orphan(now) or (request.all and not each.found.alive)
    ]
    for cloud, cluster in wanted:
        owner = _other_owner(search, cloud, cluster)
        whose = f", made by {owner}" if owner else ""
        found = cluster.found if request.all else cluster.found.without(cluster.found.kept)
        say(f"{cluster.name} ({cluster.region}, {cluster.state(now)}{whose}): {found}")
    others = [(c, each) for c, each in wanted if request.yes and _other_owner(search, c, each)]
    wanted = [each for each in wanted if each not in others]
    if any(cloud.billed or _other_owner(search, cloud, each) for cloud, each in wanted):
        confirm("Remove all of these?", yes=request.yes)
    failed = _remove_all(search, wanted, unfinished=request.all)
    left = [cluster for cluster, _ in failed]
    names = [cluster.name for _, cluster in wanted if cluster not in left]
    where = f" in {', '.join(search.places)}" * bool(search.not_searched)
    none = "" if wanted else f"No forgotten clusters{where}."
    text = f"Removed: {', '.join(names)}." if names else none
    emit(request, text, {**search.result(), "removed": names})
    done = [*wanted, *others]
    rest = [c for cloud, c in search.found if (cloud, c) not in done and not c.found.alive]
    for cloud, each in others:
        command = f"spr-cluster down --yes --name {each.name} --cloud {cloud.name}"
        say(f"Not removed, because somebody else made it: {command} --region {each.region}")
    if rest and not request.json:
        why = {"kept image": "a kept image"}
        new = "new: `up` may still be buying its nodes"
        begun = "new: `up` has bought no nodes yet"
        kept = [
            f"{c.name} ({why.get(c.state(now), begun if c.is_idle_here else new)})" for c in rest
        ]
        print(f"Not removed: {', '.join(kept)}; --all removes them")
    if failed:
        lines = "".join(f"\n  {c.name} ({c.region}): {reason}" for c, reason in failed)
        raise SprError(f"{len(failed)} of {counted(len(wanted), 'cluster')} not removed:{lines}")
    search.raise_failure()
    return 0


def _other_owner(search: _Search, cloud: Cloud, cluster: Overview) -> str:
    return other_owner(search.callers[cloud.name], cluster.found.owner)


def _remove_all(
    search: _Search, clusters: Sequence[tuple[Cloud, Overview]], *, unfinished: bool
) -> list[tuple[Overview, SprError]]:
    """Remove clusters, continuing after failures; return those that failed, and why."""
    failed = []
    for cloud, cluster in clusters:
        there, name, progress = replace(cloud, region=cluster.region), cluster.name, make_progress()
        try:
            clients, files = connect(there), ClusterFiles.of(name)
            clients.caller = search.callers[cloud.name]
            ctx = Context(there, clients, files, progress, command="gc")
            seen, kept = cluster.found, not unfinished
            with files.lock("gc"), progress.phase(f"Remove cluster {name}"):
                # `down` removes no cluster that was extended since, but knows a new one only by its group.
                if not seen.alive and describe_inventory(clients.ec2, name, ("instances",)).alive:
                    raise SprError("it is in use again")
                down(ctx, approved=seen, keep_image=kept, is_new_kept=False)
        except Exception as error:
            if (reason := translate_boto_error(error)) is None:
                raise
            failed.append((cluster, reason))
    return failed
