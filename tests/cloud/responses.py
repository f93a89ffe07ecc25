"""EC2's answers under faults: pages, reservations, networks, and consoles.

Pagination: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/Query-Requests.html#api-pagination
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import botocore.session
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError

from infra.local.api.network import ANYWHERE
from infra.local.api.responses import LocalEC2Response, url_bases
from tests.cloud.capacity import render_reservation
from tests.cloud.faults import Faults, faults_of
from tests.cloud.prices import spot_history

__all__ = ["url_bases", "url_paths"]
# By fault: the receiver's ports that a rule closes, and whether it is an outbound rule.
_DENIED = {
    "no-ssh": (22, 22, False),
    "no-answers": (1024, 65535, True),
    "no-downloads": (443, 443, True),
}


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


class FaultyEC2Response(LocalEC2Response):
    """The embedded cloud's responses, under the active faults."""

    @property
    def _faults(self) -> Faults:
        faults: Faults = faults_of(self.ec2_backend.runtime).now
        return faults

    def call_action(self) -> Any:
        if str(self._get_action()) == "DescribeInstances" and (size := self._page_size()):
            # moto paginates only this action, with pages of 100.
            self.params["MaxResults"] = size
        return super().call_action()

    def _page_size(self) -> int:
        return pages_of(str(self._get_action()), self.params, self._faults.page_size)

    def serialized(self, action_result: Any) -> Any:
        page = cut(str(self._get_action()), action_result.result, self.params, self._page_size())
        if page is not action_result.result:
            action_result = ActionResult(page)
        status, headers, body = super().serialized(action_result)
        return getattr(action_result.result, "http_status", status), headers, body

    def get_console_output(self) -> ActionResult:
        ec2, console = self.ec2_backend, self._faults.console
        latest = self._get_bool_param("Latest", False)
        if latest and not console.latest:
            raise EC2ClientError(
                "UnsupportedOperation",
                "This instance type does not support retrieving the latest console logs.",
            )
        answer = super().get_console_output()
        instance = ec2.get_instance(self._get_param("InstanceId"))
        age_s = (ec2.runtime.moto_now() - instance.launch_time).total_seconds()
        if not latest and age_s < console.delay_s:
            answer.result["Output"] = None
        return answer

    def describe_route_tables(self) -> ActionResult:
        answer, network = super().describe_route_tables(), self._faults.network
        for table in answer.result["RouteTables"]:
            suffix = table["VpcId"].removeprefix("vpc-")
            (default,) = (r for r in table["Routes"] if r["DestinationCidrBlock"] == ANYWHERE)
            if network.nat:
                default |= {"NatGatewayId": f"nat-{suffix}", "GatewayId": None}
            elif network.firewall:
                # AWS Network Firewall uses a Gateway Load Balancer endpoint.
                default["GatewayId"] = f"vpce-{suffix}"
            elif not network.internet_gateway:
                table["Routes"].remove(default)
        return answer

    def describe_network_acls(self) -> ActionResult:
        answer: ActionResult = super().describe_network_acls()
        if rule := _DENIED.get(self._faults.network.acl):
            acls = answer.result["NetworkAcls"]
            answer.result["NetworkAcls"] = [_render_acl(acl, *rule) for acl in acls]
        return answer

    def describe_vpc_block_public_access_options(self) -> ActionResult:
        answer, mode = (
            super().describe_vpc_block_public_access_options(),
            self._faults.network.block_public_access,
        )
        if mode != "off":
            answer.result["VpcBlockPublicAccessOptions"] |= {
                "State": "update-complete",
                "InternetGatewayBlockMode": mode,
            }
        return answer

    def describe_vpc_block_public_access_exclusions(self) -> ActionResult:
        answer, ec2 = super().describe_vpc_block_public_access_exclusions(), self.ec2_backend
        vpc = f"arn:aws:ec2:{ec2.region_name}:{self.current_account}:vpc/{ec2.default_vpc.id}"
        exclusion = {
            "ExclusionId": "vpcbpa-exclude-0123456789abcdef0",
            "InternetGatewayExclusionMode": "allow-bidirectional",
            "ResourceArn": vpc,
            "State": "create-complete",
        }
        if self._faults.network.excluded:
            answer.result["VpcBlockPublicAccessExclusions"] = [exclusion]
        return answer

    def describe_instance_connect_endpoints(self) -> ActionResult:
        answer = super().describe_instance_connect_endpoints()
        if not self._faults.network.connect_endpoint:
            answer.result["InstanceConnectEndpoints"] = []
        return answer

    def get_ebs_default_kms_key_id(self) -> ActionResult:
        answer = super().get_ebs_default_kms_key_id()
        if key := self._faults.ebs.kms_key:
            answer.result["KmsKeyId"] = key
        return answer

    def describe_vpc_endpoints(self) -> ActionResult:
        """Return the default VPC's endpoints. Ignores filters."""
        ec2 = self.ec2_backend
        endpoints = [
            {
                "VpcId": ec2.default_vpc.id,
                "ServiceName": f"com.amazonaws.{ec2.region_name}.{service}",
                "State": "Available",
                "PrivateDnsEnabled": True,
            }
            for service in self._faults.network.endpoints
        ]
        return ActionResult({"VpcEndpoints": endpoints})

    def describe_spot_price_history(self) -> ActionResult:
        """Return realistic prices; moto returns 0.00001 everywhere."""
        ec2, types = self.ec2_backend, self._get_param("InstanceTypes", [])
        history = spot_history(faults_of(ec2.runtime), ec2.region_name, types)
        same = {"ProductDescription": "Linux/UNIX", "Timestamp": ec2.runtime.moto_now()}
        return ActionResult({"SpotPriceHistory": [{**each, **same} for each in history]})

    def describe_capacity_reservations(self) -> ActionResult:
        ec2, ids = self.ec2_backend, self._get_param("CapacityReservationIds", [])
        rules = self._faults.reservation
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


def _render_acl(acl: Any, first: int, last: int, is_outbound: bool) -> dict[str, Any]:
    """Render one of moto's network ACLs, with a rule that denies these ports."""
    tcp = {"Protocol": "6", "PortRange": {"From": first, "To": last}, "CidrBlock": ANYWHERE}
    denial = {"RuleNumber": 1, "RuleAction": "deny", "Egress": is_outbound, **tcp}
    return {
        "NetworkAclId": acl.id,
        "VpcId": acl.vpc_id,
        "OwnerId": acl.owner_id,
        "IsDefault": acl.default,
        "Associations": acl.associations,
        "Entries": [*acl.entries, denial],
        "Tags": acl.get_tags(),
    }


url_paths = {"{0}/": FaultyEC2Response.dispatch}
