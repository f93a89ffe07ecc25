"""Everything that belongs to an embedded cloud, found by label and name rather than from its state."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from infra.errors import CloudError
from infra.local.base_image import DESCRIPTION_LABEL, REPOSITORY
from infra.local.containers import at_once
from infra.local.podman import CLOUD_LABEL, INSTANCE_LABEL, REGION_LABEL, Podman
from infra.local.state import StateFolder


@dataclass(frozen=True)
class LocalInstance:
    """An instance as its container shows it."""

    id: str
    region: str
    state: str


@dataclass(frozen=True)
class LocalResources:
    """Networks (names and ranges), instances, images created here, and the shared base images."""

    networks: dict[str, str] = field(default_factory=dict)
    instances: tuple[LocalInstance, ...] = ()
    images: tuple[str, ...] = ()
    base_images: tuple[str, ...] = ()


def find_resources(podman: Podman, folder: StateFolder) -> LocalResources:
    """List the resources of this cloud."""
    return LocalResources(
        networks={
            network.name: ", ".join(map(str, network.ranges))
            for network in podman.networks()
            if network.labels.get(CLOUD_LABEL) == folder.key
        },
        instances=tuple(
            LocalInstance(
                container.labels.get(INSTANCE_LABEL, container.name),
                container.labels.get(REGION_LABEL, ""),
                "running" if container.running else "stopped",
            )
            for container in podman.containers(f"{CLOUD_LABEL}={folder.key}")
        ),
        images=tuple(sorted(path.name for path in folder.images.glob("ami-*"))),
        base_images=tuple(podman.images(f"{REPOSITORY}:*")),
    )


def stop_containers(podman: Podman, folder: StateFolder) -> None:
    """Shut this cloud's containers down."""
    own = podman.containers(f"{CLOUD_LABEL}={folder.key}")
    at_once(podman.stop, [container.name for container in own if container.running])


def remove_resources(podman: Podman, folder: StateFolder, *, keep_base: bool) -> None:
    """Remove this cloud from podman, and the base images unless another cloud exists."""
    podman.remove(c.name for c in podman.containers(f"{CLOUD_LABEL}={folder.key}"))
    networks = podman.networks()
    own = [n.name for n in networks if n.labels.get(CLOUD_LABEL) == folder.key]
    podman.remove_networks(own)
    # Every embedded cloud has a network.
    others = [n for n in networks if CLOUD_LABEL in n.labels and n.name not in own]
    if not keep_base and not others:
        for image in podman.images(f"{REPOSITORY}:*"):
            # A container of the user's can use it; then it stays, and `local status` shows it.
            with contextlib.suppress(CloudError):
                podman.remove_image(image)
        # Images that lost their name to a newer build while they were in use.
        podman.prune_images(DESCRIPTION_LABEL)
