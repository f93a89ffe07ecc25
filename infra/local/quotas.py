"""Service Quotas: the vCPUs that the faults file allows."""

from __future__ import annotations

import functools
from typing import Any

from moto.servicequotas import urls
from moto.servicequotas.exceptions import NoSuchResource
from moto.servicequotas.models import ServiceQuotasBackend, servicequotas_backends

from infra.local.ec2_capacity import ON_DEMAND_QUOTA, SPOT_QUOTA
from infra.local.faults import ActiveFaults

# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_NAMES = {
    ON_DEMAND_QUOTA: "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
    SPOT_QUOTA: "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
}


class LocalQuotas(ServiceQuotasBackend):
    """EC2's two quotas, as the active faults set them."""

    def __init__(self, region_name: str, account_id: str, *, faults: ActiveFaults) -> None:
        super().__init__(region_name, account_id)
        self._faults = faults

    # moto looks for the API's URLs beside a backend's module.
    _url_module = urls

    def get_service_quota(self, service_code: str, quota_code: str) -> dict[str, Any]:
        if service_code != "ec2" or quota_code not in _NAMES:
            raise NoSuchResource
        quota = self._faults.now.quota
        value = quota.spot_vcpus if quota_code == SPOT_QUOTA else quota.on_demand_vcpus
        return {
            "ServiceCode": "ec2",
            "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
            "QuotaArn": f"arn:aws:servicequotas:{self.region_name}:{self.account_id}:ec2/{quota_code}",
            "QuotaCode": quota_code,
            "QuotaName": _NAMES[quota_code],
            "Value": float(value),
            "Unit": "None",
            "Adjustable": True,
            "GlobalQuota": False,
        }


def show_quotas(account: str, faults: ActiveFaults) -> None:
    """Make moto's Service Quotas answer these quotas in every region."""
    regions = servicequotas_backends[account]
    regions.clear()
    regions.backend = functools.partial(LocalQuotas, faults=faults)
