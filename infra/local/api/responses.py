"""EC2 actions that moto answers incorrectly, not at all, or without pagination.

moto's server finds the methods by name. Pagination:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/Query-Requests.html#api-pagination
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import botocore.session
from moto.core.responses import ActionResult, EmptyResult
from moto.core.types import Base64EncodedString
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.responses import EC2Response

from infra.local.api import prices, refusals
from infra.local.api.capacity import render_reservation
from infra.local.api.launches import LaunchRequest
from infra.local.api.network import render_acl, render_route_table
from infra.local.api.refusals import require_profile


@functools.cache
def _result_keys() -> dict[str, str]:
    """Return the element that holds the results, for each paginated action."""
    loader = botocore.session.get_session().get_component("data_loader")
    pages = loader.load_service_model("ec2", "paginators-1")["pagination"]
    return {action: page["result_key"] for action, page in pages.items() if "limit_key" in page}


def pages_of(action: str, params: Mapping[str, Any], page_size: int) -> int:
    """Return the page size, or 0 without pagination, such as for requests that specify ids."""
    if action not in _result_keys() or any(name.endswith("Ids") for name in params):
        return 0
    return int(params.get("MaxResults", page_size))


def cut(action: str, result: Any, params: Mapping[str, Any], size: int) -> Any:
    """Return one page of a response's results. A page's token is the index of its first result."""
    key = _result_keys().get(action, "")
    if not size or not isinstance(result, dict) or key not in result or "NextToken" in result:
        return result
    first, found = int(params.get("NextToken", 0)), list(result[key])
    rest = {"NextToken": str(first + size)} if len(found) > first + size else {}
    return {**result, key: found[first : first + size], **rest}


_HOME_REGION = "us-east-1"
# moto always returns "pending" for a launch; a retry must return the instances' current state.
_RUN_STATE = "RunInstances.Reservation.Instances.Instance.State"


class LocalEC2Response(EC2Response):
    """moto's responses, with corrections."""

    RESPONSE_KEY_PATH_TO_TRANSFORMER: ClassVar[dict[str, Callable[[Any], Any]]] = {
        path: transform
        for path, transform in EC2Response.RESPONSE_KEY_PATH_TO_TRANSFORMER.items()
        if path != _RUN_STATE
    }

    def call_action(self) -> Any:
        action, size = str(self._get_action()), self._page_size()
        if action == "DescribeInstances" and size:
            # moto paginates only this action, with pages of 100.
            self.params["MaxResults"] = size
        with self.ec2_backend.visibility.observe(action):
            return super().call_action()

    def _filters_from_querystring(self) -> Any:
        filters = super()._filters_from_querystring()
        refusals.require_known_filters(str(self._get_action()), filters)
        return filters

    def _page_size(self) -> int:
        size = self.ec2_backend.runtime.faults.now.page_size
        return pages_of(str(self._get_action()), self.params, size)

    def serialized(self, action_result: Any) -> Any:
        page = cut(str(self._get_action()), action_result.result, self.params, self._page_size())
        if page is not action_result.result:
            action_result = ActionResult(page)
        status, headers, body = super().serialized(action_result)
        return getattr(action_result.result, "http_status", status), headers, body

    # Instances

    def run_instances(self) -> Any:
        request = LaunchRequest.of(self._get_param, self.querystring)
        if name := self._get_param("IamInstanceProfile.Name"):
            require_profile(self.ec2_backend, name)
        with self.ec2_backend.launches.requested(request):
            return super().run_instances()

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
        faults, latest = ec2.runtime.faults.now.console, self._get_bool_param("Latest", False)
        if latest and not faults.latest:
            raise EC2ClientError(
                "UnsupportedOperation",
                "This instance type does not support retrieving the latest console logs.",
            )
        age_s = (ec2.runtime.moto_now() - instance.launch_time).total_seconds()
        posted = latest or age_s >= faults.delay_s
        text = ec2.instances.console_of(instance) if posted else ""
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
        network = self.ec2_backend.runtime.faults.now.network
        answer.result["RouteTables"] = [
            render_route_table(table, network) for table in answer.result["RouteTables"]
        ]
        return answer

    def describe_network_acls(self) -> ActionResult:
        answer: ActionResult = super().describe_network_acls()
        network = self.ec2_backend.runtime.faults.now.network
        answer.result["NetworkAcls"] = [
            render_acl(acl, network) for acl in answer.result["NetworkAcls"]
        ]
        return answer

    def describe_vpc_block_public_access_options(self) -> ActionResult:
        self.error_on_dryrun()
        mode = self.ec2_backend.runtime.faults.now.network.block_public_access
        options = {
            "AwsAccountId": self.current_account,
            "AwsRegion": self.ec2_backend.region_name,
            "State": "default-state" if mode == "off" else "update-complete",
            "InternetGatewayBlockMode": mode,
            "ExclusionsAllowed": "allowed",
        }
        return ActionResult({"VpcBlockPublicAccessOptions": options})

    def describe_vpc_block_public_access_exclusions(self) -> ActionResult:
        self.error_on_dryrun()
        ec2 = self.ec2_backend
        vpc = f"arn:aws:ec2:{ec2.region_name}:{self.current_account}:vpc/{ec2.default_vpc.id}"
        exclusion = {
            "ExclusionId": "vpcbpa-exclude-0123456789abcdef0",
            "InternetGatewayExclusionMode": "allow-bidirectional",
            "ResourceArn": vpc,
            "State": "create-complete",
        }
        found = [exclusion] if ec2.runtime.faults.now.network.excluded else []
        return ActionResult({"VpcBlockPublicAccessExclusions": found})

    def describe_instance_connect_endpoints(self) -> ActionResult:
        """Return the default VPC's endpoint, which moto lacks, unless faults remove it. Ignores filters."""
        self.error_on_dryrun()
        ec2 = self.ec2_backend
        endpoint = {
            "InstanceConnectEndpointId": "eice-0123456789abcdef0",
            "State": "create-complete",
            "VpcId": ec2.default_vpc.id,
            "PreserveClientIp": False,
        }
        found = [endpoint] if ec2.runtime.faults.now.network.connect_endpoint else []
        return ActionResult({"InstanceConnectEndpoints": found})

    # Spot prices

    def get_allowed_images_settings(self) -> ActionResult:
        return ActionResult({"State": "disabled", "ManagedBy": "account"})

    def describe_spot_price_history(self) -> ActionResult:
        """Return realistic prices; moto returns 0.00001 everywhere."""
        self.error_on_dryrun()
        ec2 = self.ec2_backend
        faults, types = ec2.runtime.faults.now, self._get_param("InstanceTypes", [])
        filters = self._filters_from_querystring()
        history = prices.spot_history(faults, ec2.region_name, types, filters)
        same = {"ProductDescription": "Linux/UNIX", "Timestamp": ec2.runtime.moto_now()}
        return ActionResult({"SpotPriceHistory": [{**each, **same} for each in history]})

    def describe_capacity_reservations(self) -> ActionResult:
        self.error_on_dryrun()
        ec2, ids = self.ec2_backend, self._get_param("CapacityReservationIds", [])
        rules = ec2.runtime.faults.now.reservation
        for id_ in {*ids} - {rule.id for rule in rules}:
            raise EC2ClientError(
                "InvalidCapacityReservationId.NotFound",
                f"The capacity reservation '{id_}' does not exist.",
            )
        found = [render_reservation(ec2, rule) for rule in rules if rule.id in ids or not ids]
        keys = {
            "state": "State",
            "instance-type": "InstanceType",
            "instance-match-criteria": "InstanceMatchCriteria",
            "tenancy": "Tenancy",
        }
        for name, values in self._filters_from_querystring().items():
            found = [each for each in found if each[keys[name]] in values]
        return ActionResult({"CapacityReservations": found})

    # Key pairs

    def delete_key_pair(self) -> ActionResult:
        """Delete by name or id; moto supports only names."""
        self.error_on_dryrun()
        name, id_ = self._get_param("KeyName"), self._get_param("KeyPairId")
        ec2 = self.ec2_backend
        names = [name] if name else [p.key_name for p in ec2.key_pairs.values() if p.id == id_]
        deleted = ec2.delete_key_pair(names[0]) if names else None
        return ActionResult({"Return": True, "KeyPairId": deleted.id if deleted else None})

    # Placement groups

    def create_placement_group(self) -> ActionResult:
        tags = self._parse_tag_specification("placement-group").get("placement-group", {})
        self.error_on_dryrun()
        group = self.ec2_backend.placement_groups.create(
            self._get_param("GroupName"), self._get_param("Strategy", "cluster"), tags
        )
        return ActionResult({"PlacementGroup": group})

    def describe_placement_groups(self) -> ActionResult:
        self.error_on_dryrun()
        names = [*self._get_param("GroupNames", []), *self._get_param("GroupIds", [])]
        filters = self._filters_from_querystring()
        groups = self.ec2_backend.placement_groups.describe(names, filters)
        return ActionResult({"PlacementGroups": groups})

    def delete_placement_group(self) -> EmptyResult:
        self.error_on_dryrun()
        self.ec2_backend.placement_groups.delete(self._get_param("GroupName"))
        return EmptyResult()

    # Tags and regions

    def create_tags(self) -> Any:
        known = self.ec2_backend.visibility.resources()
        refusals.require_taggable(known, self._get_param("Resources", []))
        return super().create_tags()

    def describe_regions(self) -> ActionResult:
        """Return only regions in use, because opening a region creates a container network."""
        self.error_on_dryrun()
        opened = {_HOME_REGION, *ec2_backends[self.current_account].keys()}
        names = set(self._get_param("RegionNames", []))
        regions = self.ec2_backend.describe_regions(list(names))
        return ActionResult({"Regions": [r for r in regions if r.name in opened]})


url_bases = [r"https?://ec2\.(.+)\.amazonaws\.com(|\.cn)"]
url_paths = {"{0}/": LocalEC2Response.dispatch}
