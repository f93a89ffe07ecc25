"""Spot requests: one per spot instance, with a status that follows the instance.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moto.ec2.models import EC2Backend
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.utils import random_spot_request_id

from infra.local.api import refusals
from infra.local.api.runtime import Part

_MESSAGES = {
    "fulfilled": "Your Spot request is fulfilled.",
    "marked-for-termination": "Your Spot instance is marked for termination.",
    "instance-terminated-by-user": "Your Spot instance was terminated by you.",
    "instance-terminated-no-capacity": "There is no capacity left for your Spot instance.",
    "request-canceled-and-instance-running": "Your request was canceled; the instance still runs.",
}


class SpotRequest(TaggedEC2Resource):
    """The request of one spot instance; moto's serializer depends on the attribute names."""

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
        self.create_time = backend.runtime.moto_now()
        self.state = "active"
        self.set_code("fulfilled")
        self.add_tags(tags)

    def set_code(self, code: str) -> None:
        self.code = code
        self.status = {
            "Code": code,
            "Message": _MESSAGES[code],
            "UpdateTime": self.ec2_backend.runtime.moto_now(),
        }


class SpotRequests(Part):
    """A region's spot requests; moto stores them in ``spot_instance_requests``."""

    def add(self, instance: Any, options: Mapping[str, Any], tags: dict[str, str]) -> None:
        request = SpotRequest(self._ec2, instance, options, tags)
        self._ec2.spot_instance_requests[request.id] = request
        instance.lifecycle = "spot"
        instance.spot_instance_request_id = request.id

    def find(self, instance_id: str) -> SpotRequest | None:
        """Return the request of an instance, if it has one."""
        requests: dict[str, SpotRequest] = self._ec2.spot_instance_requests
        return next((r for r in requests.values() if r.instance_id == instance_id), None)

    def close(self, instance_id: str, code: str = "instance-terminated-by-user") -> None:
        """Set the status of an ended instance's request, and close it unless it was canceled."""
        if request := self.find(instance_id):
            if request.state == "active":
                request.state = "closed"
            request.set_code(code)

    def forget(self, instance_id: str) -> None:
        if request := self.find(instance_id):
            del self._ec2.spot_instance_requests[request.id]

    def describe(self, filters: Any = None, spot_instance_ids: list[str] | None = None) -> Any:
        self._require_known(spot_instance_ids or [])
        return EC2Backend.describe_spot_instance_requests(self._ec2, filters, spot_instance_ids)

    def cancel(self, request_ids: list[str]) -> list[SpotRequest]:
        """Cancel requests; their instances keep running."""
        self._require_known(request_ids)
        requests = [self._ec2.spot_instance_requests[i] for i in request_ids]
        for request in requests:
            if request.state == "active":
                request.state = "cancelled"
                request.set_code("request-canceled-and-instance-running")
        return requests

    def _require_known(self, ids: Iterable[str]) -> None:
        known, code = self._ec2.spot_instance_requests, "InvalidSpotInstanceRequestID.NotFound"
        refusals.require_found(known, ids, code, "spot instance request ID")
