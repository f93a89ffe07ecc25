"""What ``--jump eice`` and ``--jump ssm`` need in the account, as far as it is known before a purchase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from infra.clients import Clients
from infra.errors import UsageError
from infra.network import Network
from infra.routes import look_if_allowed
from infra.spec import EICE, SSM

if TYPE_CHECKING:
    from types_boto3_ec2.type_defs import Ec2InstanceConnectEndpointTypeDef

_READY = "create-complete"
HOST_MANAGEMENT = "/ssm/managed-instance/default-ec2-instance-management-role"
_HOST_MANAGEMENT_URL = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/fleet-manager-default-host-"
    "management-configuration.html"
)


def require_jump(
    clients: Clients, jump: str | None, networks: Sequence[Network], note: Callable[[str], None]
) -> None:
    """Raise :class:`UsageError` if no machine in these subnets could be reached over ``jump``.

    What this account may not ask for is noted.
    """
    if jump == EICE and networks:
        _require_endpoint(clients, networks[0], note)
    if jump == SSM:
        _require_host_management(clients, note)


def _require_endpoint(clients: Clients, network: Network, note: Callable[[str], None]) -> None:
    """Require an endpoint: one serves all subnets of its VPC."""
    vpc, region = network.vpc_id, clients.ec2.meta.region_name
    pages = clients.ec2.get_paginator("describe_instance_connect_endpoints")

    def look() -> list[Ec2InstanceConnectEndpointTypeDef] | None:
        asked = pages.paginate(Filters=[{"Name": "vpc-id", "Values": [vpc]}])
        return [each for page in asked for each in page["InstanceConnectEndpoints"]]

    found = look_if_allowed(look, None, note)
    if found is None:
        return
    ready = [each for each in found if each.get("State") == _READY]
    if not ready:
        states = ", ".join(f"{e['InstanceConnectEndpointId']} is {e['State']}" for e in found)
        raise UsageError(
            f"--jump {EICE}: {vpc} has no EC2 Instance Connect Endpoint"
            + (f" that is ready: {states}" if states else ""),
            hint=f"create one: aws ec2 create-instance-connect-endpoint --region {region} "
            f"--subnet-id {network.subnet_id}; or choose another --jump",
        )
    if all(each.get("PreserveClientIp") for each in ready):
        note(
            f"{ready[0]['InstanceConnectEndpointId']} preserves client addresses: --ssh-cidr has to "
            "contain this machine's."
        )


def _require_host_management(clients: Clients, note: Callable[[str], None]) -> None:
    """Require what lets machines without an instance profile register with Session Manager."""

    def look() -> str:
        found = clients.ssm.get_service_setting(SettingId=HOST_MANAGEMENT)["ServiceSetting"]
        return found.get("SettingValue", "")

    role = look_if_allowed(look, "not known", note)
    if role in ("", "$None"):
        raise UsageError(
            f"--jump {SSM}: Default Host Management Configuration is off in "
            f"{clients.ec2.meta.region_name}, so that the machines, which have no instance profile, do "
            "not register with Session Manager",
            hint=f"have an administrator turn it on ({_HOST_MANAGEMENT_URL}), or choose another --jump",
        )
