"""Options of ``up`` and other commands that describe the cluster, from the table in :mod:`infra.spec`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.cli.chosen_cluster import MADE_THERE, add_cloud_options
from cluster.console.output import say
from infra.errors import UsageError
from infra.instance_types import complete_type_name
from infra.spec import OPTIONS, Option, parse_labels

_ACCESS = ("private", "jump", "subnet_ids", "proxy")


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """Add the options without defaults: an existing cluster keeps its own values."""
    parser.add_argument("--name", help="the cluster's name (default: spr)")
    add_cloud_options(parser, *MADE_THERE)
    _add(parser, [key for key in OPTIONS if key not in ("name", "labels", *_ACCESS)])
    tag = OPTIONS["labels"]
    parser.add_argument(tag.flag, action="append", metavar=tag.metavar, help=tag.help)
    add_access_options(parser)


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for reaching the machines."""
    _add(parser, _ACCESS)
    parser.add_argument(
        "--ssh-cidr",
        metavar="RANGES",
        help="address ranges that may use SSH, IPv4 or IPv6: a,b,c; `auto` tracks this machine's "
        "address (default: unchanged, or auto; with --private or --jump, the VPC)",
    )


def _add(parser: argparse.ArgumentParser, keys: Any) -> None:
    for option in map(OPTIONS.__getitem__, keys):
        how: dict[str, Any] = {"metavar": option.metavar}
        if option.const is not None:
            how = {"action": "store_const", "const": option.const}
        elif option.parse in (int, float):
            how["type"] = option.parse
        parser.add_argument(option.flag, help=option.help, **how)


def read_access_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the user gave, by the spec's names."""
    return {key: value for key in _ACCESS if (value := _given(args, OPTIONS[key])) is not None}


def read_spec_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the user gave, by the spec's names.

    Raises :class:`UsageError` for invalid ones.
    """
    kinds = {key: option for key, option in OPTIONS.items() if key not in ("name", "labels")}
    options = {key: _given(args, option) for key, option in kinds.items()}
    options["labels"] = parse_labels(args.tag) if args.tag else None
    given = {key: value for key, value in options.items() if value is not None}
    if "instance_types" in given:
        given["instance_types"] = complete_types(given["instance_types"])
    if "max_price" in given and given.get("market", "on-demand") == "on-demand":
        raise UsageError("--max-price requires --market spot; on-demand prices are fixed")
    return given


def complete_types(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types, with a size for names such as ``r7iz.metal``; a line on stderr names each."""
    full = {name: complete_type_name(name) for name in names}
    for name, chosen in full.items():
        if name != chosen:
            say(f"{name}: using {chosen}, the family's smallest bare metal")
    return tuple(full.values())


def _given(args: argparse.Namespace, option: Option) -> Any:
    value = getattr(args, option.dest)
    return option.parse(value) if isinstance(value, str) else value
