"""Security groups: the refusals that moto lacks, and one list of groups per instance.

moto keeps an instance's groups and its interfaces' groups apart, and shows the union.
"""

from __future__ import annotations

from typing import Any

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
