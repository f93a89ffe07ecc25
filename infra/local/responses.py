"""EC2's API calls that moto answers wrongly, or not at all. moto's server finds them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from moto.core.responses import ActionResult, EmptyResult
from moto.core.types import Base64EncodedString
from moto.ec2.models import ec2_backends
from moto.ec2.responses import EC2Response

from infra.local import refusals
from infra.local.clock import as_moto_time
from infra.local.ec2_launches import LaunchRequest
from infra.local.ec2_visibility import observe, resources

_HOME_REGION = "us-east-1"
# Where a machine that has just been launched may have come back to, a request sent twice sees it.
_RUN_STATE = "RunInstances.Reservation.Instances.Instance.State"


class LocalEC2Response(EC2Response):
    """EC2's answers, with those of the embedded cloud in place of some of moto's."""

    RESPONSE_KEY_PATH_TO_TRANSFORMER: ClassVar[dict[str, Callable[[Any], Any]]] = {
        path: transform
        for path, transform in EC2Response.RESPONSE_KEY_PATH_TO_TRANSFORMER.items()
        if path != _RUN_STATE
    }

    def call_action(self) -> Any:
        with observe(self.ec2_backend, str(self._get_action())):
            return super().call_action()

    def serialized(self, action_result: Any) -> Any:
        status, headers, body = super().serialized(action_result)
        return getattr(action_result.result, "http_status", status), headers, body

    # Instances

    def run_instances(self) -> Any:
        wish = LaunchRequest.of(self._get_param, self.querystring)
        with self.ec2_backend.asked(wish):
            return super().run_instances()

    def describe_instance_status(self) -> ActionResult:
        ec2 = self.ec2_backend
        filters = self._filters_from_querystring()
        found = ec2.describe_instance_status(
            self._get_param("InstanceIds", []),
            self._get_bool_param("IncludeAllInstances", False),
            [{"name": name, "values": values} for name, values in filters.items()],
        )
        wanted = filters.get("instance-status.status")
        statuses = [
            {
                "InstanceId": instance.id,
                "AvailabilityZone": instance.placement.zone,
                "InstanceState": instance.instance_state,
                "InstanceStatus": {"Status": ec2.status_of(instance)},
                "SystemStatus": {"Status": ec2.status_of(instance)},
            }
            for instance in found
            if not wanted or ec2.status_of(instance) in wanted
        ]
        return ActionResult({"InstanceStatuses": statuses})

    def get_console_output(self) -> ActionResult:
        ec2 = self.ec2_backend
        instance = ec2.get_instance(self._get_param("InstanceId"))
        text = ec2.console_of(instance)
        return ActionResult(
            {
                "InstanceId": instance.id,
                "Timestamp": as_moto_time(ec2.clock.time()),
                "Output": Base64EncodedString.from_raw_string(text) if text else None,
            }
        )

    # Placement groups

    def create_placement_group(self) -> ActionResult:
        tags = self._parse_tag_specification("placement-group").get("placement-group", {})
        self.error_on_dryrun()
        group = self.ec2_backend.create_placement_group(
            self._get_param("GroupName"), self._get_param("Strategy", "cluster"), tags
        )
        return ActionResult({"PlacementGroup": group})

    def describe_placement_groups(self) -> ActionResult:
        self.error_on_dryrun()
        names = [*self._get_param("GroupNames", []), *self._get_param("GroupIds", [])]
        groups = self.ec2_backend.describe_placement_groups(names, self._filters_from_querystring())
        return ActionResult({"PlacementGroups": groups})

    def delete_placement_group(self) -> EmptyResult:
        self.error_on_dryrun()
        self.ec2_backend.delete_placement_group(self._get_param("GroupName"))
        return EmptyResult()

    # Tags and regions

    def create_tags(self) -> Any:
        known = resources(self.ec2_backend)
        refusals.require_taggable(known, self._get_param("Resources", []))
        return super().create_tags()

    def describe_regions(self) -> ActionResult:
        """The regions that this embedded cloud has: each of them costs a network of its own."""
        self.error_on_dryrun()
        opened = {_HOME_REGION, *ec2_backends[self.current_account].keys()}
        names = set(self._get_param("RegionNames", []))
        regions = self.ec2_backend.describe_regions(list(names))
        return ActionResult({"Regions": [r for r in regions if r.name in opened]})


url_bases = [r"https?://ec2\.(.+)\.amazonaws\.com(|\.cn)"]
url_paths = {"{0}/": LocalEC2Response.dispatch}
