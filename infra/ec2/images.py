"""Machine images (AMIs): Canonical's Ubuntu, found through SSM, and our own, created from a head node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

from botocore.exceptions import ClientError

from infra.aws.clients import error_code, patient, unless
from infra.ec2 import tags
from infra.errors import CloudError
from infra.wait import IMAGE_DEADLINE_S, Clock, wait_until

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import ImageTypeDef
    from types_boto3_ssm import SSMClient

    from infra.wait import Progress


Release = Literal["20.04", "22.04", "24.04"]


@dataclass(frozen=True)
class UbuntuRelease:
    """``python`` is its Python version, ``glibc_minor`` the x of glibc 2.x, ``disk`` its AMI's disk type."""

    python: str
    glibc_minor: int
    disk: str
    free_updates_ended: str = ""


# https://documentation.ubuntu.com/aws/aws-how-to/instances/find-ubuntu-images/
RELEASES: dict[str, UbuntuRelease] = {
    "20.04": UbuntuRelease("3.8", 31, "ebs-gp2", free_updates_ended="May 2025"),
    "22.04": UbuntuRelease("3.10", 35, "ebs-gp2"),
    "24.04": UbuntuRelease("3.12", 39, "ebs-gp3"),
}


def ubuntu_parameter(release: str) -> str:
    """Return the SSM parameter that holds the current AMI id of an Ubuntu release."""
    disk = RELEASES[release].disk
    return f"/aws/service/canonical/ubuntu/server/{release}/stable/current/amd64/hvm/{disk}/ami-id"


# https://documentation.ubuntu.com/aws/aws-how-to/instances/find-ubuntu-images/
CANONICAL = {"aws": "099720109477", "aws-us-gov": "513442679011", "aws-cn": "837727238323"}
# Images and snapshots accumulate in an account, and AWS may reject or time out unpaginated lists:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSnapshots.html
PAGES: Any = {"PaginationConfig": {"PageSize": 1000}}
_CREATION_DATE = "%Y-%m-%dT%H:%M:%S.%fZ"


@dataclass(frozen=True)
class Image:
    """An AMI. ``state`` is EC2's: pending, available, failed, …"""

    id: str
    name: str
    state: str
    root_device: str
    snapshot_ids: tuple[str, ...]
    tags: dict[str, str] = field(default_factory=dict, repr=False)
    volume_gib: int = 0
    """The minimum disk size of machines that start from it."""
    reason: str = ""
    created: str = ""
    """The creation date in EC2's format, or empty."""

    @staticmethod
    def from_aws(image: ImageTypeDef) -> Image:
        mappings = [m.get("Ebs", {}) for m in image.get("BlockDeviceMappings", [])]
        return Image(
            id=image["ImageId"],
            name=image.get("Name", ""),
            state=image.get("State", "pending"),
            root_device=image.get("RootDeviceName", "/dev/sda1"),
            snapshot_ids=tuple(m["SnapshotId"] for m in mappings if m.get("SnapshotId")),
            tags=tags.from_aws(image.get("Tags")),
            volume_gib=max((m.get("VolumeSize", 0) for m in mappings), default=0),
            reason=image.get("StateReason", {}).get("Message", ""),
            created=image.get("CreationDate", ""),
        )

    def age_s(self, now: datetime) -> int | None:
        """Return the seconds since its creation, if known."""
        try:
            begun = datetime.strptime(self.created, _CREATION_DATE)
        except ValueError:
            return None
        return max(0, round((now - begun.replace(tzinfo=timezone.utc)).total_seconds()))

    @property
    def is_sound(self) -> bool:
        """Whether it is available or pending, and free of its machine's keys and identity."""
        return self.state in ("pending", "available") and self.tags.get(tags.SEALED) == "yes"

    @property
    def is_for_others(self) -> bool:
        """Whether any cluster can use it, because it holds only software and no user data."""
        return self.is_sound and self.tags.get(tags.USED) != "yes"

    @property
    def packages(self) -> str:
        """The packages beside the stack: their list's key and file; "" without any."""
        return self.tags.get(tags.PACKAGES, "")

    def holds(self, recipe: str, packages: str = "") -> bool:
        """Whether it is sound and has the recipe's software, and these packages, if any."""
        has_packages = self.packages.startswith(packages.partition(" ")[0])
        return self.is_sound and has_packages and self.tags.get(tags.INSTALLED) == recipe


