"""``spr-cluster up --check``, or ``doctor``: whether `up` would succeed, at no cost."""

from __future__ import annotations

from cluster.cli.chosen_cluster import open_chosen_cloud, open_context
from cluster.cli.spec_options import SpecRequest, read_change
from cluster.cli.verify import describe_failures, render_results
from cluster.console.display import make_progress
from cluster.console.output import emit, wrap
from cluster.lifecycle.doctor import NOBODY, Examination, examine
from cluster.verify.results import Verdict, worst
from infra.ec2.cluster_record import merge_options
from infra.errors import SprError
from provision.stacks.load import DEFAULT_STACK


def check(request: SpecRequest) -> int:
    """Examine the account and the machine, and print what was found."""
    change = read_change(request)
    progress = make_progress()
    cloud = open_chosen_cloud(request, change.name, progress=progress, must_exist=False)
    ctx = open_context(request, change.name, cloud)
    defaults = {"stack": DEFAULT_STACK, "amx_required": ctx.cloud.has_amx}
    record = ctx.find_record(only_own=True)
    spec = merge_options(change.name, (NOBODY,), change.given, record, defaults)
    where = f"{ctx.cloud.name} {ctx.cloud.region}"
    with progress.phase(f"Examine {where}"):
        results = examine(Examination(ctx, spec, change, request.ssh_cidr))
    verdict = worst(results)
    checks = [result.as_dict() for result in results]
    place = {"cloud": ctx.cloud.name, "region": ctx.cloud.region}
    zones = {result.node for result in results if result.check == "purchase"}
    text = render_results(results, len(zones))
    if verdict is not Verdict.FAIL:
        end = f"`up` should succeed in {where}, as far as can be checked for free."
        text += f"\n{wrap(end)}"
    emit(request, text, {**place, "verdict": verdict.value, "checks": checks})
    if verdict is Verdict.FAIL:
        raise SprError(describe_failures(results))
    return 0
