"""Options of ``up`` and other commands that describe the cluster, from the table in :mod:`infra.spec`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_origin

from cluster.cli.chosen_cluster import ClusterRequest
from cluster.console.options import JsonRequest, Option, option
from cluster.console.output import say
from cluster.local_files import remembered_cloud
from infra.instance_types import complete_type_name
from infra.spec import (
    DEFAULT_NAME,
    OPTIONS,
    ClusterChange,
    ClusterOptions,
    parse_labels,
    parse_ssh_cidr,
    require_spot,
    validate_options,
)
from provision.stacks.load import DEFAULT_STACK, load_stack

ACCESS = ("private", "jump", "subnet_ids", "proxy")
"""The options for reaching the machines."""


@dataclass(frozen=True, kw_only=True)
class AccessRequest(JsonRequest):
    """A request with options of the cluster."""

    given: Mapping[str, Any] = field(default_factory=dict)
    """Those that the user gave, as typed, by the spec's names."""
    ssh_cidr: str | None = option(
        "address ranges that may use SSH: a,b,c; `auto` is this machine's address (default: unchanged, "
        "or auto; with --private or --jump, the VPC)",
        metavar="RANGES",
        is_list=True,
    )


@dataclass(frozen=True, kw_only=True)
class SpecRequest(ClusterRequest, AccessRequest):
    """A request that describes the whole cluster; it never means the only one that this machine knows."""

    name: str | None = option(f"the cluster's name (default: {DEFAULT_NAME})")


def spec_options(keys: Iterable[str] = OPTIONS) -> Iterator[Option]:
    """Yield the options without defaults: an existing cluster keeps its own values."""
    for key in keys:
        each, kind = OPTIONS[key], ClusterOptions.model_fields[key].annotation
        if key != "name":
            yield Option(
                key,
                each.help,
                (each.flag,),
                each.metavar,
                parse=each.parse if each.parse in (int, float) else str,
                const=each.const,
                takes=None if each.const is None else 0,
                is_list=get_origin(kind) is tuple,
                repeats=key == "labels",
                can_clear=each.const is not None,
            )


def read_change(request: SpecRequest) -> ClusterChange:
    """Return what the user asks for. Raises :class:`UsageError` for an invalid option."""
    given = read_spec_options(request.given)
    # Checked first, so that a mistake costs no time.
    load_stack(given.get("stack", DEFAULT_STACK))
    if request.ssh_cidr is not None:
        parse_ssh_cidr(request.ssh_cidr)
    change = validate_options(name=request.name or DEFAULT_NAME, **given)
    if not remembered_cloud(change.name):
        require_spot(change)
    return change


def read_spec_options(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options that the user gave, by the spec's names.

    Raises :class:`UsageError` for invalid ones.
    """
    given = {
        key: OPTIONS[key].parse(value) if isinstance(value, str) else value
        for key, value in words.items()
    }
    if "labels" in given:
        given["labels"] = parse_labels(given["labels"])
    if "instance_types" in given:
        full = {name: complete_type_name(name) for name in given["instance_types"]}
        given["instance_types"] = tuple(full.values())
        for name, chosen in full.items():
            if name != chosen:
                say(f"{name}: using {chosen}, the family's smallest bare metal")
    return given