def find_ubuntu_image(ssm: SSMClient, ec2: EC2Client, release: str) -> Image:
    """Return the current image of an Ubuntu release. Raises :class:`CloudError` if there is none."""
    name = ubuntu_parameter(release)
    found = unless({"ParameterNotFound"}, lambda: ssm.get_parameter(Name=name))
    if found is None:
        raise CloudError(
            f"Canonical publishes no image of Ubuntu {release} in {ec2.meta.region_name}",
            hint="use another --region",
        )
    image_id = found["Parameter"]["Value"]
    try:
        return describe_image(ec2, image_id)
    except (ClientError, CloudError) as error:
        gone = isinstance(error, CloudError) or error_code(error) == "InvalidAMIID.NotFound"
        if not gone or not (managed_by := _hides_images(ec2)):
            raise
        raise CloudError(
            f"the setting Allowed AMIs hides Canonical's image {image_id} in {ec2.meta.region_name}",
            hint="an administrator can allow the image provider "
            f"{CANONICAL.get(ec2.meta.partition, 'Canonical')} (managed by: {managed_by}; "
            "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-allowed-amis.html)",
        ) from None


def _hides_images(ec2: EC2Client) -> str:
    """Return who manages the Allowed AMIs setting; "" if it is off or not visible."""
    try:
        answer = ec2.get_allowed_images_settings()
    except ClientError:
        return ""
    return answer.get("ManagedBy", "account") if answer.get("State") == "enabled" else ""


def describe_image(ec2: EC2Client, image_id: str) -> Image:
    """Return an image. Raises :class:`CloudError` if it does not exist."""
    images = ec2.describe_images(ImageIds=[image_id])["Images"]
    if not images:
        raise CloudError(f"image {image_id} does not exist in {ec2.meta.region_name}")
    return Image.from_aws(images[0])


def describe_cached_images(ec2: EC2Client, recipe: str, volume_gib: int) -> tuple[Image, ...]:
    """Return the account's kept images with this software and a disk of at most ``volume_gib``."""
    pages = ec2.get_paginator("describe_images").paginate(
        Owners=["self"],
        Filters=[
            {"Name": f"tag:{tags.INSTALLED}", "Values": [recipe]},
            {"Name": f"tag:{tags.KEPT}", "Values": ["yes"]},
            {"Name": "state", "Values": ["available"]},
        ],
        **PAGES,
    )
    images = (Image.from_aws(image) for page in pages for image in page["Images"])
    return tuple(i for i in images if i.holds(recipe) and i.volume_gib <= volume_gib)


def create_image(
    ec2: EC2Client, instance_id: str, cluster: str, name: str, labels: Mapping[str, str]
) -> str:
    """Start creating an image of a running machine and return the image's id.

    Does not reboot the machine, because bare metal takes up to 20 minutes; the caller must flush its
    buffers to disk first.
    """
    return ec2.create_image(
        InstanceId=instance_id,
        Name=name,
        Description=f"spr-cluster {cluster}: the head node with its software installed",
        NoReboot=True,
        TagSpecifications=tags.tag_specifications(
            ["image", "snapshot"], tags.resource_tags(cluster, "image", **labels)
        ),
    )["ImageId"]


def wait_until_available(
    ec2: EC2Client, image_id: str, progress: Progress, clock: Clock | None = None
) -> Image:
    """Wait up to 90 minutes for an image. Raises :class:`CloudError` if EC2 fails to create it."""

    def probe() -> Image | None:
        image = unless({"InvalidAMIID.NotFound"}, lambda: describe_image(ec2, image_id))
        if image is None:
            return None
        if image.state in ("failed", "error", "invalid"):
            raise CloudError(
                f"image {image_id} {image.state}: {image.reason or 'no reason given'}",
                hint="run the same command again to create a new image",
            )
        return image if image.state == "available" else None

    limit = IMAGE_DEADLINE_S // 60
    return wait_until(
        f"image {image_id}",
        patient(probe),
        deadline_s=IMAGE_DEADLINE_S,
        clock=clock,
        every_s=15,
        on_wait=lambda s: progress.note(f"{image_id}: {s / 60:.0f} of at most {limit} min"),
    )
