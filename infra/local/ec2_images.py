"""AMIs of the embedded cloud: folders with a copy of a node's disk."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flask import has_request_context, request
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.models.instances import Instance
from moto.ec2.utils import random_ami_id

from infra.local import refusals
from infra.local.clock import ServerClock, as_moto_time
from infra.local.containers import NodeContainers
from infra.local.faults_in_force import FaultsInForce

CANONICAL_ACCOUNT = "099720109477"
# The disk of Canonical's own images.
_BASE_GIB = 8


@dataclass(frozen=True)
class Commit:
    """An image in the making; ``rebooting`` is the instance that is down for it."""

    future: Future[None]
    ready_at: float
    rebooting: str = ""


class LocalAmi(Ami):
    """moto's AMI, as large as the disk that it was made from."""

    def __init__(self, backend: Any, ami_id: str, *, size_gib: int, **more: Any) -> None:
        super().__init__(backend, ami_id, root_device_type="ebs", **more)
        self.ebs_snapshot.volume.size = size_gib
        self.creation_date = self.ebs_snapshot.start_time = as_moto_time(backend.clock.time())

    @property
    def block_device_mappings(self) -> list[dict[str, Any]]:
        ebs = {
            "SnapshotId": self.ebs_snapshot.id,
            "VolumeSize": self.ebs_snapshot.volume.size,
            "DeleteOnTermination": True,
            "VolumeType": "gp3",
        }
        return [{"DeviceName": self.root_device_name, "Ebs": ebs}]


class ImagesBackend(EC2Backend):
    """EC2 with a disk behind every AMI; the part of a region's state that is about images."""

    containers: NodeContainers
    clock: ServerClock
    faults: FaultsInForce
    hidden_instances: tuple[Instance, ...] = ()
    """Those that the call in hand does not see."""

    def __init__(self, region_name: str, account_id: str) -> None:
        self.saved_images: set[str] = set()
        self._commits: dict[str, Commit] = {}
        super().__init__(region_name, account_id)
        self._offer_base_image()

    def _load_amis(self) -> None:
        """moto's 1,300 AMIs are left out: no container could start from them."""

    def _offer_base_image(self) -> None:
        """The one public image, as Canonical's are: owner, device name."""
        base = self.containers.base
        if base.ami_id in self.amis:
            return
        # One of an earlier release: nothing can be started from it any more.
        for image_id in [i.id for i in self.amis.values() if i.owner_id == CANONICAL_ACCOUNT]:
            del self.amis[image_id]
        image = self.amis[base.ami_id] = LocalAmi(
            self,
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
        # It is Canonical's own; moto would list it among the caller's.
        del self.snapshots[image.ebs_snapshot.id]

    def _alive(self) -> list[Instance]:
        """The machines that are not gone, also those that are too new to be seen."""
        seen = [*self.all_instances(), *self.hidden_instances]
        return [i for i in seen if i.state != "terminated"]

    def disk_of(self, image_id: str) -> str | Path:
        """What a node of an AMI starts from: podman's base image, or a folder."""
        if image_id in self.saved_images:
            return self.containers.image_of(image_id)
        return self.containers.base.reference

    def create_image(
        self,
        instance_id: str,
        name: str,
        description: str,
        tag_specifications: list[dict[str, Any]],
    ) -> Any:
        instance = self.get_instance(instance_id)
        refusals.require_running(instance)
        refusals.require_new_image_name(self, name)
        image_id = random_ami_id()
        image = self.amis[image_id] = LocalAmi(
            self,
            image_id,
            size_gib=_root_size_of(instance),
            instance=instance,
            name=name,
            description=description,
            snapshot_description=f"Created by CreateImage({instance_id}) for {image_id}",
        )
        image.state = image.ebs_snapshot.status = "pending"
        for resource, kind in ((image, "image"), (image.ebs_snapshot, "snapshot")):
            resource.add_tags(_tags_of(tag_specifications, kind))
        reboot = instance.state == "running" and not _is_no_reboot()
        self.saved_images.add(image.id)
        future = self.containers.save_image(instance_id, image.id, reboot=reboot)
        ready_at = self.clock.time() + self.faults.now.times.image_s
        self._commits[image.id] = Commit(future, ready_at, instance_id if reboot else "")
        return image

    def _resume_images(self) -> None:
        """Decide on the images that were in the making when the last server ended."""
        self._offer_base_image()
        for image_id in self.saved_images:
            image = self.amis.get(image_id)
            if image is not None and image.state == "pending":
                found = self.containers.has_image(image_id)
                finish_image(image, "" if found else "the embedded cloud ended meanwhile")

    def _finish_commits(self) -> bool:
        now = self.clock.time()
        done = {
            id_: commit
            for id_, commit in self._commits.items()
            if commit.future.done() and commit.ready_at <= now
        }
        for image_id, commit in done.items():
            del self._commits[image_id]
            if image := self.amis.get(image_id):
                error = commit.future.exception()
                finish_image(image, str(error) if error else "")
        if done:
            self._remove_unused_images()
        return bool(done)

    def deregister_image(self, ami_id: str) -> None:
        refusals.require_own_image(self, ami_id)
        super().deregister_image(ami_id)
        self._remove_unused_images()

    def describe_snapshots(
        self, snapshot_ids: list[str] | None = None, filters: Any = None
    ) -> list[Any]:
        """A snapshot holds what the disk held when it appeared, as on EC2.

        Copying a node's disk takes a while, so a snapshot appears when it has been copied.
        """
        copying = {id_ for id_, commit in self._commits.items() if not commit.future.done()}
        found = super().describe_snapshots(snapshot_ids, filters)
        return [snapshot for snapshot in found if snapshot.from_ami not in copying]

    def delete_snapshot(self, snapshot_id: str) -> Any:
        snapshot = super().delete_snapshot(snapshot_id)
        self._remove_unused_images()
        return snapshot

    def _remove_unused_images(self) -> None:
        """An image goes with the last of its AMI, its snapshot and the instances made from it."""
        used = {
            *self.amis,
            *self._commits,
            *(snapshot.from_ami for snapshot in self.snapshots.values()),
            *(instance.image_id for instance in self._alive()),
        }
        for image_id in self.saved_images - used:
            self.containers.remove_image(image_id)
            self.saved_images.discard(image_id)


def _root_size_of(instance: Instance) -> int:
    """The size of an instance's root volume in GiB."""
    root = instance.block_device_mapping.get(instance.root_device_name)
    return int(root.size) if root and root.size else _BASE_GIB


def finish_image(image: Any, error: str) -> None:
    image.state = "failed" if error else "available"
    image.ebs_snapshot.status = "error" if error else "completed"
    if error:
        image.state_reason = {"Code": "Server.InternalError", "Message": error}


def _tags_of(specifications: Iterable[dict[str, Any]], resource: str) -> dict[str, str]:
    return {
        tag["Key"]: tag["Value"]
        for specification in specifications
        if specification["ResourceType"] == resource
        for tag in specification["Tags"]
    }


def _is_no_reboot() -> bool:
    """CreateImage's NoReboot, which moto does not hand on."""
    return has_request_context() and request.values.get("NoReboot", "").lower() == "true"
