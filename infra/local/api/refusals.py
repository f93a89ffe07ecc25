"""Checks for requests that EC2 rejects but moto accepts, called before moto acts.

EC2's codes and wording: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS
from moto.iam.models import iam_backends

_IMAGE_NAME = re.compile(r"[A-Za-z0-9()\[\] ./'@_-]{3,128}")


def require_found(known: Container[str], ids: Iterable[str], code: str, kind: str) -> None:
    for id_ in ids:
        if id_ not in known:
            raise EC2ClientError(code, f"The {kind} '{id_}' does not exist")


def require_image(backend: Any, image_id: str) -> Any:
    """Return the AMI with this id, which must be available."""
    image = backend.amis.get(image_id)
    if image is None:
        raise EC2ClientError("InvalidAMIID.NotFound", f"The image id '[{image_id}]' does not exist")
    if image.state != "available":
        raise EC2ClientError(
            "InvalidAMIID.Unavailable", f"The image ID '{image_id}' is not available."
        )
    return image


def require_instance_type(backend: Any, instance_type: str) -> None:
    offered = INSTANCE_TYPE_OFFERINGS["region"].get(backend.region_name, [])
    if instance_type not in {offering["InstanceType"] for offering in offered}:
        raise EC2ClientError(
            "InvalidParameterValue", f"Invalid value '{instance_type}' for InstanceType."
        )


def require_key_pair(backend: Any, name: str | None) -> str:
    """Return the public key of a key pair; "" without a name."""
    if not name:
        return ""
    require_found(backend.key_pairs, [name], "InvalidKeyPair.NotFound", "key pair")
    return str(backend.key_pairs[name].public_key)


def require_in_default_vpc(backend: Any, vpc_id: str) -> None:
    """Require the default VPC, because containers have addresses only there."""
    if vpc_id != backend.default_vpc.id:
        raise EC2ClientError(
            "UnsupportedOperation",
            f"The embedded cloud starts instances in its default VPC only, not in {vpc_id}",
        )


def require_offered(zone: str, instance_type: str) -> None:
    offered = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(zone[:-1], [])
    zones = sorted(o["Location"] for o in offered if o["InstanceType"] == instance_type)
    if zone not in zones:
        raise EC2ClientError(
            "Unsupported",
            f"Your requested instance type ({instance_type}) is not supported in your requested "
            f"Availability Zone ({zone}). Please retry your request by not specifying an "
            f"Availability Zone or choosing {', '.join(zones)}.",
        )


def require_idle_timeouts(interfaces: Iterable[Any]) -> None:
    """Require idle timeouts for TCP connections from a minute to five days.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ConnectionTrackingSpecificationRequest.html
    """
    for interface in interfaces:
        asked = interface.get("ConnectionTrackingSpecification", {}).get("TcpEstablishedTimeout")
        if asked is not None and not 60 <= int(asked) <= 432_000:
            raise EC2ClientError(
                "InvalidParameterValue",
                f"Value ({asked}) for parameter TcpEstablishedTimeout is invalid.",
            )


def require_groups(backend: Any, group_ids: Iterable[str]) -> None:
    """Require existing groups, because moto would create missing ones."""
    known = {group_id for groups in backend.groups.values() for group_id in groups}
    require_found(known, group_ids, "InvalidGroup.NotFound", "security group")


def require_root_size(image: Any, size_gib: int | None) -> int:
    """Return the root volume's size in GiB, which must not be less than the image's."""
    least = int(image.ebs_snapshot.volume.size)
    if size_gib is not None and int(size_gib) < least:
        raise EC2ClientError(
            "InvalidBlockDeviceMapping",
            f"Volume of size {size_gib}GB is smaller than snapshot '{image.ebs_snapshot.id}', "
            f"expect size>= {least}GB",
        )
    return int(size_gib or least)


def require_disk_speed(size_gib: int, ebs: Mapping[str, Any]) -> None:
    """Require gp3's limits: https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html"""
    iops, throughput = int(ebs.get("Iops") or 3000), int(ebs.get("Throughput") or 125)
    rate = ebs.get("VolumeInitializationRate")
    ranges = {
        f"Volume size of {size_gib}": size_gib <= 65536,
        f"Iops of {iops}": 3000 <= iops <= 80000,
        f"Throughput of {throughput}": 125 <= throughput <= 2000,
        f"VolumeInitializationRate of {rate}": rate is None or 100 <= int(rate) <= 300,
        f"Iops to volume size ratio of {iops / size_gib:f}": iops <= 500 * size_gib,
        f"Throughput to iops ratio of {throughput / iops:f}": throughput <= iops / 4,
    }
    if wrong := [value for value, valid in ranges.items() if not valid]:
        raise EC2ClientError("InvalidParameterValue", f"{wrong[0]} is out of range")


