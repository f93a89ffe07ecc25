"""EC2's quotas, as Service Quotas reports them."""

from __future__ import annotations

from typing import Any

from moto.servicequotas import urls
from moto.servicequotas.exceptions import NoSuchResource
from moto.servicequotas.models import ServiceQuotasBackend

# GetServiceQuota's codes: "Running On-Demand Standard instances", "All Standard Spot Instance Requests".
ON_DEMAND_QUOTA, SPOT_QUOTA = "L-1216C47A", "L-34B43A08"
# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_NAMES = {
    ON_DEMAND_QUOTA: "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
    SPOT_QUOTA: "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
}


class LocalQuotas(ServiceQuotasBackend):
    """EC2's two quotas."""

    def value_of(self, _quota_code: str) -> float:
        return 4096

    # moto looks for the API's URLs next to the backend's module.
    _url_module = urls

    def get_service_quota(self, service_code: str, quota_code: str) -> dict[str, Any]:
        if service_code != "ec2" or quota_code not in _NAMES:
            raise NoSuchResource
        return {
            "ServiceCode": "ec2",
            "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
            "QuotaArn": f"arn:aws:servicequotas:{self.region_name}:{self.account_id}:ec2/{quota_code}",
            "QuotaCode": quota_code,
            "QuotaName": _NAMES[quota_code],
            "Value": float(self.value_of(quota_code)),
            "Unit": "None",
            "Adjustable": True,
            "GlobalQuota": False,
        }
