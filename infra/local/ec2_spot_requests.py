"""Spot machines: the request behind each of them, and what becomes of it.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.utils import random_spot_request_id

from infra.local.clock import as_moto_time
from infra.local.ec2_placement_groups import GroupsBackend

_MESSAGES = {
    "fulfilled": "Your Spot request is fulfilled.",
    "marked-for-termination": "Your Spot instance is marked for termination.",
    "instance-terminated-by-user": "Your Spot instance was terminated by you.",
    "request-canceled-and-instance-running": "Your request was canceled; the instance still runs.",
}


class SpotRequest(TaggedEC2Resource):
    """The request of one spot machine; the attributes' names are those that moto's serializer looks for."""

    def __init__(
        self, backend: Any, instance: Any, options: Mapping[str, Any], tags: dict[str, str]
    ) -> None:
        self.ec2_backend = backend
        self.id = self.spot_instance_request_id = random_spot_request_id()
        self.instance_id = instance.id
        self.launched_availability_zone = instance.placement.zone
        self.spot_price = options.get("MaxPrice")
        self.type = options.get("SpotInstanceType", "one-time")
        self.instance_interruption_behavior = options.get(
            "InstanceInterruptionBehavior", "terminate"
        )
        self.product_description = "Linux/UNIX"
        self.create_time = as_moto_time(backend.clock.time())
        self.state = "active"
        self.set_code("fulfilled")
        self.add_tags(tags)

    def set_code(self, code: str) -> None:
        self.code = code
        self.status = {
            "Code": code,
            "Message": _MESSAGES[code],
            "UpdateTime": as_moto_time(self.ec2_backend.clock.time()),
        }


class SpotBackend(GroupsBackend):
    """The part of a region's state that is about spot machines."""

    spot_instance_requests: dict[str, SpotRequest]

    def require_spot_price(self, options: Mapping[str, Any]) -> None:
        """Refuse a highest price that is below what spot machines cost now."""
        price, highest = self.faults.now.spot.usd_per_hour, options.get("MaxPrice")
        if highest is not None and float(highest) < price:
            raise EC2ClientError(
                "SpotMaxPriceTooLow",
                f"Your Spot request price of {highest} is lower than the minimum required Spot "
                f"request fulfillment price of {price}.",
            )

    def add_spot_request(
        self, instance: Any, options: Mapping[str, Any], tags: dict[str, str]
    ) -> None:
        request = SpotRequest(self, instance, options, tags)
        self.spot_instance_requests[request.id] = request
        instance.lifecycle = "spot"
        instance.spot_instance_request_id = request.id

    def spot_request_of(self, instance_id: str) -> SpotRequest | None:
        requests = self.spot_instance_requests.values()
        return next((r for r in requests if r.instance_id == instance_id), None)

    def close_spot_request(self, instance_id: str) -> None:
        """The machine ends: a request that was not cancelled before is closed."""
        if request := self.spot_request_of(instance_id):
            if request.state == "active":
                request.state = "closed"
            request.set_code("instance-terminated-by-user")

    def _require_spot_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id not in self.spot_instance_requests:
                raise EC2ClientError(
                    "InvalidSpotInstanceRequestID.NotFound",
                    f"The spot instance request ID '{request_id}' does not exist",
                )

    def describe_spot_instance_requests(
        self, filters: Any = None, spot_instance_ids: list[str] | None = None
    ) -> Any:
        self._require_spot_requests(spot_instance_ids or [])
        return super().describe_spot_instance_requests(filters, spot_instance_ids)

    def cancel_spot_instance_requests(self, request_ids: list[str]) -> list[SpotRequest]:
        """Cancel requests; their machines go on."""
        self._require_spot_requests(request_ids)
        requests = [self.spot_instance_requests[i] for i in request_ids]
        for request in requests:
            if request.state == "active":
                request.state = "cancelled"
                request.set_code("request-canceled-and-instance-running")
        return requests
