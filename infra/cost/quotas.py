"""EC2's quotas for running vCPUs: one for on-demand, one for spot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.clients import DENIED, error_code, translate_boto_error
from infra.errors import UsageError
from infra.words import counted

if TYPE_CHECKING:
    from types_boto3_service_quotas import ServiceQuotasClient

    from infra.ec2.instances import Instance
    from infra.spec import ClusterSpec

# Those of standard types: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-resource-limits.html
ON_DEMAND_QUOTA = "L-1216C47A"
SPOT_QUOTA = "L-34B43A08"


def quota_code(*, spot: bool) -> str:
    """Return the code of a market's quota."""
    return SPOT_QUOTA if spot else ON_DEMAND_QUOTA


def count_in_market(spec: ClusterSpec, kept: Iterable[Instance]) -> int:
    """Return the nodes that count toward the market's quota: all but ``kept`` ones of the other market."""
    others = sum(bool(machine.spot_request) != spec.spot for machine in kept)
    return spec.nodes - others


def require_quota(
    spec: ClusterSpec, nodes: int, needs: Mapping[str, int], held: int | None
) -> None:
    """Raise :class:`UsageError` if the quota is too small for every requested type.

    ``needs`` maps each type to the vCPUs of ``nodes`` nodes; ``held`` is the quota, if known.
    """
    if held is None or not needs or (spec.spot and spec.on_demand_allowed):
        return
    name, least = min(needs.items(), key=lambda item: item[1])
    if held >= least:
        return
    raise UsageError(
        f"quota {quota_code(spot=spec.spot)} is {held} vCPUs: {counted(nodes, 'node')} of {name} "
        f"need {least}",
        hint="request more in the console's Service Quotas, or use fewer --nodes or a smaller "
        "--instance-type",
    )


def describe_quota(
    quotas: ServiceQuotasClient, *, spot: bool, why_not: Callable[[str], object] = str
) -> int | None:
    """Return a market's vCPU quota in this region, or ``None`` after passing the reason to ``why_not``."""
    try:
        answer = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=quota_code(spot=spot))
    except (ClientError, BotoCoreError) as error:
        # The quota is informative, so a policy without this permission must not stop anything.
        is_denied = isinstance(error, ClientError) and error_code(error) in DENIED
        known = translate_boto_error(error)
        why_not("no permission to read it" if is_denied or known is None else known.message)
        return None
    return int(answer["Quota"]["Value"])
