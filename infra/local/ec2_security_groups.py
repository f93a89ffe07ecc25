"""Security groups: the refusals that moto lacks, and one list of groups per instance.

moto keeps an instance's groups and its interfaces' groups apart, and shows the union.
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import InvalidPermissionNotFoundError
from moto.ec2.models import EC2Backend

from infra.local import refusals


class SecurityGroups:
    """A region's security groups, which moto stores."""

    def __init__(self, ec2: Any) -> None:
        self._ec2 = ec2

    def delete(self, name: str | None, group_id: str | None) -> None:
        if name and not group_id:
            group = self._ec2.get_security_group_by_name_or_id(name)
            group_id = group.id if group else None
        if group_id:
            refusals.require_unused_group(self._ec2, group_id)
        EC2Backend.delete_security_group(self._ec2, name, group_id)

    def revoke_ingress(self, ip_ranges: list[dict[str, str]], **asked: Any) -> None:
        """Revoke ranges that match a rule, also its description if one is given, as AWS does.

        In a default VPC, it is no error if others do not match:
        https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RevokeSecurityGroupIngress.html
        """
        group = self._ec2.get_security_group_by_name_or_id(asked["group_name_or_id"])
        is_default = group is not None and group.vpc_id == self._ec2.default_vpc.id
        rules = [rule.ip_range for rule in group.ingress_rules] if group else []
        known = [one for one in ip_ranges if any(one.items() <= rule.items() for rule in rules)]
        if known != ip_ranges and not is_default:
            raise InvalidPermissionNotFoundError
        try:
            EC2Backend.revoke_security_group_ingress(self._ec2, ip_ranges=known, **asked)
        except InvalidPermissionNotFoundError:
            if not is_default:
                raise

    def set_of_interface(self, eni_id: str, group_ids: list[str], *more: Any, **named: Any) -> None:
        refusals.require_groups(self._ec2, group_ids)
        EC2Backend.modify_network_interface_attribute(self._ec2, eni_id, group_ids, *more, **named)
        interface = self._ec2.get_network_interface(eni_id)
        if group_ids and interface.instance and interface.device_index == 0:
            interface.instance.security_groups = list(interface._group_set)

    def set_of_instance(self, instance_id: str, group_ids: list[str]) -> Any:
        refusals.require_groups(self._ec2, group_ids)
        instance = EC2Backend.modify_instance_security_groups(self._ec2, instance_id, group_ids)
        instance.nics[0]._group_set = list(instance.security_groups)
        return instance
