"""AMIs of the embedded cloud, which are folders with a copy of a node's disk."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.models.instances import Instance
from moto.ec2.utils import random_ami_id

from infra.local.api import refusals
from infra.local.api.runtime import Part

CANONICAL_ACCOUNT = "099720109477"
# The disk size of Canonical's own images.
_BASE_GIB = 8


@dataclass(frozen=True)
class DiskCopy:
    """A disk copy in progress."""

    future: Future[None]
    ready_at: float


class LocalAmi(Ami):
    """moto's AMI plus the size of its source disk."""

    def __init__(self, backend: Any, ami_id: str, *, size_gib: int, **more: Any) -> None:
        super().__init__(backend, ami_id, root_device_type="ebs", **more)
        self.ebs_snapshot.volume.size = size_gib
        now = backend.runtime.moto_now()
        self.creation_date = self.ebs_snapshot.start_time = now

    @property
    def block_device_mappings(self) -> list[dict[str, Any]]:
        ebs = {
            "SnapshotId": self.ebs_snapshot.id,
            "VolumeSize": self.ebs_snapshot.volume.size,
            "DeleteOnTermination": True,
            "VolumeType": "gp3",
        }
        return [{"DeviceName": self.root_device_name, "Ebs": ebs}]

    def finish(self, error: str) -> None:
        """Set the state to available, or to failed if there was an error."""
        self.state = "failed" if error else "available"
        if error:
            self.state_reason = {"Code": "Server.InternalError", "Message": error}


class LocalImages(Part):
    """A region's images: Canonical's and those created from instances. moto stores the AMIs."""

    def __init__(self, ec2: Any) -> None:
        super().__init__(ec2)
        self._saved: set[str] = set()
        # Snapshots deleted while pending; EC2 deletes them once they are complete:
        # https://docs.aws.amazon.com/ebs/latest/userguide/ebs-deleting-snapshot.html
        self._doomed: set[str] = set()
        self.copies: dict[str, DiskCopy] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Copies end with the server; see resume.
        return {**self.__dict__, "copies": {}}

    def resume(self) -> None:
        """Settle the images that were pending when the last server ended."""
        self.offer_base_image()
        pending = {s.from_ami for s in self._ec2.snapshots.values() if s.status == "pending"}
        for image_id in self._saved & pending:
            found = self._runtime.containers.image_of(image_id).is_dir()
            self._settle(image_id, "" if found else "the embedded cloud stopped during the copy")

    def offer_base_image(self) -> None:
        """Publish the base image like Canonical's Ubuntu, with the same owner and device name."""
        base, amis = self._runtime.containers.base, self._ec2.amis
        if base.ami_id in amis:
            return
        # An earlier release's image can't start instances anymore.
        for image_id in [i.id for i in amis.values() if i.owner_id == CANONICAL_ACCOUNT]:
            del amis[image_id]
        image = amis[base.ami_id] = LocalAmi(
            self._ec2,
            base.ami_id,
            size_gib=_BASE_GIB,
            name=f"spr-cluster/{base.description}",
            description=base.description,
            owner_id=CANONICAL_ACCOUNT,
            public=True,
            virtualization_type="hvm",
            architecture="x86_64",
            hypervisor="xen",
            root_device_name="/dev/sda1",
            image_location=f"{CANONICAL_ACCOUNT}/{base.description}",
        )
        # moto would list Canonical's snapshot as the caller's.
        del self._ec2.snapshots[image.ebs_snapshot.id]

    def disk_of(self, image_id: str) -> str | Path:
        """Return an AMI's disk: the name of podman's base image, or a folder."""
        containers = self._runtime.containers
        return (
            containers.image_of(image_id) if image_id in self._saved else containers.base.reference
        )

    def create(
        self, instance_id: str, name: str, description: str, tag_specifications: list[Any]
    ) -> Any:
        instance = self._ec2.get_instance(instance_id)
        refusals.require_running(instance)
        refusals.require_new_image_name(self._ec2, name)
        image_id = random_ami_id()
        image = self._ec2.amis[image_id] = LocalAmi(
            self._ec2,
            image_id,
            size_gib=_root_size_of(instance),
            instance=instance,
            name=name,
            description=description,
            snapshot_description=f"Created by CreateImage({instance_id}) for {image_id}",
        )
        image.state = image.ebs_snapshot.status = "pending"
        image.add_tags(_tags_of(tag_specifications, "image"))
        image.ebs_snapshot.add_tags(_tags_of(tag_specifications, "snapshot"))
        self._saved.add(image_id)
        future = self._runtime.containers.save_image(instance_id, image_id)
        ready_at = self._runtime.now() + self._runtime.conditions.image_s
        self.copies[image_id] = DiskCopy(future, ready_at)
        return image

    def finish_copies(self) -> bool:
        """Finish images whose disk has been copied; return whether there were any."""
        now = self._runtime.now()
        done = [i for i, c in self.copies.items() if c.future.done() and c.ready_at <= now]
        for image_id in done:
            error = self.copies.pop(image_id).future.exception()
            self._settle(image_id, str(error) if error else "")
        if done:
            self.remove_unused()
        return bool(done)

    def _settle(self, image_id: str, error: str) -> None:
        """Finish an image and its snapshot, if they still exist."""
        if image := self._ec2.amis.get(image_id):
            image.finish(error)
        for snapshot in [s for s in self._ec2.snapshots.values() if s.from_ami == image_id]:
            snapshot.status = "error" if error else "completed"
            if snapshot.id in self._doomed:
                self._doomed.discard(snapshot.id)
                EC2Backend.delete_snapshot(self._ec2, snapshot.id)

    def deregister(self, image_id: str) -> None:
        refusals.require_own_image(self._ec2, image_id)
        EC2Backend.deregister_image(self._ec2, image_id)
        self.remove_unused()

    def describe_snapshots(self, *arguments: Any, **named: Any) -> list[Any]:
        """Return snapshots, without those whose disk is still being copied.

        An EC2 snapshot holds the disk's content at the time it appears, so it must not appear earlier.
        """
        copying = {id_ for id_, copy in self.copies.items() if not copy.future.done()}
        found = EC2Backend.describe_snapshots(self._ec2, *arguments, **named)
        return [s for s in found if s.from_ami not in copying or s.id in self._doomed]

    def delete_snapshot(self, snapshot_id: str) -> Any:
        pending = self._ec2.snapshots.get(snapshot_id)
        if pending and pending.status == "pending" and pending.from_ami not in self._ec2.amis:
            self._doomed.add(snapshot_id)
            return pending
        snapshot = EC2Backend.delete_snapshot(self._ec2, snapshot_id)
        self.remove_unused()
        return snapshot

    def remove_unused(self) -> None:
        """Delete disks that no AMI, snapshot, or instance needs anymore."""
        used = {
            *self._ec2.amis,
            *self.copies,
            *(snapshot.from_ami for snapshot in self._ec2.snapshots.values()),
            *(instance.image_id for instance in self._ec2.live_instances()),
        }
        for image_id in self._saved - used:
            self._runtime.containers.remove_image(image_id)
            self._saved.discard(image_id)


def _root_size_of(instance: Instance) -> int:
    """Return the size of an instance's root volume in GiB."""
    root = instance.block_device_mapping.get(instance.root_device_name)
    return int(root.size) if root and root.size else _BASE_GIB


def _tags_of(specifications: Iterable[dict[str, Any]], resource: str) -> dict[str, str]:
    return {
        tag["Key"]: tag["Value"]
        for specification in specifications
        if specification["ResourceType"] == resource
        for tag in specification["Tags"]
    }
