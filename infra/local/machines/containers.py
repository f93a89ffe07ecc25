"""The containers behind instances: EC2's operations on podman, and the instance metadata."""

from __future__ import annotations

import ipaddress
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infra.errors import CloudError
from infra.files import write_private
from infra.local.machines.base_image import BaseImage
from infra.local.machines.host import gateway_of
from infra.local.machines.podman import (
    CLOUD_LABEL,
    INSTANCE_LABEL,
    REGION_LABEL,
    Container,
    ContainerSpec,
    Mount,
    Podman,
)
from infra.local.state import StateFolder, machine_lock

SEED_TARGET = "/var/lib/cloud/seed/nocloud"


@dataclass(frozen=True)
class Seed:
    """An instance's identity and user data.

    On a clone of an image, the new instance id makes cloud-init set new host keys and a new host name.
    """

    instance_id: str
    hostname: str
    public_key: str
    user_data: bytes
    metadata: Mapping[str, str]
    """Values by path, such as ``placement/availability-zone``."""

    def meta_data(self) -> str:
        """Return the `meta-data` file as JSON, which is also YAML."""
        values: dict[str, Any] = {"instance-id": self.instance_id}
        values["local-hostname"] = self.hostname
        if self.public_key:
            values["public-keys"] = [self.public_key.strip()]
        return json.dumps(values, indent=2) + "\n"

    def write(self, folder: Path) -> None:
        """Write the seed's files, readable only by root, because user data can contain secrets."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "meta-data").write_text(self.meta_data())
        (folder / "user-data").write_bytes(self.user_data or b"#cloud-config\n{}\n")
        for name, value in self.metadata.items():
            write_metadata(folder, name, value)


def write_metadata(folder: Path, name: str, value: str) -> None:
    """Set a value of the instance metadata. The seed is mounted, so the node sees it immediately."""
    write_private(folder / "metadata/latest/meta-data" / name, value)


def hostname_of(address: str) -> str:
    """Return EC2's host name for an address: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/hostname-types.html"""
    return f"ip-{address.replace('.', '-')}"


def metadata_of(instance: Any, market: str) -> dict[str, str]:
    """Return a new instance's metadata: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html"""
    zone = str(instance.placement.zone)  # untyped, because the command line must not import moto
    return {
        "ami-id": instance.image_id,
        "instance-id": instance.id,
        "instance-life-cycle": market,
        "instance-type": instance.instance_type,
        "local-ipv4": instance.private_ip,
        "placement/availability-zone": zone,
        "placement/region": zone[:-1],
    }


T = TypeVar("T")

# Beyond this number, parallel calls only wait for podman's locks.
_PARALLEL = 16


@dataclass(frozen=True)
class ContainerRequest:
    """A new node."""

    seed: Seed
    address: str
    cpus: tuple[int, ...]
    region: str
    image: str | Path


