"""Instances as containers: what each of EC2's verbs means for podman."""

from __future__ import annotations

import ipaddress
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infra.errors import CloudError
from infra.local.base_image import BaseImage
from infra.local.host import gateway_of
from infra.local.podman import (
    CLOUD_LABEL,
    INSTANCE_LABEL,
    REGION_LABEL,
    Container,
    ContainerSpec,
    Mount,
    Podman,
)
from infra.local.seed import SEED_TARGET, Seed
from infra.local.state import StateFolder

T = TypeVar("T")

# podman takes a lock per container; more at once than this only wait for one another.
_PARALLEL = 16


@dataclass(frozen=True)
class NodeContainer:
    """What the embedded cloud knows of an instance besides what EC2 tells."""

    instance_id: str
    address: str
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class ContainerRequest:
    """A node to be started: from which image, with which seed."""

    node: NodeContainer
    region: str
    image: str | Path
    seed: Seed
    mask_ssh: bool = False
    """Nobody answers on the machine's port 22."""


class NodeContainers:
    """The containers of one embedded cloud. Every failure is a :class:`CloudError`."""

    def __init__(
        self, podman: Podman, folder: StateFolder, base: BaseImage, mounts: Sequence[Mount] = ()
    ) -> None:
        self.podman = podman
        self.base = base
        self._folder = folder
        self._mounts = tuple(mounts)
        self._background = ThreadPoolExecutor(4, thread_name_prefix="image")
        # What a server that was killed left half made or half deleted.
        for left in (*folder.images.glob("*.part"), *folder.images.glob(".*.trash")):
            self._background.submit(shutil.rmtree, left, ignore_errors=True)

    def container_of(self, instance_id: str) -> str:
        return f"spr-{self._folder.key}-{instance_id}"

    def network_of(self, region: str) -> str:
        return f"spr-{self._folder.key}-{region}"

    def image_of(self, image_id: str) -> Path:
        """The folder that holds the disk of an AMI made here."""
        return self._folder.images / image_id

    def ensure_network(self, region: str, network: ipaddress.IPv4Network) -> None:
        """One podman network spans a region's default VPC, so that each address in it is valid."""
        name = self.network_of(region)
        if name not in {known.name for known in self.podman.networks()}:
            labels = {CLOUD_LABEL: self._folder.key, REGION_LABEL: region}
            self.podman.create_network(name, str(network), gateway_of(network), labels)

    def launch(self, requests: Sequence[ContainerRequest]) -> None:
        """Start nodes at the same time: all of them, or none is left."""
        try:
            at_once(self._launch, requests)
        except CloudError:
            self.remove([request.node.instance_id for request in requests])
            raise

    def _launch(self, request: ContainerRequest) -> None:
        node = request.node
        seed = self._folder.seed(node.instance_id)
        request.seed.write(seed)
        self.podman.run(
            ContainerSpec(
                name=self.container_of(node.instance_id),
                image=request.image,
                hostname=request.seed.hostname,
                network=self.network_of(request.region),
                address=node.address,
                cpus=node.cpus,
                labels={
                    CLOUD_LABEL: self._folder.key,
                    INSTANCE_LABEL: node.instance_id,
                    REGION_LABEL: request.region,
                },
                mounts=(Mount(seed, SEED_TARGET), *self._mounts, *self._masks(request)),
            )
        )

    def _masks(self, request: ContainerRequest) -> tuple[Mount, ...]:
        """Empty unit files: systemd takes a unit as masked where its file is empty.

        https://www.freedesktop.org/software/systemd/man/latest/systemd.unit.html ("masked")
        """
        if not request.mask_ssh:
            return ()
        empty = self._folder.seed(request.node.instance_id) / "masked-unit"
        empty.touch()
        units = ("ssh.service", "sshd.service", "ssh.socket")
        return tuple(Mount(empty, f"/etc/systemd/system/{unit}") for unit in units)

    def start(self, instance_ids: Iterable[str]) -> None:
        """Start stopped nodes again: same disk, same address."""
        at_once(self.podman.start, [self.container_of(i) for i in instance_ids])

    def stop(self, instance_ids: Iterable[str]) -> None:
        at_once(self.podman.stop, [self.container_of(i) for i in instance_ids])

    def remove(self, instance_ids: Iterable[str]) -> None:
        """Remove nodes with their disks and seeds; those that are gone already are fine."""
        ids = list(instance_ids)
        self.podman.remove([self.container_of(i) for i in ids])
        for instance_id in ids:
            self._folder.remove_seed(instance_id)

    def containers(self, region: str) -> dict[str, Container]:
        """This cloud's containers in a region, by instance id."""
        found = self.podman.containers(f"{CLOUD_LABEL}={self._folder.key}")
        return {c.labels[INSTANCE_LABEL]: c for c in found if c.labels.get(REGION_LABEL) == region}

    def save_image(self, instance_id: str, image_id: str, *, reboot: bool) -> Future[None]:
        """Begin to save a running node's disk as an image, and reboot it then if asked to.

        EC2 reboots first, so that the disk is quiet. Here a disk can be read only while its node
        runs; nothing is lost by it, since a container's files need no flushing.
        """
        return self._background.submit(self._save_image, instance_id, image_id, reboot)

    def _save_image(self, instance_id: str, image_id: str, reboot: bool) -> None:
        container, image = self.container_of(instance_id), self.image_of(image_id)
        partial = image.with_suffix(".part")
        try:
            self.podman.copy_disk(container, partial)
            partial.rename(image)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if reboot:
                self.podman.stop(container)
                self.podman.start(container)

    def host_keys(self, instance_id: str, pid: int) -> tuple[str, ...]:
        """A node's public SSH host keys, once its first boot has made them."""
        return self.podman.host_keys(pid, f"var/lib/cloud/instances/{instance_id}/sem/config_ssh")

    def has_image(self, image_id: str) -> bool:
        return self.image_of(image_id).is_dir()

    def remove_image(self, image_id: str) -> None:
        """Remove an image that no node uses; one that is gone already is fine.

        It is gone at once, as on EC2; its gigabytes are deleted in the background.
        """
        image = self.image_of(image_id)
        trash = image.with_name(f".{image_id}.trash")
        with suppress(FileNotFoundError):
            image.rename(trash)
        self._background.submit(shutil.rmtree, trash, ignore_errors=True)


def at_once(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Do the same to all items, in parallel; the first failure is raised when all have ended."""
    with ThreadPoolExecutor(_PARALLEL) as pool:
        futures = [pool.submit(work, item) for item in items]
    for future in futures:
        future.result()