def require_length(parameter: str, value: str, most: int) -> None:
    if len(value) > most:
        raise EC2ClientError(
            "InvalidParameterValue",
            f"Value ({value}) for parameter {parameter} is invalid: longer than {most} characters",
        )


def require_new_image_name(backend: Any, name: str) -> None:
    """Require an unused name of 3 to 128 characters.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateImage.html
    """
    if not _IMAGE_NAME.fullmatch(name):
        raise EC2ClientError("InvalidAMIName.Malformed", f"AMI name {name} is malformed")
    for image in backend.amis.values():
        if image.name == name and image.owner_id == backend.account_id:
            raise EC2ClientError(
                "InvalidAMIName.Duplicate", f"AMI name {name} is already in use by AMI {image.id}"
            )


def require_state(instance: Any, states: Sequence[str], purpose: str) -> None:
    """Require one of these states; ``purpose`` is a participle such as ``started``."""
    if instance.state not in states:
        raise EC2ClientError(
            "IncorrectInstanceState",
            f"The instance '{instance.id}' is not in a state from which it can be {purpose}.",
        )


def require_running(instance: Any) -> None:
    """Require a running instance, because only then can its disk be copied. EC2 is less strict."""
    if instance.state != "running":
        raise EC2ClientError(
            "UnsupportedOperation",
            f"The embedded cloud creates images of running instances only; '{instance.id}' is "
            f"{instance.state}",
        )


def require_unused_group(backend: Any, group_id: str) -> None:
    """Require that no interface and no other group's rule refers to a group."""
    users = [eni.id for eni in backend.enis.values() if group_id in {g.id for g in eni.group_set}]
    referrers = [
        group.id
        for groups in backend.groups.values()
        for group in groups.values()
        if group.id != group_id and group_id in _referenced_groups(group)
    ]
    if users or referrers:
        raise EC2ClientError("DependencyViolation", f"resource {group_id} has a dependent object")


def _referenced_groups(group: Any) -> set[str]:
    rules = [*group.ingress_rules, *group.egress_rules]
    return {str((rule.source_group or {}).get("GroupId", "")) for rule in rules}


def require_own_image(backend: Any, image_id: str) -> None:
    image = backend.amis.get(image_id)
    if image is not None and image.owner_id != backend.account_id:
        raise EC2ClientError("AuthFailure", f"Not authorized for images: [{image_id}]")


_NOT_FOUND = {
    "i": "InvalidInstanceID.NotFound",
    "ami": "InvalidAMIID.NotFound",
    "sg": "InvalidGroup.NotFound",
    "key": "InvalidKeyPair.NotFound",
    "snap": "InvalidSnapshot.NotFound",
    "vol": "InvalidVolume.NotFound",
    "eni": "InvalidNetworkInterfaceID.NotFound",
    "pg": "InvalidPlacementGroup.Unknown",
    "sir": "InvalidSpotInstanceRequestID.NotFound",
    "lt": "InvalidLaunchTemplateId.NotFound",
}


def require_taggable(known: Container[str], resource_ids: Iterable[str]) -> None:
    """Require existing resources, because moto tags any id."""
    for resource_id in resource_ids:
        if code := _NOT_FOUND.get(resource_id.partition("-")[0]):
            require_found(known, [resource_id], code, "ID")


NO_RESERVATION = ("InvalidCapacityReservationId.NotFound", "capacity reservation")


def require_profile(ec2: Any, name: str) -> None:
    """Refuse an instance profile that does not exist or has no role."""
    profile = iam_backends[ec2.account_id]["aws"].instance_profiles.get(name)
    if profile is None or not profile.roles:
        raise invalid_profile(name)


def invalid_profile(name: str) -> EC2ClientError:
    return EC2ClientError(
        "InvalidParameterValue",
        f"Value ({name}) for parameter iamInstanceProfile.name is invalid. "
        "Invalid IAM Instance Profile name",
    )
