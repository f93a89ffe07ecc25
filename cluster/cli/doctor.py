"""``spr-cluster doctor``."""

from __future__ import annotations

import argparse

from cluster.cli.chosen_cluster import open_chosen_cloud, open_context
from cluster.cli.spec_options import add_spec_options, read_spec_options
from cluster.cli.verify import describe_failures, render_results
from cluster.console.display import make_progress
from cluster.console.output import emit, wrap
from cluster.console.parser import SubParsers, add_command
from cluster.lifecycle.doctor import Examination, examine
from cluster.verify.results import Verdict, worst
from infra.ec2.cluster_record import merge_options
from infra.errors import SprError
from infra.spec import DEFAULT_NAME, parse_ssh_cidr
from provision.stacks.load import DEFAULT_STACK, load_stack

_EXAMPLES = """\
  spr-cluster doctor --nodes 4
  spr-cluster doctor --nodes 2 --instance-type c7i.metal-24xl --market spot
  spr-cluster doctor --json
"""
# A documentation address, in place of the ones that `up` looks up.
_SOME_CIDRS = ("192.0.2.1/32",)


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "doctor",
        "Check whether `up` with the same options would succeed: account, region, quota, network,\n"
        "routes, permissions, image, tag policies, and outgoing connections to port 22. EC2 checks the\n"
        "purchase in each zone as a dry run. Prints a verdict for each check and how to fix problems.\n"
        "Buys and changes nothing. The exit code is 1 if a check failed, else 0.",
        _EXAMPLES,
        run=run,
    )
    add_spec_options(parser)


def run(args: argparse.Namespace) -> int:
    given = read_spec_options(args)
    args.named, args.name = args.name is not None, args.name or DEFAULT_NAME
    if args.ssh_cidr is not None:
        parse_ssh_cidr(args.ssh_cidr)
    load_stack(given.get("stack", DEFAULT_STACK))
    progress = make_progress()
    ctx = open_context(args, open_chosen_cloud(args, progress=progress, must_exist=False))
    defaults = {"stack": DEFAULT_STACK, "amx_required": ctx.cloud.has_amx}
    spec = merge_options(args.name, _SOME_CIDRS, given, None, defaults)
    where = f"{ctx.cloud.name} {ctx.cloud.region}"
    with progress.phase(f"Examine {where}"):
        results = examine(Examination(ctx, spec, given, args.ssh_cidr))
    verdict = worst(results)
    checks = [result.as_dict() for result in results]
    place = {"cloud": ctx.cloud.name, "region": ctx.cloud.region}
    zones = {result.node for result in results if result.check == "purchase"}
    text = render_results(results, len(zones))
    if verdict is not Verdict.FAIL:
        end = f"`up` should succeed in {where}, as far as can be checked for free."
        text += f"\n{wrap(end)}"
    emit(args, text, {**place, "verdict": verdict.value, "checks": checks})
    if verdict is Verdict.FAIL:
        raise SprError(describe_failures(results))
    return 0