class NodeContainers:
    """The containers of one embedded cloud. Methods raise :class:`CloudError`."""

    def __init__(
        self, podman: Podman, folder: StateFolder, base: BaseImage, mounts: Sequence[Mount] = ()
    ) -> None:
        self.podman = podman
        self.base = base
        self._folder = folder
        self._mounts = tuple(mounts)
        self._background = ThreadPoolExecutor(4, thread_name_prefix="image")
        # A server that was killed may have left incomplete folders.
        for path in (*folder.images.glob("*.part"), *folder.images.glob(".*.trash")):
            self._background.submit(shutil.rmtree, path, ignore_errors=True)

    def container_of(self, instance_id: str) -> str:
        return f"spr-{self._folder.key}-{instance_id}"

    def network_of(self, region: str) -> str:
        return f"spr-{self._folder.key}-{region}"

    def image_of(self, image_id: str) -> Path:
        """Return the folder that holds the disk of an AMI created here."""
        return self._folder.images / image_id

    def network_ranges(self) -> list[ipaddress.IPv4Network]:
        """Return the address ranges of all of podman's networks."""
        return [r for network in self.podman.networks() for r in network.ranges]

    @contextmanager
    def changing_networks(self) -> Iterator[None]:
        """Let only one embedded cloud on this machine choose a range and create its network."""
        with machine_lock("network"):
            yield

    def ensure_network(self, region: str, network: ipaddress.IPv4Network) -> None:
        """Create a podman network with the range of a region's default VPC, unless it exists."""
        name = self.network_of(region)
        if name not in {known.name for known in self.podman.networks()}:
            labels = {CLOUD_LABEL: self._folder.key, REGION_LABEL: region}
            self.podman.create_network(name, str(network), gateway_of(network), labels)

    def launch(self, requests: Sequence[ContainerRequest]) -> None:
        """Start these nodes in parallel; if one fails, remove all of them."""
        try:
            at_once(self._launch, requests)
        except (CloudError, OSError):
            self.remove([request.seed.instance_id for request in requests])
            raise

    def _launch(self, request: ContainerRequest) -> None:
        instance_id = request.seed.instance_id
        seed = self._folder.seed(instance_id)
        request.seed.write(seed)
        self.podman.run(
            ContainerSpec(
                name=self.container_of(instance_id),
                image=request.image,
                hostname=request.seed.hostname,
                network=self.network_of(request.region),
                address=request.address,
                cpus=request.cpus,
                labels={
                    CLOUD_LABEL: self._folder.key,
                    INSTANCE_LABEL: instance_id,
                    REGION_LABEL: request.region,
                },
                mounts=(Mount(seed, SEED_TARGET), *self._mounts),
            )
        )

    def write_metadata(self, instance_id: str, name: str, value: str) -> None:
        """Set a value of a node's instance metadata."""
        write_metadata(self._folder.seed(instance_id), name, value)

    def start(self, instance_ids: Iterable[str]) -> None:
        """Restart stopped nodes with the same disks and addresses."""
        at_once(self.podman.start, [self.container_of(i) for i in instance_ids])

    def stop(self, instance_ids: Iterable[str]) -> None:
        at_once(self.podman.stop, [self.container_of(i) for i in instance_ids])

    def remove(self, instance_ids: Iterable[str]) -> None:
        """Remove nodes with their disks and seeds, if they still exist."""
        ids = list(instance_ids)
        self.podman.remove([self.container_of(i) for i in ids])
        for instance_id in ids:
            self.remove_seed(instance_id)

    def remove_seed(self, instance_id: str) -> None:
        shutil.rmtree(self._folder.seed(instance_id), ignore_errors=True)

    def find(self, region: str) -> dict[str, Container]:
        """Return this cloud's containers in a region, by instance id."""
        found = self.podman.containers(f"{CLOUD_LABEL}={self._folder.key}")
        return {c.labels[INSTANCE_LABEL]: c for c in found if c.labels.get(REGION_LABEL) == region}

    def save_image(self, instance_id: str, image_id: str) -> Future[None]:
        """Start saving a running node's disk as an image. The node never reboots for this."""
        return self._background.submit(self._save_image, instance_id, image_id)

    def _save_image(self, instance_id: str, image_id: str) -> None:
        container, image = self.container_of(instance_id), self.image_of(image_id)
        partial = image.with_suffix(".part")
        try:
            self.podman.copy_disk(container, partial)
            partial.rename(image)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def host_keys(self, instance_id: str, pid: int) -> tuple[str, ...]:
        """Return a node's public SSH host keys; empty until its first boot has created them."""
        return self.podman.host_keys(pid, f"var/lib/cloud/instances/{instance_id}/sem/config_ssh")

    def remove_image(self, image_id: str) -> None:
        """Remove an image that no node uses, if it still exists.

        It disappears immediately, as on EC2; a background thread deletes its files.
        """
        image = self.image_of(image_id)
        trash = image.with_name(f".{image_id}.trash")
        with suppress(FileNotFoundError):
            image.rename(trash)
        self._background.submit(shutil.rmtree, trash, ignore_errors=True)


def at_once(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Process all items in parallel. After all have finished, raises the first failure."""
    with ThreadPoolExecutor(_PARALLEL) as pool:
        futures = [pool.submit(work, item) for item in items]
    for future in futures:
        future.result()
