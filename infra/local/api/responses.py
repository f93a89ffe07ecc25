"""EC2 actions that moto answers incorrectly or not at all. moto's server finds the methods by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from moto.core.responses import ActionResult, EmptyResult
from moto.core.types import Base64EncodedString
from moto.ec2.models import ec2_backends
from moto.ec2.responses import EC2Response

from infra.local.api import refusals
from infra.local.api.launches import LaunchRequest
from infra.local.api.network import render_route_table

_HOME_REGION = "us-east-1"
# moto always returns "pending" for a launch; a retry must return the instances' current state.
_RUN_STATE = "RunInstances.Reservation.Instances.Instance.State"


class _Terminated:
    """A terminated instance as EC2 shows it: without a network."""

    private_ip_address = subnet_id = vpc_id = None
    private_dns_name = ""
    network_interfaces = ()

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)


class LocalEC2Response(EC2Response):
    """moto's responses, with corrections."""

    RESPONSE_KEY_PATH_TO_TRANSFORMER: ClassVar[dict[str, Callable[[Any], Any]]] = {
        path: transform
        for path, transform in EC2Response.RESPONSE_KEY_PATH_TO_TRANSFORMER.items()
        if path != _RUN_STATE
    }

    def call_action(self) -> Any:
        with self.ec2_backend.observe(str(self._get_action())):
            return super().call_action()

    # Instances

    def run_instances(self) -> Any:
        request = LaunchRequest.of(self._get_param, self.querystring)
        if name := self._get_param("IamInstanceProfile.Name"):
            self.ec2_backend.require_profile(name)
        with self.ec2_backend.launches.requested(request):
            return super().run_instances()

    def describe_instances(self) -> ActionResult:
        answer: ActionResult = super().describe_instances()
        for reservation in answer.result["Reservations"]:
            reservation.instances = [
                _Terminated(i) if i.state == "terminated" else i for i in reservation.instances
            ]
        return answer

    def describe_instance_status(self) -> ActionResult:
        ec2 = self.ec2_backend
        filters = self._filters_from_querystring()
        found = ec2.describe_instance_status(
            self._get_param("InstanceIds", []),
            self._get_bool_param("IncludeAllInstances", False),
            [{"name": name, "values": values} for name, values in filters.items()],
        )
        shown = filters.get("instance-status.status")
        status_of = ec2.lifecycle.status_of
        statuses = [
            {
                "InstanceId": instance.id,
                "AvailabilityZone": instance.placement.zone,
                "InstanceState": instance.instance_state,
                "InstanceStatus": {"Status": status_of(instance)},
                "SystemStatus": {"Status": status_of(instance)},
            }
            for instance in found
            if not shown or status_of(instance) in shown
        ]
        return ActionResult({"InstanceStatuses": statuses})

    def get_console_output(self) -> ActionResult:
        ec2 = self.ec2_backend
        instance = ec2.get_instance(self._get_param("InstanceId"))
        text = ec2.instances.console_of(instance)
        return ActionResult(
            {
                "InstanceId": instance.id,
                "Timestamp": ec2.runtime.moto_now(),
                "Output": Base64EncodedString.from_raw_string(text) if text else None,
            }
        )

    # Internet access, which moto's default VPC lacks

    def describe_route_tables(self) -> ActionResult:
        answer: ActionResult = super().describe_route_tables()
        tables = answer.result["RouteTables"]
        answer.result["RouteTables"] = [render_route_table(table) for table in tables]
        return answer

    def describe_vpc_block_public_access_options(self) -> ActionResult:
        options = {
            "AwsAccountId": self.current_account,
            "AwsRegion": self.ec2_backend.region_name,
            "State": "default-state",
            "InternetGatewayBlockMode": "off",
            "ExclusionsAllowed": "allowed",
        }
        return ActionResult({"VpcBlockPublicAccessOptions": options})

    def describe_vpc_block_public_access_exclusions(self) -> ActionResult:
        return ActionResult({"VpcBlockPublicAccessExclusions": []})

    def describe_instance_connect_endpoints(self) -> ActionResult:
        """Return the default VPC's endpoint, which moto lacks. Ignores filters."""
        endpoint = {
            "InstanceConnectEndpointId": "eice-0123456789abcdef0",
            "State": "create-complete",
            "VpcId": self.ec2_backend.default_vpc.id,
            "PreserveClientIp": False,
        }
        return ActionResult({"InstanceConnectEndpoints": [endpoint]})

    # Settings and reservations of the account

    def get_allowed_images_settings(self) -> ActionResult:
        return ActionResult({"State": "disabled", "ManagedBy": "account"})

    def get_ebs_default_kms_key_id(self) -> ActionResult:
        return ActionResult({"KmsKeyId": "alias/aws/ebs"})

    def describe_capacity_reservations(self) -> ActionResult:
        ids = self._get_param("CapacityReservationIds", [])
        refusals.require_found((), ids, *refusals.NO_RESERVATION)
        return ActionResult({"CapacityReservations": []})

    # Key pairs

    def delete_key_pair(self) -> ActionResult:
        """Delete by name or id; moto supports only names."""
        name, id_ = self._get_param("KeyName"), self._get_param("KeyPairId")
        ec2 = self.ec2_backend
        names = [name] if name else [p.key_name for p in ec2.key_pairs.values() if p.id == id_]
        deleted = ec2.delete_key_pair(names[0]) if names else None
        return ActionResult({"Return": True, "KeyPairId": deleted.id if deleted else None})

    # Placement groups

    def create_placement_group(self) -> ActionResult:
        tags = self._parse_tag_specification("placement-group").get("placement-group", {})
        group = self.ec2_backend.placement_groups.create(
            self._get_param("GroupName"), self._get_param("Strategy", "cluster"), tags
        )
        return ActionResult({"PlacementGroup": group})

    def describe_placement_groups(self) -> ActionResult:
        names = [*self._get_param("GroupNames", []), *self._get_param("GroupIds", [])]
        filters = self._filters_from_querystring()
        groups = self.ec2_backend.placement_groups.describe(names, filters)
        return ActionResult({"PlacementGroups": groups})

    def delete_placement_group(self) -> EmptyResult:
        self.ec2_backend.placement_groups.delete(self._get_param("GroupName"))
        return EmptyResult()

    # Tags and regions

    def create_tags(self) -> Any:
        known = self.ec2_backend.resources()
        refusals.require_taggable(known, self._get_param("Resources", []))
        return super().create_tags()

    def describe_regions(self) -> ActionResult:
        """Return only regions in use, because opening a region creates a container network."""
        opened = {_HOME_REGION, *ec2_backends[self.current_account].keys()}
        names = set(self._get_param("RegionNames", []))
        regions = self.ec2_backend.describe_regions(list(names))
        return ActionResult({"Regions": [r for r in regions if r.name in opened]})


url_bases = [r"https?://ec2\.(.+)\.amazonaws\.com(|\.cn)"]
url_paths = {"{0}/": LocalEC2Response.dispatch}
